"""The plan of a job: names, back-off, charges, status, conditions and events."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace as replaced

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.spec import FailureAction
from elastic_operator.api.status import JobState, LastFailure
from elastic_operator.controller.messages import MESSAGE_LIMIT
from elastic_operator.controller.model import EtcdState, IncompatibleImage, Plan
from elastic_operator.controller.plan import plan
from elastic_operator.controller.pods import LONGEST_BACK_OFF, back_off, pod_name
from tests.support.builders import (
    NAME,
    NOW,
    UID,
    a_failure,
    a_job,
    a_round,
    a_world,
    condition,
    died,
    evicted,
    failure,
    left,
    lost,
    on_reasons,
    pending,
    running,
    size,
    terminating,
    termination_message,
    that_had_pods,
    that_trained,
    unready,
    with_status,
)
from torchelastic.protocol.records import FailureRecord, HistoryRecord, PastRound, ResumeRecord, RoundReason

if TYPE_CHECKING:
    from elastic_operator.controller.model import Observed, Pod
    from torchelastic.protocol.records import RoundRecord


NO_AGENT = IncompatibleImage(Reason.NO_AGENT, "the image busybox has no torchelastic-run")
OTHER_VERSION = IncompatibleImage(Reason.PROTOCOL_MISMATCH, "the agent in the image speaks version 7")

TRAINED = that_trained(a_job(replicas=2))


def messages_of(made: Plan) -> dict[Reason, str]:
    return {Reason(event.reason): event.message for event in made.events}


@pytest.mark.parametrize(("there", "goes"), [(None, 2), (a_round(running(1), running(2)), 0)])
def test_ready_and_unready_pods_are_removed_alike_after_the_store_has_lost_its_data(
    there: RoundRecord | None, goes: int
) -> None:
    job = that_trained(a_job(replicas=2, generation=2))
    sizes = {"size": size(3)}
    world = a_world(unready(0, **sizes), running(1, **sizes), running(2, **sizes), round=there)

    assert [pod.name for pod in plan(job, world, NOW).remove] == [running(goes).name]


# -- names


def test_pod_names_are_deterministic() -> None:
    world = a_world(running(0), died(1))
    [successor] = plan(TRAINED, world, NOW).create
    [again] = plan(TRAINED, replace(world, pods=world.pods[::-1]), NOW + 1).create

    assert successor.name == again.name == pod_name(NAME, UID, 1, died(1).uid)
    assert successor.name != died(1).name


def test_new_pod_does_not_reuse_the_name_of_a_draining_pod() -> None:
    gone = pod_name(NAME, UID, 1, "")
    [new] = plan(TRAINED, a_world(running(0), size=size(2, generation=3, draining=(gone,))), NOW).create
    assert new.name != gone


def test_back_off_starts_over_after_a_healthy_time() -> None:
    job = that_trained(a_job(replicas=2))
    earlier = died(1, failures=3, created=NOW - 100, ended=NOW - 80)
    [second] = plan(job, a_world(running(0), earlier), NOW - 72).create
    assert (second.failures, second.failed) == (4, NOW - 80)

    deleted = terminating(1, after=earlier, failures=4, failed=NOW - 80, started=NOW - 40)
    [third] = plan(job, a_world(running(0), deleted), NOW - 20).create
    assert (third.failures, third.failed) == (4, NOW - 80)

    dead = died(1, after=deleted, failures=4, failed=NOW - 80, started=NOW - 15, ended=NOW)
    [fourth] = plan(job, a_world(running(0), dead), NOW).create
    assert (fourth.failures, fourth.failed) == (1, NOW)


def test_back_off_time_is_not_healthy_time() -> None:
    dead = died(1, failures=9, failed=NOW - 63, started=NOW - 1, ended=NOW)
    made = plan(that_trained(a_job(replicas=2)), a_world(running(0), dead), NOW)

    assert (made.create, made.wake_at) == ((), NOW + LONGEST_BACK_OFF)


@pytest.mark.parametrize("signalled", [129, 130, 131, 143], ids=["SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM"])
def test_an_index_whose_pods_leave_repeatedly_backs_off_without_a_charge(signalled: int) -> None:
    job = that_trained(a_job(replicas=2, minimum=2))
    [second] = plan(job, a_world(running(0), died(1, signalled)), NOW).create
    assert (second.failures, second.failed) == (1, NOW)
    made = plan(job, a_world(running(0), died(1, signalled, failures=2, failed=NOW - 3)), NOW)
    assert (made.create, made.wake_at) == ((), NOW + back_off(3))
    assert "digits-1 failed 3 times in a row and is" in condition(made.status, ConditionType.WAITING).message
    assert made.status.pod_failures == 0

    [after] = plan(job, a_world(running(0), evicted(1, exit_code=143, failures=2, failed=NOW - 90)), NOW).create
    assert after.failures <= 3


@pytest.mark.parametrize("ended", [NOW + 3600, NOW - 3600])
def test_wrong_node_clock_does_not_change_the_back_off(ended: float) -> None:
    job = that_trained(a_job(replicas=2))
    dead = died(1, failures=4, failed=NOW - 40, created=NOW - 5, started=ended - 3, ended=ended)
    waits = plan(job, a_world(running(0), dead), NOW)
    assert (waits.create, waits.wake_at) == ((), NOW - 5 + back_off(5))
    assert waits.status is not None
    later = replace(job, status=waits.status)
    assert plan(later, a_world(running(0), dead), NOW + 1).status is None, "passing time alone changes nothing"
    assert [pod.index for pod in plan(later, a_world(running(0), dead), NOW + 20).create] == [1]


def test_pod_ended_by_its_own_deadline_is_charged() -> None:
    late = left(1, reasons=frozenset({"DeadlineExceeded", "Error"}))
    status = plan(that_trained(a_job(replicas=2)), a_world(running(0), late), NOW).status
    assert status.pod_failures == 1
    rules = (on_reasons(FailureAction.FAIL_JOB, "DeadlineExceeded"),)
    failed = plan(that_trained(a_job(replicas=2, failure_rules=rules)), a_world(running(0), late), NOW).status
    assert failed.state is JobState.FAILED


def test_new_pods_get_a_resume_record_if_no_pod_is_left() -> None:
    job = that_trained(a_job(replicas=2), round=7, restarts=3, uncharged_restarts=1)
    records = [pod.resume for pod in plan(job, a_world(lost(0), lost(1)), NOW).create]
    assert records == [ResumeRecord(round=7, restarts=3, uncharged_restarts=1)] * 2
    assert [pod.resume for pod in plan(job, a_world(running(0), lost(1)), NOW).create] == [None]


def test_etcd_error_is_reported() -> None:
    job = that_trained(a_job(replicas=1))
    world = a_world(store_read=False, etcd_error="its etcd does not serve yet: it cannot be scheduled")
    waiting = condition(plan(job, world, NOW).status, ConditionType.WAITING)
    assert waiting.message.endswith("its etcd does not serve yet: it cannot be scheduled")


def test_completion_time_in_the_future_delays_nothing() -> None:
    over = with_status(TRAINED, state=JobState.SUCCEEDED, completed=NOW + 3600)
    cleared = plan(over, a_world(running(0)), NOW)
    assert (len(cleared.remove), cleared.etcd, cleared.wake_at) == (1, False, None)


# -- charges


def test_exceeded_backoff_limit_fails_the_job() -> None:
    job = that_trained(a_job(replicas=2, backoff_limit=3), pod_failures=3)
    made = plan(job, a_world(running(0), died(1, 139)), NOW)

    assert made.status.state is JobState.FAILED
    assert made.status.pod_failures == 4
    failed = condition(made.status, ConditionType.FAILED)
    assert failed.reason == Reason.POD_FAILURES
    assert failed.message == (
        f"4 pods failed, and backoffLimit allows 3; the last was {died(1).name}, which was killed by SIGSEGV"
    )
    assert [pod.name for pod in made.remove] == [running(0).name]
    assert made.create == ()


# -- completion


def test_failure_names_its_root_cause() -> None:
    record = FailureRecord(round=1, rank=3, local_rank=1, node="digits-2.7f", exit_code=1, message="ValueError: no")
    made = plan(TRAINED, a_world(running(0), outcome=failure(record=record)), NOW)

    cause = "rank 3 on digits-2 exited with ValueError: no"
    assert condition(made.status, ConditionType.FAILED).message == cause
    assert condition(made.status, ConditionType.FINISHED).message == cause
    assert condition(made.status, ConditionType.FAILED).reason == Reason.RUN_FAILED
    assert made.status.last_failure == LastFailure(cause, pod="digits-2", rank=3, exit_code=1, time=NOW)
    assert messages_of(made) == {Reason.FAILED: f"failed: {cause}"}


@pytest.mark.parametrize(
    ("pods", "reason", "message"),
    [
        (
            (
                died(0, 1, message=termination_message("second"), ended=NOW),
                died(1, 1, message=termination_message("first"), ended=NOW - 1),
            ),
            Reason.RUN_FAILED,
            "first",
        ),
        (
            (died(0, 2, message=termination_message("--nnodes is not a number", "BadInput")),),
            Reason.BAD_INPUT,
            "--nnodes is not a number",
        ),
        ((died(0, 2, incompatible_image=NO_AGENT), died(1)), Reason.NO_AGENT, NO_AGENT.message),
        ((died(0, 2, incompatible_image=OTHER_VERSION), died(1)), Reason.PROTOCOL_MISMATCH, OTHER_VERSION.message),
    ],
    ids=["the first failure", "bad input", "no agent", "another version"],
)
def test_failure_quotes_the_pod_that_caused_it(pods: tuple[Pod, ...], reason: Reason, message: str) -> None:
    made = plan(TRAINED, a_world(*pods), NOW)
    failed = condition(made.status, ConditionType.FAILED)

    assert (failed.reason, failed.message) == (reason, message)
    assert messages_of(made) == {Reason.FAILED: f"failed: {message}"}
    assert made.status.pod_failures == 0


# -- status and conditions


def test_waiting_names_the_missing_pods_and_why() -> None:
    job = that_trained(a_job(minimum=3, replicas=3))
    failing = died(2, failures=2, size=size(3, minimum=3))
    pods = (running(0, size=size(3, minimum=3)), unready(1, size=size(3, minimum=3)), failing)
    waiting = condition(plan(job, a_world(*pods), NOW).status, ConditionType.WAITING)

    assert (waiting.status, waiting.reason) == (True, Reason.BELOW_MINIMUM)
    assert waiting.message == (
        f"1 of at least 3 pods is ready; {unready(1).name} has not joined yet; "
        "digits-2 failed 3 times in a row and is started again at 2023-11-14T22:13:22Z"
    )


def test_many_missing_pods_are_abbreviated() -> None:
    job = that_trained(a_job(minimum=50, replicas=50, maximum=50))
    message = condition(plan(job, a_world(), NOW).status, ConditionType.WAITING).message

    assert message.endswith(" and 46 more have not joined yet")


def test_trained_job_with_too_few_pods_is_degraded() -> None:
    world = a_world(running(0), unready(1))
    new = plan(that_had_pods(a_job(replicas=2)), world, NOW).status
    trained = plan(TRAINED, replace(world, round=a_round(running(0))), NOW).status

    assert condition(new, ConditionType.DEGRADED).status is False
    degraded = condition(trained, ConditionType.DEGRADED)
    assert (degraded.status, degraded.message) == (True, f"1 of 2 pods ready; {unready(1).name} has not joined yet")
    assert condition(trained, ConditionType.RUNNING).status is True


def test_condition_keeps_its_transition_time() -> None:
    pods = (running(0), running(1))
    first = plan(TRAINED, a_world(*pods, round=a_round(*pods)), NOW).status
    assert first is not None
    later = plan(replace(TRAINED, status=first), a_world(*pods, round=a_round(*pods, number=2)), NOW + 5).status
    broken = plan(replace(TRAINED, status=first), a_world(*pods, round=a_round(number=2)), NOW + 5).status

    assert condition(later, ConditionType.RUNNING).since == NOW
    assert condition(later, ConditionType.RUNNING).message == "round 2 with world size 2"
    assert condition(broken, ConditionType.RUNNING).since == NOW + 5


def test_waiting_quotes_the_causes_given_by_the_cluster() -> None:
    job = that_had_pods(a_job(minimum=4, replicas=5, maximum=5))
    pull = "the image cannot be pulled: not found."
    world = a_world(pending(0, waiting=pull), pending(1, waiting="unschedulable"), pending(2, waiting=pull), unready(3))
    waiting = condition(plan(job, world, NOW).status, ConditionType.WAITING)

    new = pod_name(NAME, UID, 4, "")
    assert waiting.message == (
        f"0 of at least 4 pods are ready; {pending(0).name} and {pending(2).name} are not ready yet: the image cannot "
        f"be pulled: not found; {pending(1).name} is not ready yet: unschedulable; {unready(3).name} and {new} have "
        "not joined yet"
    )


def test_blocked_pods_are_reported_once() -> None:
    job = that_trained(a_job(minimum=2))
    world = a_world(running(0), blocked="exceeded quota: pods.")
    made = plan(job, world, NOW)
    waiting, degraded = (condition(made.status, kind) for kind in (ConditionType.WAITING, ConditionType.DEGRADED))

    hindered = f"{pod_name(NAME, UID, 1, '')} cannot be created for now: exceeded quota: pods"
    assert waiting.message == f"1 of at least 2 pods is ready; {hindered}"
    assert degraded.message == f"1 of 2 pods ready; {hindered}"
    assert waiting.reason == degraded.reason == Reason.RESOURCES_BLOCKED
    assert messages_of(made) == {Reason.RESOURCES_BLOCKED: "pods cannot be created for now: exceeded quota: pods"}
    assert made.status.replicas == 1

    again = plan(replace(job, status=made.status), replace(world, blocked="exceeded quota: pods, again"), NOW)
    assert again.events == ()
    free = plan(replace(job, status=made.status), replace(world, blocked=None), NOW).status
    assert (free.replicas, condition(free, ConditionType.WAITING).reason) == (2, Reason.BELOW_MINIMUM)


def test_pods_above_the_minimum_are_removed_if_the_quota_blocks_etcd() -> None:
    job = that_had_pods(a_job(minimum=1, maximum=4, replicas=4))
    quota = 'pods "digits-etcd" is forbidden: exceeded quota: few'
    pods = (unready(0), unready(1), unready(2))
    world = replace(a_world(*pods, blocked=quota, etcd_blocked=True, store_read=False), etcd=EtcdState.STARTING)
    made = plan(job, world, NOW)
    assert ({each.name for each in made.remove}, made.create) == ({unready(1).name, unready(2).name}, ())
    assert made.etcd
    assert made.status is not None
    job = replace(job, status=made.status)
    at_least = plan(job, replace(world, pods=(unready(0), terminating(1), terminating(2))), NOW)
    assert (at_least.remove, at_least.create) == ((), ())
    there = replace(a_world(unready(0), store_read=False), etcd=EtcdState.STARTING)
    assert len(plan(job, there, NOW).create) == 3


def test_blocked_objects_are_reported_while_all_pods_train() -> None:
    pods = (running(0), running(1))
    world = a_world(
        *pods,
        round=a_round(*pods),
        blocked="a foreign Service is called digits-etcd",
        disruption_budget_error="no right",
    )
    made = plan(TRAINED, world, NOW)

    kinds = (ConditionType.RESOURCES_BLOCKED, ConditionType.DISRUPTION_BUDGET_FAILED)
    conditions = [condition(made.status, kind) for kind in kinds]
    assert [(each.status, each.reason, each.message) for each in conditions] == [
        (True, Reason.RESOURCES_BLOCKED, "a foreign Service is called digits-etcd"),
        (True, Reason.BUDGET_REJECTED, "no right"),
    ]
    assert messages_of(made)[Reason.RESOURCES_BLOCKED].endswith("for now: a foreign Service is called digits-etcd")
    assert made.status is not None
    corrected = plan(
        replace(TRAINED, status=made.status), replace(world, blocked=None, disruption_budget_error=None), NOW
    ).status
    assert [condition(corrected, kind).status for kind in kinds] == [False, False]


def test_ranks_that_begin_a_round_at_different_steps_are_reported_once_for_the_round() -> None:
    pods = (running(0), running(1))

    def seen(number: int, *steps: int) -> Observed:
        past = (
            PastRound(number=1, began=1.0, first_steps=(3, 5)),
            PastRound(number=number, began=2.0, first_steps=steps),
        )
        return replace(a_world(*pods, round=a_round(*pods, number=number)), history=HistoryRecord(rounds=past))

    job, said = TRAINED, []
    for world in (seen(3), seen(3, 0, 60), seen(3, 0, 120), seen(4), seen(5, 7, 8), seen(6, 8, 9)):
        made = plan(job, world, NOW)
        said.append([event.message for event in made.events if event.reason == Reason.STEPS_DIFFER and event.warning])
        job = replace(job, status=made.status or job.status)
    assert said == [
        [],
        ["round 3: the ranks began at different steps, from 0 to 60"],
        [],
        [],
        ["round 5: the ranks began at different steps, from 7 to 8"],
        ["round 6: the ranks began at different steps, from 8 to 9"],
    ]
    differ = condition(job.status, ConditionType.STEPS_DIFFER)
    assert (differ.status, differ.message) == (True, said[-1][0])
    agreed = condition(plan(job, seen(7), NOW).status, ConditionType.STEPS_DIFFER)
    assert (agreed.status, agreed.reason, agreed.message) == (False, Reason.STEPS_AGREE, "")


def test_rejected_pods_are_reported_once() -> None:
    made = plan(TRAINED, a_world(running(0), died(1), rejected="Pod is invalid: spec.volumes: no such volume."), NOW)

    invalid = condition(made.status, ConditionType.INVALID)
    words = "Pod is invalid: spec.volumes: no such volume"
    assert (invalid.status, invalid.reason, invalid.message) == (True, Reason.REFUSED, words)
    assert condition(made.status, ConditionType.DEGRADED).message == (
        "1 of 2 pods ready; no more pods are created from this spec, which the cluster rejects"
    )
    assert messages_of(made) == {
        Reason.POD_DIED: f"{died(1).name} was killed by SIGKILL",
        Reason.REFUSED: f"the spec is invalid, and no pod is created from it: {words}",
    }
    assert made.status is not None
    same = plan(replace(TRAINED, status=made.status), a_world(running(0), died(1), rejected=f"{words}."), NOW)
    assert (same.status, same.events, same.create) == (None, (), ())


def test_long_messages_are_shortened_in_the_status() -> None:
    made = plan(TRAINED, a_world(running(0), outcome=failure("x" * 16_384)), NOW)

    assert len(made.status.last_failure.message) == MESSAGE_LIMIT
    assert all(len(condition.message) <= MESSAGE_LIMIT for condition in made.status.conditions)


def test_invalid_spec_is_reported_until_it_is_corrected() -> None:
    bad = a_job(env=({"name": "PET_NNODES", "value": "7"},))
    made = plan(bad, a_world(), NOW)
    assert made.create == ()
    invalid = condition(made.status, ConditionType.INVALID)
    assert (invalid.status, invalid.reason) == (True, Reason.SPEC_INVALID)
    assert "PET_NNODES" in invalid.message
    waiting = condition(made.status, ConditionType.WAITING).message
    assert waiting == f"0 of at least 1 pod are ready; no pod is created from this spec: {invalid.message}"

    assert made.status is not None
    corrected = plan(replace(a_job(), status=made.status), a_world(store_read=False), NOW)
    assert [pod.index for pod in corrected.create] == [0, 1]
    assert condition(corrected.status, ConditionType.INVALID).status is False


# -- events


def test_events_of_ended_pods_announce_a_replacement() -> None:
    job = that_trained(a_job(replicas=4))
    world = a_world(
        died(0),
        died(1, 3, message=termination_message("the store cannot be reached"), failures=3),
        left(2),
        terminating(3),
    )
    made = plan(job, world, NOW)

    assert [event.message for event in made.events] == [
        f"{terminating(3).name} was deleted; a new pod takes its place",
        f"{died(0).name} was killed by SIGKILL; a new pod takes its place",
        f"{died(1).name} gave up on the store: the store cannot be reached; a new pod takes its place in 4 s",
        f"{left(2).name} was asked to leave; a new pod takes its place",
    ]
    assert [event.warning for event in made.events] == [False, True, True, False]


@pytest.mark.parametrize(
    ("dead", "how"),
    [
        (died(1, 1, message="Traceback\n  …\nKeyError: 'x'\n"), "exited with code 1: KeyError: 'x'"),
        (died(1, None), "ended for an unknown reason"),
    ],
)
def test_event_says_how_a_pod_failed(dead: Pod, how: str) -> None:
    made = plan(TRAINED, a_world(running(0), dead), NOW)
    assert messages_of(made)[Reason.POD_DIED].startswith(f"{dead.name} {how}; ")


def test_event_of_a_pod_whose_init_container_failed() -> None:
    message = "its init container fetch exited with code 7: no such bucket"
    made = plan(TRAINED, a_world(running(0), died(1, None, init_exit_code=7, message=message, ended=NOW)), NOW)

    words = f"{died(1).name} did not start: {message}"
    assert messages_of(made)[Reason.POD_DIED].startswith(f"{words}; ")
    assert made.status.last_failure == LastFailure(words, pod=died(1).name, exit_code=7, time=NOW)


def test_pods_removed_by_the_plan_are_not_reported_as_deleted() -> None:
    job = with_status(that_trained(a_job(replicas=1, generation=2)), desired=2)
    world = a_world(running(0), running(1))
    first = plan(job, world, NOW)
    assert messages_of(first) == {Reason.SCALED: "scaled from 2 to 1 pod"}

    assert first.status is not None
    after = a_world(running(0), terminating(1), size=first.size)
    assert plan(replace(job, status=first.status), after, NOW).events == ()


def test_new_round_event_names_the_cause() -> None:
    pods = (running(0), running(1))
    scaled = plan(TRAINED, a_world(*pods, round=a_round(*pods, number=2, cause="digits-1 joined")), NOW)
    cause = "rank 1 on digits-1: KeyError: 'x'"
    later = a_round(*pods, number=2, cause=cause, restarts=1, reason=RoundReason.WORKER_FAILED)
    failed = plan(TRAINED, a_world(*pods, round=later), NOW)

    assert messages_of(scaled) == {Reason.ROUND: "round 2 with world size 2: digits-1 joined"}
    assert [event.warning for event in scaled.events] == [False]
    assert messages_of(failed) == {Reason.ROUND: f"round 2 with world size 2: {cause}"}
    assert [event.warning for event in failed.events] == [True]
    assert (failed.status.restarts, failed.status.last_failure) == (1, LastFailure(cause, time=NOW))


def test_worker_failure_is_the_last_failure() -> None:
    pods = (running(0), running(1))
    later = a_round(*pods, number=2, restarts=1, cause="rank 3", reason=RoundReason.WORKER_FAILED, failure=a_failure())
    raised = plan(TRAINED, a_world(*pods, round=later), NOW).status
    killed = plan(
        TRAINED, a_world(*pods, round=replaced(later, failure=a_failure(exit_code=-9, message=""))), NOW
    ).status

    assert raised.last_failure == LastFailure(
        "rank 3 on digits-1-abcde exited with ValueError: no", pod="digits-1-abcde", rank=3, exit_code=1, time=NOW
    )
    assert killed.last_failure == LastFailure(
        "rank 3 on digits-1-abcde was killed by SIGKILL", pod="digits-1-abcde", rank=3, signal="SIGKILL", time=NOW
    )


def test_later_event_is_not_reported_as_the_failure() -> None:
    pods = (running(0), running(1))
    after = a_round(*pods, number=3, restarts=1, cause="digits-1 joined", failure=a_failure())
    made = plan(TRAINED, a_world(*pods, round=after), NOW)

    failed = "rank 3 on digits-1-abcde exited with ValueError: no"
    assert messages_of(made) == {
        Reason.WORKER_FAILED: failed,
        Reason.ROUND: "round 3 with world size 2: digits-1 joined",
    }
    assert [event.warning for event in made.events] == [True, False]
    assert made.status.last_failure.message == failed

    unknown = plan(TRAINED, a_world(*pods, round=replaced(after, failure=None)), NOW)
    assert messages_of(unknown) == {Reason.ROUND: "round 3 with world size 2: digits-1 joined"}
    assert (unknown.status.restarts, unknown.status.last_failure) == (1, None)


def test_round_without_members_is_a_pause() -> None:
    made = plan(TRAINED, a_world(running(0), running(1), round=a_round(number=2, cause="digits-1 died")), NOW)

    assert messages_of(made) == {Reason.PAUSED: "no pod trains now: digits-1 died"}
    assert made.status.state is JobState.WAITING
    assert condition(made.status, ConditionType.RUNNING).message == "digits-1 died"
