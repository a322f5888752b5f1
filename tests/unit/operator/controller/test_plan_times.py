"""The time breakdown of a job: the plan completes the leaders' records, also after suspensions and at the end."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    with_spec_applied,
    with_status,
)
from torchelastic.protocol.records import (
    DepartureReason,
    HistoryRecord,
    PastRound,
    ResumeRecord,
    RunState,
    TimeBreakdown,
)

if TYPE_CHECKING:
    from elastic_operator.api.status import JobStatus
    from elastic_operator.controller.model import Pod

NO_STORE = Observed()


class JobTimeline:
    """A job that is suspended and resumed, its leader's time records, and an operator that writes planned statuses."""

    def __init__(self, *, suspend: bool = False) -> None:
        self.job = a_job(suspend=suspend)
        self.now = NOW
        self.unrecorded = 0.0
        self.expected: dict[RunState, float] = {}
        self.record: TimeBreakdown | None = None
        self.pods: tuple[Pod, ...] = ()
        self.resume: ResumeRecord | None = None
        self.last = Plan()
        self.plan()

    @property
    def status(self) -> JobStatus:
        return self.job.status

    def plan(self, **more: Any) -> None:
        """Let the operator observe the job, plan, and write the status."""
        round = a_round(*self.pods) if self.record is not None and self.pods else None
        world = (
            a_world(*self.pods, time_breakdown=self.record, round=round, **more)
            if self.pods
            else replace(NO_STORE, **more)
        )
        if not self.pods and self.record is not None:
            world = a_world(time_breakdown=self.record, **more)
        self.last = plan(self.job, world, self.now)
        if self.last.status is not None:
            written = json.loads(json.dumps(status_to_json(self.last.status)))
            self.job = replace(self.job, status=status_from_json(written))
        if self.last.create:
            self.pods = tuple(replace(running(new.index), name=new.name) for new in self.last.create)
            self.resume = self.last.create[0].resume

    def pass_time(self, seconds: float, state: RunState) -> None:
        """Let time pass in this state before the leader records it."""
        self.now += seconds
        self.expected[state] = self.expected.get(state, 0.0) + seconds

    def pass_unrecorded(self, seconds: float) -> None:
        """Let time pass that no leader records, and to which the plan assigns a state."""
        self.now += seconds
        self.unrecorded += seconds
        if self.record is None:
            self.expect_unrecorded(RunState.WAITING)

    def expect_assumed_state(self) -> None:
        """Expect that unrecorded time gets the state that the plan assumes."""
        soon = self.record is not None and self.now - self.record.until <= 60
        self.expect_unrecorded(RunState.STOPPING if soon else RunState.WAITING)

    def expect_unrecorded(self, state: RunState) -> None:
        self.expected[state] = self.expected.get(state, 0.0) + self.unrecorded
        self.unrecorded = 0.0

    def record_time(self) -> None:
        """Let the leader record all time so far."""
        self.record = TimeBreakdown(until=self.now, state=RunState.TRAINING, seconds={**self.expected}, nodes_joined=2)

    def suspend(self, after: float) -> None:
        """Suspend the job; its pods end after this number of seconds."""
        self.job = replace(self.job, spec=msgspec.structs.replace(self.job.spec, suspend=True))
        self.plan()
        if self.pods:
            self.pass_unrecorded(after)
        self.expect_assumed_state()
        self.pods = ()
        self.plan()
        self.record = None  # the record is deleted with the store

    def resume_job(self) -> None:
        self.job = replace(self.job, spec=msgspec.structs.replace(self.job.spec, suspend=False))
        self.plan()

    def assert_breakdown(self) -> None:
        """Check that the time breakdown in the status is as expected."""
        breakdown = self.status.time_breakdown
        assert breakdown is not None
        assert breakdown.until == pytest.approx(self.now, abs=0.01)
        assert sum(breakdown.seconds.values()) == pytest.approx(self.now - self.job.created, abs=0.01)
        assert breakdown.seconds == pytest.approx({s: spent for s, spent in self.expected.items() if spent}, abs=0.01)


