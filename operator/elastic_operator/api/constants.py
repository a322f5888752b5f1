"""All names that the operator uses: labels, annotations, pod names, condition types and reasons.

The names that it shares with the agents are in :mod:`torchelastic.protocol`.
"""

from __future__ import annotations

import enum
import hashlib
from typing import Final

from elastic_operator.api.spec import GROUP

LABEL_JOB: Final = f"{GROUP}/job"
"""On all objects of a job: the job's name."""
LABEL_ROLE: Final = f"{GROUP}/role"
"""On all objects of a job: the role of the object, such as :data:`ROLE_WORKER`; scaling selects only workers."""
LABEL_INDEX: Final = f"{GROUP}/index"
"""On worker pods: the index."""
LABEL_JOB_UID: Final = f"{GROUP}/job-uid"
"""On a job's own etcd: the job's UID, so that the service of a new job never leads to the etcd of an old one."""
ROLE_WORKER: Final = "worker"
ROLE_ETCD: Final = "etcd"
ROLE_REPORT: Final = "report"

ANNOTATION_FAILURES: Final = f"{GROUP}/failures"
"""On worker pods: the number of consecutive failures of earlier pods with this index."""
ANNOTATION_FAILED: Final = f"{GROUP}/failed"
"""On worker pods with failed predecessors: when the last one failed."""
ANNOTATION_SIZE: Final = f"{GROUP}/size"
"""On worker pods: the desired size at the creation of the pod, as in TORCHELASTIC_SIZE."""
ANNOTATION_PROTOCOL: Final = f"{GROUP}/protocol-version"
"""On worker pods: the protocol version of the operator that created the pod."""
ANNOTATION_METRICS_PORT: Final = f"{GROUP}/metrics-port"
"""On worker pods: the port of the agent's /metrics; written later if the agent chooses a free port."""

MANAGED_BY: Final = "elastic-operator"
"""The operator's name in labels and events."""
METRICS_PORT: Final = "metrics"
"""The name of the port of a worker pod on which the agent serves /metrics."""
CHECKPOINT_FOLDER: Final = "/checkpoints"
"""The mount path of the volume of ``spec.checkpoint``."""
ETCD_TLS_FOLDER: Final = "/etc/torchelastic/etcd"
"""The mount path of the Secret of ``spec.etcd.tlsSecret``."""


class ConditionType(enum.StrEnum):
    """Types of conditions."""

    RUNNING = "Running"
    """At least the minimum of pods is there and trains."""
    WAITING = "Waiting"
    """Fewer pods than the minimum are ready; the message names the missing pods and the reasons."""
    DEGRADED = "Degraded"
    """The job has trained, and now has fewer pods than desired."""
    INVALID = "Invalid"
    """The spec is not supported; the operator does nothing until it changes."""
    SUSPENDED = "Suspended"
    """No pod of the job runs, because the user has suspended the job."""
    RESTART_REQUIRED = "RestartRequired"
    """The spec differs from what the pods are made from; it takes effect when the job is suspended and resumed."""
    STORE_UNREACHABLE = "StoreUnreachable"
    """The operator cannot use the job's store, although the store should be available; the message says why."""
    RESOURCES_BLOCKED = "ResourcesBlocked"
    """The cluster does not accept all objects of the job for now: pods, etcd, a PodGroup; the message says why."""
    DISRUPTION_BUDGET_FAILED = "DisruptionBudgetFailed"
    """The disruption budget cannot be created; the message says why."""
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    FINISHED = "Finished"
    """Succeeded or failed."""


