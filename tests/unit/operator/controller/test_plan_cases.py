"""The plan of a job, case by case: creation, scaling, failures, suspension, deadline, clean-up and deletion."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.spec import (
    CleanPodPolicy,
    FailureAction,
)
from elastic_operator.api.status import JobState
from elastic_operator.controller.model import STORE_TIMEOUT, EtcdState, IncompatibleImage
from elastic_operator.controller.plan import EXIT_PERIOD, plan
from tests.support.builders import (
    NOW,
    a_job,
    a_round,
    a_world,
    condition,
    died,
    left,
    lost,
    on_disruption,
    on_reasons,
    out_of_memory,
    pending,
    preempted,
    running,
    size,
    succeeded,
    success,
    terminating,
    that_had_pods,
    that_is_suspended,
    that_trained,
    unready,
    with_status,
)

if TYPE_CHECKING:
    from elastic_operator.controller.model import Job, Observed
    from torchelastic.protocol.records import SizeRecord


NO_AGENT = IncompatibleImage(Reason.NO_AGENT, "the image busybox has no torchelastic-run")
OTHER_VERSION = IncompatibleImage(Reason.PROTOCOL_MISMATCH, "the agent in the image speaks version 7")

FRESH = a_job(replicas=2)
TRAINED = that_trained(FRESH)
FINISHED = with_status(TRAINED, state=JobState.SUCCEEDED, completed=NOW)

NO_STORE = replace(a_world(store_read=False), etcd=EtcdState.ABSENT)


@dataclass(frozen=True)
class Case:
    """A job, an observation, and the expected plan.

    Attributes:
        creates: indices of new pods.
        removes: indices of pods to delete.
        expected_size: the size to write into the store.
        state: the state in the new status; None if the status does not change.
        reason: why the job finished; None if the job has not finished, or another case checks the reason.
        charges: the number of failed pods in the status.
        wakes_in: seconds until the next plan.
        etcd: whether the etcd of the job is kept.
        deletes: whether the job itself is deleted.
    """

    job: Job
    world: Observed
    creates: list[int] = field(default_factory=list)
    removes: list[int] = field(default_factory=list)
    expected_size: SizeRecord | None = None
    state: JobState | None = None
    reason: Reason | None = None
    charges: int = 0
    wakes_in: float | None = None
    etcd: bool = True
    deletes: bool = False


CASES = {
    "a new job gets all its pods at once, before its store is read": Case(
        FRESH, a_world(store_read=False), creates=[0, 1], state=JobState.PENDING
    ),
    "replicas below a raised minimum count as the minimum": Case(
        a_job(replicas=1, minimum=2), a_world(), creates=[0, 1], state=JobState.PENDING
    ),
    "a killed pod is replaced at once": Case(
        TRAINED, a_world(running(0), died(1)), creates=[1], state=JobState.RUNNING, charges=1
    ),
    "the second failure in a row waits for a second": Case(
        TRAINED, a_world(running(0), died(1, failures=1)), wakes_in=1, state=JobState.RUNNING, charges=1
    ),
    "scaling down removes pods that are not ready first": Case(
        that_trained(a_job(replicas=2, generation=2)),
        a_world(running(0, size=size(3)), unready(1, size=size(3)), running(2, size=size(3))),
        removes=[1],
        expected_size=size(2, generation=2, draining=(unready(1).name,)),
        state=JobState.RUNNING,
    ),
    "scaling down removes the highest indices next": Case(
        that_trained(a_job(replicas=1, generation=2)),
        a_world(running(0), running(1), running(2)),
        removes=[2, 1],
        expected_size=size(1, generation=2, draining=tuple(sorted([running(1).name, running(2).name]))),
        state=JobState.RUNNING,
    ),
    "the lowest empty indices are filled": Case(
        that_trained(a_job(replicas=4)),
        a_world(running(1, size=size(4)), running(3, size=size(4))),
        creates=[0, 2],
        state=JobState.RUNNING,
    ),
    "changed bounds are written to the store": Case(
        that_trained(a_job(replicas=2, maximum=8, generation=5)),
        a_world(running(0), running(1)),
        expected_size=size(2, maximum=8, generation=5),
        state=JobState.RUNNING,
    ),
    "a new size exceeds the generation of the size in the store": Case(
        that_trained(a_job(replicas=3, generation=2)),
        a_world(running(0), running(1), size=size(2, generation=7)),
        creates=[2],
        expected_size=size(3, generation=8),
        state=JobState.RUNNING,
    ),
    "a generation in the store that no operator has reached does not prevent a new size": Case(
        that_trained(a_job(replicas=3, generation=2)),
        a_world(running(0), running(1), size=size(1, generation=2**53)),
        creates=[2],
        expected_size=size(3, generation=2),
        state=JobState.RUNNING,
    ),
    "pods are changed although the store cannot be read": Case(
        that_trained(a_job(replicas=3, generation=2)),
        a_world(running(0), running(1), store_read=False),
        creates=[2],
        state=JobState.RUNNING,
    ),
    "the younger one of two pods with one index is removed": Case(
        TRAINED,
        a_world(running(0), running(1), running(1, after=died(1), created=NOW)),
        removes=[1],
        state=JobState.RUNNING,
    ),
    "a draining pod is replaced although another pod has gone": Case(
        TRAINED,
        a_world(running(0), running(1), size=size(2, generation=3, draining=(running(1).name,))),
        removes=[1],
        creates=[1],
        state=JobState.RUNNING,
    ),
    "a job that has lost all pods waits until its store was read": Case(
        TRAINED, a_world(store_read=False), state=JobState.WAITING
    ),
    "a job that has lost all pods gets new ones if its run has not ended": Case(
        TRAINED, a_world(), creates=[0, 1], state=JobState.WAITING
    ),
    "success in the store ends the job, and running agents get time to exit": Case(
        TRAINED,
        a_world(running(0), pending(1), outcome=success()),
        removes=[1],
        wakes_in=EXIT_PERIOD,
        state=JobState.SUCCEEDED,
    ),
    "an agent that reports success ends the job": Case(
        TRAINED, a_world(succeeded(0), running(1)), wakes_in=EXIT_PERIOD, state=JobState.SUCCEEDED
    ),
    "exit code 1 without a report of the agent is a failed pod": Case(
        TRAINED, a_world(died(0, 1, message="Traceback"), running(1)), creates=[0], state=JobState.RUNNING, charges=1
    ),
    "bad input ends the job and removes the other pods": Case(
        TRAINED, a_world(died(0, 2), running(1)), removes=[1], wakes_in=EXIT_PERIOD, state=JobState.FAILED
    ),
    "an invalid spec gets no store": Case(
        a_job(env=({"name": "A"}, {"name": "A"})),
        replace(a_world(), etcd=EtcdState.ABSENT),
        state=JobState.PENDING,
        etcd=False,
    ),
    "no store is created while the cluster rejects the spec": Case(
        FRESH,
        replace(a_world(store_read=False, rejected="no such volume"), etcd=EtcdState.ABSENT),
        state=JobState.PENDING,
        etcd=False,
    ),
    "a pod with an agent of another version may leave": Case(
        TRAINED, a_world(running(0), left(1, incompatible_image=OTHER_VERSION)), creates=[1], state=JobState.RUNNING
    ),
    "a replaced pod with a running sidecar is removed": Case(
        that_trained(a_job(replicas=2), counted_pod_uids=frozenset({died(1).uid})),
        a_world(running(0), died(1, sidecars_running=True), running(1, after=died(1))),
        removes=[1],
        state=JobState.RUNNING,
    ),
    "a suspended job keeps its store while an agent may leave": Case(
        that_trained(a_job(suspend=True)), a_world(terminating(0)), state=JobState.SUSPENDED
    ),
    "a suspended job does not wait for a pod on a lost node": Case(
        that_trained(a_job(suspend=True)), a_world(lost(0)), state=JobState.SUSPENDED, etcd=False
    ),
    "a run that had ended before the suspension finishes the job": Case(
        that_trained(a_job(suspend=True)),
        a_world(running(0), outcome=success()),
        state=JobState.SUCCEEDED,
        reason=Reason.RUN_SUCCEEDED,
        wakes_in=EXIT_PERIOD,
    ),
    "a resumed job gets its pods at once, before its store is read": Case(
        that_is_suspended(a_job()), NO_STORE, creates=[0, 1], state=JobState.WAITING
    ),
    "the deadline does not apply to a suspended job": Case(
        that_trained(a_job(suspend=True, active_deadline=60), active=NOW - 60),
        a_world(running(0)),
        removes=[0],
        state=JobState.SUSPENDED,
    ),
    "exit code 0 wins over a termination reason": Case(
        that_trained(a_job()),
        a_world(replace(succeeded(1), reasons=frozenset({"OOMKilled"})), running(0)),
        state=JobState.SUCCEEDED,
        reason=Reason.RUN_SUCCEEDED,
        wakes_in=EXIT_PERIOD,
    ),
    "an ignored failure backs off": Case(
        that_trained(a_job(failure_rules=(on_reasons(FailureAction.IGNORE, "OOMKilled"),))),
        a_world(running(0), out_of_memory(1, failures=2)),
        wakes_in=2,
        state=JobState.RUNNING,
    ),
    "a rule can count a disruption": Case(
        that_trained(a_job(failure_rules=(on_disruption(FailureAction.COUNT),), backoff_limit=0)),
        a_world(running(0), preempted(1)),
        removes=[0],
        state=JobState.FAILED,
        reason=Reason.POD_FAILURES,
        charges=1,
        wakes_in=EXIT_PERIOD,
    ),
    "the first rule that matches applies": Case(
        that_trained(
            a_job(
                failure_rules=(
                    on_reasons(FailureAction.FAIL_JOB, "Evicted"),
                    on_reasons(FailureAction.IGNORE, "OOMKilled"),
                    on_reasons(FailureAction.FAIL_JOB, "OOMKilled"),
                )
            )
        ),
        a_world(running(0), out_of_memory(1)),
        creates=[1],
        state=JobState.RUNNING,
    ),
    "no rule applies to a pod that was deleted or asked to leave": Case(
        that_trained(a_job(failure_rules=(on_reasons(FailureAction.FAIL_JOB, "Error"),))),
        a_world(left(0, reasons=frozenset({"Error"})), terminating(1, reasons=frozenset({"Error"}))),
        creates=[0, 1],
        state=JobState.WAITING,
    ),
    "the next plan is due at the deadline": Case(
        that_trained(a_job(active_deadline=61), active=NOW - 60),
        a_world(running(0), running(1)),
        state=JobState.RUNNING,
        wakes_in=1,
    ),
    "the deadline counts from the first pod": Case(
        a_job(active_deadline=61), a_world(), creates=[0, 1], state=JobState.PENDING, wakes_in=61
    ),
    "the deadline counts from the resumption": Case(
        that_is_suspended(a_job(active_deadline=61)), a_world(), creates=[0, 1], state=JobState.WAITING, wakes_in=61
    ),
    "the deadline waits until the store was read": Case(
        that_trained(a_job(active_deadline=60), active=NOW - 60),
        a_world(store_read=False),
        state=JobState.WAITING,
        wakes_in=STORE_TIMEOUT,
    ),
    "the deadline waits for an unreadable store for a minute only": Case(
        that_trained(a_job(active_deadline=60), active=NOW - 60 - STORE_TIMEOUT),
        a_world(store_read=False, store_error="connection refused"),
        state=JobState.FAILED,
        reason=Reason.DEADLINE_EXCEEDED,
        etcd=False,
    ),
    "failures do not wait for a starting store of a job that has not trained": Case(
        that_had_pods(a_job(minimum=1, replicas=1, backoff_limit=0)),
        replace(a_world(died(0), store_read=False), etcd=EtcdState.STARTING),
        state=JobState.FAILED,
        reason=Reason.POD_FAILURES,
        charges=1,
        etcd=False,
    ),
    "success in the store wins over an exceeded backoff limit": Case(
        that_trained(a_job(minimum=1, replicas=1, backoff_limit=0)),
        a_world(died(0), outcome=success()),
        state=JobState.SUCCEEDED,
        reason=Reason.RUN_SUCCEEDED,
        etcd=False,
    ),
    "the plan does not wait for a store that the operator may not read": Case(
        that_trained(a_job()), a_world(store_read=False, store_forbidden=True), creates=[0, 1], state=JobState.WAITING
    ),
    "the policy None removes the store only": Case(
        with_status(
            that_trained(a_job(clean_pod_policy=CleanPodPolicy.NONE)),
            state=JobState.SUCCEEDED,
            completed=NOW - EXIT_PERIOD,
            applied_spec=a_job().spec.applied,
        ),
        a_world(succeeded(0), running(1)),
        state=JobState.SUCCEEDED,
        etcd=False,
    ),
    "a time to live of 0 deletes the job at once": Case(
        that_trained(a_job(ttl_after_finished=0)),
        a_world(succeeded(0), outcome=success()),
        state=JobState.SUCCEEDED,
        reason=Reason.RUN_SUCCEEDED,
        etcd=False,
        deletes=True,
    ),
}


def with_round(case: Case) -> Observed:
    """Return the observation, with a round added if the job trains."""
    trains = case.state is JobState.RUNNING and case.world.store_read
    return replace(case.world, round=a_round(running(0), running(1))) if trains else case.world


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_plan_of(case: Case) -> None:
    world = with_round(case)
    planned = plan(case.job, world, NOW)

    index_of = {pod.uid: pod.index for pod in case.world.pods}
    assert [pod.index for pod in planned.create] == case.creates
    assert [index_of[pod.uid] for pod in planned.remove] == case.removes
    assert planned.wake_at == (None if case.wakes_in is None else NOW + case.wakes_in)
    assert (planned.size, planned.etcd, planned.delete_job) == (case.expected_size, case.etcd, case.deletes)
    assert (planned.replicas, planned.min_member, planned.min_available) == (None, None, None)
    assert (planned.status is None) == (case.state is None)
    if planned.status is not None:
        assert (planned.status.state, planned.status.pod_failures) == (case.state, case.charges)
        assert planned.status.observed_generation == case.job.generation
        if case.reason is not None:
            assert condition(planned.status, ConditionType.FINISHED).reason == case.reason

    again = plan(replace(case.job, status=planned.status or case.job.status), world, NOW)
    assert again.events == ()
    assert again.status is None or case.creates, "a second plan writes another status"
