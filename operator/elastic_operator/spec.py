"""The spec of an ElasticJob as the plan sees it: typed, with every default filled in.

The CRD (crds/elasticjob.yaml) is the one source of truth for what is allowed; this module only turns a manifest that
has passed it into frozen dataclasses, so that nothing below has to ask whether a field is there.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from elastic_operator.archived import modern, objection

GROUP: Final = "elastic.pytorch.org"
VERSION: Final = "v1alpha1"
KIND: Final = "ElasticJob"
PLURAL: Final = "elasticjobs"

Json = Mapping[str, Any]


MANAGER: Final = f"{GROUP}/elastic-operator"
"""What ``spec.managedBy`` says of jobs that are this operator's; what a job says that says nothing."""


class CleanPodPolicy(enum.StrEnum):
    """Which pods of a finished job are removed."""

    ALL = "All"
    """All, with their logs."""
    RUNNING = "Running"
    """Those of which something still runs; those that have ended stay, for their logs."""
    NONE = "None"
    """None: what still runs ends by itself, or doesn't."""


class FailureAction(enum.StrEnum):
    """What follows from a failure."""

    FAIL_JOB = "FailJob"
    """The job fails at once."""
    IGNORE = "Ignore"
    """It is made good, and charged to no budget."""
    COUNT = "Count"
    """It is made good, and charged; what follows where no rule says otherwise."""


class GangScheduler(enum.StrEnum):
    """Whose PodGroup makes the pods of a job start together or not at all."""

    SCHEDULER_PLUGINS = "SchedulerPlugins"
    VOLCANO = "Volcano"


@dataclass(frozen=True, slots=True)
class ExitCodes:
    """A set of exit codes of the program.

    Attributes:
        values: from 1 to 255; 128 + n stands for the signal n.
        negated: it is all the others.
    """

    values: frozenset[int]
    negated: bool = False

    def __contains__(self, code: object) -> bool:
        return (code in self.values) is not self.negated


@dataclass(frozen=True, slots=True)
class PodCondition:
    """A condition of a pod, such as DisruptionTarget.

    Attributes:
        type: of the condition.
        status: True, False or Unknown.
    """

    type: str
    status: str = "True"


@dataclass(frozen=True, slots=True)
class FailureRule:
    """What follows from failures of one kind. Exactly one of the first three attributes says of which.

    Attributes:
        exit_codes: workers whose program ended so. The agents apply this.
        pod_reasons: pods that ended for one of these reasons, such as OOMKilled or Evicted. The operator applies it.
        pod_conditions: pods that ended with one of these conditions. The operator applies it.
        action: what follows.
        exclude_node: the pod's successors are not placed on its node. Of pods only.
    """

    action: FailureAction
    exit_codes: ExitCodes | None = None
    pod_reasons: frozenset[str] = frozenset()
    pod_conditions: tuple[PodCondition, ...] = ()
    exclude_node: bool = False


@dataclass(frozen=True, slots=True)
class SchedulingSpec:
    """How the pods get their places.

    Attributes:
        gang: whose PodGroup is made; None for none: each pod starts as soon as there is a place for it.
        scheduler_name: of the pods; None for that of the gang's scheduler, or else the cluster's default.
        queue: of Volcano's PodGroup; empty for its default.
        priority_class: of the pods (and the PodGroup); empty for the cluster's default.
    """

    gang: GangScheduler | None = None
    scheduler_name: str | None = None
    queue: str = ""
    priority_class: str = ""


@dataclass(frozen=True, slots=True)
class RendezvousSpec:
    """How the agents meet; None for what an agent does by itself.

    Attributes:
        joining_window: seconds for which the first epoch waits for more pods where the wanted ones are not all there.
        join_timeout: seconds for which too few pods wait for more before the job fails.
        lease: seconds after which a silent pod counts as lost.
        ports: the first and the last one on which agents listen to each other; None for any free ones.
    """

    joining_window: int | None = None
    join_timeout: int | None = None
    lease: int | None = None
    ports: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class EtcdSpec:
    """The store of the job.

    Attributes:
        endpoint: host:port (several: with commas) of an etcd that is there already; None to have one made for the job.
        tls_secret: with ``ca.crt``, and ``tls.crt`` and ``tls.key`` where clients have to say who they are; None where
            the system's own authorities suffice. Of ``endpoint`` only.
        image: of the managed one.
        resources: of the managed one, as in a container's spec.
        storage: of the managed one, as in a volume claim: None keeps its data for the life of its pod.
    """

    endpoint: str | None = None
    tls_secret: str | None = None
    image: str | None = None
    resources: Json = field(default_factory=dict)
    storage: Json | None = None


