"""What the pods of a job are made from beside their number, kept as it was when the job was started or resumed.

A change of the template would otherwise reach only those pods that happen to be made after it, and two kinds of pods
would train together. So the status keeps what holds, as JSON in the words of the spec; a change takes effect when the
job is suspended and resumed. What may change at any time (sizes, budgets, times, what follows from the end) is not
among it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from elastic_operator.errors import BadInput
from elastic_operator.pods import program_of, user_env
from elastic_operator.spec import ElasticJobSpec
from elastic_operator.template import worker_container
from elastic_operator.unchecked import listing, mapping

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_operator.model import Job, Plan
    from elastic_operator.spec import EtcdSpec, ExitCodes, FailureRule, Json, RendezvousSpec, SchedulingSpec

_KEYS: Final = {
    "image": "image",
    "command": "command",
    "args": "args",
    "env": "env",
    "nproc_per_node": "nprocPerNode",
    "failure_rules": "failurePolicy",
    "scheduling": "schedulingPolicy",
    "rendezvous": "rendezvous",
    "etcd": "etcd",
    "checkpoint_volume": "checkpoint",
    "grace_period": "gracePeriodSeconds",
    "node_loss": "nodeLossSeconds",
    "metrics_port": "metricsPort",
    "template": "template",
}
"""By attribute of the typed spec, what is pinned, as the manifest calls it."""

_OF_WORKER: Final = ("image", "command", "args", "env", "template")
"""What may stand in the template or beside it."""


def pin(spec: ElasticJobSpec) -> Json:
    """What is to be kept of a spec, from which :func:`effective` makes the same spec again."""
    return {key: value for key, value in _document(spec).items() if value != _NOTHING_SAID[key]}


def effective(spec: ElasticJobSpec, pinned: Json | None) -> ElasticJobSpec:
    """The spec that holds.

    Args:
        spec: as the user has it now.
        pinned: see :func:`pin`; None where nothing is pinned.
    """
    if pinned is None:
        return spec
    sizes = {"minReplicas": spec.min_replicas, "maxReplicas": spec.max_replicas}
    kept = ElasticJobSpec.of({**sizes, **pinned})
    # What could not be meant was never pinned.
    return replace(spec, objection=None, **{name: getattr(kept, name) for name in _KEYS})


def changed(spec: ElasticJobSpec, pinned: Json | None) -> tuple[str, ...]:
    """The fields that say something else by now than what is pinned, as in ``spec.args``.

    Not those that say the same in another place, as a manifest of the first controller does that is written anew.
    """
    held = effective(spec, pinned)
    differing = {name for name in _KEYS if getattr(held, name) != getattr(spec, name)}
    if not differing.isdisjoint(_OF_WORKER) and _of_worker(held) == _of_worker(spec):
        differing.difference_update(_OF_WORKER)
    return tuple(f"spec.{key}" for name, key in _KEYS.items() if name in differing)


def as_pinned(job: Job, plan: Plan | None = None) -> Job:
    """The job with the spec that its pods and its store are made from.

    Args:
        job: as it was observed.
        plan: what is being carried out; its status may pin the spec anew. None before there is one.
    """
    status = job.status if plan is None or plan.status is None else plan.status
    return job if status.pinned is None else replace(job, spec=effective(job.spec, status.pinned))


def checked(pinned: Json) -> Json:
    """What stands in a status, if it can be understood.

    Raises:
        BadInput: it is not what :func:`pin` makes.
    """
    try:
        msgspec.convert(pinned, _Shape)
        effective(_ANY, pinned)
    except (msgspec.ValidationError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadInput(f"what is pinned in the job's status cannot be understood: {error}") from None
    return pinned


def _of_worker(spec: ElasticJobSpec) -> tuple[object, ...]:
    """What the template and the fields beside it say together, wherever it stands."""
    own = worker_container(spec)
    beside = {key: value for key, value in own.items() if key not in _OF_WORKER}
    containers = [
        beside if container is own else container for container in listing(spec.template, "spec", "containers")
    ]
    metadata = _given(mapping(spec.template, "metadata"))
    pod = {key: value for key, value in mapping(spec.template, "spec").items() if key != "containers"}
    nothing_else = containers in ([], [{"name": own.get("name")}])
    image = spec.image or own.get("image")
    return image, program_of(spec), user_env(spec), metadata, pod, [] if nothing_else else containers


class _Shape(msgspec.Struct, rename="camel"):
    image: str | None = None
    command: list[str] = []
    args: list[str] = []
    env: list[dict[str, Any]] = []
    nproc_per_node: int | str = 1
    checkpoint: dict[str, Any] | None = None
    grace_period_seconds: int | None = None
    node_loss_seconds: int = 15
    metrics_port: int | None = None
    template: dict[str, Any] = {}


def _document(spec: ElasticJobSpec) -> dict[str, Any]:
    return {
        "image": spec.image,
        "command": list(spec.command),
        "args": list(spec.args),
        "env": list(spec.env),
        "nprocPerNode": spec.nproc_per_node,
        "failurePolicy": {"rules": [_rule(rule) for rule in spec.failure_rules]},
        "schedulingPolicy": _scheduling(spec.scheduling),
        "rendezvous": _rendezvous(spec.rendezvous),
        "etcd": _etcd(spec.etcd),
        "checkpoint": _given({"volume": spec.checkpoint_volume}),
        "gracePeriodSeconds": spec.grace_period,
        "nodeLossSeconds": spec.node_loss,
        "metricsPort": spec.metrics_port,
        "template": spec.template,
    }


def _given(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if value is not None}


def _rule(rule: FailureRule) -> Json:
    codes = rule.exit_codes
    conditions = [{"type": condition.type, "status": condition.status} for condition in rule.pod_conditions]
    return _given(
        {
            "action": rule.action.value,
            "onExitCodes": None if codes is None else _exit_codes(codes),
            "onPodReasons": sorted(rule.pod_reasons) or None,
            "onPodConditions": conditions or None,
            "excludeNode": rule.exclude_node or None,
        }
    )


def _exit_codes(codes: ExitCodes) -> Json:
    return {"operator": "NotIn" if codes.negated else "In", "values": sorted(codes.values)}


def _scheduling(scheduling: SchedulingSpec) -> Json:
    return _given(
        {
            "gang": None if scheduling.gang is None else scheduling.gang.value,
            "schedulerName": scheduling.scheduler_name,
            "queue": scheduling.queue or None,
            "priorityClassName": scheduling.priority_class or None,
        }
    )


def _rendezvous(rendezvous: RendezvousSpec) -> Json:
    ports = rendezvous.ports
    return _given(
        {
            "joiningWindowSeconds": rendezvous.joining_window,
            "joinTimeoutSeconds": rendezvous.join_timeout,
            "leaseSeconds": rendezvous.lease,
            "ports": None if ports is None else {"first": ports[0], "last": ports[1]},
        }
    )


def _etcd(etcd: EtcdSpec) -> Json:
    return _given(
        {
            "endpoint": etcd.endpoint,
            "tlsSecret": etcd.tls_secret,
            "image": etcd.image,
            "resources": etcd.resources or None,
            "storage": etcd.storage,
        }
    )


_ANY: Final = ElasticJobSpec(min_replicas=1, max_replicas=1)
_NOTHING_SAID: Final = _document(_ANY)
