"""Where a job's time went: what the plan adds to what its leaders have counted, over suspensions and to the end."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_operator.api.spec import EtcdSpec
from elastic_operator.api.status import JobState, status_from_json, status_to_json
from elastic_operator.controller.model import Job, Observed, Plan
from elastic_operator.controller.plan import plan
from tests.support.builders import (
    NOW,
    a_job,
    a_round,
    a_world,
    running,
    success,
    that_rests,
    with_spec_applied,
    with_status,
)
from torchelastic.protocol import HistoryRecord, NodeEnd, PastRound, ResumeRecord, RunState, TimeBreakdown

if TYPE_CHECKING:
    from elastic_operator.api.status import JobStatus
    from elastic_operator.controller.model import Pod

NO_STORE = Observed()


class Life:
    """A job whose user suspends and resumes it, whose leaders count, and whose operator writes what it plans."""

    def __init__(self, *, suspend: bool = False) -> None:
        self.job = a_job(suspend=suspend)
        self.now = NOW
        self.unheard = 0.0
        self.expected: dict[RunState, float] = {}
        self.told: TimeBreakdown | None = None
        self.pods: tuple[Pod, ...] = ()
        self.resume: ResumeRecord | None = None
        self.last = Plan()
        self.plan()

    @property
    def status(self) -> JobStatus:
        return self.job.status

    def plan(self, **more: Any) -> None:
        """The operator looks, and writes the status."""
        round = a_round(*self.pods) if self.told is not None and self.pods else None
        world = (
            a_world(*self.pods, time_breakdown=self.told, round=round, **more)
            if self.pods
            else replace(NO_STORE, **more)
        )
        if not self.pods and self.told is not None:
            world = a_world(time_breakdown=self.told, **more)
        self.last = plan(self.job, world, self.now)
        if self.last.status is not None:
            written = json.loads(json.dumps(status_to_json(self.last.status)))
            self.job = replace(self.job, status=status_from_json(written))
        if self.last.create:
            self.pods = tuple(replace(running(new.index), name=new.name) for new in self.last.create)
            self.resume = self.last.create[0].resume

    def passes(self, seconds: float, state: RunState) -> None:
        """Time passes in this state, and is not counted yet."""
        self.now += seconds
        self.expected[state] = self.expected.get(state, 0.0) + seconds

    def passes_unheard(self, seconds: float) -> None:
        """Time passes at whose end somebody books it."""
        self.now += seconds
        self.unheard += seconds
        if self.told is None:
            self.unheard_is(RunState.WAITING)

    def is_booked(self) -> None:
        """Time that is not counted gets the state that the plan assumes."""
        soon = self.told is not None and self.now - self.told.until <= 60
        self.unheard_is(RunState.STOPPING if soon else RunState.WAITING)

    def unheard_is(self, state: RunState) -> None:
        self.expected[state] = self.expected.get(state, 0.0) + self.unheard
        self.unheard = 0.0

    def is_counted(self) -> None:
        """The leader writes where all of it went."""
        self.told = TimeBreakdown(until=self.now, state=RunState.TRAINING, seconds=dict(self.expected), joined=2)

    def is_suspended(self, after: float) -> None:
        """The user suspends it, and its pods end after this number of seconds."""
        self.job = replace(self.job, spec=msgspec.structs.replace(self.job.spec, suspend=True))
        self.plan()
        if self.pods:
            self.passes_unheard(after)
        self.is_booked()
        self.pods = ()
        self.plan()
        self.told = None  # with the store

    def is_resumed(self) -> None:
        self.job = replace(self.job, spec=msgspec.structs.replace(self.job.spec, suspend=False))
        self.plan()

    def split_is_right(self) -> None:
        """What the status says is what has passed."""
        split = self.status.time_breakdown
        assert split is not None
        assert split.until == pytest.approx(self.now, abs=0.01)
        assert sum(split.seconds.values()) == pytest.approx(self.now - self.job.created, abs=0.01)
        assert split.seconds == pytest.approx({s: spent for s, spent in self.expected.items() if spent}, abs=0.01)


SPANS = st.floats(0.001, 100_000).map(lambda seconds: round(seconds, 3))
LIVES = st.lists(st.tuples(SPANS, st.none() | SPANS, SPANS, SPANS, SPANS), max_size=5)


@settings(database=None, derandomize=True, deadline=None)
@given(st.booleans(), SPANS, LIVES, st.none() | SPANS, SPANS)
def test_each_second_is_counted_once(
    suspended_first: bool,
    rests_first: float,
    lives: list[tuple[float, float | None, float, float, float]],
    trains_last: float | None,
    ends: float,
) -> None:
    life = Life(suspend=suspended_first)
    if suspended_first:
        life.split_is_right()
        life.passes(rests_first, RunState.SUSPENDED)
        life.is_resumed()
        life.split_is_right()
    for waits, trains, unseen, stops, rests in lives:
        life.passes(waits, RunState.WAITING)
        if trains is not None:
            life.passes(trains, RunState.TRAINING)
            life.is_counted()
            life.plan()
            life.passes_unheard(unseen)
        life.is_suspended(stops)
        life.split_is_right()
        life.passes(rests, RunState.SUSPENDED)
        life.is_resumed()
        life.split_is_right()
        assert life.resume is not None
        assert life.resume.time_breakdown == life.status.time_breakdown
    if trains_last is not None:
        life.passes(trains_last, RunState.TRAINING)
        life.is_counted()
    life.passes_unheard(ends)
    life.is_booked()
    life.plan(outcome=success())
    life.split_is_right()
    assert life.status.state is JobState.SUCCEEDED
    assert life.last.report.time_breakdown == life.status.time_breakdown


def test_time_alone_writes_no_status() -> None:
    life = Life()
    life.passes(10, RunState.TRAINING)
    life.is_counted()
    life.plan()
    for _ in range(3):
        life.passes(10, RunState.TRAINING)
        life.is_counted()
        life.plan()
        assert (life.last.status, life.last.report, life.status.time_breakdown) == (None, None, None)
    life.is_suspended(1)
    split = life.status.time_breakdown
    life.passes(1000, RunState.SUSPENDED)
    life.plan()
    assert (life.last.status, life.last.report, life.status.time_breakdown) == (None, None, split)


def test_pods_that_leave_at_a_short_suspension_count_as_left() -> None:
    life = Life()
    life.passes(10, RunState.TRAINING)
    life.is_counted()
    life.plan()
    life.job = replace(life.job, spec=msgspec.structs.replace(life.job.spec, suspend=True))
    life.plan()
    life.passes(3, RunState.STOPPING)
    life.pods = tuple(replace(pod, terminating=True) for pod in life.pods)
    life.is_resumed()
    assert (life.last.create, life.status.state) == ((), JobState.SUSPENDED)

    life.pods = ()
    life.plan()
    life.split_is_right()
    life.told = None
    life.plan()
    assert len(life.last.create) == 2
    for known in (life.status.time_breakdown, life.resume and life.resume.time_breakdown):
        assert known is not None
        assert known.gone == {NodeEnd.LEFT: 2}


def test_record_from_before_the_suspension_is_ignored() -> None:
    life = Life()
    life.passes(10, RunState.TRAINING)
    life.is_counted()
    former = life.told
    life.is_suspended(5)
    life.passes(100, RunState.SUSPENDED)
    life.told = former
    life.is_resumed()
    life.split_is_right()


def test_counts_of_the_leader_are_kept_over_a_suspension() -> None:
    told = TimeBreakdown(
        until=NOW + 30,
        seconds={RunState.TRAINING: 30.0},
        lost=4.5,
        joined=3,
        gone={NodeEnd.DIED: 1},
        round=4,
        last_checkpoint_at=NOW,
    )
    job = with_spec_applied(a_job(suspend=True))
    status = plan(job, a_world(time_breakdown=told), NOW + 30).status
    assert status.time_breakdown == TimeBreakdown(
        until=NOW + 30,
        seconds={RunState.TRAINING: 30.0},
        lost=4.5,
        joined=3,
        gone={NodeEnd.DIED: 1, NodeEnd.LEFT: 2},
    )


def test_time_without_a_record_is_unknown() -> None:
    trained = with_spec_applied(a_job(suspend=True))
    status = plan(trained, a_world(), NOW + 30).status
    assert status.time_breakdown is None
    resumed = plan(replace(that_rests(a_job()), spec=a_job().spec), NO_STORE, NOW + 60)
    assert resumed.status.time_breakdown is None
    assert [new.resume and new.resume.time_breakdown for new in resumed.create] == [None, None]


def test_forbidden_store_makes_the_time_breakdown_unknown() -> None:
    known = TimeBreakdown(until=NOW, seconds={RunState.SUSPENDED: 10.0})
    job = with_status(with_spec_applied(a_job(etcd=EtcdSpec(endpoint="etcd:2379"))), time_breakdown=known)
    status = plan(job, a_world(store_read=False, store_forbidden=True, outcome=success()), NOW + 30).status
    assert status.time_breakdown is None


def test_training_that_no_leader_has_recorded_makes_the_time_unknown() -> None:
    known = TimeBreakdown(until=NOW, seconds={RunState.SUSPENDED: 10.0})
    unread = a_world(store_read=False, store_error="it does not answer", outcome=success())
    for world_size, state in ((2, None), (0, RunState.WAITING)):
        job = with_status(with_spec_applied(a_job()), time_breakdown=known, world_size=world_size)
        found = plan(job, unread, NOW + 30).status.time_breakdown
        assert (found and [*found.seconds][-1]) == state


@pytest.mark.parametrize(("after", "state"), [(60, RunState.STOPPING), (61, RunState.WAITING)])
def test_long_time_after_the_last_record_counts_as_waiting(after: float, state: RunState) -> None:
    told = TimeBreakdown(until=NOW + 30, seconds={RunState.TRAINING: 30.0})
    status = plan(with_spec_applied(a_job()), a_world(time_breakdown=told, outcome=success()), NOW + 30 + after).status
    assert status.time_breakdown.seconds == {RunState.TRAINING: 30.0, state: after}


@pytest.mark.parametrize(
    "told",
    [
        TimeBreakdown(until=NOW + 10**6, seconds={RunState.TRAINING: 10.0}),
        TimeBreakdown(until=NOW + 30, seconds={RunState.TRAINING: 1e10, RunState.WAITING: 1e10}),
    ],
    ids=["of another time", "of more time than there was"],
)
def test_implausible_time_record_is_ignored(told: TimeBreakdown) -> None:
    known = TimeBreakdown(until=NOW, seconds={})
    job = with_status(with_spec_applied(a_job()), time_breakdown=known, state=JobState.WAITING, world_size=0)
    status = plan(job, a_world(time_breakdown=told, outcome=success()), NOW + 30).status
    assert status.time_breakdown == TimeBreakdown(until=NOW + 30, seconds={RunState.WAITING: 30.0})


# -- what is kept


HISTORY = HistoryRecord(created=NOW - 5, rounds=(PastRound(number=1, began=NOW, nodes=2),))


def finished(job: Job, status: JobStatus | None) -> Job:
    assert status is not None
    return replace(job, status=status_from_json(json.loads(json.dumps(status_to_json(status)))))


def test_report_is_written_at_completion_until_the_store_is_gone() -> None:
    job = with_spec_applied(a_job())
    world = a_world(running(0), running(1), outcome=success(), history=HISTORY)
    ends = plan(job, world, NOW + 0.7)
    assert ends.etcd is True, "the agents may still read there how it ended"
    report = ends.report
    assert (report.name, report.uid, report.state, report.created) == (job.name, job.uid, JobState.SUCCEEDED, NOW)
    assert report.history == HistoryRecord(created=NOW, rounds=HISTORY.rounds)
    assert report.outcome == success()

    later = plan(finished(job, ends.status), replace(world, pods=()), NOW + 3)
    assert (later.etcd, later.status and later.status.completed) == (False, NOW)
    assert later.report == report, "the same, so that it is not written a second time"
    gone = plan(finished(job, later.status), NO_STORE, NOW + 4)
    assert gone.report is None


def test_report_of_a_job_that_never_trained() -> None:
    job = a_job(active_deadline=60)
    job = with_status(job, active=NOW)
    ends = plan(job, NO_STORE, NOW + 61)
    assert (ends.report.state, ends.report.history.rounds) == (JobState.FAILED, ())
    assert ends.report.message.startswith("the job has not come to its end")
    assert ends.report.time_breakdown == TimeBreakdown(until=NOW + 61, seconds={RunState.WAITING: 61.0})
    assert ends.report.completed_at == NOW + 61


def test_report_is_written_once_the_job_is_suspended() -> None:
    job = with_spec_applied(a_job(suspend=True))
    stopping = plan(job, a_world(running(0), history=HISTORY), NOW)
    assert stopping.report is None
    told = TimeBreakdown(
        until=NOW + 4,
        state=RunState.STOPPING,
        seconds={RunState.TRAINING: 4.0},
        joined=7,
        gone={NodeEnd.DIED: 2, NodeEnd.LEFT: 1},
    )
    rests = plan(finished(job, stopping.status), a_world(history=HISTORY, time_breakdown=told), NOW + 5.0004)
    assert (rests.report.state, rests.report.completed_at) == (JobState.SUSPENDED, None)
    assert rests.report.history.rounds == HISTORY.rounds
    assert rests.report.rested == (NOW + 5,)
    assert rests.report.time_breakdown.gone == {NodeEnd.DIED: 2, NodeEnd.LEFT: 5}, (
        "those that were still there have left"
    )
    assert rests.etcd is False


def test_deleted_job_has_no_report() -> None:
    world = a_world(outcome=success(), history=HISTORY)
    at_once = plan(with_spec_applied(a_job(ttl_after_finished=0)), world, NOW)
    assert (at_once.delete_job, at_once.report) == (True, None)
    assert plan(with_spec_applied(a_job(deleting=True)), world, NOW).report is None
    assert plan(with_spec_applied(a_job(managed_by="somebody.else/x")), world, NOW).report is None
