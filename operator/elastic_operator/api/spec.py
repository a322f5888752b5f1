"""The spec of an ElasticJob: typed, with every default filled in.

The CRD (crds/elasticjob.yaml) defines what is allowed. These structs decode a manifest that has passed it.
:class:`AppliedSpec` is the part that a job's pods are made from; ``status.appliedSpec`` keeps a copy of it.
"""

from __future__ import annotations

import enum
import posixpath
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

import msgspec

from elastic_operator.api.json_values import listing, mappings
from elastic_operator.api.legacy import WORKER, modern

GROUP: Final = "elastic.pytorch.org"
VERSION: Final = "v1alpha1"
KIND: Final = "ElasticJob"
PLURAL: Final = "elasticjobs"

Json = Mapping[str, Any]

MANAGER: Final = f"{GROUP}/elastic-operator"
"""The value of ``spec.managedBy`` for jobs of this operator, and its default."""

NEVER: Final = "Never"
"""The restart policy of every pod: only the operator replaces pods."""


class CleanPodPolicy(enum.StrEnum):
    """Which pods of a finished job are deleted."""

    ALL = "All"
    RUNNING = "Running"
    """Those in which a container still runs; the others stay for their logs."""
    NONE = "None"


class FailureAction(enum.StrEnum):
    """The action for a failure."""

    FAIL_JOB = "FailJob"
    IGNORE = "Ignore"
    """The worker or pod is replaced, and no budget is charged."""
    COUNT = "Count"
    """The worker or pod is replaced, and its budget is charged; the default if no rule matches."""


class GangScheduler(enum.StrEnum):
    """The scheduler whose PodGroup starts all pods of a job together or none of them."""

    SCHEDULER_PLUGINS = "SchedulerPlugins"
    VOLCANO = "Volcano"


