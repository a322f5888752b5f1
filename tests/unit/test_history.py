"""Where the time of a run went, as its nodes know it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.nodes import PATIENCE, Clients, Meeting, all_with
from tests.support.views import SETTINGS
from torchelastic.errors import StoreUnavailable
from torchelastic.protocol import (
    HISTORY_LIMIT,
    FailureRecord,
    HistoryRecord,
    Member,
    NodeEnd,
    NodeRecord,
    RoundReason,
    RoundRecord,
    RunKeys,
    RunState,
    SizeRecord,
    TimeBreakdown,
    decode,
    decode_state,
    encode,
)
from torchelastic.rendezvous.history import (
    MAX_CAUSE,
    MAX_CLOCK_SKEW,
    MAX_HISTORY_BYTES,
    MAX_MESSAGE,
    History,
    HistoryWriter,
    encode_history,
)
from torchelastic.rendezvous.run_state import RunStateWatch
from torchelastic.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchelastic.store import Entry

CREATED = 1_000_000.0
KEYS = RunKeys.of("run")
STATES = (RunState.WAITING, RunState.RENDEZVOUS, RunState.STARTING, RunState.TRAINING, RunState.STOPPING)


@dataclass
class Clock:
    """A clock that is set by hand; it begins when the job is made."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return CREATED + self.seconds


def round(number: int, nodes: Iterable[str] = "ab", **fields: object) -> RoundRecord:
    return RoundRecord(number, members=tuple(Member(node, "10.0.0.1", 1) for node in nodes), **fields)  # type: ignore[arg-type]


def nobody_ended(_: str) -> NodeEnd | None:
    return None


def begin(history: History, record: RoundRecord, ended: dict[str, NodeEnd] | None = None) -> RoundRecord:
    """Commit a round, and tell the node that has done it."""
    settled = decode(encode(history.with_breakdown(record, (ended or {}).get)), RoundRecord)
    history.note_round(settled)
    return settled


def progressed(history: History, round: int, **progress: float) -> bool:
    record = NodeRecord("a", "10.0.0.1", 1, SizeRecord(min=1, max=1), round=round, **progress)  # type: ignore[arg-type]
    return history.note_progress(record)


def spent(history: History) -> dict[str, float]:
    return {state.value: seconds for state, seconds in history.breakdown().seconds.items() if seconds}


def test_each_second_since_the_creation_of_the_job_is_in_one_state() -> None:
    clock = Clock(7.0)
    history = History(CREATED, clock=clock)  # 7 s until the first pod ran
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

    assert spent(history) == {"waiting": 10, "rendezvous": 6, "starting": 2, "training": 60, "stopping": 4}
    assert history.breakdown().until == clock()


def test_a_leader_continues_from_the_last_write_of_its_predecessor() -> None:
    clock = Clock(0.0)
    first, second = History(CREATED, clock=clock), History(CREATED, clock=clock)
    clock.seconds = 10
    record = begin(first, round(1))
    second.note_round(record)
    for each in (first, second):
        each.enter(RunState.STARTING)
    clock.seconds = 11
    for each in (first, second):
        each.workers_started()
    clock.seconds = 50
    written = first.breakdown()  # and its node dies 5 s later
    clock.seconds = 55
    second.round_broke()
    clock.seconds = 56
    second.adopt(written)

    assert spent(second) == {"waiting": 10, "starting": 1, "training": 44, "rendezvous": 1}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        pytest.param(TimeBreakdown(until=CREATED + 40, seconds={RunState.TRAINING: 40.0}), (40, 70), id="waiting"),
        pytest.param(TimeBreakdown(until=CREATED - 5, seconds={RunState.STOPPING: 5.0}), (0, 110), id="earlier"),
        pytest.param(TimeBreakdown(until=CREATED + 10 * MAX_CLOCK_SKEW), (0, 110), id="a wrong clock"),
    ],
)
def test_a_newcomer_continues_from_what_was_written_if_that_can_be(
    written: TimeBreakdown, expected: tuple[float, float]
) -> None:
    clock = Clock(100.0)
    newcomer = History(CREATED, clock=clock)
    newcomer.adopt(written)
    clock.seconds = 110

    assert (spent(newcomer).get("training", 0), spent(newcomer)["waiting"]) == expected


