"""Starts and controls the processes with nodes (:mod:`benchmarks.rendezvous.nodes`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from benchmarks.support.etcd import wake
from elastic_operator.local.pdeathsig import with_pdeathsig
from torchelastic.protocol.codec import decode
from torchelastic.protocol.keys import RunKeys
from torchelastic.protocol.records import LeaderRecord, NodeRecord
from torchelastic.store.api import Listing, StoreSettings
from torchelastic.store.client import connect, follow

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Sequence
    from types import TracebackType

    from torchelastic.store.api import Store

RUN_ID: Final = "benchmark"

_HEAD_START: Final = 0.05
"""Seconds between an order and its execution, so that all processes begin at the same time."""

_LIMIT: Final = 300.0
"""Seconds that a change may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A measured change of the members.

    Attributes:
        seconds: the time from the beginning of the change until the last node knew the next round.
        round: the number of the next round.
        cpu: the seconds of processor time of each process.
        warnings: the number of warnings that the nodes have logged so far.
        warning: the first warning; empty if there is none.
    """

    seconds: float
    round: int
    cpu: tuple[float, ...]
    warnings: int
    warning: str


class NodeProcesses:
    """Nodes in a few processes; an async context manager that starts the processes, but no node.

    Args:
        endpoint: host:port of the etcd for the nodes.
        direct: host:port of the same etcd, for requests that are not counted.
        shares: the number of nodes of each process.
        lease: the nodes' lease and timeout for etcd, in seconds.
    """

    def __init__(self, endpoint: str, *, direct: str, shares: Sequence[int], lease: float) -> None:
        self._direct = direct
        self._keys = RunKeys(RUN_ID)
        self._arguments = [endpoint, RUN_ID, str(sum(shares)), str(lease)]
        self._size = sum(shares)
        numbers = iter(range(self._size))
        self.names = [[f"node-{next(numbers):04}" for _ in range(share)] for share in shares]
        """The names of the nodes to start, by process."""
        self._processes: list[Process] = []
        self._present: list[set[str]] = [set() for _ in shares]
        self.round = 0
        """The number of the last round that all nodes knew."""

    async def __aenter__(self) -> Self:
        await wake(self._direct)
        for _ in self.names:
            process = await asyncio.create_subprocess_exec(
                *with_pdeathsig((sys.executable, "-m", "benchmarks.rendezvous.nodes", *self._arguments)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            self._processes.append(process)
        for process in self._processes:
            await _answer(process)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def lead(self) -> None:
        """Start the first node of the first process alone, and wait until it leads."""
        leader = self.names[0].pop(0)
        self._present[0].add(leader)
        order = {"at": 0.0, "come": [leader], "fail": None, "leave": None, "until": None}
        await _ordered(self._processes[0], order)
        async with self._looking() as store, aclosing(follow(store, self._keys.control)) as news:
            async for batch in news:
                entries = batch.entries if isinstance(batch, Listing) else [change.entry for change in batch]
                if any(entry is not None and entry.key == self._keys.leader for entry in entries):
                    return

    async def come(self) -> Change:
        """Start all other nodes at once."""
        return await self._change(self.names, None, None, None)

    async def fail(self, name: str) -> Change:
        """Let a worker of a node fail."""
        return await self._change([[] for _ in self.names], name, None, None)

    async def swap(self, *, leave: str, come: str) -> Change:
        """At once, let one node leave and start another node, in another process if there is one."""
        home = next(index for index, present in enumerate(self._present) if leave in present)
        newcomers: list[list[str]] = [[] for _ in self.names]
        newcomers[(home + 1) % len(newcomers)].append(come)
        return await self._change(newcomers, None, leave, come)

    async def _change(
        self, newcomers: Sequence[Sequence[str]], fail: str | None, leave: str | None, joined: str | None
    ) -> Change:
        until = {"above": self.round, "size": self._size, "with": joined}
        start = time.monotonic() + _HEAD_START
        orders = [
            {
                "at": start,
                "come": newcomers[index],
                "fail": fail if fail in present else None,
                "leave": leave if leave in present else None,
                "until": until,
            }
            for index, present in enumerate(self._present)
        ]
        try:
            async with asyncio.timeout(_LIMIT):
                answers = await asyncio.gather(*map(_ordered, self._processes, orders))
        except TimeoutError as error:
            raise RuntimeError(f"{self._size} nodes formed no round within {_LIMIT:g} seconds") from error
        for present, names in zip(self._present, newcomers, strict=True):
            present.update(names)
            present.discard(leave or "")
        self.round = max(int(answer["round"]) for answer in answers)
        return Change(
            seconds=max(answer["last"] for answer in answers) - min(answer["began"] for answer in answers),
            round=self.round,
            cpu=tuple(answer["cpu"] for answer in answers),
            warnings=sum(answer["warnings"] for answer in answers),
            warning=next((answer["warning"] for answer in answers if answer["warning"]), ""),
        )

    async def leader(self) -> str:
        """Return the name of the leader."""
        async with self._looking() as store:
            entry = await store.get(self._keys.leader)
        if entry is None:
            raise RuntimeError("there is no leader")
        return decode(entry.value, LeaderRecord).node.rpartition(".")[0]

    async def round_bytes(self) -> int:
        """Return the size of the record of the current round."""
        async with self._looking() as store:
            entry = await store.get(self._keys.state)
        return len(entry.value) if entry is not None else 0

    def others(self, leader: str) -> list[str]:
        """Return the names of the running nodes that do not lead."""
        return [name for present in self._present for name in sorted(present) if name != leader]

    async def settle(self) -> None:
        """Wait until every node has written to the store that it knows the last round: a change's last write."""
        try:
            async with asyncio.timeout(_LIMIT):
                await self._settled()
        except TimeoutError as error:
            raise RuntimeError(f"{self._size} nodes have not confirmed the round within {_LIMIT:g} seconds") from error

    async def _settled(self) -> None:
        wanted = {name for present in self._present for name in present}
        known: dict[str, int] = {}
        async with self._looking() as store, aclosing(follow(store, self._keys.nodes)) as news:
            async for batch in news:
                entries = batch.entries if isinstance(batch, Listing) else [change.entry for change in batch]
                for entry in entries:
                    if entry is not None:
                        record = decode(entry.value, NodeRecord)
                        known[record.name] = record.round
                rounds = {known.get(name, 0) for name in wanted}
                if len(rounds) == 1 and min(rounds) >= self.round:
                    self.round = min(rounds)
                    return

    @asynccontextmanager
    async def _looking(self) -> AsyncIterator[Store]:
        store = await connect(StoreSettings(endpoints=(self._direct,)))
        try:
            yield store
        finally:
            await store.close()


async def _ordered(process: Process, order: dict[str, Any]) -> dict[str, Any]:
    if process.stdin is None:
        raise RuntimeError("the process with nodes has no standard input")
    process.stdin.write(msgspec.json.encode(order) + b"\n")
    return await _answer(process)


async def _answer(process: Process) -> dict[str, Any]:
    line = await process.stdout.readline() if process.stdout is not None else b""
    if not line:
        raise RuntimeError("a process with nodes has exited; see its output above")
    answer: dict[str, Any] = json.loads(line)
    return answer
