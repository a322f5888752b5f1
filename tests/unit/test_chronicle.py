"""Where the time of a run went, as its nodes know it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.contract import (
    COUNT_LIMIT,
    HISTORY_LIMIT,
    EpochReason,
    EpochRecord,
    FailureRecord,
    HistoryRecord,
    Member,
    NodeEnd,
    RunKeys,
    RunState,
    TimeSplit,
    decode,
    encode,
)
from torchelastic.errors import StoreUnavailable
from torchelastic.rendezvous.chronicle import BELIEVED, LONGEST_CAUSE, LONGEST_MESSAGE, Chronicle
from torchelastic.rendezvous.chronicler import HISTORY_BYTES, Chronicler, encode_history
from torchelastic.store import MemoryStore
from torchelastic.store.lasting import LastingKeys

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


def epoch(number: int, nodes: Iterable[str] = "ab", **fields: object) -> EpochRecord:
    return EpochRecord(number, members=tuple(Member(node, "10.0.0.1", 1) for node in nodes), **fields)  # type: ignore[arg-type]


def nobody_ended(_: str) -> NodeEnd | None:
    return None


def begin(chronicle: Chronicle, record: EpochRecord, ended: dict[str, NodeEnd] | None = None) -> EpochRecord:
    """Commit an epoch, and tell the node that has done it."""
    settled = decode(encode(chronicle.settle(record, (ended or {}).get)), EpochRecord)
    chronicle.epoch(settled)
    return settled


def spent(chronicle: Chronicle) -> dict[str, float]:
    return {state.value: seconds for state, seconds in chronicle.split().seconds.items() if seconds}


def test_each_second_since_the_making_of_the_job_is_in_one_state() -> None:
    clock = Clock(7.0)
    chronicle = Chronicle(CREATED, clock=clock)  # 7 s until the first pod ran
    for seconds, state in (
        (3, RunState.RENDEZVOUS),
        (1, RunState.STARTING),
        (2, RunState.TRAINING),
        (60, RunState.STOPPING),
        (4, RunState.RENDEZVOUS),
    ):
        clock.seconds += seconds
        chronicle.enter(state)
    clock.seconds += 5

    assert spent(chronicle) == {"waiting": 10, "rendezvous": 6, "starting": 2, "training": 60, "stopping": 4}
    assert chronicle.split().until == clock()


def test_a_leader_goes_on_where_the_one_before_has_stopped_writing() -> None:
    clock = Clock(0.0)
    first, second = Chronicle(CREATED, clock=clock), Chronicle(CREATED, clock=clock)
    clock.seconds = 10
    record = begin(first, epoch(1))
    second.epoch(record)
    for each in (first, second):
        each.enter(RunState.STARTING)
    clock.seconds = 11
    for each in (first, second):
        each.started()
    clock.seconds = 50
    written = first.split()  # and its node dies 5 s later
    clock.seconds = 55
    second.broke()
    clock.seconds = 56
    second.adopt(written)

    assert spent(second) == {"waiting": 10, "starting": 1, "training": 44, "rendezvous": 1}


def test_what_passed_without_anybody_was_waiting() -> None:
    clock = Clock(100.0)
    newcomer = Chronicle(CREATED, clock=clock)
    newcomer.adopt(TimeSplit(until=CREATED + 40, state=RunState.TRAINING, seconds={RunState.TRAINING: 40.0}))
    clock.seconds = 110

    assert spent(newcomer) == {"training": 40, "waiting": 70}


def test_a_resumed_run_goes_on_with_what_was_before_its_suspension() -> None:
    before = TimeSplit(
        until=CREATED + 500, seconds={RunState.TRAINING: 100.0, RunState.SUSPENDED: 400.0}, lost=3.0, joined=2
    )
    clock = Clock(503.0)
    chronicle = Chronicle(CREATED, before, clock=clock)
    begin(chronicle, epoch(4, "a"))
    split = chronicle.split()

    assert spent(chronicle) == {"training": 100, "suspended": 400, "waiting": 3}
    assert (split.lost, split.joined) == (3.0, 3)


def test_an_earlier_word_is_not_adopted_over_a_later_one() -> None:
    clock = Clock(60.0)
    chronicle = Chronicle(CREATED, TimeSplit(until=CREATED + 50, seconds={RunState.TRAINING: 50.0}), clock=clock)
    chronicle.adopt(TimeSplit(until=CREATED + 20, seconds={RunState.STOPPING: 20.0}))

    assert spent(chronicle) == {"training": 50, "waiting": 10}


@given(
    st.lists(
        st.tuples(
            st.floats(0.001, 1000),
            st.sampled_from(["a", "b"]),
            st.sampled_from([*STATES, "lead", "step", "keep", "epoch", "start", "skew"]),
        ),
        max_size=60,
    )
)
def test_the_states_add_up_to_the_wall_time_whoever_leads_when(happened: list[tuple[float, str, object]]) -> None:
    clock = Clock(0.0)
    nodes = {name: Chronicle(CREATED, clock=clock) for name in "ab"}
    written: TimeSplit | None = None
    number = 0
    for seconds, name, what in happened:
        clock.seconds += seconds
        node = nodes[name]
        match what:
            case RunState():
                node.enter(what)
            case "lead":
                if written is not None:
                    node.adopt(decode(encode(written), TimeSplit))
                written = node.split()
            case "step":
                node.told(number, stepped=clock() - seconds / 2)
            case "keep":
                node.told(number, kept=clock() - seconds / 2)
            case "start":
                node.started()
            case "epoch":
                number += 1
                record = node.settle(epoch(number, "ab" if seconds > 1 else ""), nobody_ended)
                for each in nodes.values():
                    each.epoch(record)
            case "skew":  # a leader whose clock goes wrong by a little
                node.adopt(msgspec.structs.replace(node.split(), until=clock() - min(seconds, 0.01)))
    for node in nodes.values():
        split = node.split()
        assert sum(split.seconds.values()) == pytest.approx(clock.seconds, abs=0.01 * len(happened) + 0.1)
        assert all(seconds >= 0 for seconds in split.seconds.values())
        assert split.lost is None or split.lost >= 0


def test_a_program_that_says_nothing_trains_from_its_start_and_restores_nothing() -> None:
    clock = Clock(0.0)
    chronicle = Chronicle(CREATED, clock=clock)
    begin(chronicle, epoch(1))
    chronicle.started()
    clock.seconds = 30

    assert chronicle.split().seconds == {RunState.TRAINING: 30}
    assert chronicle.split().lost is None


def test_a_program_that_says_its_steps_restores_until_the_first_one() -> None:
    clock = Clock(0.0)
    chronicle = Chronicle(CREATED, clock=clock)
    begin(chronicle, epoch(1))
    chronicle.started()
    clock.seconds = 8
    assert chronicle.told(1, stepped=CREATED + 7)
    assert not chronicle.told(1, stepped=CREATED + 7), "the same again is no news"
    clock.seconds = 10
    assert spent(chronicle) == {"restoring": 7, "training": 3}

    begin(chronicle, epoch(2))
    chronicle.enter(RunState.STARTING)
    clock.seconds = 11
    chronicle.started()
    clock.seconds = 15
    assert chronicle.state is RunState.RESTORING, "now it is known to say so"
    chronicle.told(2, stepped=CREATED + 13)
    assert spent(chronicle) == {"restoring": 9, "training": 5, "starting": 1}


def test_a_first_step_that_is_told_of_before_this_nodes_own_workers_run_is_not_forgotten() -> None:
    clock = Clock(0.0)
    chronicle = Chronicle(CREATED, clock=clock)
    begin(chronicle, epoch(1))
    chronicle.enter(RunState.STARTING)
    clock.seconds = 2
    chronicle.told(1, stepped=CREATED + 1)
    chronicle.started()
    clock.seconds = 5

    assert spent(chronicle) == {"starting": 2, "training": 3}


def trained_and_kept(clock: Clock) -> Chronicle:
    """An epoch that has trained for 20 s, and begun its last checkpoint 5 s ago."""
    chronicle = Chronicle(CREATED, clock=clock)
    begin(chronicle, epoch(1))
    chronicle.started()
    clock.seconds = 20
    chronicle.told(1, kept=CREATED + 15)
    return chronicle


def test_what_no_checkpoint_held_when_an_epoch_ended_is_lost() -> None:
    clock = Clock(0.0)
    chronicle = trained_and_kept(clock)
    assert chronicle.split().lost == 0, "nothing is lost as long as it trains"
    chronicle.enter(RunState.STOPPING)
    clock.seconds = 25  # until the next epoch; that is no training
    begin(chronicle, epoch(2))
    chronicle.started()
    assert chronicle.split().lost == 5
    assert chronicle.history().epochs[-1].lost == 5

    clock.seconds = 29  # and no checkpoint in this one
    begin(chronicle, epoch(3))
    assert chronicle.split().lost == 9


def test_the_loss_is_counted_once_however_often_a_commit_is_tried() -> None:
    clock = Clock(0.0)
    chronicle = trained_and_kept(clock)
    for _ in range(3):
        chronicle.settle(epoch(2, "bc"), nobody_ended)
    begin(chronicle, epoch(2, "bc"))
    split = chronicle.split()

    assert split.lost == 5
    assert (split.joined, split.gone) == (3, {NodeEnd.NOT_NEEDED: 1})


def test_a_run_that_succeeds_has_lost_nothing_of_its_last_epoch_and_one_that_fails_has() -> None:
    chronicle = trained_and_kept(Clock(0.0))

    assert chronicle.last_word(succeeded=True).lost == 0
    assert chronicle.last_word(succeeded=False).lost == 5


def test_a_leader_that_was_not_there_knows_the_last_checkpoint_by_what_was_written() -> None:
    clock = Clock(0.0)
    written = trained_and_kept(clock).split()
    newcomer = Chronicle(CREATED, clock=clock)
    newcomer.epoch(epoch(1))
    newcomer.adopt(written)
    clock.seconds = 60
    begin(newcomer, epoch(2))

    assert newcomer.split().lost == 5


@pytest.mark.parametrize("member", [True, False], ids=["a member", "a newcomer"])
def test_a_leader_that_was_not_told_of_steps_knows_by_what_was_written_for_how_long_the_epoch_has_trained(
    *, member: bool
) -> None:
    clock = Clock(0.0)
    first, heir = (Chronicle(CREATED, clock=clock) for _ in range(2))
    first.adopt(TimeSplit(until=CREATED, lost=10.0))
    heir.epoch(begin(first, epoch(1)))
    for chronicle in (first, heir) if member else (first,):
        chronicle.enter(RunState.STARTING)
        clock.seconds = 1
        chronicle.started()
    clock.seconds = 4
    first.told(1, stepped=clock())
    clock.seconds = 104
    heir.adopt(first.split())
    clock.seconds = 110  # the leader's machine has vanished: that is known only now
    heir.broke()
    begin(heir, epoch(2, "b"), {"a": NodeEnd.DIED})

    assert heir.split().lost == (10 + 106 if member else 10 + 100)
    assert spent(heir) == {"starting": 1, "restoring": 3} | (
        {"training": 106} if member else {"training": 100, "waiting": 6}
    )


def test_nodes_that_come_and_go_are_counted_by_what_became_of_them() -> None:
    clock = Clock(0.0)
    chronicle = Chronicle(CREATED, clock=clock)
    begin(chronicle, epoch(1, "abcd"))
    begin(chronicle, epoch(2, "ad"), {"b": NodeEnd.DIED, "c": NodeEnd.LEFT})
    begin(chronicle, epoch(3, "a"))
    begin(chronicle, epoch(4, "ae"))
    split = chronicle.split()

    assert split.joined == 5
    assert split.gone == {NodeEnd.DIED: 1, NodeEnd.LEFT: 1, NodeEnd.NOT_NEEDED: 1}


def test_a_node_that_died_before_a_pause_is_counted_once() -> None:
    chronicle = Chronicle(CREATED, clock=Clock(0.0))
    begin(chronicle, epoch(1, "ab"))
    begin(chronicle, epoch(2, ""), {"b": NodeEnd.DIED})
    assert chronicle.state is RunState.WAITING
    begin(chronicle, epoch(3, "ac"), {"b": NodeEnd.DIED})
    split = chronicle.split()

    assert (split.joined, split.gone) == (3, {NodeEnd.DIED: 1})


def test_an_epoch_that_the_store_had_lost_is_given_back_as_it_was() -> None:
    chronicle = Chronicle(CREATED, clock=Clock(5.0))
    record = begin(chronicle, epoch(3))

    assert chronicle.settle(record, nobody_ended) == record


def test_the_history_tells_of_each_epoch_why_it_came_and_shortens_long_texts() -> None:
    failure = FailureRecord(1, 0, 0, "b", 1, message="x" * 16_000)
    chronicle = Chronicle(CREATED, clock=Clock(5.0))
    begin(chronicle, epoch(1, reason=EpochReason.NODE_JOINED, cause="a and b joined"))
    begin(chronicle, epoch(2, reason=EpochReason.WORKER_FAILED, cause="y" * 12_000, failure=failure))
    begin(chronicle, epoch(3, reason=EpochReason.RESIZED, failure=failure))
    first, second, third = chronicle.history().epochs

    assert (first.number, first.began, first.nodes, first.workers) == (1, CREATED + 5, 2, 2)
    assert first.cause == "a and b joined"
    assert second.failure is not None
    assert len(second.failure.message) <= LONGEST_MESSAGE
    assert len(second.cause) <= LONGEST_CAUSE
    assert third.failure is None, "the failure before is not why this one came"


def test_a_long_history_keeps_its_beginning_and_its_end() -> None:
    chronicle = Chronicle(CREATED, clock=Clock(0.0))
    for number in range(1, HISTORY_LIMIT + 51):
        begin(chronicle, epoch(number))
    history = chronicle.history()

    assert len(history.epochs) == HISTORY_LIMIT
    assert history.omitted == 50
    assert history.epochs[0].number == 1
    assert history.epochs[-1].number == HISTORY_LIMIT + 50


def test_who_takes_the_lead_in_a_long_history_counts_no_epoch_twice() -> None:
    first, heir = (Chronicle(CREATED, clock=Clock(0.0)) for _ in range(2))
    for number in range(1, HISTORY_LIMIT + 51):
        settled = begin(first, epoch(number))
        if number > HISTORY_LIMIT // 2:
            heir.epoch(settled)
    heir.adopt_history(first.history())

    assert heir.history() == first.history()


def test_a_history_of_long_texts_in_any_script_stays_small_enough_for_the_store() -> None:
    chronicle = Chronicle(CREATED, clock=Clock(0.0))
    failure = FailureRecord(1, 0, 0, "b", 1, message="\x01\U0001f525" * 8000)
    for number in range(1, HISTORY_LIMIT + 1):
        begin(chronicle, epoch(number, reason=EpochReason.WORKER_FAILED, cause="\x01" * 12_000, failure=failure))
    encoded = encode_history(chronicle.history())
    kept = decode(encoded, HistoryRecord)

    assert len(encoded) <= HISTORY_BYTES
    assert len(kept.epochs) + kept.omitted == HISTORY_LIMIT
    assert (kept.epochs[0].number, kept.epochs[-1].number) == (1, HISTORY_LIMIT)


class Unreadable(MemoryStore):
    """A store that refuses whatever is of the past, as a node that takes part is told it: it may be away."""

    async def get(self, key: str) -> Entry | None:
        raise StoreUnavailable("you may not read this")


async def test_a_leader_that_may_not_read_the_past_leads_without_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, chronicle = Unreadable(), Chronicle(CREATED, clock=Clock(0.0))
    chronicler = Chronicler(chronicle, store, RunKeys.of("run"), LastingKeys(store, "run"))
    read = asyncio.Event()
    running = asyncio.create_task(chronicler.run(lambda: False, read.set))
    await read.wait()
    await chronicler.finish(chronicle.last_word(succeeded=True))
    assert not running.done()
    running.cancel()

    said = "what is known of the run's past cannot be read: you may not read this"
    assert [record.message for record in caplog.records] == [said]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def chronicler_of(chronicle: Chronicle, store: MemoryStore) -> Chronicler:
    return Chronicler(chronicle, store, KEYS, LastingKeys(store, "run"))


async def test_after_the_last_word_no_other_is_written(store: MemoryStore) -> None:
    clock = Clock(0.0)
    chronicle = trained_and_kept(clock)
    chronicler = chronicler_of(chronicle, store)
    running = asyncio.create_task(chronicler.run(lambda: False, lambda: None))
    await chronicler.finish(chronicle.last_word(succeeded=False))
    chronicler.note()
    for _ in range(20):
        await asyncio.sleep(0)
    running.cancel()

    entry = await store.get(KEYS.split)
    assert entry is not None
    split = decode(entry.value, TimeSplit)
    assert (split.state, split.lost) == (RunState.STOPPING, 5)


async def test_a_store_that_came_back_empty_gets_the_same_epochs_again(store: MemoryStore) -> None:
    chronicle = trained_and_kept(Clock(0.0))
    chronicler = chronicler_of(chronicle, store)
    await chronicler.finish(chronicle.split())
    await store.delete(KEYS.history)
    await chronicler.finish(chronicle.split())
    assert await store.get(KEYS.history) is None, "what stands there already is not written again"
    chronicler.note(anew=True)
    await chronicler.finish(chronicle.split())
    assert await store.get(KEYS.history) is not None


async def test_a_split_that_cannot_be_read_costs_no_epochs(store: MemoryStore) -> None:
    chronicle = trained_and_kept(Clock(0.0))
    await chronicler_of(chronicle, store).finish(chronicle.split())
    await store.put(KEYS.split, b"nonsense")
    newcomer = Chronicle(CREATED, clock=Clock(30.0))
    read = asyncio.Event()
    running = asyncio.create_task(chronicler_of(newcomer, store).run(lambda: False, read.set))
    await read.wait()
    running.cancel()

    assert [past.number for past in newcomer.history().epochs] == [1]


def test_a_word_from_far_ahead_is_not_believed() -> None:
    clock = Clock(30.0)
    chronicle = Chronicle(CREATED, clock=clock)
    chronicle.adopt(TimeSplit(until=CREATED + 10 * BELIEVED, seconds={RunState.TRAINING: 1e9}))

    assert spent(chronicle) == {"waiting": 30}


def test_whoever_goes_on_from_a_last_word_counts_no_loss_twice() -> None:
    clock = Clock(0.0)
    first = trained_and_kept(clock)
    heir = Chronicle(CREATED, clock=clock)
    heir.epoch(epoch(1))
    heir.adopt(first.last_word(succeeded=False))
    clock.seconds = 25
    begin(heir, epoch(2))

    assert heir.split().lost == 5


def test_a_node_that_was_only_told_of_a_pause_knows_who_is_still_there() -> None:
    clock = Clock(0.0)
    first = Chronicle(CREATED, clock=clock)
    begin(first, epoch(1, "abc"))
    pause = begin(first, epoch(2, ""), {"b": NodeEnd.DIED})
    told, newcomer = Chronicle(CREATED, clock=clock), Chronicle(CREATED, clock=clock)
    told.epoch(epoch(1, "abc"))
    for heir in (told, newcomer):
        heir.epoch(pause)
        begin(heir, epoch(3, "ad"), {"b": NodeEnd.DIED, "c": NodeEnd.LEFT})
        split = heir.split()
        assert (split.joined, split.gone) == (4, {NodeEnd.DIED: 1, NodeEnd.LEFT: 1})


def test_a_count_stays_within_what_a_record_may_hold() -> None:
    chronicle = Chronicle(CREATED, TimeSplit(until=CREATED, joined=COUNT_LIMIT), clock=Clock(0.0))
    begin(chronicle, epoch(1, "ab"))

    assert chronicle.split().joined == COUNT_LIMIT


def test_an_epoch_ends_when_its_workers_run_no_more() -> None:
    clock = Clock(0.0)
    chronicle = Chronicle(CREATED, clock=clock)
    begin(chronicle, epoch(1))
    chronicle.started()
    clock.seconds = 20
    chronicle.enter(RunState.STOPPING)
    clock.seconds = 25
    begin(chronicle, epoch(2))

    assert [past.ended for past in chronicle.history().epochs] == [CREATED + 20, 0]

    chronicle.enter(RunState.STARTING)
    chronicle.started()
    clock.seconds = 30
    begin(chronicle, epoch(3))  # while the second one trains
    clock.seconds = 31
    chronicle.enter(RunState.STARTING)
    chronicle.started()
    clock.seconds = 40
    chronicle.broke()
    clock.seconds = 45
    begin(chronicle, epoch(4))
    assert [past.ended for past in chronicle.history().epochs] == [CREATED + 20, CREATED + 30, CREATED + 40, 0]


def test_that_all_nodes_died_is_why_there_is_another_epoch_and_the_one_before_ended_with_the_last_word() -> None:
    clock = Clock(0.0)
    first = Chronicle(CREATED, clock=clock)
    begin(first, epoch(1))
    first.started()
    clock.seconds = 20
    written, history = first.split(), first.history()
    clock.seconds = 60
    newcomer = Chronicle(CREATED, clock=clock)
    newcomer.epoch(epoch(1))
    newcomer.adopt(written)
    newcomer.adopt_history(history)
    begin(newcomer, epoch(2, "cd", cause="c and d joined"), dict.fromkeys("ab", NodeEnd.DIED))
    begin(newcomer, epoch(3, "ef", cause="e and f joined"), dict.fromkeys("cd", NodeEnd.LEFT))
    former, after, later = newcomer.history().epochs

    assert (former.began, former.ended) == (CREATED, CREATED + 20)
    assert (after.reason, after.cause) == (EpochReason.NODE_LOST, "all 2 nodes died; c and d joined")
    assert later.reason is EpochReason.NODE_JOINED


def test_where_one_died_and_the_others_left_that_is_told() -> None:
    chronicle = Chronicle(CREATED, clock=Clock(0.0))
    begin(chronicle, epoch(1, "abc"))
    ends = {"a": NodeEnd.DIED, "b": NodeEnd.LEFT, "c": NodeEnd.LEFT}
    begin(chronicle, epoch(2, "d", cause="d joined"), ends)

    assert chronicle.history().epochs[1].cause == "1 of the 3 nodes died, and the others left; d joined"


def test_what_a_new_leader_has_seen_of_an_end_outlives_an_older_history() -> None:
    clock = Clock(0.0)
    leader, heir = (Chronicle(CREATED, clock=clock) for _ in range(2))
    record = begin(leader, epoch(1))
    heir.epoch(record)
    heir.started()
    clock.seconds = 20
    heir.enter(RunState.STOPPING)
    clock.seconds = 22
    heir.epoch(epoch(2))
    heir.adopt_history(leader.history())

    assert heir.history().epochs[0].ended == CREATED + 20


def test_the_loss_is_the_same_whether_the_epoch_or_what_was_written_of_it_is_heard_first() -> None:
    clock = Clock(100.0)
    written = TimeSplit(
        until=CREATED + 100, state=RunState.TRAINING, epoch=1, stepped=CREATED + 50, kept=CREATED + 80, lost=0.0
    )
    losses = []
    for epoch_first in (True, False):
        heir = Chronicle(CREATED, clock=clock)
        if epoch_first:
            heir.epoch(epoch(1))
        heir.adopt(written)
        heir.epoch(epoch(1))
        losses.append(heir.last_word(succeeded=False).lost)

    assert losses == [20, 20]


def test_a_new_leader_knows_the_epochs_before_its_time() -> None:
    clock = Clock(0.0)
    first = Chronicle(CREATED, clock=clock)
    for number in (1, 2, 3):
        begin(first, epoch(number, cause=f"cause {number}"))
    newcomer = Chronicle(CREATED, clock=clock)
    newcomer.epoch(epoch(3))
    newcomer.adopt_history(first.history())
    begin(newcomer, epoch(4))

    assert [past.number for past in newcomer.history().epochs] == [1, 2, 3, 4]
    assert newcomer.history().epochs[2].cause == "cause 3"
