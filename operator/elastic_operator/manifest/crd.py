"""Checks manifests on this machine as an API server checks them in a cluster.

``crds/elasticjob.yaml``, which the package carries as ``elasticjob.yaml``, is the one source of truth for the spec and
the status. Defaults, schema and CEL rules are read from it. The metadata is the same for every kind of object, so no
CRD describes it; its schema is here.
"""

from __future__ import annotations

import copy
import functools
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

import yaml

from elastic_operator.api.json_values import shown
from elastic_operator.api.spec import GROUP, KIND, VERSION, Json
from elastic_operator.api.validation import Problem
from elastic_operator.manifest.structural import Schema, field_schema, unknown_fields, violations

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Problem", "apply_defaults", "definition", "schema", "validate"]

_TEXT: Final[Schema] = {"type": "string"}
_NUMBER: Final[Schema] = {"type": "integer"}
_OBJECTS: Final[Schema] = {"type": "array", "items": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
_NAME: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_NAME_WORDS: Final = (
    "at most 63 letters, digits and -_. that begin and end with a letter or digit; "
    "in a key, a DNS name and a slash may precede them"
)


def _texts(dns: str, value: Schema) -> Schema:
    """Return the schema of labels or annotations; ``dns`` are the characters of a part of a DNS name."""
    part = f"[{dns}0-9]([-{dns}0-9]*[{dns}0-9])?"
    key = {"pattern": rf"^((?=.{{1,253}}/){part}(\.{part})*/)?{_NAME}$", "description": _NAME_WORDS}
    return {"type": "object", "propertyNames": key, "additionalProperties": value}


_METADATA: Final[Schema] = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "annotations": _texts("A-Za-z", _TEXT),
        "creationTimestamp": _TEXT,
        "deletionGracePeriodSeconds": _NUMBER,
        "deletionTimestamp": _TEXT,
        "finalizers": {"type": "array", "items": _TEXT},
        "generateName": _TEXT,
        "generation": _NUMBER,
        "labels": _texts("a-z", {**_TEXT, "pattern": f"^({_NAME})?$", "description": _NAME_WORDS}),
        "managedFields": _OBJECTS,
        "name": {**_TEXT, "minLength": 1},
        "namespace": {
            **_TEXT,
            "pattern": "^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$",
            "description": "at most 63 small letters, digits and dashes that begin and end with a letter or digit",
        },
        "ownerReferences": _OBJECTS,
        "resourceVersion": _TEXT,
        "selfLink": _TEXT,
        "uid": _TEXT,
    },
}
_MAX_ANNOTATION_BYTES: Final = 256 * 1024


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


@functools.cache
def _whole_schema() -> Schema:
    return {**schema(), "properties": {**schema()["properties"], "metadata": _METADATA}}


def apply_defaults(manifest: Json) -> dict[str, Any]:
    """Return a copy of the manifest with the CRD's defaults and without nulls."""
    job = copy.deepcopy(dict(manifest))
    _default(job, _whole_schema())
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
    job = {"metadata": {}, **apply_defaults(manifest)}
    violated = list(violations({key: value for key, value in job.items() if key != "status"}, _whole_schema()))
    wrong = {problem.location for problem in violated}
    # A mapping in a list's place is one problem, not one for each of its fields.
    unknown = [each for each in unknown_fields(job, _whole_schema()) if each.location[:-1] not in wrong]
    if problems := [*unknown, *violated, *_annotation_problems(job["metadata"])]:
        return problems
    from elastic_operator.manifest.cel import broken_rules  # slow to import, and most commands do not validate

    job.pop("status", None)
    if old is None:
        return list(broken_rules(job, schema()))
    if "status" in old:
        job["status"] = old["status"]
    return list(broken_rules(job, schema(), apply_defaults(old)))


def _misnamed(manifest: Json) -> Iterator[Problem]:
    """Check that this is an ElasticJob."""
    for key, expected in (("apiVersion", f"{GROUP}/{VERSION}"), ("kind", KIND)):
        found = manifest.get(key)
        if found is None:
            yield Problem((key,), f"this field is missing; write {key}: {expected}")
        elif found != expected:
            yield Problem((key,), f"is {found if isinstance(found, str) else shown(found)}, expected {expected}")


def _annotation_problems(metadata: object) -> Iterator[Problem]:
    annotations = metadata.get("annotations") if isinstance(metadata, dict) else None
    size = (
        sum(len(f"{key}{value}".encode()) for key, value in annotations.items()) if isinstance(annotations, dict) else 0
    )
    if size > _MAX_ANNOTATION_BYTES:
        at = ("metadata", "annotations")
        yield Problem(at, f"have {size} bytes in all; at most {_MAX_ANNOTATION_BYTES} are possible")


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
