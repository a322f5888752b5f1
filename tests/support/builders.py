"""Builders for jobs, pods and observed states in tests: ``a_job(replicas=2)``, ``running(0)``,
``died(1, code=137)``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.spec import ElasticJobSpec, FailureAction, FailurePolicy, FailureRule, PodCondition
from elastic_operator.api.status import Condition, JobState, JobStatus
from elastic_operator.api.validation import problem_of
from elastic_operator.controller.model import EtcdState, Job, Observed, Pod, PodPhase, TerminationCause
from elastic_operator.controller.pods import pod_name
from torchelastic.protocol.pod import TerminationMessage
from torchelastic.protocol.records import (
    FailureRecord,
    Member,
    OutcomeRecord,
    OutcomeState,
    RoundReason,
    RoundRecord,
    SizeRecord,
)

NOW = 1_700_000_000.0
"""The current time in tests."""

NAME = "digits"
UID = "0b0c7a52-8f0e-4c61-9a4e-6f0d5b0a9a11"


def a_job(*, minimum: int = 1, maximum: int = 4, replicas: int | None = 2, generation: int = 1, **more: Any) -> Job:
    """Return a job before its first reconcile; ``more`` are fields of its spec, and ``deleting``."""
    deleting = more.pop("deleting", False)
    if "failure_rules" in more:
        more["failure_policy"] = FailurePolicy(more.pop("failure_rules"))
    spec = ElasticJobSpec(min_replicas=minimum, max_replicas=maximum, replicas=replicas, **more)
    return Job(
        name=NAME,
        namespace="default",
        uid=UID,
        generation=generation,
        spec=spec,
        created=NOW,
        deleting=deleting,
        problem=problem_of(spec),
    )


def with_spec(job: Job, spec: ElasticJobSpec, **fields: Any) -> Job:
    """Return the same job with another spec and these fields."""
    return replace(job, spec=spec, problem=problem_of(spec), **fields)


def with_status(job: Job, **fields: Any) -> Job:
    """Return the same job with these fields in its status."""
    return replace(job, status=replace(job.status, **fields))


def that_had_pods(job: Job, **fields: Any) -> Job:
    """Return the same job, with pods that were created some time ago."""
    return with_status(
        job, **{"size_generation": 1, "desired": job.spec.desired, "observed_generation": job.generation, **fields}
    )


def that_trained(job: Job, **fields: Any) -> Job:
    """Return the same job, with a first round that formed a minute ago."""
    known = {"started": NOW - 60, "round": 1, "world_size": 2, "state": JobState.RUNNING}
    return that_had_pods(job, **{**known, **fields})


def with_spec_applied(job: Job, **fields: Any) -> Job:
    """Return the same job, with pods that were created from its present spec a minute ago."""
    return that_trained(job, **{"applied_spec": job.spec.applied, "active": NOW - 60, **fields})


def that_is_suspended(job: Job, **fields: Any) -> Job:
    """Return the same job, suspended after five rounds with two restarts; its spec determines whether it is resumed."""
    rests = Condition(ConditionType.SUSPENDED, status=True, reason=Reason.SUSPENDED, since=NOW - 60)
    known = {"state": JobState.SUSPENDED, "round": 5, "restarts": 2, "uncharged_restarts": 3, "started": NOW - 600}
    return that_had_pods(job, **{**known, "conditions": (rests,), "size_generation": 0, **fields})


def size(
    wanted: int = 2, *, generation: int = 1, minimum: int = 1, maximum: int = 4, draining: tuple[str, ...] = ()
) -> SizeRecord:
    """Return the desired size of a run, in the form that pods get and the store contains."""
    return SizeRecord(min=minimum, max=maximum, generation=generation, desired=wanted, draining=draining)


def pending(index: int, **more: Any) -> Pod:
    """Return a pod that does not run yet."""
    return _pod(index, PodPhase.PENDING, **more)


def running(index: int, **more: Any) -> Pod:
    """Return a pod whose agent is ready."""
    return _pod(index, PodPhase.RUNNING, **{"ready": True, "started": NOW - 10, **more})


def unready(index: int, **more: Any) -> Pod:
    """Return a running pod whose agent is not ready yet."""
    return running(index, ready=False, **more)


def terminating(index: int, **more: Any) -> Pod:
    """Return a pod whose deletion has begun."""
    return running(index, terminating=True, **more)


def died(index: int, code: int | None = 137, **more: Any) -> Pod:
    """Return a pod whose agent exited with this code."""
    return _pod(index, PodPhase.FAILED, **{"exit_code": code, "ended": NOW, "started": NOW - 10, **more})


def left(index: int, **more: Any) -> Pod:
    """Return a pod whose agent left on SIGTERM."""
    return died(index, 143, **more)


def succeeded(index: int, **more: Any) -> Pod:
    """Return a pod whose agent reports that the run succeeded."""
    return replace(died(index, 0, **more), phase=PodPhase.SUCCEEDED)


def out_of_memory(index: int, **more: Any) -> Pod:
    """Return a pod whose container was killed because it was out of memory."""
    return died(
        index, 137, **{"termination_cause": TerminationCause.OUT_OF_MEMORY, "reasons": frozenset({"OOMKilled"}), **more}
    )


def evicted(index: int, **more: Any) -> Pod:
    """Return a pod that its kubelet evicted."""
    return died(
        index,
        None,
        **{
            "termination_cause": TerminationCause.DISRUPTED,
            "reasons": frozenset({"Evicted", "TerminationByKubelet"}),
            "conditions": {"DisruptionTarget": "True"},
            "message": "The node was low on resource: memory.",
            "node": "node-7",
            **more,
        },
    )


def preempted(index: int, **more: Any) -> Pod:
    """Return a pod that the scheduler preempts."""
    return terminating(
        index,
        **{
            "termination_cause": TerminationCause.DISRUPTED,
            "reasons": frozenset({"PreemptionByScheduler"}),
            "conditions": {"DisruptionTarget": "True"},
            **more,
        },
    )


def lost(index: int, **more: Any) -> Pod:
    """Return a pod that stays Terminating because its node is unreachable."""
    return terminating(
        index, **{"termination_cause": TerminationCause.NODE_LOST, "node": "node-9", "ready": False, **more}
    )


def rejected_by_node(index: int, **more: Any) -> Pod:
    """Return a pod that its node rejected for lack of resources."""
    return died(
        index,
        None,
        **{
            "termination_cause": TerminationCause.NOT_ADMITTED,
            "reasons": frozenset({"OutOfcpu"}),
            "message": "the resource cpu is short",
            "node": "node-7",
            "started": None,
            **more,
        },
    )


def on_reasons(action: FailureAction, *reasons: str, exclude: bool = False) -> FailureRule:
    """Return a rule of the failure policy about reasons of pod failures."""
    return FailureRule(action, pod_reasons=frozenset(reasons), exclude_node=exclude)


def on_disruption(action: FailureAction, *, exclude: bool = False) -> FailureRule:
    """Return a rule of the failure policy about disrupted pods."""
    return FailureRule(action, pod_conditions=(PodCondition("DisruptionTarget"),), exclude_node=exclude)


def termination_message(message: str, reason: str = "WorkerFailed") -> TerminationMessage:
    """Return an agent's termination message."""
    return TerminationMessage(reason=reason, message=message)