SPANS = st.floats(0.001, 100_000).map(lambda seconds: round(seconds, 3))
CYCLES = st.lists(st.tuples(SPANS, st.none() | SPANS, SPANS, SPANS, SPANS), max_size=5)


@settings(database=None, derandomize=True, deadline=None)
@given(st.booleans(), SPANS, CYCLES, st.none() | SPANS, SPANS)
def test_each_second_is_counted_once(
    suspended_first: bool,
    suspended_seconds: float,
    cycles: list[tuple[float, float | None, float, float, float]],
    trains_last: float | None,
    ends: float,
) -> None:
    timeline = JobTimeline(suspend=suspended_first)
    if suspended_first:
        timeline.assert_breakdown()
        timeline.pass_time(suspended_seconds, RunState.SUSPENDED)
        timeline.resume_job()
        timeline.assert_breakdown()
    for waits, trains, unrecorded, stops, suspended in cycles:
        timeline.pass_time(waits, RunState.WAITING)
        if trains is not None:
            timeline.pass_time(trains, RunState.TRAINING)
            timeline.record_time()
            timeline.plan()
            timeline.pass_unrecorded(unrecorded)
        timeline.suspend(stops)
        timeline.assert_breakdown()
        timeline.pass_time(suspended, RunState.SUSPENDED)
        timeline.resume_job()
        timeline.assert_breakdown()
        assert timeline.resume is not None
        assert timeline.resume.time_breakdown == timeline.status.time_breakdown
    if trains_last is not None:
        timeline.pass_time(trains_last, RunState.TRAINING)
        timeline.record_time()
    timeline.pass_unrecorded(ends)
    timeline.expect_assumed_state()
    timeline.plan(outcome=success())
    timeline.assert_breakdown()
    assert timeline.status.state is JobState.SUCCEEDED
    assert timeline.last.report.time_breakdown == timeline.status.time_breakdown


def test_passing_time_alone_causes_no_status_update() -> None:
    timeline = JobTimeline()
    timeline.pass_time(10, RunState.TRAINING)
    timeline.record_time()
    timeline.plan()
    for _ in range(3):
        timeline.pass_time(10, RunState.TRAINING)
        timeline.record_time()
        timeline.plan()
        assert (timeline.last.status, timeline.last.report, timeline.status.time_breakdown) == (None, None, None)
    timeline.suspend(1)
    breakdown = timeline.status.time_breakdown
    timeline.pass_time(1000, RunState.SUSPENDED)
    timeline.plan()
    assert (timeline.last.status, timeline.last.report, timeline.status.time_breakdown) == (None, None, breakdown)


def test_pods_that_leave_at_a_short_suspension_count_as_left() -> None:
    timeline = JobTimeline()
    timeline.pass_time(10, RunState.TRAINING)
    timeline.record_time()
    timeline.plan()
    timeline.job = replace(timeline.job, spec=msgspec.structs.replace(timeline.job.spec, suspend=True))
    timeline.plan()
    timeline.pass_time(3, RunState.STOPPING)
    timeline.pods = tuple(replace(pod, terminating=True) for pod in timeline.pods)
    timeline.resume_job()
    assert (timeline.last.create, timeline.status.state) == ((), JobState.SUSPENDED)

    timeline.pods = ()
    timeline.plan()
    timeline.assert_breakdown()
    timeline.record = None
    timeline.plan()
    assert len(timeline.last.create) == 2
    for known in (timeline.status.time_breakdown, timeline.resume and timeline.resume.time_breakdown):
        assert known is not None
        assert known.departures == {DepartureReason.LEFT: 2}


def test_record_from_before_the_suspension_is_ignored() -> None:
    timeline = JobTimeline()
    timeline.pass_time(10, RunState.TRAINING)
    timeline.record_time()
    former = timeline.record
    timeline.suspend(5)
    timeline.pass_time(100, RunState.SUSPENDED)
    timeline.record = former
    timeline.resume_job()
    timeline.assert_breakdown()


