"""The template of a job's pods: what it says of the container ``worker``, and what it may not say.

The CRD leaves it opaque, so it may be anything. What the operator itself reads of it is checked here, as is what would
be said twice; on everything else the API server has the word, when pods are made.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Final

from elastic_operator.archived import WORKER
from elastic_operator.names import CHECKPOINT_FOLDER, ETCD_TLS_FOLDER, METRICS_PORT, OWN_PREFIX
from elastic_operator.pod_ending import least_period
from elastic_operator.problem import shown
from elastic_operator.unchecked import at, integer, listing, mapping, mappings

__all__ = ["NEVER", "WORKER", "mounted_folders", "template_problem", "worker_container"]

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_operator.spec import ElasticJobSpec, Json

NEVER: Final = "Never"
"""The restart policy of every pod: only the operator replaces."""

_EACH_ITS_OWN: Final = {
    "name": "each pod has a name of its own",
    "generateName": "each pod has a name of its own",
    "namespace": "pods live in the namespace of their job",
    "ownerReferences": "pods belong to their job alone",
    "finalizers": "pods go with their job",
}


def worker_container(spec: ElasticJobSpec) -> Json:
    """The template's container ``worker``; an empty one where the template has none."""
    containers = mappings(spec.template, "spec", "containers")
    return next((container for container in containers if container.get("name") == WORKER), {})


def mounted_folders(container: Json) -> frozenset[str]:
    """The folders where a container has volumes."""
    paths = (mount.get("mountPath") for mount in mappings(container, "volumeMounts"))
    return frozenset(posixpath.normpath(path) for path in paths if isinstance(path, str) and path)


def template_problem(spec: ElasticJobSpec) -> str | None:
    """What the template must not say, or lacks, in a sentence; None where all is well."""
    for source, said in (spec.checkpoint_volume or {}).items():
        if source == "name" or not isinstance(said, dict):
            return (
                f"spec.checkpoint.volume has {shown(source)} with {shown(said)}, which is no source of a volume, such "
                "as persistentVolumeClaim with its claimName"
            )
    if not spec.template:
        return None
    return next(_problems(spec, worker_container(spec)), None)


def _problems(spec: ElasticJobSpec, worker: Json) -> Iterator[str]:
    yield from _shapes(spec, worker)
    yield from _of_metadata(mapping(spec.template, "metadata"))
    pod = mapping(spec.template, "spec")
    yield from _of_restarts(pod, worker)
    if pod.get("hostname") is not None:
        yield "hostname of the template is given, but each pod has one of its own, <job>-<index>; remove it"
    period = integer(pod, "terminationGracePeriodSeconds")
    if period is not None and spec.grace_period is not None and period < (least := least_period(spec.grace_period)):
        yield (
            f"spec.gracePeriodSeconds is {spec.grace_period}, but terminationGracePeriodSeconds of the template gives "
            f"the whole pod {period}; remove that, or make it {least} or more"
        )
    if any(port.get("name") == METRICS_PORT for port in mappings(worker, "ports")):
        yield (
            f"the template's container {WORKER} has a port named {METRICS_PORT}, which is the agent's own; give it "
            "another name"
        )
    for field, given, folder in (
        ("spec.checkpoint.volume", spec.checkpoint_volume, CHECKPOINT_FOLDER),
        ("spec.etcd.tlsSecret", spec.etcd.tls_secret, ETCD_TLS_FOLDER),
    ):
        if given and folder in mounted_folders(worker):
            yield (
                f"{field} and a mount of the template's container {WORKER} at {folder} are both given; "
                "remove one of the two"
            )
    for field, said, name in (
        ("spec.schedulingPolicy.schedulerName", spec.scheduling.scheduler_name, "schedulerName"),
        ("spec.schedulingPolicy.gang, whose scheduler it is,", spec.scheduling.gang, "schedulerName"),
        ("spec.schedulingPolicy.priorityClassName", spec.scheduling.priority_class, "priorityClassName"),
    ):
        if said and pod.get(name):
            yield f"{field} and {name} of the template are both given; remove one of the two"
    if not (spec.image or worker.get("image")):
        yield f"neither spec.image nor the template's container {WORKER} names an image; give one of the two"
    if not (spec.command or spec.args or worker.get("command") or worker.get("args")):
        yield f"neither spec.args nor the template's container {WORKER} names a program; give args in one of the two"


def _of_restarts(pod: Json, worker: Json) -> Iterator[str]:
    for where, restarts in (("template", pod), (f"template's container {WORKER}", worker)):
        if restarts.get("restartPolicy") not in (None, NEVER):
            yield (
                f"restartPolicy of the {where} is {shown(restarts['restartPolicy'])}, but pods are replaced and never "
                "restarted; remove it"
            )
    if worker.get("restartPolicyRules"):
        yield (
            f"restartPolicyRules of the template's container {WORKER} are given, but pods are replaced and never "
            "restarted; remove them"
        )


def _shapes(spec: ElasticJobSpec, worker: Json) -> Iterator[str]:
    """Where something else stands than what the operator reads."""
    containers = at(spec.template, "spec", "containers")
    if not _is_list_of(containers, dict):
        yield f"containers of the template's spec must be a list of containers, and not {shown(containers)}"
    if not _is_list_of(worker.get("env"), dict):
        yield (
            f"env of the template's container {WORKER} must be a list of names with values, and not "
            f"{shown(worker['env'])}"
        )
    for name in ("command", "args"):
        value = worker.get(name)
        if not _is_list_of(value, object):
            yield f"{name} of the template's container {WORKER} must be a list of texts, and not {shown(value)}"
        for position, item in enumerate(listing(value)):
            if not isinstance(item, str):
                yield (
                    f"{name}[{position}] of the template's container {WORKER} is {shown(item)} and not a text; put it "
                    "in quotes"
                )


def _of_metadata(metadata: Json) -> Iterator[str]:
    for field, why in _EACH_ITS_OWN.items():
        if metadata.get(field):
            yield f"metadata.{field} of the template is given, but {why}; remove it"
    for kind in ("labels", "annotations"):
        for key in mapping(metadata, kind):
            if str(key).startswith(OWN_PREFIX):
                yield f"{kind} of the template name {key}, which only the operator sets; remove it"


def _is_list_of(value: object, kind: type) -> bool:
    """Whether it is a list of such things; what is not there counts as one."""
    return value is None or (isinstance(value, list) and all(isinstance(item, kind) for item in value))
