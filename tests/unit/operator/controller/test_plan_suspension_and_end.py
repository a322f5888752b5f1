"""The plan of a job: suspension, the applied spec, the failure policy, completion, and stores that cannot be used."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.spec import (
    EtcdSpec,
    FailureAction,
)
from elastic_operator.api.status import JobState, LastFailure
from elastic_operator.controller.model import EtcdState, Plan, with_applied_spec
from elastic_operator.controller.plan import plan
from tests.support.builders import (
    NOW,
    a_failure,
    a_job,
    a_round,
    a_world,
    condition,
    died,
    evicted,
    failure,
    lost,
    on_disruption,
    on_reasons,
    out_of_memory,
    pending,
    preempted,
    rejected_by_node,
    running,
    succeeded,
    success,
    that_had_pods,
    that_is_suspended,
    that_trained,
    with_spec,
    with_spec_applied,
)
from torchelastic.protocol.records import FailureRecord

if TYPE_CHECKING:
    from elastic_operator.controller.model import Job, Observed

NO_STORE = replace(a_world(store_read=False), etcd=EtcdState.ABSENT)


def messages_of(made: Plan) -> dict[Reason, str]:
    return {Reason(event.reason): event.message for event in made.events}


def apply_status(job: Job, world: Observed) -> Job:
    """Return the job with the status that the plan writes."""
    status = plan(job, world, NOW).status
    assert status is not None
    return replace(job, status=status)


# -- suspended and resumed


def test_suspension_is_reported_step_by_step() -> None:
    job = with_spec_applied(a_job(suspend=True), active=NOW - 60, replicas=2)
    stopping = plan(job, a_world(running(0), running(1)), NOW)
    first = condition(stopping.status, ConditionType.SUSPENDED)
    assert (first.status, first.reason, first.message) == (False, Reason.STOPPING, "the pods are terminating")
    assert messages_of(stopping) == {Reason.SUSPENDED: "suspended: its pods are asked to leave"}
    assert (stopping.status.replicas, stopping.status.ready_replicas, stopping.status.active) == (0, 0, None)
    assert stopping.status.desired == 0
    assert stopping.status.applied_spec == job.status.applied_spec

    rests = plan(replace(job, status=stopping.status), a_world(), NOW + 5)
    last = condition(rests.status, ConditionType.SUSPENDED)
    assert (last.status, last.reason, last.since) == (True, Reason.SUSPENDED, NOW + 5)
    assert rests.events == ()
    assert rests.status.applied_spec is None
    for kind in (ConditionType.RUNNING, ConditionType.WAITING, ConditionType.DEGRADED):
        assert (condition(rests.status, kind).status, condition(rests.status, kind).reason) == (False, Reason.SUSPENDED)


@pytest.mark.parametrize("job", [a_job(), that_is_suspended(a_job())], ids=["new", "resumed"])
def test_rejected_pods_do_not_make_the_outcome_unknown(job: Job) -> None:
    external = replace(job, spec=msgspec.structs.replace(job.spec, etcd=EtcdSpec(endpoint="etcd:2379")))
    away = a_world(store_read=False, store_error="cannot be reached")
    tried = apply_status(external, away)
    hindered = plan(tried, replace(away, blocked="exceeded quota"), NOW + 1)
    assert [pod.index for pod in hindered.create] == [0, 1]
    assert condition(hindered.status, ConditionType.WAITING).reason == Reason.RESOURCES_BLOCKED
    refused = apply_status(tried, replace(away, rejected="no such volume"))

    # A restarted operator does not know of the rejection, and also creates the pods.
    for before in (tried, replace(tried, status=hindered.status), replace(refused, generation=2)):
        assert [pod.index for pod in plan(before, away, NOW + 600).create] == [0, 1]
        assert [pod.index for pod in plan(before, NO_STORE, NOW + 600).create] == [0, 1]
        coming = replace(NO_STORE, etcd=EtcdState.STARTING)
        assert [pod.index for pod in plan(before, coming, NOW + 600).create] == [0, 1]


def test_restarted_operator_reads_the_store_before_it_creates_pods() -> None:
    job = apply_status(a_job(), NO_STORE)
    waits = plan(job, a_world(store_read=False), NOW)
    assert waits.create == ()
    assert condition(waits.status, ConditionType.WAITING).message == (
        "whether the run has ended is not known while the store cannot be read; no pod is started until it can be read"
    )
    ended = plan(job, a_world(outcome=success()), NOW).status
    assert ended.state is JobState.SUCCEEDED
    assert [pod.index for pod in plan(job, a_world(), NOW).create] == [0, 1]


def test_first_pods_are_recorded_with_the_next_status() -> None:
    job = apply_status(a_job(), NO_STORE)
    names = [pod.name for pod in plan(a_job(), NO_STORE, NOW).create]
    pods = [replace(pending(index), name=name) for index, name in enumerate(names)]
    assert plan(job, a_world(*pods), NOW).status is None

    ready = [replace(running(index), name=name) for index, name in enumerate(names)]
    seen = apply_status(job, a_world(*ready))
    assert seen.status.size_generation == 1
    held = plan(seen, a_world(store_read=False, store_error="cannot be reached"), NOW)
    assert held.create == ()
    assert condition(held.status, ConditionType.WAITING).message == (
        "whether the run has ended is not known while the store cannot be read; no pod is started until it can be "
        "read; cannot be reached"
    )


def test_round_before_a_suspension_does_not_count_as_training() -> None:
    former = plan(a_job(), NO_STORE, NOW).create
    outlived = a_round(*(replace(running(pod.index), name=pod.name) for pod in former), number=5)
    rests = that_is_suspended(a_job())
    pods = [replace(running(new.index), name=new.name) for new in plan(rests, NO_STORE, NOW).create]
    again = plan(replace(rests, status=replace(rests.status, active=NOW)), NO_STORE, NOW + 60).create
    assert [pod.name for pod in again] == [pod.name for pod in pods]
    job = apply_status(rests, a_world())
    waits = plan(job, a_world(*pods, round=outlived), NOW).status
    trains = plan(job, a_world(*pods, round=a_round(*pods, number=6)), NOW).status

    assert (waits.state, waits.world_size) == (JobState.WAITING, 0)
    assert (trains.state, trains.world_size) == (JobState.RUNNING, 2)


# -- the applied spec


def test_changed_applied_fields_require_a_restart_which_is_reported_once() -> None:
    before = with_spec_applied(a_job(args=("old.py",)))
    after = replace(
        before, spec=a_job(args=("new.py",), template={"metadata": {"labels": {"a": "b"}}}).spec, generation=2
    )
    world = a_world(running(0), died(1), round=a_round(running(0)))
    made = plan(after, world, NOW)

    message = "spec.args and spec.template have changed; suspend the job and resume it to apply the change"
    waiting = condition(made.status, ConditionType.RESTART_REQUIRED)
    assert (waiting.status, waiting.reason) == (True, Reason.SPEC_CHANGED)
    assert waiting.message.startswith(message)
    assert messages_of(made)[Reason.RESTART_REQUIRED] == waiting.message
    assert [pod.index for pod in made.create] == [1]
    assert with_applied_spec(after, made).spec.args == ("old.py",)
    assert plan(apply_status(after, world), world, NOW).events == ()

    taken_back = plan(replace(apply_status(after, world), spec=before.spec, generation=3), world, NOW).status
    in_effect = condition(taken_back, ConditionType.RESTART_REQUIRED)
    assert (in_effect.status, in_effect.reason) == (False, Reason.SPEC_IN_EFFECT)


def test_invalid_change_of_a_running_job_is_reported_and_stops_nothing() -> None:
    before = with_spec_applied(a_job())
    after = with_spec(before, a_job(env=({"name": "PET_NNODES", "value": "7"},)).spec)
    made = plan(after, a_world(running(0)), NOW)

    assert [pod.index for pod in made.create] == [1]
    assert condition(made.status, ConditionType.RESTART_REQUIRED).message.startswith("spec.env has changed; ")


def test_live_pods_keep_the_applied_spec_on_resumption() -> None:
    suspended = apply_status(with_spec_applied(a_job(suspend=True, args=("old.py",))), a_world(running(0)))
    resumed = replace(suspended, spec=a_job(args=("new.py",)).spec, generation=2)
    made = plan(resumed, a_world(running(0)), NOW)

    assert (made.remove, [pod.index for pod in made.create]) == ((), [1])
    assert with_applied_spec(resumed, made).spec.args == ("old.py",)
    assert condition(made.status, ConditionType.RESTART_REQUIRED).status is True


def test_change_before_the_first_pod_takes_effect_at_once() -> None:
    refused = apply_status(a_job(image="no/such:image:at:all"), replace(NO_STORE, rejected="no such image"))
    corrected = replace(refused, spec=a_job(image="digits:1").spec, generation=2)
    made = plan(corrected, a_world(), NOW)

    assert [pod.index for pod in made.create] == [0, 1]
    assert with_applied_spec(corrected, made).spec.image == "digits:1"


def test_sizes_limits_and_times_change_at_any_time() -> None:
    before = with_spec_applied(a_job())
    changes = {"backoff_limit": 7, "active_deadline": 3600, "ttl_after_finished": 1, "disruption_budget": True}
    after = replace(before, spec=a_job(maximum=8, replicas=3, max_restarts=1, **changes).spec, generation=2)
    made = plan(after, a_world(running(0), running(1)), NOW)

    assert [pod.index for pod in made.create] == [2]
    assert (made.min_available, made.wake_at) == (1, NOW + 3540)
    assert not any(each.type == ConditionType.RESTART_REQUIRED for each in made.status.conditions)


# -- failures


def test_events_name_the_termination_cause() -> None:
    job = that_trained(a_job(maximum=8, replicas=6))
    pods = (out_of_memory(0), evicted(1), preempted(2), lost(3), rejected_by_node(4), running(5))
    made = plan(job, a_world(*pods), NOW)

    assert {(event.reason, event.message) for event in made.events} == {
        (Reason.POD_DIED, f"{pods[0].name} ran out of memory; a new pod takes its place"),
        (Reason.POD_DISRUPTED, f"{pods[2].name} was preempted; a new pod takes its place"),
        (Reason.POD_DISRUPTED, f"{pods[3].name} was lost with its node node-9; a new pod takes its place"),
        (
            Reason.POD_DISRUPTED,
            f"{pods[1].name} was evicted: The node was low on resource: memory; a new pod takes its place",
        ),
        (
            Reason.POD_DISRUPTED,
            f"{pods[4].name} was not admitted by its node node-7: the resource cpu is short; a new pod takes its place",
        ),
    }
    assert made.status.pod_failures == 1
    assert made.status.last_failure == LastFailure(
        f"{pods[0].name} ran out of memory", pod=pods[0].name, signal="SIGKILL", time=NOW
    )


def test_failure_policy_is_named_in_messages() -> None:
    ignores = (on_reasons(FailureAction.IGNORE, "OOMKilled"),)
    made = plan(that_trained(a_job(failure_rules=ignores)), a_world(running(0), out_of_memory(1)), NOW)
    assert messages_of(made) == {
        Reason.POD_DIED: f"{out_of_memory(1).name} ran out of memory, which the failure policy ignores; a new pod "
        "takes its place"
    }
    assert made.status.last_failure is None

    fails = (on_disruption(FailureAction.IGNORE), on_reasons(FailureAction.FAIL_JOB, "OOMKilled"))
    made = plan(that_trained(a_job(failure_rules=fails)), a_world(running(0), out_of_memory(1)), NOW)
    why = f"{out_of_memory(1).name} ran out of memory, and spec.failurePolicy.rules[1] fails the job"
    assert condition(made.status, ConditionType.FAILED).message == why
    assert messages_of(made) == {Reason.FAILED: f"failed: {why}"}


@pytest.mark.parametrize(
    ("message", "exit_code", "reported"),
    [
        ("killed by SIGKILL: out of memory", -9, "rank 3 on digits-2-abcde was killed by SIGKILL: out of memory"),
        (
            "the process that serves the round's TCPStore was killed by SIGKILL: out of memory",
            1,
            "on digits-2-abcde the process that serves the round's TCPStore was killed by SIGKILL: out of memory",
        ),
        ("", 3, "rank 3 on digits-2-abcde exited with code 3"),
    ],
)
def test_run_failure_message(message: str, exit_code: int, reported: str) -> None:
    record = FailureRecord(
        round=1, rank=3, local_rank=1, node="digits-2-abcde.7f", exit_code=exit_code, message=message
    )
    status = plan(that_trained(a_job()), a_world(running(0), outcome=failure(record=record)), NOW).status

    assert status.last_failure.message == reported


@pytest.mark.parametrize("ended", ["outcome", "word"])
def test_round_first_seen_at_completion_is_counted(ended: str) -> None:
    pods = (running(0), running(1))
    round = a_round(*pods, number=3, restarts=1, free=2, failure=a_failure())
    seen = a_world(*pods, round=round, outcome=success(round=3, restarts=1) if ended == "outcome" else None)
    world = seen if ended == "outcome" else replace(seen, pods=(succeeded(0), running(1)))
    status = plan(that_had_pods(a_job()), world, NOW).status

    assert (status.state, status.started, status.world_size) == (JobState.SUCCEEDED, NOW, 2)
    assert (status.round, status.restarts, status.uncharged_restarts) == (3, 1, 2)
    assert status.last_failure.rank == 3


# -- completion


def test_exceeded_deadline_is_the_failure_message() -> None:
    job = that_trained(a_job(active_deadline=60), active=NOW - 60)
    made = plan(job, a_world(running(0), died(1)), NOW)

    why = "the job has not finished within the 60 seconds that activeDeadlineSeconds allows"
    assert condition(made.status, ConditionType.FAILED).message == why
    assert made.status.last_failure == LastFailure(why, time=NOW)


def test_finished_job_has_no_other_true_condition() -> None:
    changed = replace(with_spec_applied(a_job()), spec=a_job(args=("new.py",)).spec)
    job = apply_status(changed, replace(a_world(running(0)), store_error="connection refused"))
    for kind in (ConditionType.RESTART_REQUIRED, ConditionType.STORE_UNREACHABLE):
        assert condition(job.status, kind).status is True
    over = plan(job, a_world(running(0), outcome=success()), NOW).status

    assert {each.type for each in over.conditions if each.status} == {ConditionType.SUCCEEDED, ConditionType.FINISHED}


# -- an unusable or forbidden store


def test_unusable_store_is_a_condition_and_pods_are_created() -> None:
    job = a_job(etcd=EtcdSpec(endpoint="etcd:2379"))
    world = a_world(store_read=False, store_error="etcd:2379 cannot be reached: connection refused.")
    made = plan(job, world, NOW)

    unreachable = condition(made.status, ConditionType.STORE_UNREACHABLE)
    assert (unreachable.status, unreachable.reason) == (True, Reason.UNREACHABLE)
    assert unreachable.message == "etcd:2379 cannot be reached: connection refused"
    assert messages_of(made) == {Reason.STORE_UNREACHABLE: f"the operator cannot use the store: {unreachable.message}"}
    assert [pod.index for pod in made.create] == [0, 1]

    with_pods = replace(world, pods=(pending(0), pending(1)))
    again = plan(apply_status(job, world), replace(with_pods, store_error="timed out"), NOW)
    assert again.events == ()
    reached = plan(apply_status(job, world), replace(with_pods, store_error=None), NOW).status
    assert condition(reached, ConditionType.STORE_UNREACHABLE).reason == Reason.REACHABLE


def test_forbidden_store_and_enough_pods_count_as_running() -> None:
    world = a_world(running(0), running(1), store_read=False, store_error="no right to read", store_forbidden=True)
    status = plan(that_had_pods(a_job(minimum=2)), world, NOW).status

    assert (status.state, status.started, status.world_size) == (JobState.RUNNING, NOW, 0)
    known = condition(status, ConditionType.RUNNING)
    assert (known.status, known.message) == (True, "enough pods are ready; the operator cannot read the round")
    unreachable = condition(status, ConditionType.STORE_UNREACHABLE)
    assert (unreachable.status, unreachable.reason) == (True, Reason.NOT_ALLOWED)
