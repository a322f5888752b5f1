"""The history of a run: its time breakdown and its rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.views import SETTINGS
from torchelastic.protocol.codec import decode, encode
from torchelastic.protocol.keys import RunKeys
from torchelastic.protocol.records import (
    HISTORY_LIMIT,
    DepartureReason,
    FailureRecord,
    HistoryRecord,
    Member,
    NodeRecord,
    RoundReason,
    RoundRecord,
    RunState,
    SizeRecord,
    TimeBreakdown,
)
from torchelastic.rendezvous.history import (
    MAX_CAUSE,
    MAX_CLOCK_SKEW,
    MAX_MESSAGE,
    History,
    HistoryWriter,
)
from torchelastic.rendezvous.run_watch import RunWatch
from torchelastic.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterable


CREATED = 1_000_000.0
KEYS = RunKeys("run")
STATES = (RunState.WAITING, RunState.RENDEZVOUS, RunState.STARTING, RunState.TRAINING, RunState.STOPPING)


@dataclass
class Clock:
    """A clock that the test sets, in seconds since the job was created."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return CREATED + self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def history(clock: Clock) -> History:
    return History(CREATED, clock=clock)


def round(number: int, nodes: Iterable[str] = "ab", **fields: object) -> RoundRecord:
    return RoundRecord(number, members=tuple(Member(node, "10.0.0.1", 1) for node in nodes), **fields)  # type: ignore[arg-type]


def no_node_ended(_: str) -> DepartureReason | None:
    return None


def commit(history: History, record: RoundRecord, ended: dict[str, DepartureReason] | None = None) -> RoundRecord:
    """Commit a round, and note the committed round in the history."""
    settled = decode(encode(history.with_breakdown(record, (ended or {}).get)), RoundRecord)
    history.note_round(settled)
    return settled


def note_progress(history: History, round: int, **progress: float) -> bool:
    record = NodeRecord("a", "10.0.0.1", 1, SizeRecord(min=1, max=1), round=round, **progress)  # type: ignore[arg-type]
    return history.note_progress(record)


def seconds_by_state(history: History) -> dict[str, float]:
    return {state.value: seconds for state, seconds in history.breakdown().seconds.items() if seconds}


def test_each_second_since_job_creation_belongs_to_one_state() -> None:
    clock = Clock(7.0)
    history = History(CREATED, clock=clock)  # the first pod started after 7 s
    for seconds, state in (
        (3, RunState.RENDEZVOUS),
        (1, RunState.STARTING),
        (2, RunState.TRAINING),
        (60, RunState.STOPPING),
        (4, RunState.RENDEZVOUS),
    ):
        clock.seconds += seconds
        history.enter(state)
    clock.seconds += 5

    assert seconds_by_state(history) == {"waiting": 10, "rendezvous": 6, "starting": 2, "training": 60, "stopping": 4}
    assert history.breakdown().until == clock()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        pytest.param(TimeBreakdown(until=CREATED + 40, seconds={RunState.TRAINING: 40.0}), (40, 70), id="waiting"),
        pytest.param(TimeBreakdown(until=CREATED - 5, seconds={RunState.STOPPING: 5.0}), (0, 110), id="earlier"),
        pytest.param(TimeBreakdown(until=CREATED + 10 * MAX_CLOCK_SKEW), (0, 110), id="a wrong clock"),
    ],
)
def test_a_new_node_continues_from_a_plausible_stored_breakdown(
    written: TimeBreakdown, expected: tuple[float, float]
) -> None:
    clock = Clock(100.0)
    new_node = History(CREATED, clock=clock)
    new_node.adopt(written)
    clock.seconds = 110

    assert (seconds_by_state(new_node).get("training", 0), seconds_by_state(new_node)["waiting"]) == expected


@pytest.mark.parametrize("round_first", [True, False], ids=["round first", "breakdown first"])
def test_a_breakdown_written_during_a_commit_does_not_undo_the_round(clock: Clock, *, round_first: bool) -> None:
    leader, successor = trained_with_checkpoint(clock), History(CREATED, clock=clock)
    successor.note_round(round(1))
    pause = leader.with_breakdown(round(2, ""), {"b": DepartureReason.LEFT}.get)
    clock.seconds += 0.1
    written = leader.breakdown()  # the commit is in progress
    clock.seconds += 0.1
    for history in (leader, successor):
        if round_first:
            history.note_round(pause)
        history.adopt(written)
        history.note_round(pause)
        history.end(succeeded=False)
        final = history.breakdown()
        assert (final.round, final.lost, final.departures) == (2, 5, {DepartureReason.LEFT: 1})
        assert sum(final.seconds.values()) == pytest.approx(clock.seconds, abs=0.01)


