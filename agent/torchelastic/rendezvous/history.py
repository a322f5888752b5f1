"""The history of a run as one node knows it: its time breakdown and its rounds.

Every node keeps a history of the records that it receives and of its own actions. The leader's history is
authoritative. A new leader adopts the history that its predecessor has written, and adds its own observations, so each
second since the creation of the job counts for exactly one state. Time without any node counts as waiting.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import logging
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from torchelastic.errors import MalformedRecord, StoreUnavailable
from torchelastic.protocol.codec import Record, decode, encode, shorten
from torchelastic.protocol.records import (
    COUNT_LIMIT,
    HISTORY_LIMIT,
    DepartureReason,
    HistoryRecord,
    PastRound,
    RoundReason,
    RunState,
    TimeBreakdown,
)
from torchelastic.rendezvous.run_watch import ChangeSignal
from torchelastic.store.client import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchelastic.protocol.records import NodeRecord, RoundRecord
    from torchelastic.rendezvous.run_watch import RunWatch
    from torchelastic.store.api import Entry

logger = logging.getLogger(__name__)

MAX_CAUSE: Final = 200
"""Maximum length of a round's cause in characters."""

MAX_MESSAGE: Final = 500
"""Maximum length of a failure's message in characters. Rounds with messages of this length fit into one record."""

MAX_CLOCK_SKEW: Final = 3600.0
"""Maximum seconds by which another node's clock may be ahead; a breakdown that ends later is ignored."""

WRITE_INTERVAL: Final = 10.0
"""Seconds that the writer waits for a change before it writes anyway. If all nodes are killed, the breakdown lacks at
most this time and :data:`MIN_INTERVAL`."""

MIN_INTERVAL: Final = 1.0
"""Minimum number of seconds between two writes."""

_WORKING_STATES: Final = (RunState.RESTORING, RunState.TRAINING)


@dataclass
class _RoundTimes:
    """The current round and its times, in seconds since the Unix epoch; a time that this node does not know is 0."""

    number: int = 0
    nodes: frozenset[str] = frozenset()
    started: float = 0.0
    first_step: float = 0.0
    last_checkpoint: float = 0.0
    ended: float = 0.0
    first_steps: frozenset[int] = frozenset()


