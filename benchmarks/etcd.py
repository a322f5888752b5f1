"""The etcd under a benchmark: a real one, started for it and thrown away after it.

It is started as ``elasticjob run`` starts its own: one member on the loopback interface that does not wait for the disk
(``--unsafe-no-fsync``). What a slow disk costs is etcd's, and is the same for whoever uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elastic_operator.local.etcd import EtcdProcess, EtcdSettings, find_etcd
from torchelastic.store import StoreSettings, connect, follow

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


_KEYS: Final = "/benchmark/wake/"
_ROUNDS: Final = 20
_LEASE: Final = 60.0


async def choose_etcd(named: Path | None = None) -> Path:
    """The etcd to measure with: the named one, else the newest of the test bed's cache, else what a run would start.

    Args:
        named: a binary that somebody asked for.

    Raises:
        BadInput: there is none that will do.
    """
    if named is not None:
        return named
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "elastic-operator" / "bin"
    kept = sorted(cache.glob("etcd-v*/etcd"), key=_version)
    return kept[-1] if kept else await find_etcd(os.environ.get("PATH"))


@contextlib.asynccontextmanager
async def etcd_serving(binary: Path) -> AsyncIterator[EtcdProcess]:
    """An etcd that serves within the block.

    Raises:
        BadInput: it cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-etcd-") as folder:
        settings = EtcdSettings(binary, Path(folder) / "data", Path(folder) / "etcd.log", os.environ)
        process = EtcdProcess(settings, changed=lambda: None, tell=lambda _: None)
        running = asyncio.create_task(process.run())
        ready = asyncio.create_task(process.ready.wait())
        try:
            await asyncio.wait((running, ready), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
            yield process
        finally:
            running.cancel()
            ready.cancel()
            await asyncio.gather(running, ready, return_exceptions=True)


async def wake(endpoint: str) -> None:
    """Ask an etcd for one of each of the things that it is about to be asked for, as if it had served others before."""
    store = await connect(StoreSettings(endpoints=(endpoint,)))
    try:
        for _ in range(_ROUNDS):
            lease = await store.grant(_LEASE)
            async with aclosing(follow(store, _KEYS)) as news:
                await anext(news)
                revision = await store.put(f"{_KEYS}a", b"a", lease=lease)
                await store.compare_and_swap(f"{_KEYS}a", b"b", expected=revision, lease=lease)
                while not await anext(news):
                    pass
            await store.keep_alive(lease)
            await store.revoke(lease)
    finally:
        await store.close()


def cpu_seconds(pid: int) -> float:
    """The processor time that a process has had so far, its own and the kernel's on its behalf."""
    # Of each thread the first field is its time on a processor in nanoseconds; /proc/PID/stat counts in ticks of 10 ms.
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text(encoding="utf-8").split()[0]) for task in tasks) / 1e9


def _version(binary: Path) -> tuple[int, ...]:
    number = binary.parent.name.split("-")[1].removeprefix("v")
    return tuple(int(part) for part in number.split(".") if part.isdigit())
