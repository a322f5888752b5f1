"""The input and the output of a plan: the job, its observed state, and the actions.

The frozen dataclasses do not depend on I/O, a clock or Kubernetes. Times are in seconds since the Unix epoch,
durations in seconds.

Until the store has been read, the run may have ended unnoticed. So no pod is created for a run without pods, the store
is not deleted, and no pod failure or deadline ends the job. A store that remains unreadable delays failures, deadlines
and suspensions by at most :data:`STORE_TIMEOUT`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Self

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.status import JobState, JobStatus, Report

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_operator.api.spec import AppliedSpec, ElasticJobSpec, FailureRule
    from elastic_operator.api.status import LastFailure
    from torchelastic.protocol import pod, records


STORE_TIMEOUT: Final = 60.0
"""Seconds to wait for a store that cannot be read."""


class PodPhase(enum.StrEnum):
    """The phase of a pod's worker container."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def ended(self) -> bool:
        """Whether the container has ended."""
        return self in (PodPhase.SUCCEEDED, PodPhase.FAILED)


class TerminationCause(enum.StrEnum):
    """Why a pod ended, if its agent did not cause the end."""

    OUT_OF_MEMORY = "OutOfMemory"
    """The kernel killed the worker container for memory: a failure."""
    OVER_LIMIT = "OverLimit"
    """The node evicted the pod because the pod exceeded its own limits: a failure."""
    DISRUPTED = "Disrupted"
    """The pod was preempted, drained, evicted or deleted by its node: not a failure."""
    NODE_LOST = "NodeLost"
    """The node is lost: it was removed, or sends no heartbeats. This is not a failure."""
    NOT_ADMITTED = "NotAdmitted"
    """The node did not admit the pod: not a failure."""


@dataclass(frozen=True, slots=True)
class IncompatibleImage:
    """The reason why a pod's image has no compatible agent, and a message that says what to do."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Pod:
    """The observed state of a worker pod.

    Attributes:
        name: ``<job>-<index>-<suffix>``.
        index: its index in the job, from 0.
        ready: whether its agent has joined the others.
        terminating: whether its deletion has begun.
        deletion_deadline: when it must be gone; None if unknown, or if it is not being deleted.
        started: when its worker container started; None if it has not, or if that is unknown.
        ended: when its worker container ended; None if it has not.
        exit_code: the exit code of the agent; 128 + n for a signal; None while it runs, or if unknown.
        init_exit_code: the exit code of the init container that failed; None if none failed.
        message: the agent's termination message; a plain text if another program wrote it; None if there is none.
        failures: the number of consecutive failures of earlier pods with this index.
        failed: when the last of them failed; None if none failed, or if that is unknown.
        size: the desired size that it was started with; None if unknown.
        waiting: why its worker container has not started, or is not ready; empty if unknown.
        incompatible_image: why its image has no compatible agent; None if it has one.
        sidecars_running: whether its worker container has ended and another container still runs.
        node: its node; empty while it has none.
        termination_cause: why it ended, if its agent did not cause the end; None otherwise.
        reasons: the reasons for its end in its status and in the status of its worker container.
        conditions: the conditions of its status by type: True, False or Unknown.
        metrics_port: the port of its agent's /metrics; 0 if unknown.
        etcd_address: the host of the etcd that its agent uses; None if unknown.
    """

    name: str
    uid: str
    index: int
    phase: PodPhase
    ready: bool = False
    terminating: bool = False
    deletion_deadline: float | None = None
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    init_exit_code: int | None = None
    message: pod.TerminationMessage | str | None = None
    failures: int = 0
    failed: float | None = None
    size: records.SizeRecord | None = None
    waiting: str = ""
    incompatible_image: IncompatibleImage | None = None
    sidecars_running: bool = False
    node: str = ""
    termination_cause: TerminationCause | None = None
    reasons: frozenset[str] = frozenset()
    conditions: Mapping[str, str] = field(default_factory=dict)
    metrics_port: int = 0
    etcd_address: str | None = None


class PodEnd(enum.Enum):
    """The meaning of a pod's end."""

    RUN_SUCCEEDED = enum.auto()
    """The agent reports that the run succeeded."""
    RUN_FAILED = enum.auto()
    """The agent reports, in a termination message, that the run failed."""
    BAD_INPUT = enum.auto()
    """The settings of the agent are invalid; another pod would fail, too."""
    INCOMPATIBLE = enum.auto()
    """The image has no agent, or an agent with another protocol version; another pod would fail, too."""
    LEFT = enum.auto()
    """The pod was deleted, or asked to leave: not a failure."""
    DISRUPTED = enum.auto()
    """The pod was evicted, not admitted, lost with its node, or could not reach the store: not its own failure."""
    FAILED = enum.auto()
    """The pod ended before the run, in none of the ways above."""