@given(
    st.lists(
        st.tuples(
            st.floats(0.001, 1000),
            st.sampled_from(["a", "b"]),
            st.sampled_from([*STATES, "lead", "step", "keep", "round", "start", "skew"]),
        ),
        max_size=60,
    )
)
def test_the_states_add_up_to_the_elapsed_time_with_any_leader(
    events: list[tuple[float, str, object]],
) -> None:
    clock = Clock(0.0)
    nodes = {name: History(CREATED, clock=clock) for name in "ab"}
    written: TimeBreakdown | None = None
    number = 0
    for seconds, name, what in events:
        clock.seconds += seconds
        node = nodes[name]
        match what:
            case RunState():
                node.enter(what)
            case "lead":
                if written is not None:
                    node.adopt(decode(encode(written), TimeBreakdown))
                written = node.breakdown()
            case "step":
                note_progress(node, number, first_step_at=clock() - seconds / 2)
            case "keep":
                note_progress(node, number, last_checkpoint_at=clock() - seconds / 2)
            case "start":
                node.workers_started()
            case "round":
                number += 1
                record = node.with_breakdown(round(number, "ab" if seconds > 1 else ""), no_node_ended)
                for each in nodes.values():
                    each.note_round(record)
            case "skew":  # a leader with a small clock error
                node.adopt(msgspec.structs.replace(node.breakdown(), until=clock() - min(seconds, 0.01)))
    for node in nodes.values():
        split = node.breakdown()
        assert sum(split.seconds.values()) == pytest.approx(clock.seconds, abs=0.01 * len(events) + 0.1)
        assert all(seconds >= 0 for seconds in split.seconds.values())
        assert split.lost is None or split.lost >= 0


def test_the_time_until_the_first_reported_step_is_restoring(clock: Clock, history: History) -> None:
    commit(history, round(1))
    history.workers_started()
    clock.seconds = 8
    assert history.breakdown().seconds == {RunState.TRAINING: 8}, "no step was reported yet"
    assert note_progress(history, 1, first_step_at=CREATED + 7)
    assert not note_progress(history, 1, first_step_at=CREATED + 7), "a repeated report changes nothing"
    clock.seconds = 10
    assert seconds_by_state(history) == {"restoring": 7, "training": 3}

    commit(history, round(2))
    history.enter(RunState.STARTING)
    clock.seconds = 11
    history.workers_started()
    clock.seconds = 15
    assert history.state is RunState.RESTORING, "the program is known to report steps"
    note_progress(history, 2, first_step_at=CREATED + 13)
    again = history.record().rounds[1]
    assert (again.started_at, again.first_step_at) == (CREATED + 11, CREATED + 13)
    assert seconds_by_state(history) == {"restoring": 9, "training": 5, "starting": 1}


def trained_with_checkpoint(clock: Clock) -> History:
    """Return the history of a round that has trained for 20 s and started its last checkpoint 5 s ago."""
    clock.seconds = 0.0
    history = History(CREATED, clock=clock)
    commit(history, round(1))
    history.workers_started()
    clock.seconds = 20
    note_progress(history, 1, last_checkpoint_at=CREATED + 15)
    return history


def test_training_after_the_last_checkpoint_is_lost(clock: Clock) -> None:
    for succeeded, lost in ((True, 0), (False, 5)):
        ended = trained_with_checkpoint(clock)
        assert ended.breakdown().lost == 0, "nothing is lost during the training"
        ended.end(succeeded=succeeded)
        clock.seconds += 1
        assert (ended.breakdown().lost, ended.breakdown().state) == (lost, RunState.STOPPING)
    history = trained_with_checkpoint(clock)
    history.enter(RunState.STOPPING)
    clock.seconds = 25  # the pause until the next round is not training
    commit(history, round(2))
    history.workers_started()
    assert history.breakdown().lost == 5
    assert history.record().rounds[-1].lost == 5

    clock.seconds = 29  # without a checkpoint in this round
    commit(history, round(3))
    assert history.breakdown().lost == 9