def steady_clock() -> Callable[[], float]:
    """Return a clock of seconds since the Unix epoch that is never set back."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


class History:
    """The time breakdown and the rounds of a run.

    Args:
        created: when the job was created, in seconds since the Unix epoch; None for the current time.
        resumed: the breakdown of the time before the run was resumed; None if the run was never suspended.
        clock: returns the seconds since the Unix epoch; None for :func:`steady_clock`.

    Attributes:
        imports: the installed modules that workers import.
        news: announces what the leader writes at once.
    """

    def __init__(
        self, created: float | None, resumed: TimeBreakdown | None = None, *, clock: Callable[[], float] | None = None
    ) -> None:
        self.news = ChangeSignal()
        self._now = steady_clock() if clock is None else clock
        now = self._now()
        self.created: Final = now if created is None else min(created, now)
        self._base = TimeBreakdown(until=self.created) if resumed is None else resumed
        self._transitions = [(now, RunState.WAITING)]  # after the base; TRAINING includes restoring
        self._round = _RoundTimes()
        self._rounds: dict[int, PastRound] = {}
        self.imports: tuple[str, ...] = ()

    # -- observations of this node

    @property
    def state(self) -> RunState:
        """The run's current state."""
        _, state = self._transitions[-1]
        restores = state is RunState.TRAINING and _trains_from(self._round, self._base) > self._now()
        return RunState.RESTORING if restores else state

    def enter(self, state: RunState) -> None:
        """Note a change of the run's state."""
        (_, before), now = self._transitions[-1], self._now()
        if state is not before:
            if before is RunState.TRAINING:
                self._round.ended = now
            self._transitions.append((now, state))

    def round_ended(self) -> None:
        """Note that the current round has ended and the next rendezvous starts."""
        if self.state in _WORKING_STATES:
            self.enter(RunState.RENDEZVOUS)

    def workers_started(self) -> None:
        """Note that the workers of the current round were started."""
        self.enter(RunState.TRAINING)
        self._round.started, self._round.ended = self._transitions[-1][0], 0.0
        self._note_in_round(started_at=round(self._round.started, 3))
        self.news.send()

    def note_round(self, record: RoundRecord) -> None:
        """Note a round that this node has received."""
        breakdown, before, base = record.time_breakdown, self._round, self._base
        nodes = frozenset(record.nodes or (breakdown.present if breakdown is not None else ()))
        if record.number == before.number and nodes == before.nodes:
            return
        if ended := self._ended_at():
            self._note_in_round(ended=round(ended, 3))
        if breakdown is not None:
            self.adopt(breakdown)
        self._round = _RoundTimes(record.number, nodes)
        self.note_progress(self._base)
        past = _past_round(record, began=self._now())
        died = self._base.departures.get(DepartureReason.DIED, 0) - base.departures.get(DepartureReason.DIED, 0)
        if nodes and died > 0 and before.nodes.isdisjoint(nodes):
            past = _with_loss_of_all_nodes(past, died, len(before.nodes))
        if self._base.lost is not None:
            past = msgspec.structs.replace(past, lost=round(max(self._base.lost - (base.lost or 0.0), 0.0), 3))
        self._rounds.setdefault(record.number, past)
        self._limit_rounds()
        if not record.members:
            self.enter(RunState.WAITING)

    def note_progress(self, record: NodeRecord | TimeBreakdown) -> bool:
        """Note the program's progress in the current round; return whether it is new."""
        times, step, checkpoint = self._round, record.first_step_at, record.last_checkpoint_at
        if record.round != times.number or (step <= times.first_step and checkpoint <= times.last_checkpoint):
            return False
        times.first_step = times.first_step or step
        times.last_checkpoint = max(times.last_checkpoint, checkpoint)
        self._note_in_round(first_step_at=times.first_step)
        return True

    def note_first_steps(self, record: NodeRecord) -> tuple[int, ...]:
        """Note the steps at which a node's workers began the round.

        Returns:
            The lowest and the highest one of all nodes if they differ, and have changed; else nothing.
        """
        times, before = self._round, self._round.first_steps
        if record.round != times.number:
            return ()
        times.first_steps = before.union(record.first_steps)
        if times.first_steps == before or len(times.first_steps) == 1:
            return ()
        steps = min(times.first_steps), max(times.first_steps)
        times.first_steps = frozenset(steps)
        if times.first_steps == before:
            return ()
        self._note_in_round(first_steps=steps)
        return steps

    def _note_in_round(self, **changes: Any) -> None:  # noqa: ANN401 - any field of the round
        if (past := self._rounds.get(self._round.number)) is not None:
            self._rounds[past.number] = msgspec.structs.replace(past, **changes)

    # -- records of other nodes

    def adopt(self, breakdown: TimeBreakdown) -> None:
        """Continue from the previous leader's breakdown; this node's observations count from the end of the breakdown.

        A breakdown of an earlier round is ignored, even if it is more recent. A leader may write such a breakdown while
        it commits the next round; the loss and the departures are only in the breakdown of the next round.
        """
        base = self._base
        is_older = (breakdown.round, breakdown.until) < (base.round, base.until)
        if is_older or breakdown.until > self._now() + MAX_CLOCK_SKEW:
            return
        self._base = breakdown
        first = bisect.bisect_right(self._transitions, breakdown.until, key=lambda transition: transition[0]) - 1
        del self._transitions[: max(first, 0)]
        self.note_progress(breakdown)

    def adopt_rounds(self, history: HistoryRecord) -> None:
        """Add the previous leader's rounds; they replace this node's records of the same rounds."""
        for past in history.rounds:
            known = self._rounds.get(past.number)
            ended = past.ended or (0.0 if known is None else known.ended)
            self._rounds[past.number] = msgspec.structs.replace(past, ended=ended)
        self._rounds = dict(sorted(self._rounds.items()))
        self._limit_rounds()
        self.imports = self.imports or history.imports

    # -- records of the leader

    def with_breakdown(self, record: RoundRecord, end_of: Callable[[str], DepartureReason | None]) -> RoundRecord:
        """Return a round with the time breakdown until its commit; the history does not change.

        ``end_of`` returns why a member of the current round is gone; None if the member is present.
        """
        before, nodes = self._round, frozenset(record.nodes)
        if record.number <= before.number:
            return record  # the leader restores it to a store that lost it
        away = before.nodes - nodes
        ends = {node: end for node in away if (end := end_of(node)) is not None}
        present = () if nodes else tuple(sorted(before.nodes - ends.keys()))
        if nodes:
            ends |= dict.fromkeys(away - ends.keys(), DepartureReason.NOT_NEEDED)
        breakdown = self.breakdown()
        departures = Counter(breakdown.departures) + Counter(ends.values())
        breakdown = msgspec.structs.replace(
            breakdown,
            lost=(breakdown.lost or 0.0) if record.staying else self._lost_if_ended(),
            round=record.number,
            first_step_at=0.0,
            last_checkpoint_at=0.0,
            nodes_joined=min(breakdown.nodes_joined + len(nodes - before.nodes), COUNT_LIMIT),
            departures={end: min(count, COUNT_LIMIT) for end, count in departures.items()},
            present=present,
        )
        return msgspec.structs.replace(record, time_breakdown=breakdown)

    def end(self, *, succeeded: bool) -> None:
        """Note that the run ends now; if it succeeds, no training time of its last round is lost."""
        lost = self.breakdown().lost if succeeded else self._lost_if_ended()
        self.enter(RunState.STOPPING)
        breakdown = self.breakdown()
        # A node that continues from this breakdown must not count this round's loss again.
        checkpoint = 0.0 if lost is None else breakdown.until
        self.adopt(msgspec.structs.replace(breakdown, lost=lost, last_checkpoint_at=checkpoint))

    def breakdown(self) -> TimeBreakdown:
        """Return the time breakdown up to now."""
        # A scrape runs in another thread. adopt() replaces the base first, so read the transitions before the base.
        transitions = tuple(self._transitions)
        base, times = self._base, self._round
        now = max(self._now(), base.until)
        return TimeBreakdown(
            until=max(round(now, 3), base.until),
            state=self.state,
            seconds=_seconds_by_state(base, transitions, times, now),
            lost=(base.lost or 0.0) if times.last_checkpoint else base.lost,
            round=max(times.number, base.round),
            first_step_at=times.first_step,
            last_checkpoint_at=times.last_checkpoint,
            nodes_joined=base.nodes_joined,
            departures=dict(base.departures),
        )

    def record(self) -> HistoryRecord:
        """Return the record of the rounds and the imports."""
        return HistoryRecord(self.created, tuple(self._rounds.values()), self.imports)

    # -- queries

    def _lost_if_ended(self) -> float | None:
        """Return the training time lost in the run if the round ends now; None if no checkpoint was reported."""
        base, times = self._base, self._round
        if base.lost is None and not times.last_checkpoint:
            return None
        began = ended = 0.0
        if times.started:
            began, ended = _trains_from(times, base), times.ended or self._now()
        elif base.round == times.number and base.state is RunState.TRAINING:
            began = times.first_step or times.last_checkpoint
            ended = base.until if began else 0.0
        return round((base.lost or 0.0) + max(ended - max(began, times.last_checkpoint), 0.0), 3)

    def _ended_at(self) -> float:
        """Return when the current round's workers stopped, as this node saw or another node wrote; 0 if unknown."""
        base, times, past = self._base, self._round, self._rounds.get(self._round.number)
        written = base.until if base.round == times.number and base.state in _WORKING_STATES else 0.0
        if past is None or written <= past.began:  # written before the round
            written = 0.0
        if not times.started:
            return written
        # A node that joined later has received only the round.
        return written if 0 < written < times.started else times.ended or self._now()

    def _limit_rounds(self) -> None:
        while len(self._rounds) > HISTORY_LIMIT:
            del self._rounds[list(self._rounds)[HISTORY_LIMIT // 2]]


def _trains_from(times: _RoundTimes, base: TimeBreakdown) -> float:
    """Return when the workers of the current round began to train; infinity if they are still restoring."""
    if times.first_step:
        return max(times.first_step, times.started)
    return float("inf") if RunState.RESTORING in base.seconds else times.started


def _seconds_by_state(
    base: TimeBreakdown, transitions: Sequence[tuple[float, RunState]], times: _RoundTimes, now: float
) -> dict[RunState, float]:
    """Return the seconds in each state until now: those of the base, and of the transitions after it."""
    seconds = dict(base.seconds)

    def add(state: RunState, began: float, ended: float) -> None:
        spent = max(ended - max(began, base.until), 0.0)
        if spent or state is RunState.RESTORING:
            seconds[state] = seconds.get(state, 0.0) + spent

    add(RunState.WAITING, base.until, transitions[0][0])
    reports_steps = bool(times.first_step) or RunState.RESTORING in base.seconds
    for (at, state), (end, _) in itertools.pairwise((*transitions, (now, RunState.WAITING))):
        trains_from = at
        if state is RunState.TRAINING and at == times.started and reports_steps:
            trains_from = min(_trains_from(times, base), end)
            add(RunState.RESTORING, at, trains_from)
        add(state, trains_from, end)
    return {state: round(spent, 3) for state, spent in seconds.items()}


def _past_round(record: RoundRecord, *, began: float) -> PastRound:
    failure = record.failure if record.reason is RoundReason.WORKER_FAILED else None
    if failure is not None:
        failure = msgspec.structs.replace(failure, message=shorten(failure.message, MAX_MESSAGE))
    return PastRound(
        number=record.number,
        began=round(began, 3),
        nodes=len(record.members),
        workers=record.world_size,
        reason=record.reason,
        cause=shorten(record.cause, MAX_CAUSE),
        failure=failure,
        staying=record.staying,
    )


def _with_loss_of_all_nodes(past: PastRound, died: int, nodes: int) -> PastRound:
    """Return the first round after the loss of all nodes, with the loss as its cause."""
    if past.reason is not RoundReason.NODE_JOINED:
        return past
    gone = "the only node died" if nodes == 1 else f"all {nodes} nodes died"
    if died < nodes:
        gone = f"{died} of the {nodes} nodes died, and the others left"
    cause = shorten(f"{gone}; {past.cause}", MAX_CAUSE)
    return msgspec.structs.replace(past, reason=RoundReason.NODE_LOST, cause=cause)


class HistoryWriter:
    """Reads and writes the run's history while this node leads.

    Rounds do not wait for the writer, but a new leader reads its predecessor's history before it decides anything.

    Attributes:
        has_read: whether this node has read the previous leader's history, as far as it is readable.
    """

    def __init__(self, history: History, run: RunWatch) -> None:
        self.has_read = False
        self._history = history
        self._run = run
        self._news = history.news
        self._writing = asyncio.Lock()
        self._written: bytes | None = None

    def notify(self, *, rewrite: bool = False) -> None:
        """Request a write; with ``rewrite``, write unchanged rounds too, because the store may have lost them."""
        if rewrite:
            self._written = None
        self._news.send()

    async def run(self) -> None:
        """Read the history, then write changes until cancelled or the run is over."""
        backoff = Backoff()
        while not self.has_read:
            try:
                await self.read()
            except StoreUnavailable as error:
                if backoff.attempts == 0 and self._run.unreachable_since is None:
                    logger.warning("cannot read the run's history; trying again: %s", error)
                await backoff.wait()
        self._run.changed.send()
        while self._run.outcome is None:
            seen = self._news.count
            try:
                await self.write()
            except StoreUnavailable:
                await backoff.wait()
                continue
            backoff.reset()
            await asyncio.sleep(MIN_INTERVAL)
            await self._news.after(seen, timeout=WRITE_INTERVAL)

    async def read(self) -> None:
        """Adopt the previous leader's history."""
        store, keys = self._run.store, self._run.keys
        breakdown, history = await asyncio.gather(store.get(keys.time_breakdown), store.get(keys.history))
        if (known := _decoded(breakdown, TimeBreakdown)) is not None:
            self._history.adopt(known)
        if (past := _decoded(history, HistoryRecord)) is not None:
            self._history.adopt_rounds(past)
        self.has_read = True

    async def write(self) -> None:
        """Write the time breakdown, and the rounds if they have changed."""
        async with self._writing:
            keys, put = self._run.keys, self._run.run_lease.put
            history = encode(self._history.record())
            writes = [put(keys.time_breakdown, encode(self._history.breakdown()))]
            if history != self._written:
                writes.append(put(keys.history, history))
            await asyncio.gather(*writes)
            self._written = history


async def read_imports(run: RunWatch) -> tuple[str, ...]:
    """Return the installed modules that the run's workers import, as far as the store has them now."""
    with suppress(StoreUnavailable):
        record = _decoded(await run.store.get(run.keys.history), HistoryRecord)
        return () if record is None else record.imports
    return ()


def _decoded(entry: Entry | None, kind: type[Record]) -> Record | None:
    if entry is None:
        return None
    try:
        return decode(entry.value, kind)
    except MalformedRecord as error:
        logger.warning("replacing an unreadable record of the run's history: %s", error)
        return None
