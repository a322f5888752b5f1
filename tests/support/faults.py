"""Fault scripts for the rendezvous: nodes join and leave, connections break, etcd fails.

A script depends only on its seed, so that a failure can be reproduced. The script acts on real nodes and a real etcd,
and every guarantee of the rendezvous is checked meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import os
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Self

from tests.support.nodes import NodeFactory, TestNode
from tests.support.ports import accepted_connections, cut
from tests.support.tcp_proxy import TcpProxy
from torchelastic.errors import StoreUnavailable
from torchelastic.protocol.records import OutcomeRecord
from torchelastic.rendezvous.node import Partitioned, RoundStarted
from torchelastic.store.client import connect

if TYPE_CHECKING:
    from types import TracebackType

    from tests.support.etcd import EtcdServer
    from torchelastic.protocol.records import RoundRecord
    from torchelastic.store.api import Store

LEASE: Final = 1.0
"""The lease in seconds; the minimum that etcd grants."""

LOW, HIGH = 2, 4
"""The minimum and the maximum number of nodes that train together."""

MOST_NODES: Final = 6

TIMEOUT: Final = 180.0
"""Seconds without progress after which a script has failed, even on a busy machine."""


class FaultKind(enum.StrEnum):
    """A kind of fault."""

    JOIN = "joins"
    LEAVE = "leaves"
    CRASH = "crashes"
    CUT_LINE = "has its connections to etcd cut"
    STALL_LINE = "has a stalled connection to etcd"
    SLOW_LINE = "has a slow connection to etcd"
    CUT_LINKS = "has its peer connections cut"
    ETCD_DOWN = "etcd is killed and restarted with its data"
    ETCD_EMPTY = "etcd is killed and restarted without its data"
    ETCD_PAUSED = "etcd is paused"
    ALL_STALL = "all connections to etcd are stalled"
    ALL_SLOW = "all connections to etcd are slow"


@dataclass(frozen=True, slots=True)
class Step:
    """A fault, its delay after the previous step, and its duration."""

    after: float
    kind: FaultKind
    node: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.2f} s" if self.seconds else ""
        return f"after {self.after:.2f} s: {f'{self.node} ' if self.node else ''}{self.kind}{lasting}"


@dataclass(frozen=True, slots=True)
class Round:
    """Faults after which the run must recover.

    Attributes:
        steps: the faults.
        all_stay: whether only etcd and the connections to etcd have faults, so that the round must not change.
    """

    steps: tuple[Step, ...]
    all_stay: bool = False


_TO_MEMBERS: Final = (
    FaultKind.LEAVE,
    FaultKind.CRASH,
    FaultKind.CUT_LINE,
    FaultKind.STALL_LINE,
    FaultKind.SLOW_LINE,
    FaultKind.CUT_LINKS,
)
_TO_ETCD: Final = (FaultKind.ETCD_DOWN, FaultKind.ETCD_PAUSED, FaultKind.ALL_STALL, FaultKind.ALL_SLOW)


def script(seed: int, rounds: int) -> list[Round]:
    """Return the steps of a seed. The first node never leaves, because round numbers may fall when no node is left."""
    random_source = random.Random(seed)
    names = (f"n{number}" for number in itertools.count())
    present = [next(names) for _ in range(random_source.randint(LOW, HIGH))]
    parts = [Round(tuple(Step(random_source.uniform(0, 0.1), FaultKind.JOIN, name) for name in present))]

    def step(kind: FaultKind) -> Step:
        node, seconds = "", 0.0
        if kind is FaultKind.JOIN:
            node = next(names)
            present.append(node)
        elif kind in {FaultKind.LEAVE, FaultKind.CRASH}:
            node = present.pop(random_source.randrange(1, len(present)))
        elif kind in _TO_MEMBERS:
            node = random_source.choice(present)
        if kind not in {FaultKind.JOIN, FaultKind.LEAVE, FaultKind.CRASH, FaultKind.CUT_LINE, FaultKind.CUT_LINKS}:
            seconds = random_source.choice((0.1, 0.5, 1.0, 3.0)) * LEASE * random_source.uniform(0.8, 1.2)
        return Step(random_source.choice((0.0, 0.02, 0.3)) * random_source.random(), kind, node, seconds)

    for _ in range(rounds):
        chance = random_source.random()
        if chance < 0.25:
            steps = [
                step(random_source.choice((*_TO_ETCD, FaultKind.ETCD_EMPTY)))
                for _ in range(random_source.randint(1, 3))
            ]
            parts.append(Round(tuple(steps), all_stay=True))
            continue
        # While etcd is empty, the nodes that know its data must stay. Fewer than HIGH nodes may join, because
        # HIGH new nodes would form a round without waiting for the others.
        empty = chance >= 0.75
        choices = (
            (FaultKind.CUT_LINE, FaultKind.SLOW_LINE, FaultKind.JOIN)
            if empty
            else (FaultKind.JOIN, *_TO_MEMBERS, *_TO_ETCD)
        )
        steps = [step(FaultKind.ETCD_EMPTY)] if empty else []
        for _ in range(random_source.randint(2, 6)):
            kind = random_source.choice(choices)
            joined = sum(each.kind is FaultKind.JOIN for each in steps)
            if kind is FaultKind.JOIN and (len(present) >= MOST_NODES or (empty and joined >= HIGH - 1)):
                continue
            if kind in {FaultKind.LEAVE, FaultKind.CRASH} and len(present) < 2:
                continue
            steps.append(step(kind))
        steps += [step(FaultKind.JOIN) for _ in range(LOW - len(present))]
        parts.append(Round(tuple(steps)))
    return parts


class GuaranteeViolatedError(AssertionError):
    """A guarantee of the rendezvous was broken."""


@dataclass(eq=False)
class Member:
    """A node, its proxy to etcd, and the events that it received."""

    name: str
    line: TcpProxy
    node: TestNode | None = None
    rounds: list[RoundRecord] = field(default_factory=list)
    partitioned_in: int = -1
    reading: asyncio.Task[None] | None = None


class FaultRun:
    """Nodes of one run on one etcd, and their faults; an async context manager.

    Args:
        etcd: the server, which is killed, paused and emptied.
        run_id: the id of the run.
    """

    def __init__(self, etcd: EtcdServer, run_id: str) -> None:
        self.rounds: dict[int, RoundRecord] = {}
        self._etcd = etcd
        self._live: dict[str, Member] = {}
        self._violations: list[str] = []
        self._factory = NodeFactory(
            self._reach_directly, run_id, lease=LEASE, last_call_timeout=LEASE, join_timeout=10 * TIMEOUT
        )
        self._stack = contextlib.AsyncExitStack()
        self._changed = asyncio.Event()
        self._etcd_lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._factory)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(self._stop_reading(member) for member in self._live.values()))
        await self._stack.aclose()

    async def play(self, part: Round) -> None:
        """Inflict the faults, and wait until all live nodes are in one round again.

        Raises:
            GuaranteeViolatedError: a guarantee was broken, or the nodes did not form a round again.
        """
        before, partitioned = dict(self.rounds), self._partitioned()
        async with asyncio.TaskGroup() as faults:
            for step in part.steps:
                await asyncio.sleep(step.after)
                faults.create_task(self._inflict(step))
        try:
            async with asyncio.timeout(TIMEOUT):
                while not self._in_one_round():
                    self._check()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise GuaranteeViolatedError(f"no progress: {self._state()}") from None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEASE / 2):
                while True:
                    self._changed.clear()
                    await self._changed.wait()
        self._check()
        if not self._in_one_round():
            raise GuaranteeViolatedError(f"rounds keep changing: {self._state()}")
        if part.all_stay and before != self.rounds:
            raise GuaranteeViolatedError(f"the round changed, although only etcd had faults: {self._state()}")
        if part.all_stay and partitioned != self._partitioned():
            raise GuaranteeViolatedError(f"workers were stopped, although only etcd had faults: {self._state()}")

    # -- faults

    async def _inflict(self, step: Step) -> None:
        member = self._live.get(step.node)
        match step.kind:
            case FaultKind.JOIN:
                await self._join(step.node)
            case FaultKind.LEAVE | FaultKind.CRASH:
                await self._remove(step.node, crash=step.kind is FaultKind.CRASH)
            case FaultKind.ETCD_DOWN | FaultKind.ETCD_EMPTY | FaultKind.ETCD_PAUSED:
                async with self._etcd_lock:
                    await self._etcd_away(step)
            case FaultKind.CUT_LINKS:
                if member is not None and member.node is not None:
                    for link in accepted_connections(os.getpid(), member.node.inner.server.port).values():
                        cut(os.getpid(), link)
            case FaultKind.CUT_LINE:
                if member is not None:
                    member.line.cut()
            case FaultKind.STALL_LINE | FaultKind.ALL_STALL:
                await self._stall([member] if member else list(self._live.values()), step.seconds)
            case FaultKind.SLOW_LINE | FaultKind.ALL_SLOW:
                await self._slow([member] if member else list(self._live.values()), step.seconds)

    async def _join(self, name: str) -> None:
        line = await self._stack.enter_async_context(TcpProxy(self._etcd.endpoint))
        member = self._live[name] = Member(name, line)
        settings = replace(self._etcd.settings, endpoints=(line.endpoint,), request_timeout=LEASE, silence_limit=LEASE)

        async def reach() -> Store:
            while True:
                with contextlib.suppress(StoreUnavailable):
                    return await connect(settings)
                await asyncio.sleep(0.05)

        member.node = await self._factory.node(name, low=LOW, high=HIGH, connect=reach)
        member.reading = asyncio.create_task(self._read(member, member.node))

    async def _remove(self, name: str, *, crash: bool) -> None:
        member = self._live.get(name)
        while member is None or member.reading is None:  # the node is joining
            await asyncio.sleep(0.01)
            member = self._live.get(name)
        del self._live[name]
        await self._stop_reading(member)
        assert member.node is not None
        if crash:
            await member.node.crash()
        else:
            await member.node.inner.leave()
            await member.node.close()

    async def _etcd_away(self, step: Step) -> None:
        if step.kind is FaultKind.ETCD_PAUSED:
            with self._etcd.paused():
                await asyncio.sleep(step.seconds)
            return
        await self._etcd.kill()
        if step.kind is FaultKind.ETCD_EMPTY:
            self._etcd.wipe()
        await asyncio.sleep(step.seconds)
        await self._etcd.start()

    async def _stall(self, members: list[Member], seconds: float) -> None:
        for member in members:
            member.line.fall_silent()
        await asyncio.sleep(seconds)
        for member in members:
            member.line.speak_again()

    async def _slow(self, members: list[Member], seconds: float) -> None:
        for member in members:
            member.line.delay = 0.15 * LEASE
        await asyncio.sleep(seconds)
        for member in members:
            member.line.delay = 0.0

    # -- guarantees

    async def _read(self, member: Member, node: TestNode) -> None:
        while True:
            event = await node.inner.events.get()
            if isinstance(event, RoundStarted):
                if event.tcp_store_listener is not None:
                    event.tcp_store_listener.close()
                self._check_round(member, event.record)
            elif isinstance(event, Partitioned):
                member.partitioned_in = member.rounds[-1].number
            elif isinstance(event, OutcomeRecord):
                self._violations.append(f"{member.name} received an outcome: {event}")
            self._changed.set()

    def _check_round(self, member: Member, round: RoundRecord) -> None:
        known = self.rounds.setdefault(round.number, round)
        if known != round:
            self._violations.append(f"round {round.number} is {known}, but {member.name} received {round}")
        if member.rounds and member.rounds[-1].number >= round.number:
            self._violations.append(f"{member.name} received round {round.number} after {member.rounds[-1].number}")
        if round.members and not LOW <= len(round.members) <= HIGH:
            self._violations.append(f"round {round.number} has {len(round.members)} members")
        if len(set(round.nodes)) < len(round.nodes):
            self._violations.append(f"round {round.number} has a node twice: {round.nodes}")
        member.rounds.append(round)

    def _check(self) -> None:
        for member in self._live.values():
            if member.node is not None and member.node.inner.failed.done():
                self._violations.append(f"{member.name} ended by itself: {member.node.inner.failed.exception()!r}")
        if self._violations:
            raise GuaranteeViolatedError("; ".join(self._violations))

    def _in_one_round(self) -> bool:
        """Return whether every live node knows the last round, and the round has as many live nodes as possible."""
        if not self.rounds:
            return False
        last = self.rounds[max(self.rounds)]
        ids = {member.node.inner.node for member in self._live.values() if member.node is not None}
        return (
            all(member.rounds and member.rounds[-1] == last for member in self._live.values())
            and all(member.partitioned_in < last.number for member in self._live.values())
            and ids.issuperset(last.nodes)
            and len(last.nodes) == min(len(self._live), HIGH)
        )

    def _partitioned(self) -> dict[str, int]:
        return {name: member.partitioned_in for name, member in self._live.items()}

    def _state(self) -> str:
        nodes = {
            name: (
                f"knows {member.rounds[-1].number if member.rounds else 'none'}"
                + (f", partitioned in {member.partitioned_in}" if member.partitioned_in >= 0 else "")
            )
            for name, member in self._live.items()
        }
        history = [
            f"{round.number}: {', '.join(round.nodes) or 'no nodes'} ({round.cause})" for round in self.rounds.values()
        ]
        return f"{nodes}; rounds: " + "; ".join(history)

    async def _stop_reading(self, member: Member) -> None:
        if member.reading is not None:
            member.reading.cancel()
            await asyncio.gather(member.reading, return_exceptions=True)

    async def _reach_directly(self) -> Store:
        return await connect(self._etcd.settings)