@dataclass(frozen=True, slots=True)
class EndedPod:
    """A pod that has ended or terminates, and the consequences of its end.

    Attributes:
        charged: whether it counts against the backoff limit.
        rule: the first rule of the failure policy that matches; None if none matches.
        position: the position of that rule, from 0.
    """

    pod: Pod
    end: PodEnd
    charged: bool
    rule: FailureRule | None = None
    position: int = 0


@dataclass(frozen=True, slots=True)
class FailureCount:
    """The classified pods, and the counts of their failures.

    Attributes:
        classified: all ended and terminating pods except the pending ones, in the order in which they ended.
        ended: the classified pods that the last written status does not count.
        pending: UIDs of pods that count or end the job unless the store shows that the run had ended before.
        pod_failures: the number of pod failures that count, including those in ``ended``.
        last_failure: the last failure of a pod or a worker; None if there was none.
        excluded_nodes: nodes on which later pods are not scheduled, including the new ones.
        newly_excluded: the newly excluded nodes, each with the pod that failed on it.
        may_be_fatal: whether the job would fail if the pending pods were counted.
        next_due: the latest time at which the next pending pod is counted; None without a pending pod.
    """

    classified: tuple[EndedPod, ...]
    ended: tuple[EndedPod, ...]
    pending: frozenset[str]
    pod_failures: int
    last_failure: LastFailure | None
    excluded_nodes: tuple[str, ...]
    newly_excluded: tuple[tuple[str, Pod], ...]
    may_be_fatal: bool
    next_due: float | None


class EtcdState(enum.StrEnum):
    """The state of the job's store."""

    ABSENT = "Absent"
    STARTING = "Starting"
    READY = "Ready"