def test_a_resumed_run_goes_on_with_what_was_before_its_suspension() -> None:
    before = TimeBreakdown(
        until=CREATED + 500, seconds={RunState.TRAINING: 100.0, RunState.SUSPENDED: 400.0}, lost=3.0, joined=2
    )
    clock = Clock(503.0)
    history = History(CREATED, before, clock=clock)
    begin(history, round(4, "a"))
    split = history.breakdown()

    assert spent(history) == {"training": 100, "suspended": 400, "waiting": 3}
    assert (split.lost, split.joined) == (3.0, 3)


@pytest.mark.parametrize("round_first", [True, False], ids=["the round first", "the other first"])
def test_a_breakdown_written_while_the_next_round_is_committed_does_not_undo_what_the_round_says(
    *, round_first: bool
) -> None:
    clock = Clock(0.0)
    leader, heir = trained_and_kept(clock), History(CREATED, clock=clock)
    heir.note_round(round(1))
    pause = leader.with_breakdown(round(2, ""), {"b": NodeEnd.LEFT}.get)
    clock.seconds += 0.1
    written = leader.breakdown()  # the commit is on its way
    clock.seconds += 0.1
    for history in (leader, heir):
        if round_first:
            history.note_round(pause)
        history.adopt(written)
        history.note_round(pause)
        final = history.final_breakdown(succeeded=False)
        assert (final.round, final.lost, final.gone) == (2, 5, {NodeEnd.LEFT: 1})
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
def test_the_states_add_up_to_the_wall_time_with_any_leader(
    happened: list[tuple[float, str, object]],
) -> None:
    clock = Clock(0.0)
    nodes = {name: History(CREATED, clock=clock) for name in "ab"}
    written: TimeBreakdown | None = None
    number = 0
    for seconds, name, what in happened:
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
                progressed(node, number, first_step_at=clock() - seconds / 2)
            case "keep":
                progressed(node, number, last_checkpoint_at=clock() - seconds / 2)
            case "start":
                node.workers_started()
            case "round":
                number += 1
                record = node.with_breakdown(round(number, "ab" if seconds > 1 else ""), nobody_ended)
                for each in nodes.values():
                    each.note_round(record)
            case "skew":  # a leader whose clock goes wrong by a little
                node.adopt(msgspec.structs.replace(node.breakdown(), until=clock() - min(seconds, 0.01)))
    for node in nodes.values():
        split = node.breakdown()
        assert sum(split.seconds.values()) == pytest.approx(clock.seconds, abs=0.01 * len(happened) + 0.1)
        assert all(seconds >= 0 for seconds in split.seconds.values())
        assert split.lost is None or split.lost >= 0


def test_a_program_that_reports_steps_restores_until_the_first_one() -> None:
    clock = Clock(0.0)
    history = History(CREATED, clock=clock)
    begin(history, round(1))
    history.workers_started()
    clock.seconds = 8
    assert history.breakdown().seconds == {RunState.TRAINING: 8}, "it has not reported steps yet"
    assert progressed(history, 1, first_step_at=CREATED + 7)
    assert not progressed(history, 1, first_step_at=CREATED + 7), "the same again is no news"
    clock.seconds = 10
    assert spent(history) == {"restoring": 7, "training": 3}

    begin(history, round(2))
    history.enter(RunState.STARTING)
    clock.seconds = 11
    history.workers_started()
    clock.seconds = 15
    assert history.state is RunState.RESTORING, "now it is known to say so"
    progressed(history, 2, first_step_at=CREATED + 13)
    assert spent(history) == {"restoring": 9, "training": 5, "starting": 1}


def test_a_first_step_reported_before_this_nodes_own_workers_run_counts() -> None:
    clock = Clock(0.0)
    history = History(CREATED, clock=clock)
    begin(history, round(1))
    history.enter(RunState.STARTING)
    clock.seconds = 2
    progressed(history, 1, first_step_at=CREATED + 1)
    history.workers_started()
    clock.seconds = 5

    assert spent(history) == {"starting": 2, "training": 3}


def trained_and_kept(clock: Clock) -> History:
    """A round that has trained for 20 s, and begun its last checkpoint 5 s ago."""
    history = History(CREATED, clock=clock)
    begin(history, round(1))
    history.workers_started()
    clock.seconds = 20
    progressed(history, 1, last_checkpoint_at=CREATED + 15)
    return history


