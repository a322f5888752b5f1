"""The object of a job that runs on this machine, the equivalent of the object in an API server.

A change is validated as a whole, as on a cluster; a rejected change has no effect. Some fields of a manifest have no
effect when pods are processes; one warning names them. The warning omits the image, which every manifest has, and
labels, annotations, and security settings.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from elastic_operator.api.json_values import get_dict, get_dicts, get_value, rfc3339
from elastic_operator.api.spec import (
    MANAGER,
    WORKER,
    CleanPodPolicy,
    ElasticJobSpec,
    FailurePolicy,
    SchedulingSpec,
    current_spec,
)
from elastic_operator.api.status import status_to_json
from elastic_operator.api.validation import Problem, error_list, problem_of
from elastic_operator.controller.model import Job
from elastic_operator.errors import BadInput
from elastic_operator.manifest import crd
from elastic_operator.manifest.loader import ElasticJobManifest, Manifest, with_defaults

if TYPE_CHECKING:
    from elastic_operator.api.json_values import Json

_POD_FIELDS: Final = frozenset(
    {
        *("containers", "restartPolicy", "terminationGracePeriodSeconds", "securityContext"),
        *("automountServiceAccountToken", "enableServiceLinks", "hostIPC", "hostNetwork", "hostPID"),
    }
)
_CONTAINER_FIELDS: Final = frozenset({"name", "image", "command", "args", "env", "securityContext"})
_NO_EFFECT: Final = {
    "managedBy": MANAGER,
    "cleanPodPolicy": CleanPodPolicy.RUNNING,
    "nodeLossSeconds": 15,
    "disruptionBudget": False,
    "metricsPort": 0,
    **dict.fromkeys(("ttlSecondsAfterFinished", "schedulingPolicy", "rendezvous.ports", "checkpoint.volume")),
    **dict.fromkeys(("etcd.tlsSecret", "etcd.image", "etcd.resources", "etcd.storage")),
}
"""Fields without effect on this machine, each with the value that has no effect on a cluster either."""


class LiveJob:
    """One job that runs on this machine.

    Attributes:
        job: the job as the reconciler sees it, with its latest status.
        key: the key of the job in the reconciler: namespace/name.
        manifest: the live object, without its status.
    """

    def __init__(self, given: ElasticJobManifest, *, uid: str, created: float) -> None:
        """Create a job from a manifest, at ``created`` seconds since the Unix epoch."""
        spec = supported(given.spec)
        self.job = Job(
            given.name, given.namespace, uid, generation=1, spec=spec, created=created, problem=problem_of(spec)
        )
        self.key = f"{given.namespace}/{given.name}"
        self._applied = given.source
        self.manifest = self._as_object(given.job)

    def patch(self, fields: Json) -> bool:
        """Set fields of the spec, as ``kubectl patch`` does; return whether the job changes.

        Raises:
            BadInput: the result is not valid, or the job has ended.
        """
        self._check_alive()
        changed = {**self.manifest, "spec": {**self.manifest["spec"], **fields}}
        if problems := crd.validate(changed, old=self.manifest):
            raise BadInput(error_list(problems))
        return self._take(changed)

    def apply(self, file: Manifest) -> bool:
        """Apply a file, as ``kubectl apply`` does; return whether the job changes.

        A field is removed if the last applied file has it and this file does not. Other fields that are missing in this
        file are kept.

        Raises:
            BadInput: the result is not valid, the job has ended, or the file changes a field that must stay the same.
        """
        self._check_alive()
        live, data = self.manifest, dict(file.data)
        if isinstance(metadata := data.get("metadata"), Mapping):
            data["metadata"] = {"namespace": live["metadata"]["namespace"], **metadata}
        if isinstance(spec := data.get("spec"), Mapping):
            named = self._applied.data["spec"]
            kept = {name: value for name, value in live["spec"].items() if named.get(name) is None}
            data["spec"] = {**kept, **{name: value for name, value in spec.items() if value is not None}}
        if problems := crd.validate(data, old={**live, "status": status_to_json(self.job.status)}):
            raise file.bad_input(problems)
        changed = with_defaults(file, data)
        same = {
            ("metadata", "name"): changed.name == self.job.name,
            ("metadata", "namespace"): changed.namespace == self.job.namespace,
            ("spec", "etcd", "endpoint"): changed.spec.etcd.endpoint == self.job.spec.etcd.endpoint,
        }
        sentence = (
            "cannot be set, changed or removed while the job exists; undo that, or delete the job and run it again"
        )
        if problems := [Problem(location, sentence) for location, is_same in same.items() if not is_same]:
            raise file.bad_input(problems)
        self._applied = file
        return self._take(changed.job)

    def set_replicas(self, replicas: int) -> None:
        """Set the number of pods that the plan chose because the user gave none."""
        self._take({**self.manifest, "spec": {**self.manifest["spec"], "replicas": replicas}})

    def delete(self) -> None:
        """Begin the deletion of the job."""
        self.job = dataclasses.replace(self.job, deleting=True)

    def _check_alive(self) -> None:
        job = self.job
        if job.deleting or job.status.finished:
            how = "is being deleted" if job.deleting else f"has ended ({job.status.state})"
            raise BadInput(f"the job {job.name} {how} and can no longer be changed")

    def _take(self, changed: Json) -> bool:
        if changed["spec"] != self.manifest["spec"]:
            spec, generation = supported(ElasticJobSpec.of(changed["spec"])), self.job.generation + 1
            self.job = dataclasses.replace(self.job, spec=spec, generation=generation, problem=problem_of(spec))
        before, self.manifest = self.manifest, self._as_object(changed)
        return before != self.manifest

    def _as_object(self, job: Json) -> dict[str, Any]:
        """Return the object with the metadata that an API server writes."""
        written: dict[str, Any] = copy.deepcopy(dict(job))
        written["metadata"] |= {
            "uid": self.job.uid,
            "generation": self.job.generation,
            "creationTimestamp": rfc3339(self.job.created),
        }
        return written


def supported(spec: ElasticJobSpec) -> ElasticJobSpec:
    """Return the spec with neutral values in the fields that this machine does not support."""
    return replace(
        spec,
        ttl_after_finished=None,
        clean_pod_policy=CleanPodPolicy.RUNNING,
        failure_policy=FailurePolicy(tuple(rule for rule in spec.failure_policy.rules if rule.exit_codes is not None)),
        scheduling=SchedulingSpec(),
        rendezvous=replace(spec.rendezvous, ports=None),
        etcd=replace(spec.etcd, tls_secret=None),
        disruption_budget=False,
    )


def unsupported_fields(spec: Json) -> Iterator[str]:
    """Yield the paths, below ``spec``, of the given fields that have no effect on this machine."""
    spec = current_spec(spec)
    yield from _values_from("env", spec.get("env"))
    yield from (
        path for path, neutral in _NO_EFFECT.items() if get_value(spec, *path.split(".")) not in (None, {}, neutral)
    )
    for position, rule in enumerate(get_dicts(spec.get("failurePolicy"), "rules")):
        fields = ("onPodReasons", "onPodConditions")
        yield from (f"failurePolicy.rules[{position}].{field}" for field in fields if field in rule)
    yield from _of_pod(get_dict(spec.get("template"), "spec"))


def _of_pod(pod: Json) -> Iterator[str]:
    yield from (f"template.spec.{field}" for field in pod if field not in _POD_FIELDS)
    for container in get_dicts(pod, "containers"):
        name = container.get("name")
        if name != WORKER:
            yield f"the container {name!r} of template.spec.containers"
            continue
        path = f"template.spec.containers[{name}]"
        yield from (f"{path}.{field}" for field in container if field not in _CONTAINER_FIELDS)
        yield from _values_from(f"{path}.env", container.get("env"))


def _values_from(path: str, variables: object) -> Iterator[str]:
    for variable in get_dicts(variables):
        if "valueFrom" in variable:
            name = variable.get("name")
            yield f"{path}[{name}].valueFrom (set {name} in the environment of elasticjob)"
