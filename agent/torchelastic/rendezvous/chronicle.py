"""What a run did at which time, as one node knows it: its time split, and its epochs.

Every node keeps one, from what it is told and what it does itself; that of the leading node is the run's. Where a node
takes the lead it takes over what its predecessor has written, and goes on from there with what it saw itself. So each
second since the making of the job is in one state, whoever led when. What passed while nobody was there is waiting.

Nothing is awaited here, and what time it is comes from outside.
"""

from __future__ import annotations

import bisect
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from torchelastic.contract import (
    COUNT_LIMIT,
    HISTORY_LIMIT,
    EpochReason,
    HistoryRecord,
    NodeEnd,
    PastEpoch,
    RunState,
    TimeSplit,
    missing_between,
    shorten,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torchelastic.contract import EpochRecord, FailureRecord, NodeRecord

LONGEST_CAUSE: Final = 300
"""Characters of an epoch's cause that the history keeps."""

LONGEST_MESSAGE: Final = 1000
"""Characters of a failure's text that the history keeps."""

BELIEVED: Final = 3600.0
"""Seconds by which another node's clock may be ahead of this one's; a word from beyond that is not believed."""

_AT_WORK: Final = (RunState.RESTORING, RunState.TRAINING)


class _Mark(NamedTuple):
    """A state began."""

    at: float
    state: RunState


def steady_clock() -> Callable[[], float]:
    """A clock of seconds since the Unix epoch that is not set back while it is used."""
    ahead = time.time() - time.monotonic()
    return lambda: ahead + time.monotonic()


class Chronicle:
    """The time of a run and its epochs.

    Args:
        created: when its job was made, in seconds since the Unix epoch; None where nobody knows: now.
        resumed: where its time went before it was resumed; None for a run that was never suspended.
        clock: gives the present time.
    """

    def __init__(
        self, created: float | None, resumed: TimeSplit | None = None, *, clock: Callable[[], float] | None = None
    ) -> None:
        self._now = steady_clock() if clock is None else clock
        now = self._now()
        self.created: Final = now if created is None else min(created, now)
        self._before = TimeSplit(until=self.created) if resumed is None else resumed
        self._marks = [_Mark(now, RunState.WAITING)]
        self._epochs: dict[int, PastEpoch] = {}
        self._number = 0
        self._since = now
        self._stepped = self._kept = 0.0
        self._nodes: frozenset[str] = frozenset()

    # -- what this node does and is told

    @property
    def state(self) -> RunState:
        """What the run does now."""
        return self._marks[-1].state

    def enter(self, state: RunState) -> None:
        """The run does something else from now on."""
        if state is not self.state:
            self._marks.append(_Mark(self._now(), state))

    def broke(self) -> None:
        """The epoch that stands has come to its end, and the next one is to be agreed on."""
        if self.state in _AT_WORK:
            self.enter(RunState.RENDEZVOUS)

    def epoch(self, record: EpochRecord) -> None:
        """This node was told of an epoch."""
        there = record.split.there if record.split is not None else ()
        nodes = frozenset(record.nodes or there)
        if record.number == self._number and nodes == self._nodes:
            return
        lost, now = self._before.lost or 0.0, self._now()
        ended, died = self._ended(), self._before.gone.get(NodeEnd.DIED, 0)
        if record.split is not None:
            self.adopt(record.split)
        past = _past(record, began=now)
        died = self._before.gone.get(NodeEnd.DIED, 0) - died
        if nodes and died > 0 and self._nodes.isdisjoint(nodes):
            past = _with_nobody_left(past, died, len(self._nodes))
        if ended and self._number in self._epochs:
            self._epochs[self._number] = msgspec.structs.replace(self._epochs[self._number], ended=round(ended, 3))
        if self._before.lost is not None:
            past = msgspec.structs.replace(past, lost=round(max(self._before.lost - lost, 0.0), 3))
        self._epochs.setdefault(record.number, past)
        self._forget_epochs()
        self._number, self._since = record.number, now
        self._stepped = self._kept = 0.0
        self._nodes = nodes
        if not record.members:
            self.enter(RunState.WAITING)

    def started(self) -> None:
        """The workers of this epoch were started."""
        self.enter(RunState.RESTORING if self._says_steps() and not self._stepped else RunState.TRAINING)

    def told(self, epoch: int, *, stepped: float = 0.0, kept: float = 0.0) -> bool:
        """The program has told how far it is.

        Args:
            epoch: in which epoch.
            stepped: when it began its first step there; 0 where it has not said so.
            kept: when it began to write its last checkpoint there; 0 where it has not said so.

        Returns:
            Whether that is news.
        """
        if epoch != self._number or (stepped <= self._stepped and kept <= self._kept):
            return False
        if stepped and not self._stepped:
            self._stepped = stepped
            self._step_from(stepped)
        self._kept = max(self._kept, kept)
        return True

    def hear(self, record: NodeRecord) -> bool:
        """Take in what a node's record says of the program; whether that is news."""
        return self.told(record.epoch, stepped=record.stepped, kept=record.kept)

    # -- what others have written

    def adopt(self, split: TimeSplit) -> None:
        """Take over where the time went up to a moment, from whoever led then; what was seen here counts from there."""
        if not self._before.until <= split.until <= self._now() + BELIEVED:
            return
        self._before = split
        first = max(bisect.bisect_right(self._marks, split.until, key=lambda mark: mark.at) - 1, 0)
        del self._marks[:first]
        self.told(split.epoch, stepped=split.stepped, kept=split.kept)

    def adopt_history(self, history: HistoryRecord) -> None:
        """Take over the epochs of which this node was not told."""
        for past in history.epochs:
            known = self._epochs.get(past.number)
            ended = past.ended or (0.0 if known is None else known.ended)
            self._epochs[past.number] = msgspec.structs.replace(past, ended=ended)
        self._epochs = dict(sorted(self._epochs.items()))
        self._forget_epochs()

    # -- what the leader says

    def settle(self, record: EpochRecord, ends: Callable[[str], NodeEnd | None]) -> EpochRecord:
        """An epoch with what is known of the time before it, to be committed; nothing is changed here by that.

        Args:
            record: the epoch.
            ends: what became of a node of the last one; None where it is there.
        """
        if record.number <= self._number:
            return record  # one that the store had lost
        nodes = frozenset(record.nodes)
        away = self._nodes - nodes
        ended = {node: end for node in away if (end := ends(node)) is not None}
        there = () if nodes else tuple(sorted(self._nodes - ended.keys()))
        if nodes:
            ended |= dict.fromkeys(away - ended.keys(), NodeEnd.NOT_NEEDED)
        split = self.split()
        split = msgspec.structs.replace(
            split,
            lost=self._lost_now(),
            epoch=record.number,
            stepped=0.0,
            kept=0.0,
            joined=min(split.joined + len(nodes - self._nodes), COUNT_LIMIT),
            gone=_counted(split.gone, ended.values()),
            there=there,
        )
        return msgspec.structs.replace(record, split=split)

    def last_word(self, *, succeeded: bool) -> TimeSplit:
        """Where the time went, when the run is about to end; what a run that succeeds has trained is not lost."""
        split = self.split()
        lost = split.lost if succeeded else self._lost_now()
        # Whoever goes on from here counts nothing of this epoch a second time.
        kept = 0.0 if lost is None else split.until
        return msgspec.structs.replace(split, state=RunState.STOPPING, lost=lost, kept=kept)

    # -- what it comes to

    def split(self) -> TimeSplit:
        """Where the time went, up to now."""
        # In this order, since a scrape asks from another thread: what is adopted in between cuts off what is counted.
        marks = tuple(self._marks)
        before = self._before
        now = max(self._now(), before.until)
        seconds = dict(before.seconds)
        _add(seconds, RunState.WAITING, marks[0].at - before.until)
        ends = (*(mark.at for mark in marks[1:]), now)
        for (at, state), end in zip(marks, ends, strict=True):
            _add(seconds, state, end - max(at, before.until))
        return TimeSplit(
            until=max(round(now, 3), before.until),
            state=marks[-1].state,
            seconds={state: round(spent, 3) for state, spent in seconds.items()},
            lost=(before.lost or 0.0) if self._kept else before.lost,
            epoch=self._number,
            stepped=self._stepped,
            kept=self._kept,
            joined=before.joined,
            gone=dict(before.gone),
        )

    def history(self) -> HistoryRecord:
        """The epochs of the run."""
        epochs = tuple(self._epochs.values())
        return HistoryRecord(created=self.created, epochs=epochs, omitted=missing_between(epochs))

    # -- below

    def _says_steps(self) -> bool:
        """Whether the program is known to say when it begins to train."""
        marked = any(mark.state is RunState.RESTORING for mark in self._marks)
        return marked or RunState.RESTORING in self._before.seconds

    def _step_from(self, at: float) -> None:
        """The workers of this epoch train since that time; until then, from when they were started, they restored."""
        seen = self._seen(*_AT_WORK)
        if seen is None:
            return  # those of this node are not started yet
        index, began, until = seen
        at = min(max(at, began), until)
        self._marks[index : index + 1] = [_Mark(began, RunState.RESTORING), _Mark(at, RunState.TRAINING)]

    def _seen(self, *states: RunState) -> tuple[int, float, float] | None:
        """When the epoch that stands was last seen here in one of these states: the mark's place, from when, until."""
        for index in range(len(self._marks) - 1, -1, -1):
            began, state = self._marks[index]
            if state in states and began >= self._since:
                return index, began, self._marks[index + 1].at if index + 1 < len(self._marks) else self._now()
        return None

    def _lost_now(self) -> float | None:
        """What has been lost in the run if the epoch that stands ends now; None where no checkpoint was told of."""
        before = self._before
        kept = max(self._kept, before.kept if before.epoch == self._number else 0.0)
        if before.lost is None and not kept:
            return None
        began, ended = self._trained()
        return round((before.lost or 0.0) + max(ended - max(began, kept), 0.0), 3)

    def _trained(self) -> tuple[float, float]:
        """From when until when the epoch that stands has trained, as far as it was seen here or told of."""
        if (seen := self._seen(RunState.TRAINING)) is not None:
            _, began, ended = seen
            return began, ended
        before = self._before
        began = before.stepped or before.kept
        known = began and before.epoch == self._number and before.state is RunState.TRAINING
        return (began, before.until) if known else (0.0, 0.0)

    def _ended(self) -> float:
        """When the workers of the epoch that stands ran no more, as far as was seen here or told of; 0 for unknown."""
        before, epoch = self._before, self._epochs.get(self._number)
        last_word = before.until if before.epoch == self._number and before.state in _AT_WORK else 0.0
        if epoch is None or last_word <= epoch.began:  # that of its own record, which is of the time before it
            last_word = 0.0
        if (seen := self._seen(*_AT_WORK)) is None:
            return last_word
        _, began, ended = seen
        has_come_since = 0 < last_word < began  # and only heard of the epoch
        return last_word if has_come_since else ended

    def _forget_epochs(self) -> None:
        while len(self._epochs) > HISTORY_LIMIT:
            del self._epochs[list(self._epochs)[HISTORY_LIMIT // 2]]


def _past(record: EpochRecord, *, began: float) -> PastEpoch:
    return PastEpoch(
        number=record.number,
        began=round(began, 3),
        nodes=len(record.members),
        workers=record.world_size,
        reason=record.reason,
        cause=shorten(record.cause, LONGEST_CAUSE),
        failure=_shortened(record.failure) if record.reason is EpochReason.WORKER_FAILED else None,
    )


def _with_nobody_left(past: PastEpoch, died: int, nodes: int) -> PastEpoch:
    """The first epoch after one of which no node is left, and some died: for those that form it, it is a beginning."""
    if past.reason is not EpochReason.NODE_JOINED:
        return past
    gone = "the only node died" if nodes == 1 else f"all {nodes} nodes died"
    if died < nodes:
        gone = f"{died} of the {nodes} nodes died, and the others left"
    cause = shorten(f"{gone}; {past.cause}", LONGEST_CAUSE)
    return msgspec.structs.replace(past, reason=EpochReason.NODE_LOST, cause=cause)


def _shortened(failure: FailureRecord | None) -> FailureRecord | None:
    if failure is None:
        return None
    return msgspec.structs.replace(failure, message=shorten(failure.message, LONGEST_MESSAGE))


def _add(seconds: dict[RunState, float], state: RunState, spent: float) -> None:
    if spent > 0 or (state is RunState.RESTORING and state not in seconds):
        seconds[state] = seconds.get(state, 0.0) + max(spent, 0.0)


def _counted(counts: Mapping[NodeEnd, int], ends: Iterable[NodeEnd]) -> dict[NodeEnd, int]:
    found = dict(counts)
    for end in ends:
        found[end] = min(found.get(end, 0) + 1, COUNT_LIMIT)
    return found