def test_training_after_the_last_checkpoint_of_a_round_is_lost() -> None:
    clock = Clock(0.0)
    history = trained_and_kept(clock)
    assert history.breakdown().lost == 0, "nothing is lost as long as it trains"
    history.enter(RunState.STOPPING)
    clock.seconds = 25  # until the next round; that is no training
    begin(history, round(2))
    history.workers_started()
    assert history.breakdown().lost == 5
    assert history.record().rounds[-1].lost == 5

    clock.seconds = 29  # and no checkpoint in this one
    begin(history, round(3))
    assert history.breakdown().lost == 9


def test_a_run_that_succeeds_has_lost_nothing_of_its_last_round_and_one_that_fails_has() -> None:
    history = trained_and_kept(Clock(0.0))

    assert history.final_breakdown(succeeded=True).lost == 0
    assert history.final_breakdown(succeeded=False).lost == 5


@pytest.mark.parametrize("member", [True, False], ids=["a member", "a newcomer"])
def test_a_leader_without_reports_of_steps_knows_the_training_time_from_the_written_breakdown(*, member: bool) -> None:
    clock = Clock(0.0)
    first, heir = (History(CREATED, clock=clock) for _ in range(2))
    first.adopt(TimeBreakdown(until=CREATED, lost=10.0))
    heir.note_round(begin(first, round(1)))
    for history in (first, heir) if member else (first,):
        history.enter(RunState.STARTING)
        clock.seconds = 1
        history.workers_started()
    clock.seconds = 4
    progressed(first, 1, first_step_at=clock())
    clock.seconds = 104
    heir.adopt(first.breakdown())
    clock.seconds = 110  # the leader's machine has vanished: that is known only now
    heir.round_broke()
    begin(heir, round(2, "b"), {"a": NodeEnd.DIED})

    assert heir.breakdown().lost == (10 + 106 if member else 10 + 100)
    assert spent(heir) == {"starting": 1, "restoring": 3} | (
        {"training": 106} if member else {"training": 100, "waiting": 6}
    )


def test_nodes_that_come_and_go_are_counted_by_what_became_of_them() -> None:
    clock = Clock(0.0)
    history = History(CREATED, clock=clock)
    begin(history, round(1, "abcd"))
    begin(history, round(2, "ad"), {"b": NodeEnd.DIED, "c": NodeEnd.LEFT})
    begin(history, round(3, "a"))
    begin(history, round(4, "ae"))
    split = history.breakdown()

    assert split.joined == 5
    assert split.gone == {NodeEnd.DIED: 1, NodeEnd.LEFT: 1, NodeEnd.NOT_NEEDED: 1}


def test_the_history_tells_of_each_round_why_it_came_and_shortens_long_texts() -> None:
    failure = FailureRecord(1, 0, 0, "b", 1, message="x" * 16_000)
    history = History(CREATED, clock=Clock(5.0))
    begin(history, round(1, reason=RoundReason.NODE_JOINED, cause="a and b joined"))
    begin(history, round(2, reason=RoundReason.WORKER_FAILED, cause="y" * 12_000, failure=failure))
    begin(history, round(3, reason=RoundReason.RESIZED, failure=failure))
    first, second, third = history.record().rounds

    assert (first.number, first.began, first.nodes, first.workers) == (1, CREATED + 5, 2, 2)
    assert first.cause == "a and b joined"
    assert second.failure is not None
    assert len(second.failure.message) <= MAX_MESSAGE
    assert len(second.cause) <= MAX_CAUSE
    assert third.failure is None, "the failure before is not why this one came"


def test_a_long_history_keeps_its_beginning_and_its_end_with_any_leader() -> None:
    first, heir = (History(CREATED, clock=Clock(0.0)) for _ in range(2))
    for number in range(1, HISTORY_LIMIT + 51):
        settled = begin(first, round(number))
        if number > HISTORY_LIMIT // 2:
            heir.note_round(settled)
    kept = first.record()
    heir.adopt_rounds(kept)

    assert heir.record() == kept
    assert (kept.rounds[0].number, kept.rounds[-1].number) == (1, HISTORY_LIMIT + 50)
    assert (len(kept.rounds), kept.omitted) == (HISTORY_LIMIT, 50)


