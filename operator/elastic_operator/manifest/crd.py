"""Checks manifests on this machine as an API server with strict field validation checks them in a cluster.

``crds/elasticjob.yaml``, which the package contains as ``elasticjob.yaml``, is the only definition of the spec and the
status. Defaults, schema and CEL rules are read from it. jsonschema checks the schema, with Kubernetes' keywords in
addition to its own. Only the types of the metadata are checked. Rules in CEL are in
:mod:`elastic_operator.manifest.cel`.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, Final

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

from elastic_operator.api.json_values import shown
from elastic_operator.api.spec import GROUP, KIND, VERSION, Json
from elastic_operator.api.validation import Location, Problem
from torchelastic.protocol import shorten

Schema = Mapping[str, Any]
_Errors = Iterator[ValidationError]

_OPAQUE: Final[Schema] = {"x-kubernetes-preserve-unknown-fields": True}
_ANY: Final[Schema] = {**_OPAQUE, "items": _OPAQUE}
_TEXT: Final[Schema] = {"type": "string"}
_TEXTS: Final[Schema] = {"type": "object", "additionalProperties": _TEXT}
_METADATA: Final[Schema] = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": _TEXT,
        "namespace": _TEXT,
        "labels": _TEXTS,
        "annotations": _TEXTS,
        **dict.fromkeys(("creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers"), _ANY),
        **dict.fromkeys(("generateName", "generation", "managedFields", "ownerReferences"), _ANY),
        **dict.fromkeys(("resourceVersion", "selfLink", "uid"), _ANY),
    },
}
"""The metadata is the same for every kind of object, so no CRD describes it."""

_INT_OR_STRING: Final = {"type": ["integer", "string"], "minimum": -(2**63), "maximum": 2**63 - 1}
"""An API server has no integers beyond 64 bits, and celpy fails on them."""

_MAX_SENTENCE: Final = 300


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
    """Return the problems that must be fixed before the manifest can be accepted.

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
    if problems := [*unknown, *violated]:
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


def violations(value: object, schema: Schema) -> Iterator[Problem]:
    """Yield the violations of a CRD's schema in a value whose defaults are applied."""
    for error in _Validator(schema).iter_errors(value):
        yield Problem(tuple(error.absolute_path), _sentence(error))


def unknown_fields(value: object, schema: Schema, location: Location = ()) -> Iterator[Problem]:
    """Yield the fields that the schema does not declare."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown_fields(item, schema.get("items", {}), (*location, index))
    elif isinstance(value, Mapping):
        properties = schema.get("properties", {})
        for key, below in value.items():
            if key in properties or "additionalProperties" in schema:
                yield from unknown_fields(below, field_schema(schema, key), (*location, key))
            elif not schema.get("x-kubernetes-preserve-unknown-fields"):
                yield Problem((*location, key), f"there is no such field{_suggestion(key, properties)}")


def field_schema(schema: Schema, key: str) -> Schema:
    """Return the schema of a mapping's field; an empty one if it is not declared."""
    known: Schema = schema.get("properties", {}).get(key) or schema.get("additionalProperties") or {}
    return known


def _suggestion(key: str, properties: Schema) -> str:
    """Return the field that was probably meant, as the end of a sentence."""
    owners = [name for name, schema in properties.items() if key in schema.get("properties", {})]
    if owners:
        return f" here; it belongs below {owners[0]}"
    folded = {name.lower().replace("_", ""): name for name in properties}
    close = difflib.get_close_matches(key.lower().replace("_", ""), folded, n=1, cutoff=0.7)
    return f"; did you mean {folded[close[0]]}?" if close else "; remove it"


def _required(_: object, names: list[str], value: object, _schema: object) -> _Errors:
    """Check required fields as in JSON Schema, but report the missing field as the location of the error."""
    if isinstance(value, Mapping):
        missing = "this field is missing; it must be given"
        yield from (ValidationError(missing, path=[name]) for name in names if name not in value)


def _int_or_string(_: object, _keyword: object, value: object, _schema: object) -> _Errors:
    yield from Draft202012Validator(_INT_OR_STRING).iter_errors(value)


def _unique(_: object, keys: object, items: object, _schema: object) -> _Errors:
    """Check that the items of a set, or of a list with map keys, differ."""
    seen: set[str] = set()
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if keys == "set":
            identity = item
        elif isinstance(keys, list) and isinstance(item, Mapping):
            identity = {key: item.get(key) for key in keys}
        else:
            continue
        if (exactly := json.dumps(identity)) in seen:
            yield ValidationError(f"{shown(identity)} is in this list already; remove one of the two", path=[index])
        seen.add(exactly)


KEYWORDS: Final[Mapping[str, Any]] = {
    "required": _required,
    "x-kubernetes-int-or-string": _int_or_string,
    "x-kubernetes-list-type": _unique,
    "x-kubernetes-list-map-keys": _unique,
}
"""The keywords that :func:`violations` checks in another way than jsonschema."""

_Validator = extend(Draft202012Validator, KEYWORDS)


def _sentence(error: ValidationError) -> str:
    """Return what is wrong and what to change."""
    if error.validator == "pattern":
        expected = str(error.schema.get("description", "")).removesuffix(".")
        return f"{shown(error.instance)} is not possible here; expected is: {expected}"
    if error.validator == "type" and "string" in error.validator_value and isinstance(error.instance, int | float):
        return f"{shown(error.instance)} is not a text; write it in quotes"
    return shorten(error.message, _MAX_SENTENCE)