class Reason(enum.StrEnum):
    """Why a condition has its value, and reasons of events; the last ones only for runs on this machine."""

    TRAINING = "Training"
    STARTING = "Starting"
    """Enough pods are there; the agents have not formed a round yet."""
    BELOW_MINIMUM = "BelowMinimum"
    BELOW_DESIRED = "BelowDesired"
    STORE_UNREADABLE = "StoreUnreadable"
    """It is unknown whether the run has ended, so no pod is created."""
    NOT_STARTED = "NotStarted"
    ENOUGH_PODS = "EnoughPods"
    ALL_PODS = "AllPods"
    SPEC_INVALID = "SpecInvalid"
    SPEC_VALID = "SpecValid"
    REFUSED = "Refused"
    """The cluster rejects the pods or the etcd of this spec, or a running job does not follow a changed manifest."""
    RESOURCES_BLOCKED = "ResourcesBlocked"
    """The cluster does not accept objects for now, because of a quota, a policy or a permission."""
    RUN_SUCCEEDED = "RunSucceeded"
    RUN_FAILED = "RunFailed"
    """The agents ended the run: the program failed too often, or too few nodes joined."""
    BAD_INPUT = "BadInput"
    """The command line or the environment of an agent is invalid."""
    SUSPENDED = "Suspended"
    STOPPING = "Stopping"
    """The pods are terminating."""
    RESUMED = "Resumed"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    """The job has exceeded its deadline."""
    POD_FAILURE_POLICY = "PodFailurePolicy"
    """A rule of the failure policy fails the job."""
    SPEC_CHANGED = "SpecChanged"
    SPEC_IN_EFFECT = "SpecInEffect"
    UNREACHABLE = "Unreachable"
    NOT_ALLOWED = "NotAllowed"
    """The operator has no permission to read the credentials of the store."""
    REACHABLE = "Reachable"
    RESOURCES_AVAILABLE = "ResourcesAvailable"
    BUDGET_REJECTED = "BudgetRejected"
    BUDGET_CREATED = "BudgetCreated"
    NOT_REQUESTED = "NotRequested"
    """The spec no longer requests it."""
    POD_FAILURES = "PodFailures"
    """More pods failed than the backoff limit allows."""
    NO_AGENT = "NoAgent"
    """The image of the pods has no ``torchelastic-run``."""
    PROTOCOL_MISMATCH = "ProtocolMismatch"
    """The agent in the image speaks another version of the protocol than this operator."""
    STARTED = "Started"
    ROUND = "Round"
    """Another set of pods trains; the message says why."""
    WORKER_FAILED = "WorkerFailed"
    """A worker failed, and the set of pods changed in the same round."""
    PAUSED = "Paused"
    """Too few nodes are left to train."""
    SCALED = "Scaled"
    NODE_EXCLUDED = "NodeExcluded"
    """The failure policy excludes a node for later pods."""
    RESTART_REQUIRED = "RestartRequired"
    STORE_UNREACHABLE = "StoreUnreachable"
    POD_DIED = "PodDied"
    POD_LEFT = "PodLeft"
    POD_DELETED = "PodDeleted"
    """A pod was deleted by another client; the message quotes its termination message."""
    POD_DISRUPTED = "PodDisrupted"
    """A pod was preempted, evicted, not admitted, or lost with its node."""
    REPORT_NOT_KEPT = "ReportNotKept"
    """The report of the run is lost, because its ConfigMap cannot be created."""
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNSUPPORTED_FIELDS = "UnsupportedFields"
    """Some fields of the manifest have no effect when pods are processes."""
    ETCD_DIED = "EtcdDied"
    ETCD_RESTARTED = "EtcdRestarted"
    STORE_AWAY = "StoreAway"
    """An etcd that is not ours cannot be reached."""
    STORE_BACK = "StoreBack"
    APPLIED = "Applied"
    """The manifest's file has changed, and so has the job."""
    NOT_RECORDED = "NotRecorded"
    """The run's folder cannot be written any more."""
    INTERRUPTED = "Interrupted"
    DELETED = "Deleted"


_SUFFIX_LENGTH: Final = 5
_SUFFIX_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"
"""No vowels, and no characters that look alike."""


def hostname(job: str, index: int) -> str:
    """Return the host name of the pods of an index."""
    return f"{job}-{index}"


def pod_name(job: str, job_uid: str, index: int, replaces: str) -> str:
    """Return the name of a pod: the same in all operators that saw the same pods, and different from its predecessor's.

    Args:
        job: the job's name.
        job_uid: the UID of the job.
        index: the index of the pod.
        replaces: the UID of the pod that it replaces; empty for the first of its index.
    """
    digest = hashlib.blake2b(f"{job_uid}\n{index}\n{replaces}".encode(errors="surrogatepass"), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    suffix = ""
    for _ in range(_SUFFIX_LENGTH):
        number, letter = divmod(number, len(_SUFFIX_LETTERS))
        suffix += _SUFFIX_LETTERS[letter]
    return f"{hostname(job, index)}-{suffix}"


def report_name(job: str) -> str:
    """Return the name of the ConfigMap with a job's report."""
    return f"{job}-report"


def worker_selector(job: str) -> str:
    """Return the label selector that matches a job's worker pods and nothing else."""
    return f"{LABEL_JOB}={job},{LABEL_ROLE}={ROLE_WORKER}"