def test_a_history_of_long_texts_in_any_script_stays_small_enough_for_the_store() -> None:
    history = History(CREATED, clock=Clock(0.0))
    failure = FailureRecord(1, 0, 0, "b", 1, message="\x01\U0001f525" * 8000)
    for number in range(1, HISTORY_LIMIT + 1):
        begin(history, round(number, reason=RoundReason.WORKER_FAILED, cause="\x01" * 12_000, failure=failure))
    encoded = encode_history(history.record())
    kept = decode(encoded, HistoryRecord)

    assert len(encoded) <= MAX_HISTORY_BYTES
    assert len(kept.rounds) + kept.omitted == HISTORY_LIMIT
    assert (kept.rounds[0].number, kept.rounds[-1].number) == (1, HISTORY_LIMIT)


class Unreadable(MemoryStore):
    """A store that refuses whatever is of the past, as a node that takes part is told it: it may be away."""

    async def get(self, key: str) -> Entry | None:
        raise StoreUnavailable("you may not read this")


async def test_a_leader_that_cannot_read_the_history_leads_without_it_and_logs_that_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, history = Unreadable(), History(CREATED, clock=Clock(0.0))
    writer = writer_of(history, store)
    read = asyncio.Event()
    running = asyncio.create_task(writer.run(read.set))
    await read.wait()
    await writer.finish(history.final_breakdown(succeeded=True))
    assert not running.done()
    running.cancel()

    said = "cannot read the run's history; continuing without it: you may not read this"
    assert [record.message for record in caplog.records] == [said]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def writer_of(history: History, store: MemoryStore) -> HistoryWriter:
    run = RunStateWatch("a.1", SETTINGS, store)
    run.away_since = None
    return HistoryWriter(history, run)


async def test_after_the_final_breakdown_no_other_is_written(store: MemoryStore) -> None:
    clock = Clock(0.0)
    history = trained_and_kept(clock)
    writer = writer_of(history, store)
    running = asyncio.create_task(writer.run(lambda: None))
    await writer.finish(history.final_breakdown(succeeded=False))
    writer.notify()
    for _ in range(20):
        await asyncio.sleep(0)
    running.cancel()

    entry = await store.get(KEYS.time_breakdown)
    assert entry is not None
    split = decode(entry.value, TimeBreakdown)
    assert (split.state, split.lost) == (RunState.STOPPING, 5)


async def test_a_store_that_came_back_empty_gets_the_same_rounds_again(store: MemoryStore) -> None:
    history = trained_and_kept(Clock(0.0))
    writer = writer_of(history, store)
    await writer.finish(history.breakdown())
    await store.delete(KEYS.history)
    await writer.finish(history.breakdown())
    assert await store.get(KEYS.history) is None, "what stands there already is not written again"
    writer.notify(rewrite=True)
    await writer.finish(history.breakdown())
    assert await store.get(KEYS.history) is not None


async def test_an_unreadable_breakdown_costs_no_rounds(store: MemoryStore) -> None:
    history = trained_and_kept(Clock(0.0))
    await writer_of(history, store).finish(history.breakdown())
    await store.put(KEYS.time_breakdown, b"nonsense")
    newcomer = History(CREATED, clock=Clock(30.0))
    read = asyncio.Event()
    running = asyncio.create_task(writer_of(newcomer, store).run(read.set))
    await read.wait()
    running.cancel()

    assert [past.number for past in newcomer.record().rounds] == [1]


@pytest.mark.parametrize("final", [True, False])
def test_a_leader_that_was_not_there_counts_the_loss_once_by_what_was_written(*, final: bool) -> None:
    clock = Clock(0.0)
    first = trained_and_kept(clock)
    heir = History(CREATED, clock=clock)
    heir.note_round(round(1))
    heir.adopt(first.final_breakdown(succeeded=False) if final else first.breakdown())
    clock.seconds = 60
    for _ in range(2):  # a commit may be tried again
        heir.with_breakdown(round(2), nobody_ended)
    record = begin(heir, round(2))

    assert heir.breakdown().lost == 5
    assert heir.with_breakdown(record, nobody_ended) == record, "a store that lost the round gets it back as it was"


def test_a_node_that_only_knows_a_pause_knows_which_members_are_present() -> None:
    clock = Clock(0.0)
    first = History(CREATED, clock=clock)
    begin(first, round(1, "abc"))
    pause = begin(first, round(2, ""), {"b": NodeEnd.DIED})
    told, newcomer = History(CREATED, clock=clock), History(CREATED, clock=clock)
    told.note_round(round(1, "abc"))
    for heir in (told, newcomer):
        heir.note_round(pause)
        begin(heir, round(3, "ad"), {"b": NodeEnd.DIED, "c": NodeEnd.LEFT})
        split = heir.breakdown()
        assert (split.joined, split.gone) == (4, {NodeEnd.DIED: 1, NodeEnd.LEFT: 1})