@dataclass(frozen=True, slots=True)
class ElasticJobSpec:
    """What the user asked for.

    Attributes:
        min_replicas: fewer pods than this never train.
        max_replicas: more pods than this are never made.
        replicas: the wanted number; None until the operator has written one.
        first_replicas: the number to begin with, of a manifest of the first controller; None for the maximum.
        image: of the worker container; None where the template names it.
        command: the program that each worker is; empty to have ``args`` appended to torchelastic-run.
        args: see ``command``.
        env: more environment variables, each as in a container's spec.
        nproc_per_node: workers in each pod: a number, or "auto", "cpu", "gpu".
        max_restarts: how many failures of workers the whole job may have.
        backoff_limit: how many pods may die by themselves.
        suspend: nothing runs, until this is taken back.
        managed_by: who looks after the job.
        active_deadline: seconds that it may run, from its (last) start.
        ttl_after_finished: seconds after its end when the job is removed; None for never.
        clean_pod_policy: which pods of the finished job are removed.
        failure_rules: what follows from failures; the first rule that fits holds.
        scheduling: how the pods get their places.
        rendezvous: how the agents meet.
        etcd: the store.
        checkpoint_volume: any volume source; None for an emptyDir, which is lost with its pod.
        grace_period: seconds that workers have between SIGTERM and SIGKILL when their pod is asked to go; None for what
            an agent gives by itself.
        node_loss: seconds after which pods on a node that is silent are given up.
        disruption_budget: whether evictions never leave less than the minimum of pods.
        metrics_port: of the agents' /metrics; None for what the operator is set up with.
        template: a pod template, as the user wrote it.
        objection: what in a manifest of the first controller cannot be honoured, in a sentence; None for nothing.
    """

    min_replicas: int
    max_replicas: int
    replicas: int | None = None
    first_replicas: int | None = None
    image: str | None = None
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: tuple[Json, ...] = ()
    nproc_per_node: int | str = 1
    max_restarts: int = 100
    backoff_limit: int = 100
    suspend: bool = False
    managed_by: str = MANAGER
    active_deadline: int | None = None
    ttl_after_finished: int | None = None
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    failure_rules: tuple[FailureRule, ...] = ()
    scheduling: SchedulingSpec = field(default_factory=SchedulingSpec)
    rendezvous: RendezvousSpec = field(default_factory=RendezvousSpec)
    etcd: EtcdSpec = field(default_factory=EtcdSpec)
    checkpoint_volume: Json | None = None
    grace_period: int | None = None
    node_loss: int = 15
    disruption_budget: bool = False
    metrics_port: int | None = None
    template: Json = field(default_factory=dict)
    objection: str | None = None

    @property
    def desired(self) -> int:
        """How many pods there should be: the wanted number, kept within the bounds."""
        given = (number for number in (self.replicas, self.first_replicas) if number is not None)
        wanted = next(given, self.max_replicas)
        return min(max(wanted, self.min_replicas), self.max_replicas)

    @classmethod
    def of(cls, spec: Json) -> ElasticJobSpec:
        """The typed form of a ``spec``, today's or an archived one, that has passed the CRD's validation."""
        objection_to_it, replicas, spec = objection(spec), spec.get("replicas"), modern(spec)
        max_restarts = spec.get("maxRestarts", 100)
        return cls(
            min_replicas=spec["minReplicas"],
            max_replicas=spec["maxReplicas"],
            replicas=replicas,
            first_replicas=spec.get("replicas") if replicas is None else None,
            image=spec.get("image"),
            command=tuple(spec.get("command") or ()),
            args=tuple(spec.get("args") or ()),
            env=tuple(spec.get("env") or ()),
            nproc_per_node=spec.get("nprocPerNode", 1),
            max_restarts=max_restarts,
            backoff_limit=spec.get("backoffLimit", max_restarts),
            suspend=spec.get("suspend", False),
            managed_by=spec.get("managedBy", MANAGER),
            active_deadline=spec.get("activeDeadlineSeconds"),
            ttl_after_finished=spec.get("ttlSecondsAfterFinished"),
            clean_pod_policy=CleanPodPolicy(spec.get("cleanPodPolicy", CleanPodPolicy.RUNNING)),
            failure_rules=tuple(map(_failure_rule, (spec.get("failurePolicy") or {}).get("rules") or ())),
            scheduling=_scheduling(spec.get("schedulingPolicy") or {}),
            rendezvous=_rendezvous(spec.get("rendezvous") or {}),
            etcd=_etcd(spec.get("etcd") or {}),
            checkpoint_volume=(spec.get("checkpoint") or {}).get("volume"),
            grace_period=spec.get("gracePeriodSeconds"),
            node_loss=spec.get("nodeLossSeconds", 15),
            disruption_budget=spec.get("disruptionBudget", False),
            metrics_port=spec.get("metricsPort"),
            template=spec.get("template") or {},
            objection=objection_to_it,
        )


def _failure_rule(rule: Json) -> FailureRule:
    codes = rule.get("onExitCodes")
    return FailureRule(
        action=FailureAction(rule["action"]),
        exit_codes=None if codes is None else ExitCodes(frozenset(codes["values"]), codes["operator"] == "NotIn"),
        pod_reasons=frozenset(rule.get("onPodReasons") or ()),
        pod_conditions=tuple(
            PodCondition(condition["type"], condition.get("status", "True"))
            for condition in rule.get("onPodConditions") or ()
        ),
        exclude_node=rule.get("excludeNode", False),
    )


def _scheduling(policy: Json) -> SchedulingSpec:
    gang = policy.get("gang")
    return SchedulingSpec(
        gang=None if gang is None else GangScheduler(gang),
        scheduler_name=policy.get("schedulerName"),
        queue=policy.get("queue", ""),
        priority_class=policy.get("priorityClassName", ""),
    )


def _rendezvous(rendezvous: Json) -> RendezvousSpec:
    ports = rendezvous.get("ports")
    return RendezvousSpec(
        joining_window=rendezvous.get("joiningWindowSeconds"),
        join_timeout=rendezvous.get("joinTimeoutSeconds"),
        lease=rendezvous.get("leaseSeconds"),
        ports=None if ports is None else (ports["first"], ports["last"]),
    )


def _etcd(etcd: Json) -> EtcdSpec:
    return EtcdSpec(
        endpoint=etcd.get("endpoint"),
        tls_secret=etcd.get("tlsSecret"),
        image=etcd.get("image"),
        resources=etcd.get("resources") or {},
        storage=etcd.get("storage"),
    )
