"""The plan of a job whose store cannot be read: which steps wait, for how long, and which pods are charged."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.spec import EtcdSpec, FailureAction
from elastic_operator.api.status import JobState
from elastic_operator.controller.model import STORE_TIMEOUT, IncompatibleImage, with_applied_spec
from elastic_operator.controller.plan import plan
from tests.support.builders import (
    NOW,
    a_job,
    a_world,
    condition,
    died,
    on_reasons,
    out_of_memory,
    running,
    success,
    terminating,
    with_spec_applied,
)

if TYPE_CHECKING:
    from elastic_operator.controller.model import Job, Observed, Plan, Pod

UNREADABLE = a_world(store_read=False, store_error="old:2379 refuses")
OLD = EtcdSpec(endpoint="old:2379")
NEW = EtcdSpec(endpoint="new:2379")


def unreadable(*pods: Pod) -> Observed:
    return replace(UNREADABLE, pods=pods)


def apply_plan(job: Job, world: Observed, now: float) -> tuple[Job, Plan]:
    applied = plan(job, world, now)
    return (job if applied.status is None else replace(job, status=applied.status)), applied


def reasons(applied: Plan) -> list[Reason]:
    return [event.reason for event in applied.events]


# -- resumed before the suspension is complete


def resumed_early() -> Job:
    """Return a job that was suspended, changed and resumed while its old store could not be read."""
    job = with_spec_applied(a_job(etcd=OLD, suspend=True))
    job, _ = apply_plan(job, unreadable(running(0), running(1)), NOW)
    job, _ = apply_plan(job, UNREADABLE, NOW + 10)
    return replace(job, spec=a_job(etcd=NEW).spec, generation=4)


def test_job_resumed_before_it_is_suspended_stops_first() -> None:
    job, waiting_plan = apply_plan(resumed_early(), UNREADABLE, NOW + 11)
    assert (waiting_plan.create, waiting_plan.events, waiting_plan.wake_at) == ((), (), NOW + 10 + STORE_TIMEOUT)
    assert with_applied_spec(job).spec.etcd == OLD
    assert job.status.state is JobState.SUSPENDED

    job, suspended_plan = apply_plan(job, UNREADABLE, NOW + 10 + STORE_TIMEOUT)
    assert (suspended_plan.create, suspended_plan.events, job.status.applied_spec, job.status.size_generation) == (
        (),
        (),
        None,
        0,
    )
    assert suspended_plan.wake_at is not None

    job, resumed_plan = apply_plan(job, UNREADABLE, suspended_plan.wake_at)
    assert [pod.index for pod in resumed_plan.create] == [0, 1]
    assert reasons(resumed_plan) == [Reason.RESUMED, Reason.STORE_UNREACHABLE]
    assert with_applied_spec(job, resumed_plan).spec.etcd == NEW


def test_old_store_of_a_resumed_job_is_read_first() -> None:
    job, _ = apply_plan(resumed_early(), UNREADABLE, NOW + 11)
    finished, _ = apply_plan(job, a_world(outcome=success()), NOW + 12)
    assert finished.status.state is JobState.SUCCEEDED

    job, stopped_plan = apply_plan(job, a_world(), NOW + 12)
    assert (stopped_plan.create, stopped_plan.etcd, job.status.applied_spec) == ((), False, None)
    job, resumed_plan = apply_plan(job, a_world(), NOW + 13)
    assert [pod.index for pod in resumed_plan.create] == [0, 1]
    assert with_applied_spec(job, resumed_plan).spec.etcd == NEW


def test_resumed_job_waits_for_terminating_pods_and_the_store() -> None:
    job = with_spec_applied(a_job(etcd=OLD, suspend=True))
    job, _ = apply_plan(job, unreadable(running(0)), NOW)
    job = replace(job, spec=a_job(etcd=NEW).spec, generation=4)
    for later in (10, 100):
        job, waiting_plan = apply_plan(job, unreadable(terminating(0)), NOW + later)
        assert (waiting_plan.create, waiting_plan.wake_at, with_applied_spec(job).spec.etcd) == ((), None, OLD)
    job, waiting_plan = apply_plan(job, UNREADABLE, NOW + 101)
    assert (waiting_plan.create, waiting_plan.wake_at) == ((), NOW + 101 + STORE_TIMEOUT)


# -- suspended


def test_plan_waits_for_the_store_after_the_last_pod_has_ended() -> None:
    job = with_spec_applied(a_job(suspend=True))
    job, _ = apply_plan(job, unreadable(terminating(0), terminating(1)), NOW)
    for kind, reason in ((ConditionType.SUSPENDED, Reason.STOPPING), (ConditionType.WAITING, Reason.SUSPENDED)):
        assert (condition(job.status, kind).status, condition(job.status, kind).reason) == (False, reason)
    assert plan(job, unreadable(terminating(0)), NOW + STORE_TIMEOUT).status is None

    job, waiting_plan = apply_plan(job, UNREADABLE, NOW + 100)
    assert waiting_plan.wake_at == NOW + 100 + STORE_TIMEOUT
    waiting = condition(job.status, ConditionType.WAITING)
    assert (waiting.status, waiting.reason, waiting.since) == (True, Reason.STORE_UNREADABLE, NOW + 100)
    job, _ = apply_plan(job, UNREADABLE, NOW + 100 + STORE_TIMEOUT)
    assert condition(job.status, ConditionType.SUSPENDED).status is True


# -- failed pods


def test_pod_that_may_have_failed_the_job_is_not_replaced() -> None:
    job = with_spec_applied(a_job(backoff_limit=0))
    world = unreadable(running(0), died(1))
    job, held = apply_plan(job, world, NOW + 1)
    assert (held.create, held.wake_at, job.status.pod_failures) == ((), NOW + STORE_TIMEOUT, 0)
    assert condition(job.status, ConditionType.WAITING).status is False
    assert "no pod is started until it can be read" in condition(job.status, ConditionType.DEGRADED).message

    alone = plan(with_spec_applied(a_job(backoff_limit=0)), unreadable(died(1)), NOW + 1).status
    waiting = condition(alone, ConditionType.WAITING)
    assert (waiting.status, waiting.reason) == (True, Reason.STORE_UNREADABLE)

    job, _ = apply_plan(job, world, NOW + STORE_TIMEOUT)
    assert (job.status.state, job.status.pod_failures) == (JobState.FAILED, 1)


def test_pod_within_the_backoff_limit_is_replaced_unless_a_rule_fails_the_job() -> None:
    allowed = plan(with_spec_applied(a_job(backoff_limit=1)), unreadable(running(0), died(1)), NOW + 1)
    assert [pod.index for pod in allowed.create] == [1]

    rule = on_reasons(FailureAction.FAIL_JOB, "OOMKilled")
    fatal = with_spec_applied(a_job(backoff_limit=9, failure_rules=(rule,)))
    assert plan(fatal, unreadable(running(0), out_of_memory(1)), NOW + 1).create == ()


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (died(1, 2), Reason.BAD_INPUT),
        (
            died(1, 128, incompatible_image=IncompatibleImage(Reason.NO_AGENT, "the image has no torchelastic-run")),
            Reason.NO_AGENT,
        ),
    ],
    ids=["bad input", "no agent"],
)
def test_pod_that_cannot_start_fails_the_job_only_if_the_run_has_not_ended(last: Pod, reason: Reason) -> None:
    job = with_spec_applied(a_job())
    world = unreadable(last)
    job, held = apply_plan(job, world, NOW + 1)
    assert (held.create, held.remove, held.wake_at, job.status.state) == ((), (), NOW + STORE_TIMEOUT, JobState.WAITING)
    status = plan(job, a_world(last, outcome=success()), NOW + 2).status
    assert status.state is JobState.SUCCEEDED
    for later, seen in ((2, a_world(last)), (STORE_TIMEOUT, world)):
        ended = plan(job, seen, NOW + later).status
        assert condition(ended, ConditionType.FINISHED).reason == reason


def test_pod_that_gave_up_on_its_store_is_uncharged_and_the_last_failure() -> None:
    status = plan(with_spec_applied(a_job()), a_world(running(0), died(1, 3)), NOW).status
    assert (status.pod_failures, status.last_failure.exit_code) == (0, 3)
    assert status.last_failure.message.endswith("gave up on the store")