def test_a_round_ends_when_its_workers_stop() -> None:
    clock = Clock(0.0)
    history = History(CREATED, clock=clock)
    begin(history, round(1))
    history.workers_started()
    clock.seconds = 20
    history.enter(RunState.STOPPING)
    clock.seconds = 25
    begin(history, round(2))

    assert [past.ended for past in history.record().rounds] == [CREATED + 20, 0]

    history.enter(RunState.STARTING)
    history.workers_started()
    clock.seconds = 30
    begin(history, round(3))  # while the second one trains
    clock.seconds = 31
    history.enter(RunState.STARTING)
    history.workers_started()
    clock.seconds = 40
    history.round_broke()
    clock.seconds = 45
    begin(history, round(4))
    assert [past.ended for past in history.record().rounds] == [CREATED + 20, CREATED + 30, CREATED + 40, 0]


def test_the_death_of_all_nodes_is_the_cause_of_the_next_round_and_the_last_write_is_the_end_of_the_round() -> None:
    clock = Clock(0.0)
    first = History(CREATED, clock=clock)
    begin(first, round(1))
    first.workers_started()
    clock.seconds = 20
    written, history = first.breakdown(), first.record()
    clock.seconds = 60
    newcomer = History(CREATED, clock=clock)
    newcomer.note_round(round(1))
    newcomer.adopt(written)
    newcomer.adopt_rounds(history)
    begin(newcomer, round(2, "cd", cause="c and d joined"), dict.fromkeys("ab", NodeEnd.DIED))
    begin(newcomer, round(3, "ef", cause="e and f joined"), dict.fromkeys("cd", NodeEnd.LEFT))
    ends = {"e": NodeEnd.DIED, "f": NodeEnd.LEFT}
    begin(newcomer, round(4, "g", cause="g joined"), ends)
    former, after, later, last = newcomer.record().rounds

    assert (former.began, former.ended) == (CREATED, CREATED + 20)
    assert (after.reason, after.cause) == (RoundReason.NODE_LOST, "all 2 nodes died; c and d joined")
    assert later.reason is RoundReason.NODE_JOINED
    assert last.cause == "1 of the 2 nodes died, and the others left; g joined"


def test_what_a_new_leader_has_seen_of_an_end_outlives_an_older_history() -> None:
    clock = Clock(0.0)
    leader, heir = (History(CREATED, clock=clock) for _ in range(2))
    record = begin(leader, round(1))
    heir.note_round(record)
    heir.workers_started()
    clock.seconds = 20
    heir.enter(RunState.STOPPING)
    clock.seconds = 22
    heir.note_round(round(2))
    heir.adopt_rounds(leader.record())

    assert heir.record().rounds[0].ended == CREATED + 20


def test_the_loss_is_the_same_whether_the_round_or_what_was_written_of_it_is_heard_first() -> None:
    clock = Clock(100.0)
    written = TimeBreakdown(
        until=CREATED + 100,
        state=RunState.TRAINING,
        round=1,
        first_step_at=CREATED + 50,
        last_checkpoint_at=CREATED + 80,
        lost=0.0,
    )
    losses = []
    for round_first in (True, False):
        heir = History(CREATED, clock=clock)
        if round_first:
            heir.note_round(round(1))
        heir.adopt(written)
        heir.note_round(round(1))
        losses.append(heir.final_breakdown(succeeded=False).lost)

    assert losses == [20, 20]


async def test_training_time_goes_on_counting_while_the_store_lacks_its_round() -> None:
    clients = Clients()
    async with Meeting(clients.connect, "run") as meeting:
        a = await meeting.node("a", wanted=1)
        first = await all_with(a)
        a.inner.history.workers_started()
        before = spent(a.inner.history)
        async with asyncio.timeout(PATIENCE):
            watch = clients.data.watch(KEYS.state, 0)
            await anext(watch)
            await clients.data.delete(KEYS.state)
            while (entry := await clients.data.get(KEYS.state)) is None:
                await anext(watch)
            await watch.aclose()
        assert decode_state(entry.value).round == first
        assert a.inner.history.state is RunState.TRAINING
        after = spent(a.inner.history)
        assert {state for state in after if after[state] > before.get(state, 0.0)} <= {"training"}