def test_unrecorded_training_makes_the_time_breakdown_unknown() -> None:
    known = TimeBreakdown(until=NOW, seconds={RunState.SUSPENDED: 10.0})
    unread = a_world(store_read=False, store_error="it does not answer", outcome=success())
    for world_size, state in ((2, None), (0, RunState.WAITING)):
        job = with_status(with_spec_applied(a_job()), time_breakdown=known, world_size=world_size)
        found = plan(job, unread, NOW + 30).status.time_breakdown
        assert (found and [*found.seconds][-1]) == state


@pytest.mark.parametrize(("after", "state"), [(60, RunState.STOPPING), (61, RunState.WAITING)])
def test_long_time_after_the_last_record_counts_as_waiting(after: float, state: RunState) -> None:
    record = TimeBreakdown(until=NOW + 30, seconds={RunState.TRAINING: 30.0})
    status = plan(
        with_spec_applied(a_job()), a_world(time_breakdown=record, outcome=success()), NOW + 30 + after
    ).status
    assert status.time_breakdown.seconds == {RunState.TRAINING: 30.0, state: after}


@pytest.mark.parametrize(
    "record",
    [
        TimeBreakdown(until=NOW + 10**6, seconds={RunState.TRAINING: 10.0}),
        TimeBreakdown(until=NOW + 30, seconds={RunState.TRAINING: 1e10, RunState.WAITING: 1e10}),
    ],
    ids=["in the future", "longer than the age of the job"],
)
def test_implausible_time_record_is_ignored(record: TimeBreakdown) -> None:
    known = TimeBreakdown(until=NOW, seconds={})
    job = with_status(with_spec_applied(a_job()), time_breakdown=known, state=JobState.WAITING, world_size=0)
    status = plan(job, a_world(time_breakdown=record, outcome=success()), NOW + 30).status
    assert status.time_breakdown == TimeBreakdown(until=NOW + 30, seconds={RunState.WAITING: 30.0})


# -- the report


HISTORY = HistoryRecord(created=NOW - 5, rounds=(PastRound(number=1, began=NOW, nodes=2),))


def finished(job: Job, status: JobStatus | None) -> Job:
    assert status is not None
    return replace(job, status=status_from_json(json.loads(json.dumps(status_to_json(status)))))


def test_plan_contains_the_report_from_completion_until_the_store_is_deleted() -> None:
    job = with_spec_applied(a_job())
    world = a_world(running(0), running(1), outcome=success(), history=HISTORY)
    ends = plan(job, world, NOW + 0.7)
    assert ends.etcd is True, "the agents may still read the outcome in the store"
    report = ends.report
    assert (report.name, report.uid, report.state, report.created) == (job.name, job.uid, JobState.SUCCEEDED, NOW)
    assert report.history == HistoryRecord(created=NOW, rounds=HISTORY.rounds)
    assert report.outcome == success()

    later = plan(finished(job, ends.status), replace(world, pods=()), NOW + 3)
    assert (later.etcd, later.status and later.status.completed) == (False, NOW)
    assert later.report == report, "the report is unchanged, so that it is not written a second time"
    gone = plan(finished(job, later.status), NO_STORE, NOW + 4)
    assert gone.report is None


def test_report_of_a_job_that_never_trained() -> None:
    job = a_job(active_deadline=60)
    job = with_status(job, active=NOW)
    ends = plan(job, NO_STORE, NOW + 61)
    assert (ends.report.state, ends.report.history.rounds) == (JobState.FAILED, ())
    assert ends.report.message.startswith("the job has not finished")
    assert ends.report.time_breakdown == TimeBreakdown(until=NOW + 61, seconds={RunState.WAITING: 61.0})
    assert ends.report.completed_at == NOW + 61


def test_deleted_job_has_no_report() -> None:
    world = a_world(outcome=success(), history=HISTORY)
    at_once = plan(with_spec_applied(a_job(ttl_after_finished=0)), world, NOW)
    assert (at_once.delete_job, at_once.report) == (True, None)
    assert plan(with_spec_applied(a_job(deleting=True)), world, NOW).report is None
