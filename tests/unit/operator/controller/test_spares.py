"""Spares: pods beyond the desired number, which stand by to take the place of a lost pod."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.status import JobState
from elastic_operator.controller.plan import plan
from tests.support.builders import (
    NOW,
    a_job,
    a_round,
    a_world,
    condition,
    died,
    pending,
    running,
    size,
    terminating,
    that_had_pods,
    that_is_suspended,
    that_trained,
    unready,
    with_spec,
    with_status,
)

if TYPE_CHECKING:
    from elastic_operator.api.status import JobStatus
    from elastic_operator.controller.model import Job, Observed, Plan, Pod

WANTED = a_job(replicas=2, spares=1)
TRAINS = that_trained(WANTED)
POD_0, POD_1, POD_2 = running(0), running(1), running(2)
WITH_SPARE = a_world(POD_0, POD_1, POD_2, round=a_round(POD_0, POD_1), size=size(2))


def scaled(job: Job, **fields: int) -> Job:
    """Return the job after an edit of its spec."""
    return with_spec(job, msgspec.structs.replace(job.spec, **fields), generation=job.generation + 1)


def status_of(made: Plan) -> JobStatus:
    assert made.status is not None
    return made.status


def numbers(made: Plan) -> tuple[int, int, int, int]:
    """Return the desired, existing and ready pods of the new status, and its ready spares."""
    status = status_of(made)
    return status.desired, status.replicas, status.ready_replicas, status.ready_spares


def indices(made: Plan) -> tuple[list[int], list[int]]:
    """Return the indices of the created and of the removed pods."""
    return [new.index for new in made.create], [pod.index for pod in made.remove]


def test_a_job_gets_its_spares_with_its_pods_and_its_agents_learn_only_the_desired_size() -> None:
    made = plan(WANTED, a_world(store_read=False), NOW)
    assert indices(made) == ([0, 1, 2], [])
    assert {(new.size.min, new.size.desired, new.size.max) for new in made.create} == {(1, 2, 4)}
    assert numbers(made) == (2, 2, 0, 0)


@pytest.mark.parametrize("more", [(), (unready(2),), (pending(2, waiting="no node has 8 GPUs"),), (died(2),)])
def test_a_job_whose_spare_is_missing_neither_waits_nor_is_degraded(more: tuple[Pod, ...]) -> None:
    made = plan(TRAINS, a_world(POD_0, POD_1, *more, round=a_round(POD_0, POD_1)), NOW)
    status = status_of(made)
    assert (status.state, status.ready, status.ready_spares) == (JobState.RUNNING, "2/2", 0)
    assert not status.holds(ConditionType.WAITING)
    assert not status.holds(ConditionType.DEGRADED)
    assert condition(status, ConditionType.RUNNING).message.startswith(
        "round 1 with world size 2; 0 of 1 spare ready; digits-2-"
    )


def test_the_condition_running_says_why_a_spare_is_not_ready() -> None:
    made = plan(TRAINS, a_world(POD_0, POD_1, pending(2, waiting="no node has 8 GPUs"), round=a_round(POD_0, POD_1)), 0)
    assert condition(status_of(made), ConditionType.RUNNING).message.endswith("is not ready yet: no node has 8 GPUs")


def test_a_spare_that_a_quota_blocks_does_not_degrade_the_job() -> None:
    made = plan(TRAINS, a_world(POD_0, POD_1, round=a_round(POD_0, POD_1), blocked="exceeded quota: pods=2"), NOW)
    status = status_of(made)
    assert (status.state, status.ready) == (JobState.RUNNING, "2/2")
    assert not status.holds(ConditionType.DEGRADED)
    assert condition(status, ConditionType.RESOURCES_BLOCKED).message == "exceeded quota: pods=2"
    assert "digits-2-" in condition(status, ConditionType.RUNNING).message


def test_ready_spares_are_not_counted_as_ready_pods() -> None:
    made = plan(TRAINS, WITH_SPARE, NOW)
    assert indices(made) == ([], [])
    assert numbers(made) == (2, 2, 2, 1)
    assert status_of(made).ready == "2/2"
    assert condition(status_of(made), ConditionType.RUNNING).message == "round 1 with world size 2; 1 of 1 spare ready"


def test_a_lost_pod_is_replaced_by_a_pod_that_stands_by_while_the_spare_trains() -> None:
    made = plan(TRAINS, a_world(POD_0, died(1), POD_2, round=a_round(POD_0, POD_2, number=2)), NOW)
    assert indices(made) == ([1], [])
    status = status_of(made)
    assert (status.ready, status.ready_spares, status.pod_failures) == ("2/2", 0, 1)
    assert not status.holds(ConditionType.DEGRADED)
    back = a_world(POD_0, running(1, after=died(1)), POD_2, round=a_round(POD_0, POD_2, number=2))
    assert numbers(plan(with_status(TRAINS, size_generation=1), back, NOW)) == (2, 2, 2, 1)


def test_without_a_ready_spare_a_lost_pod_degrades_the_job() -> None:
    made = plan(TRAINS, a_world(POD_0, died(1), unready(2), round=a_round(POD_0)), NOW)
    status = status_of(made)
    assert (status.ready, status.ready_spares) == ("1/2", 0)
    assert condition(status, ConditionType.DEGRADED).message.startswith("1 of 2 pods ready; ")
    assert condition(status, ConditionType.RUNNING).message == "round 1 with world size 1; 0 of 1 spare ready"


def test_the_death_of_a_spare_counts_as_a_failure_of_a_pod_and_the_spare_is_replaced() -> None:
    made = plan(TRAINS, a_world(POD_0, POD_1, died(2), round=a_round(POD_0, POD_1)), NOW)
    assert indices(made) == ([2], [])
    assert status_of(made).pod_failures == 1
    failed = plan(with_spec(TRAINS, msgspec.structs.replace(TRAINS.spec, backoff_limit=0)), a_world(died(2)), NOW)
    assert condition(status_of(failed), ConditionType.FAILED).reason == Reason.POD_FAILURES


def test_growing_the_job_keeps_the_number_of_spares() -> None:
    made = plan(scaled(TRAINS, replicas=3), WITH_SPARE, NOW)
    assert indices(made) == ([3], [])
    assert made.size == size(3, generation=2)


def test_shrinking_the_job_removes_an_unused_pod_first() -> None:
    in_use = a_round(running(1), running(2))
    made = plan(scaled(TRAINS, replicas=1), a_world(POD_0, POD_1, POD_2, round=in_use, size=size(2)), NOW)
    assert indices(made) == ([], [0])
    assert made.size == size(1, generation=2, draining=(POD_0.name,))


def test_shrinking_the_job_removes_spares_and_then_the_highest_indices() -> None:
    job = that_trained(a_job(replicas=3, spares=1))
    pods = [running(index, size=size(3)) for index in range(4)]
    world = a_world(*pods, round=a_round(*pods[:3]), size=size(3))
    assert sorted(indices(plan(scaled(job, replicas=1), world, NOW))[1]) == [2, 3]


def test_fewer_spares_leave_the_size_of_the_job_and_its_members_alone() -> None:
    in_use = a_world(POD_0, POD_1, POD_2, round=a_round(running(1), running(2)), size=size(2))
    made = plan(scaled(TRAINS, spares=0), in_use, NOW)
    assert indices(made) == ([], [0])
    assert made.size is None


def test_more_spares_are_created_without_a_new_size() -> None:
    made = plan(scaled(TRAINS, spares=3), WITH_SPARE, NOW)
    assert (indices(made), made.size) == (([3, 4], []), None)


def test_a_suspended_job_keeps_no_spare_and_a_resumed_one_gets_all() -> None:
    suspended = with_spec(TRAINS, msgspec.structs.replace(WANTED.spec, suspend=True))
    made = plan(suspended, WITH_SPARE, NOW)
    assert indices(made) == ([], [0, 1, 2])
    assert numbers(made) == (0, 0, 0, 0)
    assert indices(plan(that_is_suspended(WANTED), a_world(), NOW)) == ([0, 1, 2], [])


def test_a_disruption_budget_and_a_gang_are_about_the_minimum() -> None:
    job = that_had_pods(a_job(replicas=2, minimum=2, spares=2, disruption_budget=True))
    assert plan(job, WITH_SPARE, NOW).min_available == 2


def world_of(*pods: Pod) -> Observed:
    return a_world(*pods, round=a_round(POD_0, POD_1), size=size(2))


def test_a_finished_job_has_no_spares() -> None:
    finished = with_status(TRAINS, state=JobState.SUCCEEDED, completed=NOW, ready_spares=1)
    assert numbers(plan(finished, world_of(terminating(0), terminating(1), terminating(2)), NOW)) == (2, 0, 0, 0)
