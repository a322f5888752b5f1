"""Every name that the operator gives to something, in one place: labels, pods, condition types, reasons.

What the operator and the agents say to each other is named in :mod:`torchelastic.contract`.
"""

from __future__ import annotations

import enum
import hashlib
from typing import Final

from elastic_operator.spec import GROUP

LABEL_JOB: Final = f"{GROUP}/job"
"""On everything that belongs to a job: its name."""
LABEL_ROLE: Final = f"{GROUP}/role"
"""On everything that belongs to a job: what it is for, as :data:`ROLE_WORKER`; scaling selects the workers alone."""
LABEL_INDEX: Final = f"{GROUP}/index"
"""On worker pods: which of the job's places it fills."""
LABEL_JOB_UID: Final = f"{GROUP}/job-uid"
"""On a job's own etcd: the job's UID, so that the service of a new job never leads to the etcd of an old one."""
ROLE_WORKER: Final = "worker"
ROLE_ETCD: Final = "etcd"
ROLE_REPORT: Final = "report"

ANNOTATION_FAILURES: Final = f"{GROUP}/failures"
"""On worker pods: how many pods of this index failed in a row before it."""
ANNOTATION_FAILED: Final = f"{GROUP}/failed"
"""On worker pods that have such predecessors: when the last of them failed."""
ANNOTATION_SIZE: Final = f"{GROUP}/size"
"""On worker pods: the wanted size that it was started with, as in TORCHELASTIC_SIZE."""
ANNOTATION_CONTRACT: Final = f"{GROUP}/contract-version"
"""On worker pods: the version of the contract that the operator which made it speaks."""
ANNOTATION_METRICS_PORT: Final = f"{GROUP}/metrics-port"
"""On worker pods: where the agent serves /metrics; of an agent that serves on any free port, as soon as it says so."""

OWN_PREFIX: Final = f"{GROUP}/"
"""What the labels and annotations begin with that are the operator's alone."""

MANAGED_BY: Final = "elastic-operator"
"""How the operator calls itself in labels and events."""
METRICS_PORT: Final = "metrics"
"""The name of the port of worker pods where the agent serves /metrics."""
CHECKPOINT_FOLDER: Final = "/checkpoints"
"""Where worker pods find the volume of ``spec.checkpoint``."""
ETCD_TLS_FOLDER: Final = "/etc/torchelastic/etcd"
"""Where worker pods find the Secret of ``spec.etcd.tlsSecret``."""


class ConditionType(enum.StrEnum):
    """What can be said of a job, each true or false."""

    RUNNING = "Running"
    """At least the minimum of pods is there and trains."""
    WAITING = "Waiting"
    """Fewer than the minimum are there; the message says for which pods it waits, and why."""
    DEGRADED = "Degraded"
    """It has trained, and fewer pods than desired are there."""
    INVALID = "Invalid"
    """The spec cannot be honoured; nothing is done for it until it changes."""
    SUSPENDED = "Suspended"
    """Nothing of the job runs, by the user's wish."""
    CHANGES_WAITING = "ChangesWaiting"
    """The spec says something else than the pods are made from; it takes effect when the job is resumed."""
    STORE_UNREACHABLE = "StoreUnreachable"
    """The operator cannot use the job's store, which should be there; the message says why."""
    HINDERED = "Hindered"
    """The cluster does not take all that the job needs, for now: pods, etcd, a PodGroup; the message says why."""
    UNGUARDED = "Unguarded"
    """The disruption budget that the spec asks for cannot be there; the message says why."""
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    FINISHED = "Finished"
    """Succeeded or failed: nothing more will happen."""