@dataclass(frozen=True, slots=True)
class Observed:
    """The observed state of one job.

    Attributes:
        pods: its worker pods, in any state.
        etcd: the state of the store; an external store counts as ready.
        store_read: whether the next five attributes are current; if not, they have their last known values, or None.
        outcome: how the run ended; None if it has not ended.
        size: the desired size in the store.
        time_breakdown: the run's time breakdown, as the leader wrote it last.
        history: the run's rounds, as the leader wrote them last.
        rejected: why the cluster will never accept the pods or the etcd of this spec; None if it accepts them.
        blocked: why an object cannot be created at present; None if no object is blocked.
        etcd_blocked: whether the blocked object is the etcd pod: workers may occupy the resources that this pod needs.
        store_error: why an existing store cannot be used; None if it can, or if that is unknown.
        store_forbidden: whether the operator lacks a permission for the store, so that waiting does not help.
        etcd_error: why the job's own etcd does not serve; None if it serves, or if that is unknown.
        disruption_budget_error: why the disruption budget could not be created; None if it exists or is not requested.
        unreadable: why the job's spec cannot be read, so that all other attributes have their defaults; else None.
    """

    pods: tuple[Pod, ...] = ()
    etcd: EtcdState = EtcdState.ABSENT
    store_read: bool = False
    round: records.RoundRecord | None = None
    outcome: records.OutcomeRecord | None = None
    size: records.SizeRecord | None = None
    time_breakdown: records.TimeBreakdown | None = None
    history: records.HistoryRecord | None = None
    rejected: str | None = None
    blocked: str | None = None
    etcd_blocked: bool = False
    store_error: str | None = None
    store_forbidden: bool = False
    etcd_error: str | None = None
    disruption_budget_error: str | None = None
    unreadable: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """An ElasticJob.

    Attributes:
        name: the name, which is unique in the namespace.
        uid: the UID, which is the run id of the agents.
        generation: the generation of the spec, which grows with each change.
        spec: the user's spec.
        status: the status that the operator wrote last.
        deleting: whether its deletion has begun.
        problem: why the spec is invalid, from :func:`~elastic_operator.api.validation.problem_of`; None if it is valid.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    spec: ElasticJobSpec
    status: JobStatus = field(default_factory=JobStatus)
    created: float = 0.0
    deleting: bool = False
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The input of a plan.

    Attributes:
        job: the job, with the spec in effect, its problem, and the status that was written last.
        desired: the desired number of pods that train.
        wanted: the number of pods that the job should have: the desired number and the spares.
        live: the pods that neither have ended nor terminate.
        gone: the other pods: first those that are being deleted, then those that ended.
        ended: the pods in ``gone`` that ended and are not being deleted.
        unfinished: the pods whose agent may still run; a terminating pod on a lost node does not count.
        never_read: whether no round is known, and the store is not read although the operator may read it.
        outcome_unknown: whether the run may have ended unnoticed: the job had pods, has no live pod now, and its store
            is not read.
        store_wait: seconds to wait for the store before a decision about an event.
        was_suspended: whether the job has ever been suspended.
        applied: the applied spec that the status keeps; None if nothing is applied.
        changes: the fields in which the user's spec differs from the applied spec.
    """

    job: Job
    observed: Observed
    now: float
    desired: int
    wanted: int
    live: tuple[Pod, ...]
    gone: tuple[Pod, ...]
    ended: tuple[Pod, ...]
    unfinished: tuple[Pod, ...]
    never_read: bool
    outcome_unknown: bool
    store_wait: float
    was_suspended: bool
    applied: AppliedSpec | None = None
    changes: tuple[str, ...] = ()

    @classmethod
    def of(cls, job: Job, observed: Observed, now: float) -> Self:
        """Create the input of a plan from a job and its observed state."""
        live: list[Pod] = []
        terminating: list[Pod] = []
        ended: list[Pod] = []
        for pod in sorted(observed.pods, key=lambda pod: (pod.index, pod.created, pod.uid)):
            (terminating if pod.terminating else ended if pod.phase.ended else live).append(pod)
        leaving = [pod for pod in terminating if pod.termination_cause is not TerminationCause.NODE_LOST]
        # The operator does not wait for a store that it has no permission to read.
        unread = not observed.store_read and not observed.store_forbidden
        return cls(
            job,
            observed,
            now,
            desired=job.spec.desired,
            wanted=job.spec.desired + job.spec.spares,
            live=tuple(live),
            gone=(*terminating, *ended),
            ended=tuple(ended),
            unfinished=(*live, *(pod for pod in leaving if not pod.phase.ended)),
            never_read=unread and observed.round is None,
            outcome_unknown=unread and not live and _had_pods(job, observed),
            store_wait=_store_wait(job, observed) if unread else 0.0,
            was_suspended=job.status.condition(ConditionType.SUSPENDED) is not None,
        )

    def must_wait_for_store(self, since: float) -> bool:
        """Return whether to wait for the store before a decision about an event at ``since``."""
        return self.store_wait == math.inf or since <= self.now < since + self.store_wait

    def store_needed_until(self) -> float | None:
        """Return the time until which the unread store of a suspended job is kept; None if it is not needed."""
        if self.unfinished or not self.outcome_unknown:
            return None
        status, since = self.job.status, self.now
        waiting = status.condition(ConditionType.WAITING) if status.state is JobState.SUSPENDED else None
        if waiting is not None and waiting.status and waiting.reason == Reason.STORE_UNREADABLE:
            since = waiting.since
        return since + STORE_TIMEOUT if self.must_wait_for_store(since) else None