def test_nothing_is_lost_if_workers_stay(clock: Clock) -> None:
    history = trained_with_checkpoint(clock)
    commit(history, round(2, staying=1, starting=(1,)))
    assert history.breakdown().lost == 0
    assert [past.staying for past in history.record().rounds] == [0, 1]


@pytest.mark.parametrize("member", [True, False], ids=["member", "new node"])
def test_a_leader_without_step_reports_reads_the_training_time_from_the_store(clock: Clock, *, member: bool) -> None:
    first, successor = (History(CREATED, clock=clock) for _ in range(2))
    first.adopt(TimeBreakdown(until=CREATED, lost=10.0))
    successor.note_round(commit(first, round(1)))
    for history in (first, successor) if member else (first,):
        history.enter(RunState.STARTING)
        clock.seconds = 1
        history.workers_started()
    clock.seconds = 4
    note_progress(first, 1, first_step_at=clock())
    clock.seconds = 104
    successor.adopt(first.breakdown())
    clock.seconds = 110  # the loss of the leader's machine is noticed only now
    successor.round_ended()
    commit(successor, round(2, "b"), {"a": DepartureReason.DIED})

    assert successor.breakdown().lost == (10 + 106 if member else 10 + 100)
    assert seconds_by_state(successor) == {"starting": 1, "restoring": 3} | (
        {"training": 106} if member else {"training": 100, "waiting": 6}
    )


def test_joined_and_gone_nodes_are_counted(clock: Clock, history: History) -> None:
    commit(history, round(1, "abcd"))
    commit(history, round(2, "ad"), {"b": DepartureReason.DIED, "c": DepartureReason.LEFT})
    commit(history, round(3, "a"))
    commit(history, round(4, "ae"))
    split = history.breakdown()

    assert split.nodes_joined == 5
    assert split.departures == {DepartureReason.DIED: 1, DepartureReason.LEFT: 1, DepartureReason.NOT_NEEDED: 1}


def test_a_round_has_its_cause_and_long_texts_are_shortened() -> None:
    failure = FailureRecord(1, 0, 0, "b", 1, message="x" * 16_000)
    history = History(CREATED, clock=Clock(5.0))
    commit(history, round(1, reason=RoundReason.NODE_JOINED, cause="a and b joined"))
    commit(history, round(2, reason=RoundReason.WORKER_FAILED, cause="y" * 12_000, failure=failure))
    commit(history, round(3, reason=RoundReason.RESIZED, failure=failure))
    first, second, third = history.record().rounds

    assert (first.number, first.began, first.nodes, first.workers) == (1, CREATED + 5, 2, 2)
    assert first.cause == "a and b joined"
    assert second.failure is not None
    assert len(second.failure.message) <= MAX_MESSAGE
    assert len(second.cause) <= MAX_CAUSE
    assert third.failure is None, "an earlier failure is not the cause of this round"


def test_a_round_whose_ranks_began_at_different_steps_is_marked() -> None:
    history = History(CREATED, clock=Clock())
    history.note_round(round(1))
    record = NodeRecord(name="a", address="10.0.0.1", workers=2, size=SizeRecord(min=1, max=2), round=1)
    found = [
        history.note_first_steps(msgspec.structs.replace(record, first_steps=steps, round=number))
        for steps, number in [((), 1), ((20, 20), 1), ((0, 0), 0), ((20, 120), 1), ((20, 120), 1), ((0, 20), 1)]
    ]
    assert found == [(), (), (), (20, 120), (), (0, 120)]
    assert [each.first_steps for each in history.record().rounds] == [(0, 120)]


def test_a_long_history_keeps_its_first_and_last_rounds() -> None:
    first, successor = (History(CREATED, clock=Clock(0.0)) for _ in range(2))
    for number in range(1, HISTORY_LIMIT + 51):
        settled = commit(first, round(number))
        if number > HISTORY_LIMIT // 2:
            successor.note_round(settled)
    kept = first.record()
    successor.adopt_rounds(kept)

    assert successor.record() == kept
    assert (kept.rounds[0].number, kept.rounds[-1].number) == (1, HISTORY_LIMIT + 50)
    assert (len(kept.rounds), kept.omitted) == (HISTORY_LIMIT, 50)