def _pod(index: int, phase: PodPhase, *, after: Pod | None = None, **more: Any) -> Pod:
    """Return a pod; if ``after`` is given, the pod replaces that one."""
    name = pod_name(NAME, UID, index, after.uid if after else "")
    fields = {"uid": f"uid-of-{name}", "created": NOW - 20, "size": size(), **more}
    return Pod(name=name, index=index, phase=phase, **fields)


def a_world(*pods: Pod, store_read: bool = True, **more: Any) -> Observed:
    """Return an observation of these pods and, by default, a readable store; ``more`` are further fields."""
    return Observed(pods=pods, etcd=EtcdState.READY, store_read=store_read, **more)


def a_round(
    *pods: Pod,
    number: int = 1,
    cause: str = "",
    restarts: int = 0,
    free: int = 0,
    reason: RoundReason = RoundReason.NODE_JOINED,
    failure: FailureRecord | None = None,
) -> RoundRecord:
    """Return a round of these pods with one worker each; without pods, a round without members."""
    members = tuple(Member(node=f"{pod.name}.1", address="10.0.0.1", workers=1) for pod in pods)
    return RoundRecord(
        number=number,
        members=members,
        cause=cause,
        restarts=restarts,
        uncharged_restarts=free,
        reason=reason,
        failure=failure,
    )


def a_failure(**fields: Any) -> FailureRecord:
    """Return the failure of rank 3 with an exception."""
    known = {"round": 1, "rank": 3, "local_rank": 1, "node": "digits-1-abcde.7f", "exit_code": 1}
    return FailureRecord(**{**known, "message": "ValueError: no", **fields})


def success(*, round: int = 1, restarts: int = 0) -> OutcomeRecord:
    """Return the outcome of a run that succeeded."""
    return OutcomeRecord(state=OutcomeState.SUCCEEDED, round=round, restarts=restarts)


def failure(message: str = "", *, record: FailureRecord | None = None, restarts: int = 0) -> OutcomeRecord:
    """Return the outcome of a run that failed."""
    return OutcomeRecord(state=OutcomeState.FAILED, round=1, restarts=restarts, message=message, failure=record)


def condition(status: JobStatus | None, kind: ConditionType) -> Condition:
    """Return the condition of this type, which the status must have."""
    assert status is not None, "the plan writes no status"
    return next(condition for condition in status.conditions if condition.type == kind)
