"""The words in which the plan thinks: what a job is, what was observed of it, and what is to be done.

Frozen dataclasses without behaviour that reaches outside: no I/O, no clock, nothing of Kubernetes. Times are seconds
since the Unix epoch, durations seconds.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_operator.report import Report
    from elastic_operator.spec import ElasticJobSpec, Json
    from torchelastic.contract import (
        EpochRecord,
        HistoryRecord,
        OutcomeRecord,
        ResumeRecord,
        SizeRecord,
        TerminationMessage,
        TimeSplit,
    )


class JobState(enum.StrEnum):
    """One word for where a job stands; what ``kubectl get`` shows."""

    PENDING = "Pending"
    """Its pods or its etcd are not all there yet, and nothing trains."""
    RUNNING = "Running"
    """At least the minimum of pods is there and trains."""
    WAITING = "Waiting"
    """It has trained, but fewer than the minimum are there now."""
    SUSPENDED = "Suspended"
    """Its pods are gone or on their way out, and there will be no others until it is resumed."""
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def finished(self) -> bool:
        """Whether nothing more will happen to the job."""
        return self in (JobState.SUCCEEDED, JobState.FAILED)


class PodPhase(enum.StrEnum):
    """Where the worker container of a pod stands."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def ended(self) -> bool:
        """Whether the container has come to its end."""
        return self in (PodPhase.SUCCEEDED, PodPhase.FAILED)


class Fate(enum.StrEnum):
    """What became of a pod, where that was not its agent's own doing."""

    OUT_OF_MEMORY = "OutOfMemory"
    """The kernel killed its worker container for memory: a failure, which is charged."""
    OVER_LIMIT = "OverLimit"
    """Its node evicted it for what it did itself: it wrote more than it may. A failure, which is charged."""
    DISRUPTED = "Disrupted"
    """It was preempted, drained, evicted or deleted by its node: no failure of its own."""
    NODE_LOST = "NodeLost"
    """Its node is gone, or silent for too long: no failure of its own."""
    NOT_ADMITTED = "NotAdmitted"
    """Its node took it and had no room for it: no failure of its own."""


class Misfit(enum.StrEnum):
    """Why no agent that this operator understands can run in a pod; equal to the reasons of the condition Failed."""

    NO_AGENT = "NoAgent"
    """The image carries no agent."""
    CONTRACT_MISMATCH = "ContractMismatch"
    """Its agent speaks another version of the contract."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """That a pod's worker container can't have an agent that this operator understands.

    Attributes:
        reason: in a word.
        message: in a sentence that names the image and says what to do.
    """

    reason: Misfit
    message: str


@dataclass(frozen=True, slots=True)
class Pod:
    """A worker pod as it was observed.

    Attributes:
        name: ``<job>-<index>-<suffix>``.
        uid: unique for all time.
        index: which of the job's places it fills, from 0.
        phase: where its worker container stands.
        ready: whether its agent serves.
        terminating: whether its deletion has begun.
        due_to_go: when it is to be gone, by then; None where that is not known, or it is not being deleted.
        created: when it was made.
        started: when its worker container started; None where it has not, or where it is not known.
        ended: when its worker container ended; None while it has not.
        exit_code: of the agent; 128 + n for a signal; None while it runs or where it is not known.
        init_exit_code: of the init container whose failure kept the agent from starting; None where none did.
        message: the agent's last words; a plain text where they were not ours, None where there are none.
        failures: how many pods of this index came to nothing in a row before it.
        failed: when the last of them did; None where none did, or where it is not known.
        size: the wanted size that it was started with; None where it is not known.
        waiting: why its worker container has not started yet, or why one that runs is not ready, in words; empty where
            nobody says.
        unfit: why its worker container can't have an agent that this operator understands; None where it can.
        lingers: whether its worker container has ended and another one of its containers still runs.
        node: the node where it has its place; empty while it has none.
        fate: what became of it where its agent's own words do not say so; None for nothing out of the ordinary.
        reasons: why it ended, each in one word, as its status and the one of its worker container have them.
        conditions: of its status, by type: True, False or Unknown.
        metrics_port: where its agent serves /metrics, as the pod says it; 0 where it does not.
    """

    name: str
    uid: str
    index: int
    phase: PodPhase
    ready: bool = False
    terminating: bool = False
    due_to_go: float | None = None
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    init_exit_code: int | None = None
    message: TerminationMessage | str | None = None
    failures: int = 0
    failed: float | None = None
    size: SizeRecord | None = None
    waiting: str = ""
    unfit: Unfit | None = None
    lingers: bool = False
    node: str = ""
    fate: Fate | None = None
    reasons: frozenset[str] = frozenset()
    conditions: Mapping[str, str] = field(default_factory=dict)
    metrics_port: int = 0


class EtcdState(enum.StrEnum):
    """Where the job's store stands."""

    ABSENT = "Absent"
    STARTING = "Starting"
    READY = "Ready"


