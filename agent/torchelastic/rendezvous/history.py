"""What a run did when, as one node knows it: its time breakdown and its rounds.

Every node keeps a history of what it is told and does; the leader's is the run's. A new leader adopts what its
predecessor has written, and continues from there with what it has seen itself. So each second since the creation of
the job is in one state, whichever node led. Time in which no node was present is waiting time.

Nothing is awaited here, and the clock is injected.
"""

from __future__ import annotations

import bisect
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from torchelastic.protocol import (
    COUNT_LIMIT,
    HISTORY_LIMIT,
    HistoryRecord,
    NodeEnd,
    PastRound,
    RoundReason,
    RunState,
    TimeBreakdown,
    missing_between,
    shorten,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torchelastic.protocol import NodeRecord, RoundRecord

MAX_CAUSE: Final = 300
"""Characters of a round's cause that the history keeps."""

MAX_MESSAGE: Final = 1000
"""Characters of a failure's message that the history keeps."""

MAX_CLOCK_SKEW: Final = 3600.0
"""Seconds by which another node's clock may be ahead; a breakdown from later is ignored."""

_AT_WORK: Final = (RunState.RESTORING, RunState.TRAINING)


class _Transition(NamedTuple):
    at: float
    state: RunState


def steady_clock() -> Callable[[], float]:
    """Return a clock of seconds since the Unix epoch that is never set back."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


class History:
    """The time of a run and its rounds.

    Args:
        created: when its job was created, in seconds since the Unix epoch; None if unknown: now.
        resumed: the time before the run was resumed; None if it never was suspended.
        clock: returns the current time.
    """

    def __init__(
        self, created: float | None, resumed: TimeBreakdown | None = None, *, clock: Callable[[], float] | None = None
    ) -> None:
        self._now = steady_clock() if clock is None else clock
        now = self._now()
        self.created: Final = now if created is None else min(created, now)
        self._base = TimeBreakdown(until=self.created) if resumed is None else resumed
        self._transitions = [_Transition(now, RunState.WAITING)]
        self._rounds: dict[int, PastRound] = {}
        self._number = 0
        self._formed_at = now
        self._first_step_at = self._last_checkpoint_at = 0.0
        self._nodes: frozenset[str] = frozenset()

    # -- what this node sees

    @property
    def state(self) -> RunState:
        """The run's current state."""
        return self._transitions[-1].state

    def enter(self, state: RunState) -> None:
        """Note that the run is in another state from now on."""
        if state is not self.state:
            self._transitions.append(_Transition(self._now(), state))

    def round_broke(self) -> None:
        """Note that the current round has ended, and the next one is to be agreed on."""
        if self.state in _AT_WORK:
            self.enter(RunState.RENDEZVOUS)

    def workers_started(self) -> None:
        """Note that the workers of the current round were started."""
        steps = RunState.RESTORING in self._base.seconds or any(
            transition.state is RunState.RESTORING for transition in self._transitions
        )
        self.enter(RunState.RESTORING if steps and not self._first_step_at else RunState.TRAINING)

    def note_round(self, record: RoundRecord) -> None:
        """Note a round that this node was told of."""
        present = record.time_breakdown.there if record.time_breakdown is not None else ()
        nodes = frozenset(record.nodes or present)
        if record.number == self._number and nodes == self._nodes:
            return
        ended, lost_before, died_before = self._ended_at(), self._base.lost or 0.0, self._died()
        if record.time_breakdown is not None:
            self.adopt(record.time_breakdown)
        now = self._now()
        past = _past_round(record, began=now)
        died = self._died() - died_before
        if nodes and died > 0 and self._nodes.isdisjoint(nodes):
            past = _with_all_gone(past, died, len(self._nodes))
        if ended and self._number in self._rounds:
            self._rounds[self._number] = msgspec.structs.replace(self._rounds[self._number], ended=round(ended, 3))
        if self._base.lost is not None:
            past = msgspec.structs.replace(past, lost=round(max(self._base.lost - lost_before, 0.0), 3))
        self._rounds.setdefault(record.number, past)
        self._limit_rounds()
        self._number, self._formed_at, self._nodes = record.number, now, nodes
        self._first_step_at = self._last_checkpoint_at = 0.0
        if not record.members:
            self.enter(RunState.WAITING)

    def note_progress(self, record: NodeRecord) -> bool:
        """Note what a node reports of the program's progress; return whether it is new."""
        return self._note_progress(record.round, record.first_step_at, record.last_checkpoint_at)

    def _note_progress(self, round: int, first_step_at: float, last_checkpoint_at: float) -> bool:
        known = first_step_at <= self._first_step_at and last_checkpoint_at <= self._last_checkpoint_at
        if round != self._number or known:
            return False
        if first_step_at and not self._first_step_at:
            self._first_step_at = first_step_at
            if (seen := self._seen(*_AT_WORK)) is not None:
                # The workers trained since then, and restored before.
                index, began, until = seen
                stepped = min(max(first_step_at, began), until)
                trained = [_Transition(began, RunState.RESTORING), _Transition(stepped, RunState.TRAINING)]
                self._transitions[index : index + 1] = trained
        self._last_checkpoint_at = max(self._last_checkpoint_at, last_checkpoint_at)
        return True

    # -- what other nodes have written

    def adopt(self, breakdown: TimeBreakdown) -> None:
        """Continue from the breakdown of the node that led until then; what this node saw counts from there.

        A breakdown of an earlier round is ignored, even if it is more recent: the leader may have written it while it
        committed the next round, and it lacks the loss and the departures that the round's own breakdown has.
        """
        base = self._base
        is_older = (breakdown.round, breakdown.until) < (base.round, base.until)
        if is_older or breakdown.until > self._now() + MAX_CLOCK_SKEW:
            return
        self._base = breakdown
        first = bisect.bisect_right(self._transitions, breakdown.until, key=lambda transition: transition.at) - 1
        del self._transitions[: max(first, 0)]
        self._note_progress(breakdown.round, breakdown.first_step_at, breakdown.last_checkpoint_at)

    def adopt_rounds(self, history: HistoryRecord) -> None:
        """Add the rounds of which this node was not told."""
        for past in history.rounds:
            known = self._rounds.get(past.number)
            ended = past.ended or (0.0 if known is None else known.ended)
            self._rounds[past.number] = msgspec.structs.replace(past, ended=ended)
        self._rounds = dict(sorted(self._rounds.items()))
        self._limit_rounds()

    # -- what the leader writes

    def with_breakdown(self, record: RoundRecord, end_of: Callable[[str], NodeEnd | None]) -> RoundRecord:
        """Return a round to be committed with the time before it; the history does not change.

        Args:
            record: the round.
            end_of: returns why a member of the current round is gone; None if it is present.
        """
        if record.number <= self._number:
            return record  # restored to a store that had lost it
        nodes = frozenset(record.nodes)
        away = self._nodes - nodes
        ends = {node: end for node in away if (end := end_of(node)) is not None}
        present = () if nodes else tuple(sorted(self._nodes - ends.keys()))
        if nodes:
            ends |= dict.fromkeys(away - ends.keys(), NodeEnd.NOT_NEEDED)
        breakdown = self.breakdown()
        breakdown = msgspec.structs.replace(
            breakdown,
            lost=self._lost_if_ended(),
            round=record.number,
            first_step_at=0.0,
            last_checkpoint_at=0.0,
            joined=min(breakdown.joined + len(nodes - self._nodes), COUNT_LIMIT),
            gone=_added(breakdown.gone, ends.values()),
            there=present,
        )
        return msgspec.structs.replace(record, time_breakdown=breakdown)

    def final_breakdown(self, *, succeeded: bool) -> TimeBreakdown:
        """Return the breakdown of a run that is about to end; a run that succeeds loses nothing of its last round."""
        breakdown = self.breakdown()
        lost = breakdown.lost if succeeded else self._lost_if_ended()
        # A node that continues from here must not count this round's loss again.
        checkpoint = 0.0 if lost is None else breakdown.until
        return msgspec.structs.replace(breakdown, state=RunState.STOPPING, lost=lost, last_checkpoint_at=checkpoint)

    def breakdown(self) -> TimeBreakdown:
        """Return where the time went until now."""
        # Read before the base, because a scrape runs in another thread: adopt() replaces the base first.
        transitions = tuple(self._transitions)
        base = self._base
        now = max(self._now(), base.until)
        return TimeBreakdown(
            until=max(round(now, 3), base.until),
            state=transitions[-1].state,
            seconds=_seconds_by_state(base, transitions, now),
            lost=(base.lost or 0.0) if self._last_checkpoint_at else base.lost,
            round=max(self._number, base.round),
            first_step_at=self._first_step_at,
            last_checkpoint_at=self._last_checkpoint_at,
            joined=base.joined,
            gone=dict(base.gone),
        )

    def record(self) -> HistoryRecord:
        """Return the rounds of the run."""
        rounds = tuple(self._rounds.values())
        return HistoryRecord(created=self.created, rounds=rounds, omitted=missing_between(rounds))

    # -- queries

    def _seen(self, *states: RunState) -> tuple[int, float, float] | None:
        """When this node last saw the current round in one of these states: the transition's index, from, until."""
        for index in range(len(self._transitions) - 1, -1, -1):
            began, state = self._transitions[index]
            if state in states and began >= self._formed_at:
                is_last = index + 1 == len(self._transitions)
                return index, began, self._now() if is_last else self._transitions[index + 1].at
        return None

    def _lost_if_ended(self) -> float | None:
        """The training time lost in the run if the current round ends now; None if no checkpoint was reported."""
        base = self._base
        checkpoint = max(self._last_checkpoint_at, base.last_checkpoint_at if base.round == self._number else 0.0)
        if base.lost is None and not checkpoint:
            return None
        began = ended = 0.0
        if (seen := self._seen(RunState.TRAINING)) is not None:
            _, began, ended = seen
        elif base.round == self._number and base.state is RunState.TRAINING:
            began = base.first_step_at or base.last_checkpoint_at
            ended = base.until if began else 0.0
        return round((base.lost or 0.0) + max(ended - max(began, checkpoint), 0.0), 3)

    def _ended_at(self) -> float:
        """When the workers of the current round stopped, as seen here or written by others; 0 if unknown."""
        base, past = self._base, self._rounds.get(self._number)
        written = base.until if base.round == self._number and base.state in _AT_WORK else 0.0
        if past is None or written <= past.began:  # of the time before the round
            written = 0.0
        if (seen := self._seen(*_AT_WORK)) is None:
            return written
        _, began, ended = seen
        return written if 0 < written < began else ended  # a node that came later has only heard of the round

    def _died(self) -> int:
        return self._base.gone.get(NodeEnd.DIED, 0)

    def _limit_rounds(self) -> None:
        while len(self._rounds) > HISTORY_LIMIT:
            del self._rounds[list(self._rounds)[HISTORY_LIMIT // 2]]


def _seconds_by_state(base: TimeBreakdown, transitions: Sequence[_Transition], now: float) -> dict[RunState, float]:
    """Return the seconds in each state: those of the base, and of the transitions after it."""
    seconds = dict(base.seconds)
    spans = [(RunState.WAITING, transitions[0].at - base.until)]
    ends = (*(transition.at for transition in transitions[1:]), now)
    spans += [(state, end - max(at, base.until)) for (at, state), end in zip(transitions, ends, strict=True)]
    for state, spent in spans:
        if spent > 0 or (state is RunState.RESTORING and state not in seconds):
            seconds[state] = seconds.get(state, 0.0) + max(spent, 0.0)
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
    )


def _with_all_gone(past: PastRound, died: int, nodes: int) -> PastRound:
    """The first round after one of which no node is left: its cause is that, and not who joined."""
    if past.reason is not RoundReason.NODE_JOINED:
        return past
    gone = "the only node died" if nodes == 1 else f"all {nodes} nodes died"
    if died < nodes:
        gone = f"{died} of the {nodes} nodes died, and the others left"
    cause = shorten(f"{gone}; {past.cause}", MAX_CAUSE)
    return msgspec.structs.replace(past, reason=RoundReason.NODE_LOST, cause=cause)


def _added(counts: Mapping[NodeEnd, int], ends: Iterable[NodeEnd]) -> dict[NodeEnd, int]:
    found = dict(counts)
    for end in ends:
        found[end] = min(found.get(end, 0) + 1, COUNT_LIMIT)
    return found