class Reason(enum.StrEnum):
    """Why a condition has its value."""

    TRAINING = "Training"
    STARTING = "Starting"
    """Enough pods are there; the agents have not formed an epoch yet."""
    BELOW_MINIMUM = "BelowMinimum"
    BELOW_DESIRED = "BelowDesired"
    STORE_UNREADABLE = "StoreUnreadable"
    """Whether the run has ended is not known, so no pod is made."""
    NOT_STARTED = "NotStarted"
    ENOUGH_PODS = "EnoughPods"
    ALL_PODS = "AllPods"
    BAD_SPEC = "BadSpec"
    GOOD_SPEC = "GoodSpec"
    REFUSED = "Refused"
    """The cluster will never take the pods, or the etcd, that the spec asks for; the message has its words."""
    HINDERED = "Hindered"
    """The cluster does not take pods for now: a quota, a policy, a missing right; the message has its words."""
    RUN_SUCCEEDED = "RunSucceeded"
    RUN_FAILED = "RunFailed"
    """The agents have ended the run: a program that fails too often, or nodes that did not come."""
    BAD_INPUT = "BadInput"
    """An agent cannot honour what it was started with."""
    SUSPENDED = "Suspended"
    STOPPING = "Stopping"
    """Its pods are on their way out."""
    RESUMED = "Resumed"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    """The job has taken longer than it may."""
    POD_FAILURE_POLICY = "PodFailurePolicy"
    """A rule of the failure policy says that the job fails."""
    SPEC_CHANGED = "SpecChanged"
    SPEC_IN_EFFECT = "SpecInEffect"
    UNREACHABLE = "Unreachable"
    NOT_ALLOWED = "NotAllowed"
    """The operator has no right to read what it takes to reach the store; it was set up so."""
    REACHABLE = "Reachable"
    UNHINDERED = "Unhindered"
    NO_BUDGET = "NoBudget"
    GUARDED = "Guarded"
    NOT_ASKED_FOR = "NotAskedFor"
    """The spec does not ask for it any more."""
    POD_FAILURES = "PodFailures"
    """More pods died by themselves than may."""
    NO_AGENT = "NoAgent"
    """The image of the pods has no ``torchelastic-run``."""
    CONTRACT_MISMATCH = "ContractMismatch"
    """The agent in the image speaks another version of the contract than this operator."""


class EventReason(enum.StrEnum):
    """What a person would want to know."""

    STARTED = "Started"
    EPOCH = "Epoch"
    """Others train together than before; the message says why."""
    WORKER_FAILED = "WorkerFailed"
    """A worker failed, and others train together by now than those that started anew."""
    PAUSED = "Paused"
    """Too few nodes are left: nobody trains."""
    SCALED = "Scaled"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    NODE_EXCLUDED = "NodeExcluded"
    """Later pods keep away from a node, by the failure policy."""
    CHANGES_WAITING = "ChangesWaiting"
    STORE_UNREACHABLE = "StoreUnreachable"
    POD_DIED = "PodDied"
    POD_LEFT = "PodLeft"
    POD_DELETED = "PodDeleted"
    """Somebody else has deleted a pod; the message has its last words."""
    POD_DISRUPTED = "PodDisrupted"
    """A pod ended by no fault of its own: preempted, evicted, turned away by its node, or lost with it."""
    REFUSED = "Refused"
    """The cluster will never take what the spec asks for; see :attr:`Reason.REFUSED`."""
    HINDERED = "Hindered"
    """The cluster does not take pods for now; see :attr:`Reason.HINDERED`."""
    REPORT_NOT_KEPT = "ReportNotKept"
    """What is known of the run is lost with its store: the cluster does not take the ConfigMap with its report."""
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class LocalReason(enum.StrEnum):
    """What a person would want to know of a run on one machine, beside the reasons that events have everywhere."""

    NOT_HONOURED = "NotHonoured"
    """Fields of the manifest that have no effect where pods are processes."""
    ETCD_DIED = "EtcdDied"
    ETCD_RESTARTED = "EtcdRestarted"
    STORE_AWAY = "StoreAway"
    """An etcd that is not ours cannot be reached."""
    STORE_BACK = "StoreBack"
    APPLIED = "Applied"
    """The manifest's file has changed, and so has the job."""
    REFUSED = "Refused"
    """The manifest's file has changed in a way that a running job does not follow."""
    NOT_RECORDED = "NotRecorded"
    """The run's folder cannot be written any more."""
    INTERRUPTED = "Interrupted"
    DELETED = "Deleted"


_SUFFIX_LENGTH: Final = 5
_SUFFIX_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"
"""No vowels, and nothing that looks like something else."""


def hostname(job: str, index: int) -> str:
    """What the pods of one place are called from inside, and by people."""
    return f"{job}-{index}"


def pod_name(job: str, job_uid: str, index: int, replaces: str) -> str:
    """The name of a pod: whoever saw the same past chooses the same one, and no predecessor stands in its way.

    Args:
        job: the job's name.
        job_uid: its UID.
        index: which of its places the pod fills.
        replaces: the UID of the pod that it replaces; empty for the first of its place.
    """
    digest = hashlib.blake2b(f"{job_uid}\n{index}\n{replaces}".encode(errors="surrogatepass"), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    suffix = ""
    for _ in range(_SUFFIX_LENGTH):
        number, letter = divmod(number, len(_SUFFIX_LETTERS))
        suffix += _SUFFIX_LETTERS[letter]
    return f"{hostname(job, index)}-{suffix}"


def report_name(job: str) -> str:
    """What the ConfigMap is called in which the report of a job is kept."""
    return f"{job}-report"


def worker_selector(job: str) -> str:
    """The label selector that matches a job's worker pods and nothing else."""
    return f"{LABEL_JOB}={job},{LABEL_ROLE}={ROLE_WORKER}"
