"""The CRD, read and applied to manifests on this machine as an API server applies it in a cluster.

``crds/elasticjob.yaml`` is the one source of truth for what a job may say; it comes with the package as
``elasticjob.yaml``. Nothing in this module repeats a rule of it: its defaults, its schema and its CEL rules are read
from there. What this module accepts and refuses is what an API server under strict field validation does.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, Final

import yaml

from elastic_operator.archived import modern
from elastic_operator.objectmeta import metadata_problems
from elastic_operator.problem import Location, Problem, shown
from elastic_operator.spec import GROUP, KIND, VERSION, Json
from elastic_operator.structural import Schema, field_schema, repeated_keys, unknown_fields, violations
from elastic_operator.unchecked import mapping

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
"""Fields of the spec that may change while a job runs; all others may while it is suspended."""

_OWN_METADATA: Final = ("name", "namespace", "labels", "annotations")
"""What a person writes of the metadata; the rest is bookkeeping."""


@functools.cache
def definition() -> Json:
    """The CustomResourceDefinition."""
    text = resources.files("elastic_operator").joinpath("elasticjob.yaml").read_text(encoding="utf-8")
    loaded: Json = yaml.safe_load(text)
    return loaded


@functools.cache
def schema() -> Schema:
    """The structural schema of the version that this operator speaks."""
    versions = {version["name"]: version for version in definition()["spec"]["versions"]}
    found: Schema = versions[VERSION]["schema"]["openAPIV3Schema"]
    return found


def apply_defaults(manifest: Json) -> dict[str, Any]:
    """A copy of the manifest with the CRD's defaults; a null counts as left out, as for the API server."""
    job = copy.deepcopy(dict(manifest))
    _default(job, schema())
    return job


def validate(manifest: Json, *, old: Json | None = None) -> list[Problem]:
    """What has to be changed before the manifest can be accepted.

    Args:
        manifest: the object, with or without the defaults. Its status is not looked at: only the operator writes it.
        old: the object as it was before the change, with its status; None where it is to be created.

    Returns:
        Problems; none where it can be accepted. Rules that span fields are asked only where each field for itself is as
        it should be.
    """
    if misnamed := list(_misnamed(manifest)):
        return misnamed
    job = apply_defaults(manifest)
    spoken = {key: value for key, value in job.items() if key not in ("metadata", "status")}
    violated = list(violations(spoken, schema()))
    wrong = {problem.location for problem in violated}
    unknown = unknown_fields({key: value for key, value in job.items() if key != "metadata"}, schema())
    problems = [
        *metadata_problems(job.get("metadata")),
        # Where a mapping stands in a list's place, that is said; not that the list has no such fields.
        *(problem for problem in unknown if problem.location[:-1] not in wrong),
        *violated,
        *repeated_keys(spoken, schema()),
    ]
    if problems:
        return problems
    # Takes a tenth of a second to import; what never validates (most commands) does not pay for it.
    from elastic_operator.cel import broken_rules

    job.pop("status", None)
    if old is None:
        return list(broken_rules(job, schema()))
    if "status" in old:
        job["status"] = old["status"]
    return list(broken_rules(job, schema(), (apply_defaults(old),)))


def refused_changes(old: Json, new: Json) -> list[Problem]:
    """The changes that a job on this machine cannot follow.

    While it runs, those are all but :data:`CHANGEABLE`; while it is suspended, only what the run itself is made from.

    Args:
        old: the job as it is.
        new: the job as it is wanted.
    """
    before, after = _written(old), _written(new)
    differences = [*_differences(before, after, ())]
    if before["spec"].get("suspend") or after["spec"].get("suspend"):
        never = "while the job exists; undo that, or delete the job and run it anew"
        named = [
            Problem(location, f"{change} {never}")
            for location, change in differences
            if location[:2] in (("metadata", "name"), ("metadata", "namespace"))
        ]
        endpoints = {mapping(modern(spec), "etcd").get("endpoint") for spec in (before["spec"], after["spec"])}
        store = Problem(("spec", "etcd", "endpoint"), f"cannot be set, changed or removed {never}")
        return [*named, *([store] if len(endpoints) > 1 else [])]
    return [
        Problem(location, f"{change} while the job runs; undo that, or suspend the job, change it, and resume the job")
        for location, change in differences
        if not (len(location) > 1 and location[0] == "spec" and _follows(location))
    ]


def _follows(location: Location) -> bool:
    """Whether a job follows a change of a field of its spec while it runs."""
    if location[1] == "replicaSpecs":
        return location[2:] in (("Worker", "replicas"), ("Worker", "restartPolicy"))
    return location[1] in CHANGEABLE or location[1] == "RunPolicy"


def _misnamed(manifest: Json) -> Iterator[Problem]:
    """Whether this is another kind of object."""
    for key, expected in (("apiVersion", f"{GROUP}/{VERSION}"), ("kind", KIND)):
        found = manifest.get(key)
        if found is None:
            yield Problem((key,), f"this field is missing; write {key}: {expected}")
        elif found != expected:
            yield Problem((key,), f"is {found if isinstance(found, str) else shown(found)}, expected {expected}")


def _default(value: object, schema: Schema) -> None:
    """Fill in defaults and drop nulls, in place, as the API server does before it validates."""
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        for key in [key for key, below in value.items() if below is None]:
            below = field_schema(schema, key)
            if below and not below.get("nullable"):
                del value[key]
        for key, below in properties.items():
            if "default" in below and key not in value:
                value[key] = copy.deepcopy(below["default"])
        for key in value:
            _default(value[key], field_schema(schema, key))
    elif isinstance(value, list):
        for item in value:
            _default(item, schema.get("items", {}))


def _written(job: Json) -> dict[str, Any]:
    """The part of an object that a person writes, defaults filled in."""
    metadata = job.get("metadata") or {}
    own = {key: metadata[key] for key in _OWN_METADATA if metadata.get(key)}
    return {"metadata": {"namespace": "default", **own}, "spec": apply_defaults(job).get("spec", {})}


def _differences(old: object, new: object, location: Location) -> Iterator[tuple[Location, str]]:
    """Where two objects differ, each with what happened there and cannot."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            at = (*location, key)
            if key not in new:
                yield at, f"{shown(old[key])} cannot be removed"
            elif key not in old:
                yield at, f"{shown(new[key])} cannot be added"
            else:
                yield from _differences(old[key], new[key], at)
    elif type(old) is not type(new) or old != new:
        yield location, f"{shown(old)} cannot become {shown(new)}"
