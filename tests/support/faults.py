"""Fault scripts for the rendezvous: nodes that join and leave, broken connections, failures of etcd.

A script depends only on its seed, so that a failure can be reproduced. It acts on
real nodes and a real etcd; every guarantee of the rendezvous is checked while it runs.
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

from tests.support.links import cut, links_to
from tests.support.nodes import NodeFactory, TestNode
from tests.support.tcp_proxy import TcpProxy
from torchelastic.errors import StoreUnavailable
from torchelastic.protocol import OutcomeRecord
from torchelastic.rendezvous.node import Partitioned, RoundStarted
from torchelastic.store import connect

if TYPE_CHECKING:
    from types import TracebackType

    from tests.support.etcd import EtcdServer
    from torchelastic.protocol import RoundRecord
    from torchelastic.store import Store

LEASE: Final = 1.0
"""The lease in seconds; the shortest that etcd grants."""

LOW, HIGH = 2, 4
"""The number of nodes that train together."""

MOST_NODES: Final = 6

PATIENCE: Final = 180.0
"""Seconds without progress after which a script has failed, also on a busy machine."""


class What(enum.StrEnum):
    """A kind of fault."""

    JOIN = "joins"
    LEAVE = "leaves"
    CRASH = "dies"
    CUT_LINE = "has its connections to etcd cut"
    STALL_LINE = "does not get through to etcd"
    SLOW_LINE = "gets through to etcd slowly"
    CUT_LINKS = "has all links cut that others hold to it"
    ETCD_DOWN = "etcd is killed, and comes back with its data"
    ETCD_EMPTY = "etcd is killed, and comes back without its data"
    ETCD_PAUSED = "etcd stands still"
    ALL_STALL = "nobody gets through to etcd"
    ALL_SLOW = "everybody gets through to etcd slowly"


@dataclass(frozen=True, slots=True)
class Step:
    """A fault, its delay after the previous step, and its duration."""

    after: float
    what: What
    who: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.2f} s" if self.seconds else ""
        return f"after {self.after:.2f} s: {f'{self.who} ' if self.who else ''}{self.what}{lasting}"


@dataclass(frozen=True, slots=True)
class Round:
    """Steps after which the run recovers.

    Attributes:
        steps: the faults.
        all_stay: whether no node joins or leaves and no connection breaks, so that the round must stay.
    """

    steps: tuple[Step, ...]
    all_stay: bool = False


_TO_MEMBERS: Final = (What.LEAVE, What.CRASH, What.CUT_LINE, What.STALL_LINE, What.SLOW_LINE, What.CUT_LINKS)
_TO_ETCD: Final = (What.ETCD_DOWN, What.ETCD_PAUSED, What.ALL_STALL, What.ALL_SLOW)


def script(seed: int, rounds: int) -> list[Round]:
    """The steps of a seed. The first node stays to the end: while one lives, round numbers never fall."""
    dice = random.Random(seed)
    names = (f"n{number}" for number in itertools.count())
    present = [next(names) for _ in range(dice.randint(LOW, HIGH))]
    played = [Round(tuple(Step(dice.uniform(0, 0.1), What.JOIN, name) for name in present))]

    def step(what: What) -> Step:
        who, seconds = "", 0.0
        if what is What.JOIN:
            who = next(names)
            present.append(who)
        elif what in {What.LEAVE, What.CRASH}:
            who = present.pop(dice.randrange(1, len(present)))
        elif what in _TO_MEMBERS:
            who = dice.choice(present)
        if what not in {What.JOIN, What.LEAVE, What.CRASH, What.CUT_LINE, What.CUT_LINKS}:
            seconds = dice.choice((0.1, 0.5, 1.0, 3.0)) * LEASE * dice.uniform(0.8, 1.2)
        return Step(dice.choice((0.0, 0.02, 0.3)) * dice.random(), what, who, seconds)

    for _ in range(rounds):
        kind = dice.random()
        if kind < 0.25:
            steps = [step(dice.choice((*_TO_ETCD, What.ETCD_EMPTY))) for _ in range(dice.randint(1, 3))]
            played.append(Round(tuple(steps), all_stay=True))
            continue
        # While etcd is empty, the nodes that know its data must live; and fewer nodes than the wanted number
        # may join, since the wanted number of nodes starts without waiting.
        empty = kind >= 0.75
        choices = (What.CUT_LINE, What.SLOW_LINE, What.JOIN) if empty else (What.JOIN, *_TO_MEMBERS, *_TO_ETCD)
        steps = [step(What.ETCD_EMPTY)] if empty else []
        for _ in range(dice.randint(2, 6)):
            what = dice.choice(choices)
            joined = sum(each.what is What.JOIN for each in steps)
            if what is What.JOIN and (len(present) >= MOST_NODES or (empty and joined >= HIGH - 1)):
                continue
            if what in {What.LEAVE, What.CRASH} and len(present) < 2:
                continue
            steps.append(step(what))
        steps += [step(What.JOIN) for _ in range(LOW - len(present))]
        played.append(Round(tuple(steps)))
    return played


class BrokenPromiseError(AssertionError):
    """A guarantee of the rendezvous was broken."""


@dataclass(eq=False)
class Member:
    """A node, its proxy to etcd, and the events that it received."""

    name: str
    line: TcpProxy
    node: TestNode | None = None
    told: list[RoundRecord] = field(default_factory=list)
    isolated_in: int = -1
    reading: asyncio.Task[None] | None = None


class Play:
    """Nodes of one run on one etcd with faults; an async context manager.

    Args:
        etcd: the server; it is killed, paused and emptied.
        run_id: the id of the run.
    """

    def __init__(self, etcd: EtcdServer, run_id: str) -> None:
        self.rounds: dict[int, RoundRecord] = {}
        self._etcd = etcd
        self._live: dict[str, Member] = {}
        self._broken: list[str] = []
        self._factory = NodeFactory(
            self._reach_directly, run_id, lease=LEASE, last_call_timeout=LEASE, join_timeout=10 * PATIENCE
        )
        self._stack = contextlib.AsyncExitStack()
        self._news = asyncio.Event()
        self._etcds_turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._factory)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(self._stop_reading(member) for member in self._live.values()))
        await self._stack.aclose()

    async def play(self, part: Round) -> None:
        """Perform the steps, and wait until all living nodes are in one round again.

        Raises:
            BrokenPromiseError: a guarantee was broken, or the nodes did not meet again.
        """
        before, cut_off = dict(self.rounds), self._cut_off()
        async with asyncio.TaskGroup() as happening:
            for step in part.steps:
                await asyncio.sleep(step.after)
                happening.create_task(self._happens(step))
        try:
            async with asyncio.timeout(PATIENCE):
                while not self._together():
                    self._check()
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise BrokenPromiseError(f"no progress: {self._state()}") from None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEASE / 2):
                while True:
                    self._news.clear()
                    await self._news.wait()
        self._check()
        if not self._together():
            raise BrokenPromiseError(f"no rest: {self._state()}")
        if part.all_stay and before != self.rounds:
            raise BrokenPromiseError(f"the round changed, though only etcd was away: {self._state()}")
        if part.all_stay and cut_off != self._cut_off():
            raise BrokenPromiseError(f"workers were stopped, though only etcd was away: {self._state()}")

    # -- faults

    async def _happens(self, step: Step) -> None:
        member = self._live.get(step.who)
        match step.what:
            case What.JOIN:
                await self._join(step.who)
            case What.LEAVE | What.CRASH:
                await self._go(step.who, crash=step.what is What.CRASH)
            case What.ETCD_DOWN | What.ETCD_EMPTY | What.ETCD_PAUSED:
                async with self._etcds_turn:
                    await self._etcd_away(step)
            case What.CUT_LINKS:
                if member is not None and member.node is not None:
                    for link in links_to(os.getpid(), member.node.inner.server.port).values():
                        cut(os.getpid(), link)
            case What.CUT_LINE:
                if member is not None:
                    member.line.cut()
            case What.STALL_LINE | What.ALL_STALL:
                await self._stall([member] if member else list(self._live.values()), step.seconds)
            case What.SLOW_LINE | What.ALL_SLOW:
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

    async def _go(self, name: str, *, crash: bool) -> None:
        member = self._live.get(name)
        while member is None or member.reading is None:  # it is joining
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
        if step.what is What.ETCD_PAUSED:
            with self._etcd.paused():
                await asyncio.sleep(step.seconds)
            return
        await self._etcd.kill()
        if step.what is What.ETCD_EMPTY:
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
                if event.store is not None:
                    event.store.close()
                self._told(member, event.record)
            elif isinstance(event, Partitioned):
                member.isolated_in = member.told[-1].number
            elif isinstance(event, OutcomeRecord):
                self._broken.append(f"{member.name} was told that the run has ended: {event}")
            self._news.set()

    def _told(self, member: Member, round: RoundRecord) -> None:
        standing = self.rounds.setdefault(round.number, round)
        if standing != round:
            self._broken.append(f"round {round.number} is {standing}, and to {member.name} it is {round}")
        if member.told and member.told[-1].number >= round.number:
            self._broken.append(f"{member.name} was told of {round.number} after {member.told[-1].number}")
        if round.members and not LOW <= len(round.members) <= HIGH:
            self._broken.append(f"round {round.number} has {len(round.members)} members")
        if len(set(round.nodes)) < len(round.nodes):
            self._broken.append(f"round {round.number} has a node twice: {round.nodes}")
        member.told.append(round)

    def _check(self) -> None:
        for member in self._live.values():
            if member.node is not None and member.node.inner.failed.done():
                self._broken.append(f"{member.name} ended by itself: {member.node.inner.failed.exception()!r}")
        if self._broken:
            raise BrokenPromiseError("; ".join(self._broken))

    def _together(self) -> bool:
        """Whether every living node is in the last round, or waits because it is full, and knows it."""
        if not self.rounds:
            return False
        last = self.rounds[max(self.rounds)]
        ids = {member.node.inner.node for member in self._live.values() if member.node is not None}
        return (
            all(member.told and member.told[-1] == last for member in self._live.values())
            and all(member.isolated_in < last.number for member in self._live.values())
            and ids.issuperset(last.nodes)
            and len(last.nodes) == min(len(self._live), HIGH)
        )

    def _cut_off(self) -> dict[str, int]:
        return {name: member.isolated_in for name, member in self._live.items()}

    def _state(self) -> str:
        told = {
            name: (
                f"knows {member.told[-1].number if member.told else 'none'}"
                + (f", isolated in {member.isolated_in}" if member.isolated_in >= 0 else "")
            )
            for name, member in self._live.items()
        }
        history = [
            f"{round.number}: {', '.join(round.nodes) or 'nobody'} ({round.cause})" for round in self.rounds.values()
        ]
        return f"{told}; rounds: " + "; ".join(history)

    async def _stop_reading(self, member: Member) -> None:
        if member.reading is not None:
            member.reading.cancel()
            await asyncio.gather(member.reading, return_exceptions=True)

    async def _reach_directly(self) -> Store:
        return await connect(self._etcd.settings)