def test_a_history_of_long_texts_fits_the_store() -> None:
    history = History(CREATED, clock=Clock(0.0))
    failure = FailureRecord(1, 0, 0, "b", 1, message="\x01\U0001f525" * 8000)
    for number in range(1, HISTORY_LIMIT + 1):
        commit(history, round(number, reason=RoundReason.WORKER_FAILED, cause="\x01" * 12_000, failure=failure))

    assert decode(encode(history.record()), HistoryRecord) == history.record()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def writer_of(history: History, store: MemoryStore) -> HistoryWriter:
    run = RunWatch("a.1", SETTINGS, store)
    run.unreachable_since = None
    return HistoryWriter(history, run)


async def test_an_invalid_breakdown_does_not_lose_the_rounds(store: MemoryStore) -> None:
    history = trained_with_checkpoint(Clock(0.0))
    await writer_of(history, store).write()
    await store.put(KEYS.time_breakdown, b"nonsense")
    new_node = History(CREATED, clock=Clock(30.0))
    await writer_of(new_node, store).read()

    assert [past.number for past in new_node.record().rounds] == [1]


@pytest.mark.parametrize("final", [True, False])
def test_a_new_leader_counts_the_lost_time_once(clock: Clock, *, final: bool) -> None:
    first = trained_with_checkpoint(clock)
    successor = History(CREATED, clock=clock)
    successor.note_round(round(1))
    if final:
        first.end(succeeded=False)
    successor.adopt(first.breakdown())
    clock.seconds = 60
    for _ in range(2):  # a commit may be retried
        successor.with_breakdown(round(2), no_node_ended)
    record = commit(successor, round(2))

    assert successor.breakdown().lost == 5
    assert successor.with_breakdown(record, no_node_ended) == record, (
        "a round that is restored to the store is unchanged"
    )


def test_a_node_that_missed_the_round_before_a_pause_counts_its_members(clock: Clock) -> None:
    first = History(CREATED, clock=clock)
    commit(first, round(1, "abc"))
    pause = commit(first, round(2, ""), {"b": DepartureReason.DIED})
    informed, new_node = History(CREATED, clock=clock), History(CREATED, clock=clock)
    informed.note_round(round(1, "abc"))
    for successor in (informed, new_node):
        successor.note_round(pause)
        commit(successor, round(3, "ad"), {"b": DepartureReason.DIED, "c": DepartureReason.LEFT})
        split = successor.breakdown()
        assert (split.nodes_joined, split.departures) == (4, {DepartureReason.DIED: 1, DepartureReason.LEFT: 1})


def test_a_round_ends_when_its_workers_stop(clock: Clock, history: History) -> None:
    commit(history, round(1))
    history.workers_started()
    clock.seconds = 20
    history.enter(RunState.STOPPING)
    clock.seconds = 25
    commit(history, round(2))

    assert [past.ended for past in history.record().rounds] == [CREATED + 20, 0]


def test_a_round_whose_nodes_all_die_ends_at_the_last_write_and_the_deaths_cause_the_next(clock: Clock) -> None:
    first = History(CREATED, clock=clock)
    commit(first, round(1))
    first.workers_started()
    clock.seconds = 20
    written, history = first.breakdown(), first.record()
    clock.seconds = 60
    new_node = History(CREATED, clock=clock)
    new_node.note_round(round(1))
    new_node.adopt(written)
    new_node.adopt_rounds(history)
    commit(new_node, round(2, "cd", cause="c and d joined"), dict.fromkeys("ab", DepartureReason.DIED))
    commit(new_node, round(3, "ef", cause="e and f joined"), dict.fromkeys("cd", DepartureReason.LEFT))
    ends = {"e": DepartureReason.DIED, "f": DepartureReason.LEFT}
    commit(new_node, round(4, "g", cause="g joined"), ends)
    former, after, later, last = new_node.record().rounds

    assert (former.began, former.ended) == (CREATED, CREATED + 20)
    assert (after.reason, after.cause) == (RoundReason.NODE_LOST, "all 2 nodes died; c and d joined")
    assert later.reason is RoundReason.NODE_JOINED
    assert last.cause == "1 of the 2 nodes died, and the others left; g joined"