def _had_pods(job: Job, observed: Observed) -> bool:
    """Return whether a job without live pods had pods before."""
    status = job.status
    if status.size_generation > 0 or any(pod.uid not in status.counted_pod_uids for pod in observed.pods):
        return True
    errors = (observed.rejected, observed.blocked, observed.store_error)
    # The operator may have restarted after it created pods. If it never saw pods, it does not wait for a faulty store.
    return status.applied_spec is not None and observed.etcd is EtcdState.READY and errors == (None, None, None)


def _store_wait(job: Job, observed: Observed) -> float:
    """Return the seconds to wait for an unread store: 0 if it has no data of the job, infinity if it is being read."""
    has_trained = job.status.started is not None or job.status.round > 0
    if observed.etcd is EtcdState.ABSENT or (observed.etcd is EtcdState.STARTING and not has_trained):
        return 0.0
    return math.inf if observed.etcd is EtcdState.READY and observed.store_error is None else STORE_TIMEOUT


@dataclass(frozen=True, slots=True)
class NewPod:
    """A pod to create, now or later.

    Attributes:
        name: ``<job>-<index>-<suffix>``.
        size: the desired size that it is started with.
        failures: the number of consecutive failures of earlier pods with this index.
        failed: when the last of them failed; None if none failed.
        resume: the earlier state of the run, for an agent that may find an empty store; None if not needed.
        excluded: nodes on which it must not run.
        due: when it may be created; seconds since the Unix epoch.
        replaces: the last pod of the index; None if there is none any more.
    """

    name: str
    index: int
    size: records.SizeRecord
    failures: int = 0
    failed: float | None = None
    resume: records.ResumeRecord | None = None
    excluded: tuple[str, ...] = ()
    due: float = 0.0
    replaces: Pod | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPods:
    """The pods that the job will have after the plan is applied.

    Attributes:
        gone: UIDs of pods that have ended, terminate, or are deleted now, except those whose failure is pending.
        created: the pods that are created now.
        missing: the pods that are created now or later.
        held: whether no pod is created because it is unknown whether the run has ended.
        size: the size that new pods are started with; None if no pod can be created.
        announce: the size to write into the store; None if that is not needed, or not possible now.
    """

    staying: tuple[Pod, ...]
    gone: frozenset[str]
    created: tuple[NewPod, ...] = ()
    remove: tuple[Pod, ...] = ()
    missing: tuple[NewPod, ...] = ()
    held: bool = False
    size: records.SizeRecord | None = None
    announce: records.SizeRecord | None = None


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An event of a job.

    Attributes:
        reason: one word in CamelCase, from :mod:`elastic_operator.api.constants`.
    """

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The actions for one job, in the order of the attributes.

    Attributes:
        report: the report to write before the store is deleted; None for none. The report comes first, because the
            store is not read again after the status is written.
        replicas: the number to write into ``spec.replicas``; None to leave that field unchanged.
        status: the new status; None if it would not change.
        events: the events to emit after the status is written.
        ended: the pods whose end the new status counts.
        etcd: whether the managed etcd should exist.
        min_member: the size of the gang's PodGroup; None for no PodGroup.
        min_available: the ``minAvailable`` of the PodDisruptionBudget; None for no budget.
        size: the size to write into the store before any pod is changed; None if the store has it.
        wake_at: when to plan again at the latest; None for no limit.
        unmanaged: whether no object of the job may be changed, because its spec cannot be read.
    """

    report: Report | None = None
    replicas: int | None = None
    status: JobStatus | None = None
    events: tuple[JobEvent, ...] = ()
    ended: tuple[EndedPod, ...] = ()
    etcd: bool = True
    min_member: int | None = None
    min_available: int | None = None
    size: records.SizeRecord | None = None
    remove: tuple[Pod, ...] = ()
    create: tuple[NewPod, ...] = ()
    delete_job: bool = False
    wake_at: float | None = None
    unmanaged: bool = False


def with_applied_spec(job: Job, plan: Plan | None = None) -> Job:
    """Return the job with the spec from which its pods and its store are created.

    Args:
        job: the observed job.
        plan: the plan that is applied, whose status may apply another spec; None before the first plan.
    """
    status = job.status if plan is None or plan.status is None else plan.status
    return job if status.applied_spec is None else replace(job, spec=job.spec.with_applied(status.applied_spec))