class _Part(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A part of the spec."""


class ExitCodes(_Part, frozen=True):
    """A set of exit codes from 1 to 255; 128 + n stands for the signal n. With NotIn: all other codes."""

    values: frozenset[int]
    operator: Literal["In", "NotIn"]

    def __contains__(self, code: object) -> bool:
        return (code in self.values) is (self.operator == "In")


class PodCondition(_Part, frozen=True):
    """A condition of a pod, such as DisruptionTarget."""

    type: str
    status: str = "True"


class FailureRule(_Part, frozen=True):
    """The action for failures of one kind. Exactly one of exit codes, pod reasons and pod conditions is given.

    Attributes:
        action: the action for the failure.
        exit_codes: exit codes of worker programs. The agents apply this.
        pod_reasons: reasons for which pods end, such as OOMKilled or Evicted. The operator applies this.
        pod_conditions: conditions of pods that end. The operator applies this.
        exclude_node: whether later pods keep away from the failed pod's node.
    """

    action: FailureAction
    exit_codes: ExitCodes | None = msgspec.field(default=None, name="onExitCodes")
    pod_reasons: frozenset[str] = msgspec.field(default=frozenset(), name="onPodReasons")
    pod_conditions: tuple[PodCondition, ...] = msgspec.field(default=(), name="onPodConditions")
    exclude_node: bool = False


class FailurePolicy(_Part, frozen=True):
    """Rules for failures; the first one that matches applies."""

    rules: tuple[FailureRule, ...] = ()


class SchedulingSpec(_Part, frozen=True):
    """How the pods are scheduled.

    Attributes:
        gang: the scheduler whose PodGroup is created; None for no PodGroup.
        scheduler_name: the scheduler of the pods; None for the gang's scheduler, or else the cluster's default.
        queue: the queue of Volcano's PodGroup; empty for Volcano's default.
        priority_class: the priority class of the pods and the PodGroup; empty for the cluster's default.
    """

    gang: GangScheduler | None = None
    scheduler_name: str | None = None
    queue: str = ""
    priority_class: str = msgspec.field(default="", name="priorityClassName")


class PortRange(_Part, frozen=True):
    """The first and the last of a range of ports."""

    first: int
    last: int


class RendezvousSpec(_Part, frozen=True):
    """The rendezvous of the agents; None stands for the agent's default.

    Attributes:
        joining_window: seconds that the first round waits for more pods than the minimum.
        join_timeout: seconds after which the job fails if fewer pods than the minimum have joined.
        lease: seconds after which a silent pod counts as lost.
        ports: the ports on which agents listen to each other; None for any free ports.
    """

    joining_window: int | None = msgspec.field(default=None, name="joiningWindowSeconds")
    join_timeout: int | None = msgspec.field(default=None, name="joinTimeoutSeconds")
    lease: int | None = msgspec.field(default=None, name="leaseSeconds")
    ports: PortRange | None = None


class EtcdSpec(_Part, frozen=True):
    """The store of the job.

    Attributes:
        endpoint: host:port of an existing etcd (several with commas); None to create one for the job.
        tls_secret: the Secret with ``ca.crt``, and ``tls.crt`` and ``tls.key`` for client authentication; for
            ``endpoint`` only. None to trust the system's authorities.
        image: the image of the created etcd.
        resources: the resources of the created etcd, as in a container's spec.
        storage: the storage of the created etcd, as in a volume claim; None to lose the data with the pod.
    """

    endpoint: str | None = None
    tls_secret: str | None = None
    image: str | None = None
    resources: dict[str, Any] = {}
    storage: dict[str, Any] | None = None


class CheckpointSpec(_Part, frozen=True):
    """The volume for the program's checkpoints: any volume source; None for an emptyDir, lost with its pod."""

    volume: dict[str, Any] | None = None


class AppliedSpec(_Part, frozen=True, kw_only=True):
    """The part of the spec from which pods are made. A change takes effect when the job is suspended and resumed.

    Attributes:
        image: the image of the worker container; None if the template names it.
        command: the program of each worker; empty to pass ``args`` to torchelastic-run.
        args: see ``command``.
        env: more environment variables, each as in a container's spec.
        nproc_per_node: workers in each pod: a number, or "auto", "cpu", "gpu".
        failure_policy: the rules for failures.
        scheduling: how the pods are scheduled.
        rendezvous: the settings of the rendezvous.
        etcd: the store.
        checkpoint: the volume for checkpoints.
        grace_period: seconds between SIGTERM and SIGKILL for workers; None for the agent's own default.
        node_loss: seconds after which pods on a silent node count as lost.
        metrics_port: the port of the agents' /metrics; None for the operator's default.
        template: a pod template, as the user wrote it.
    """

    image: str | None = None
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: tuple[dict[str, Any], ...] = ()
    nproc_per_node: int | str = 1
    failure_policy: FailurePolicy = FailurePolicy()
    scheduling: SchedulingSpec = msgspec.field(default=SchedulingSpec(), name="schedulingPolicy")
    rendezvous: RendezvousSpec = RendezvousSpec()
    etcd: EtcdSpec = EtcdSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    grace_period: int | None = msgspec.field(default=None, name="gracePeriodSeconds")
    node_loss: int = msgspec.field(default=15, name="nodeLossSeconds")
    metrics_port: int | None = None
    template: dict[str, Any] = {}

    @property
    def failure_rules(self) -> tuple[FailureRule, ...]:
        """The rules of the failure policy."""
        return self.failure_policy.rules


class ElasticJobSpec(AppliedSpec, frozen=True, kw_only=True):
    """The spec of a job.

    Attributes:
        min_replicas: the minimum number of pods for training.
        max_replicas: the maximum number of pods.
        replicas: the desired number of pods; None until the operator has written one.
        first_replicas: the number to begin with, from a manifest of the first controller; None for the maximum.
        max_restarts: the maximum number of worker failures in the whole job.
        backoff_limit: the maximum number of failed pods.
        suspend: whether the job has no pods until this is false again.
        managed_by: the controller that is responsible for the job.
        active_deadline: the maximum number of seconds that it runs, from its start or last resumption.
        ttl_after_finished: seconds from the end of the job to its deletion; None to keep it.
        clean_pod_policy: which pods of the finished job are deleted.
        disruption_budget: whether evictions never leave fewer pods than the minimum.
        objection: why a manifest of the first controller is not supported, in a sentence; None if it is.
    """

    min_replicas: int
    max_replicas: int
    replicas: int | None = None
    first_replicas: int | None = None
    max_restarts: int = 100
    backoff_limit: int = 100
    suspend: bool = False
    managed_by: str = MANAGER
    active_deadline: int | None = msgspec.field(default=None, name="activeDeadlineSeconds")
    ttl_after_finished: int | None = msgspec.field(default=None, name="ttlSecondsAfterFinished")
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    disruption_budget: bool = False
    objection: str | None = None

    @classmethod
    def of(cls, spec: Json) -> Self:
        """Decode a ``spec``, of today's form or the first controller's, that has passed the CRD's validation.

        Raises:
            msgspec.ValidationError: a value has another type than the CRD allows.
        """
        today = {key: value for key, value in modern(spec).items() if value is not None}
        if "maxRestarts" in today:
            today = {"backoffLimit": today["maxRestarts"], **today}
        for key in ("command", "args", "env", "etcd", "checkpoint", "rendezvous", "schedulingPolicy", "failurePolicy"):
            if isinstance(value := today.get(key), dict):
                today[key] = {name: inner for name, inner in value.items() if inner is not None}
        replicas = spec.get("replicas")
        return msgspec.structs.replace(
            msgspec.convert(today, cls),
            replicas=replicas,
            first_replicas=today.get("replicas") if replicas is None else None,
        )

    @property
    def desired(self) -> int:
        """The desired number of pods, within the bounds."""
        wanted = self.first_replicas if self.replicas is None else self.replicas
        return min(max(self.max_replicas if wanted is None else wanted, self.min_replicas), self.max_replicas)

    @property
    def applied(self) -> AppliedSpec:
        """The part from which pods are made."""
        return AppliedSpec(**{name: getattr(self, name) for name in AppliedSpec.__struct_fields__})

    def with_applied(self, applied: AppliedSpec | None) -> Self:
        """Return the spec with the applied values in place of its own; itself if nothing is applied."""
        if applied is None:
            return self
        values = {name: getattr(applied, name) for name in AppliedSpec.__struct_fields__}
        # A spec with an objection is never applied.
        return msgspec.structs.replace(self, objection=None, **values)


# The CRD leaves the template opaque, so any value in it may have an unexpected type.


def worker_container(spec: AppliedSpec) -> Json:
    """Return the template's container ``worker``; an empty one if the template has none."""
    containers = mappings(spec.template, "spec", "containers")
    return next((container for container in containers if container.get("name") == WORKER), {})


def mounted_folders(container: Json) -> frozenset[str]:
    """Return the folders of a container with volumes."""
    paths = (mount.get("mountPath") for mount in mappings(container, "volumeMounts"))
    return frozenset(posixpath.normpath(path) for path in paths if isinstance(path, str) and path)


def program_of(spec: AppliedSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the command and the arguments, from the spec or from the template's container ``worker``."""
    container = worker_container(spec)
    return (
        spec.command or tuple(str(item) for item in listing(container, "command")),
        spec.args or tuple(str(item) for item in listing(container, "args")),
    )


def user_env(spec: AppliedSpec) -> tuple[Json, ...]:
    """Return the user's environment variables, each as in a container's spec: the template's, then the spec's."""
    return (*mappings(worker_container(spec), "env"), *spec.env)


def changed_fields(spec: ElasticJobSpec, applied: AppliedSpec) -> tuple[str, ...]:
    """Return the fields that differ from the applied spec, such as ``spec.args``."""
    keys = zip(AppliedSpec.__struct_fields__, AppliedSpec.__struct_encode_fields__, strict=True)
    return tuple(f"spec.{key}" for name, key in keys if getattr(applied, name) != getattr(spec, name))
