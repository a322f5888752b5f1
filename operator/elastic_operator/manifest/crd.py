"""Checks manifests on this machine as an API server checks them in a cluster.

``crds/elasticjob.yaml``, which the package carries as ``elasticjob.yaml``, is the one source of truth for what a job
may say. Defaults, schema and CEL rules are read from there.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, Final

import yaml

from elastic_operator.api.json_access import mapping
from elastic_operator.api.legacy import modern
from elastic_operator.api.spec import GROUP, KIND, VERSION, Json
from elastic_operator.api.validation_error import Location, Problem, shown
from elastic_operator.manifest.object_meta import metadata_problems
from elastic_operator.manifest.structural import Schema, field_schema, unknown_fields, violations

__all__ = ["CHANGEABLE", "Problem", "apply_defaults", "definition", "refused_changes", "schema", "validate"]

CHANGEABLE: Final = frozenset(
    {
        "activeDeadlineSeconds",
        "backoffLimit",
        "cleanPodPolicy",
        "disruptionBudget",
        "maxReplicas",
        "maxRestarts",
        "minReplicas",
        "replicas",
        "suspend",
        "ttlSecondsAfterFinished",
    }
)
"""Fields of the spec that may change while a job runs; the others may change while it is suspended."""
_ARCHIVED_CHANGEABLE: Final = {
    ("spec", "RunPolicy"),
    ("spec", "replicaSpecs", "Worker", "replicas"),
    ("spec", "replicaSpecs", "Worker", "restartPolicy"),
}


@functools.cache
def definition() -> Json:
    """Return the CustomResourceDefinition."""
    text = resources.files("elastic_operator").joinpath("elasticjob.yaml").read_text(encoding="utf-8")
    loaded: Json = yaml.safe_load(text)
    return loaded


@functools.cache
def schema() -> Schema:
    """Return the structural schema of the version that this operator supports."""
    versions = {version["name"]: version for version in definition()["spec"]["versions"]}
    found: Schema = versions[VERSION]["schema"]["openAPIV3Schema"]
    return found


def apply_defaults(manifest: Json) -> dict[str, Any]:
    """Return a copy of the manifest with the CRD's defaults and without nulls."""
    job = copy.deepcopy(dict(manifest))
    _default(job, schema())
    return job


def validate(manifest: Json, *, old: Json | None = None) -> list[Problem]:
    """Return what has to be changed before the manifest can be accepted.

    Rules that span fields are checked only if each field by itself is valid.

    Args:
        manifest: the object, with or without the defaults. Only the field names of its status are checked.
        old: the object before the change, with its status; None if it is to be created.
    """
    if misnamed := list(_misnamed(manifest)):
        return misnamed
    job = apply_defaults(manifest)
    checked = {key: value for key, value in job.items() if key not in ("metadata", "status")}
    violated = list(violations(checked, schema()))
    wrong = {problem.location for problem in violated}
    unknown = unknown_fields({key: value for key, value in job.items() if key != "metadata"}, schema())
    problems = [
        *metadata_problems(job.get("metadata")),
        # A mapping in a list's place is one problem, not one for each of its fields.
        *(problem for problem in unknown if problem.location[:-1] not in wrong),
        *violated,
    ]
    if problems:
        return problems
    from elastic_operator.manifest.cel import broken_rules  # slow to import, and most commands do not validate

    job.pop("status", None)
    if old is None:
        return list(broken_rules(job, schema()))
    if "status" in old:
        job["status"] = old["status"]
    return list(broken_rules(job, schema(), (apply_defaults(old),)))


def refused_changes(old: Json, new: Json) -> list[Problem]:
    """Return the changes that a job on this machine cannot follow.

    While it runs, those are all but :data:`CHANGEABLE`; while it is suspended, its name, its namespace and its etcd.
    """
    before, after = _written(old), _written(new)
    differences = [*_differences(before, after, ())]
    if before["spec"].get("suspend") or after["spec"].get("suspend"):
        never = "while the job exists; undo that, or delete the job and run it again"
        problems = [
            Problem(location, f"{change} {never}")
            for location, change in differences
            if location[:2] in (("metadata", "name"), ("metadata", "namespace"))
        ]
        if len({mapping(modern(spec), "etcd").get("endpoint") for spec in (before["spec"], after["spec"])}) > 1:
            problems.append(Problem(("spec", "etcd", "endpoint"), f"cannot be set, changed or removed {never}"))
        return problems
    return [
        Problem(location, f"{change} while the job runs; undo that, or suspend the job, change it, and resume the job")
        for location, change in differences
        if not (location[0] == "spec" and location[1:2] and location[1] in CHANGEABLE)
        and not {location[:2], location[:4]} & _ARCHIVED_CHANGEABLE
    ]


def _misnamed(manifest: Json) -> Iterator[Problem]:
    """Check that this is an ElasticJob."""
    for key, expected in (("apiVersion", f"{GROUP}/{VERSION}"), ("kind", KIND)):
        found = manifest.get(key)
        if found is None:
            yield Problem((key,), f"this field is missing; write {key}: {expected}")
        elif found != expected:
            yield Problem((key,), f"is {found if isinstance(found, str) else shown(found)}, expected {expected}")


def _default(value: object, schema: Schema) -> None:
    """Drop nulls of declared fields and fill in defaults, in place."""
    if isinstance(value, dict):
        for key in [key for key, below in value.items() if below is None and field_schema(schema, key)]:
            del value[key]
        for key, below in schema.get("properties", {}).items():
            if "default" in below and key not in value:
                value[key] = copy.deepcopy(below["default"])
        for key in value:
            _default(value[key], field_schema(schema, key))
    elif isinstance(value, list):
        for item in value:
            _default(item, schema.get("items", {}))


def _written(job: Json) -> dict[str, Any]:
    """Return the part of an object that a person writes, with the defaults."""
    metadata = job.get("metadata") or {}
    own = {key: metadata[key] for key in ("name", "namespace", "labels", "annotations") if metadata.get(key)}
    return {"metadata": {"namespace": "default", **own}, "spec": apply_defaults(job).get("spec", {})}


def _differences(old: object, new: object, location: Location) -> Iterator[tuple[Location, str]]:
    """Yield where two objects differ, and the change."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in {**old, **new}:
            at = (*location, key)
            if key not in new:
                yield at, f"{shown(old[key])} cannot be removed"
            elif key not in old:
                yield at, f"{shown(new[key])} cannot be added"
            else:
                yield from _differences(old[key], new[key], at)
    elif type(old) is not type(new) or old != new:
        yield location, f"{shown(old)} cannot become {shown(new)}"