@dataclass(frozen=True, slots=True)
class Observed:
    """The world as far as one job is concerned.

    Attributes:
        pods: the worker pods that exist, in any state.
        etcd: the store; an external one counts as ready.
        store_read: whether the keys below are what stands in the store now; where not, they are what was last seen
            there, and None means nothing.
        epoch: the current epoch.
        outcome: the end of the run.
        size: the wanted size as it stands in the store.
        split: where the run's time went, as the leader wrote it last.
        history: the run's epochs, likewise.
        refusal: why the cluster will never take the pods (or the etcd) that this spec asks for, in its own words; None
            where it does.
        hindrance: why something could not be made when it was tried last, though later it may be, in words; None where
            all could.
        etcd_hindered: whether that is the store's own pod: the workers may have taken the room that it needs.
        store_trouble: why a store that should be there cannot be used by us, in words; None where it can, or where it
            was not tried.
        store_closed: whether that is for want of a right, so that it makes no sense to wait until it can be read.
        etcd_trouble: what keeps the store that is made for the job from serving, in words; None where nothing is known.
        unguarded: why the disruption budget could not be made when it was tried last, in words; None where it could, or
            where there is to be none.
    """

    pods: tuple[Pod, ...] = ()
    etcd: EtcdState = EtcdState.ABSENT
    store_read: bool = False
    epoch: EpochRecord | None = None
    outcome: OutcomeRecord | None = None
    size: SizeRecord | None = None
    split: TimeSplit | None = None
    history: HistoryRecord | None = None
    refusal: str | None = None
    hindrance: str | None = None
    etcd_hindered: bool = False
    store_trouble: str | None = None
    store_closed: bool = False
    etcd_trouble: str | None = None
    unguarded: str | None = None


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition as in Kubernetes' metav1.

    Attributes:
        type: one of the names in :mod:`elastic_operator.names`.
        status: whether it holds.
        reason: one word in CamelCase.
        message: a sentence.
        since: when ``status`` last changed.
    """

    type: str
    status: bool
    reason: str
    message: str = ""
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class LastFailure:
    """What failed last.

    Attributes:
        message: all of it, in words.
        pod: the pod's name; empty where it was none.
        rank: of the worker; None where no worker was it.
        exit_code: of the worker, or of the pod's agent; None where a signal ended it, or where it is not known.
        signal: the name of the signal that ended it; empty for none.
        time: when it was seen.
    """

    message: str
    pod: str = ""
    rank: int | None = None
    exit_code: int | None = None
    signal: str = ""
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What the operator says of a job; part of the object, and all that a reconcile remembers.

    Attributes:
        state: one word.
        observed_generation: of the spec that this status speaks of.
        replicas: worker pods that are neither ended nor going, once the plan that came with this status is carried out.
        ready: of these, the ready ones.
        desired: how many there should be.
        epoch: the number of the current epoch.
        world_size: how many workers train in it.
        restarts: failures of workers charged so far.
        free_restarts: how often workers started anew for another reason: members that came or went, failures that
            the failure policy ignores.
        pod_failures: pods that ended by themselves, without an outcome, charged so far.
        accounted: UIDs of pods, ended or going, that are charged or forgiven already and not yet gone.
        size_generation: of the wanted size that the agents were told last, with their pods or through the store; 0 as
            long as no pod was seen, and once the job has come to rest.
        started: when the first epoch formed.
        active: since when the job may have pods without a break: from its beginning, or from its last resumption; None
            while it is suspended.
        completed: when the job finished.
        last_failure: what failed last; None where nothing has.
        excluded: nodes that its later pods keep away from.
        pinned: what its pods are made from beside their number, as the spec said when the job was started or resumed
            (see :mod:`elastic_operator.pinned`); None as long as it has had none, and once it is suspended and the last
            one has ended.
        split: where the job's time went up to when it last came to rest, was resumed or finished; None before that, and
            where nobody knows.
        conditions: by type.
    """

    state: JobState = JobState.PENDING
    observed_generation: int = 0
    replicas: int = 0
    ready: int = 0
    desired: int = 0
    epoch: int = 0
    world_size: int = 0
    restarts: int = 0
    free_restarts: int = 0
    pod_failures: int = 0
    accounted: frozenset[str] = frozenset()
    size_generation: int = 0
    started: float | None = None
    active: float | None = None
    completed: float | None = None
    last_failure: LastFailure | None = None
    excluded: tuple[str, ...] = ()
    pinned: Json | None = None
    split: TimeSplit | None = None
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """An ElasticJob.

    Attributes:
        name: unique in its namespace.
        namespace: where it lives.
        uid: unique for all time; the run id of its agents.
        generation: counts the changes of its spec.
        spec: what the user asked for.
        status: what the operator last said of it.
        created: when it was made.
        deleting: whether its deletion has begun.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    spec: ElasticJobSpec
    status: JobStatus = field(default_factory=JobStatus)
    created: float = 0.0
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class NewPod:
    """A pod to be made.

    Attributes:
        name: ``<job>-<index>-<suffix>``.
        index: which of the job's places it fills.
        size: the wanted size that it is started with.
        failures: how many pods of this index came to nothing in a row before it.
        failed: when the last of them did; None where none did.
        resume: what its agent knows of the run from the start; None where there is nothing to know.
        excluded: nodes that it keeps away from.
    """

    name: str
    index: int
    size: SizeRecord
    failures: int = 0
    failed: float | None = None
    resume: ResumeRecord | None = None
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Removal:
    """A pod to be removed.

    Attributes:
        name: its name.
        uid: its UID: a precondition, so that a successor of the same name is left alone.
        reason: why, in words.
    """

    name: str
    uid: str
    reason: str


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that a person would want to know.

    Attributes:
        reason: one word in CamelCase, from :mod:`elastic_operator.names`.
        message: a sentence.
        warning: whether it is bad news.
    """

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done about one job, in the order of the attributes.

    Attributes:
        report: what is to be kept of the run, which its store, about to go, is the last to know; None for nothing. It
            comes first: once the status is written, nobody asks the store again.
        replicas: the number to write into ``spec.replicas``, once, where the user wrote none.
        status: the new status; None where it would not change.
        events: to be told if writing the status succeeded.
        etcd: whether the managed etcd should exist.
        together: how many pods the PodGroup of a gang asks for; None where there should be none.
        guarded: how many pods the PodDisruptionBudget keeps; None where there should be none.
        size: what to write into the store before any pod is changed; None where it stands there already.
        remove: pods to remove.
        create: pods to make.
        delete_job: whether the job itself is to be removed, with all that belongs to it.
        wake_at: when to plan again though nothing happened; None for never.
        hands_off: whether the job is somebody else's: nothing at all is done, whatever the attributes say.
    """

    report: Report | None = None
    replicas: int | None = None
    status: JobStatus | None = None
    events: tuple[JobEvent, ...] = ()
    etcd: bool = True
    together: int | None = None
    guarded: int | None = None
    size: SizeRecord | None = None
    remove: tuple[Removal, ...] = ()
    create: tuple[NewPod, ...] = ()
    delete_job: bool = False
    wake_at: float | None = None
    hands_off: bool = False
