"""Check manifests on this machine, as an API server with strict field validation does on a cluster.

``crds/elasticjob.yaml``, which the package contains as ``elasticjob.yaml``, is the only definition of the spec and the
status, with the defaults, the schema and the CEL rules. jsonschema checks the schema, with additional keywords of
Kubernetes, and celpy evaluates the rules. Of the metadata, only the types are checked.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, cast

import celpy
import yaml
from celpy import celtypes
from celpy.adapter import json_to_cel
from celpy.evaluation import CELEvalError, Context, Result
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

from elastic_operator.api.json_values import Json, shown
from elastic_operator.api.spec import GROUP, KIND, VERSION
from elastic_operator.api.validation import Location, Problem
from torchelastic.protocol.codec import shorten

if TYPE_CHECKING:
    from celpy.celtypes import Value

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
"""The schema of the metadata, which is the same for every kind of object and therefore in no CRD."""

_INT_OR_STRING: Final = {"type": ["integer", "string"], "minimum": -(2**63), "maximum": 2**63 - 1}
"""An API server has no integers of more than 64 bits, and celpy fails on them."""

_MAX_SENTENCE: Final = 300
_OLD_SELF: Final = re.compile(r"\boldSelf\b")


@functools.cache
def schema() -> Schema:
    """Return the structural schema of the version that this operator supports."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, but not in every build of PyYAML
    text = resources.files("elastic_operator").joinpath("elasticjob.yaml").read_bytes()
    definition = yaml.load(text, loader)  # noqa: S506 - both loaders are safe
    versions = {version["name"]: version for version in definition["spec"]["versions"]}
    found: Schema = versions[VERSION]["schema"]["openAPIV3Schema"]
    return found


@functools.cache
def _whole_schema() -> Schema:
    return {**schema(), "properties": {**schema()["properties"], "metadata": _METADATA}}


def apply_defaults(manifest: Json) -> dict[str, Any]:
    """Return a copy of the manifest with the CRD's defaults and without nulls in declared fields."""
    job = copy.deepcopy(dict(manifest))
    _default(job, _whole_schema())
    return job


def validate(manifest: Json, *, old: Json | None = None) -> list[Problem]:
    """Return the problems for which an API server would reject the manifest.

    CEL rules are checked only if there are no other problems.

    Args:
        manifest: the object, with or without the defaults. Only the field names of its status are checked.
        old: the object before the change, with its status if a rule may use it; None for a new object.
    """
    if misnamed := list(_misnamed(manifest)):
        return misnamed
    job = {"metadata": {}, **apply_defaults(manifest)}
    errors = _Validator(_whole_schema()).iter_errors({key: value for key, value in job.items() if key != "status"})
    violated = [Problem(tuple(error.absolute_path), _sentence(error)) for error in errors]
    wrong = {problem.location for problem in violated}
    # Report a mapping in place of a list as one problem, not as one for each field of the mapping.
    unknown = [each for each in unknown_fields(job, _whole_schema()) if each.location[:-1] not in wrong]
    if problems := [*unknown, *violated]:
        return problems
    job.pop("status", None)
    if old is None:
        return list(_broken_rules(job, schema(), None))
    if "status" in old:
        job["status"] = old["status"]
    return list(_broken_rules(job, schema(), apply_defaults(old)))


def _misnamed(manifest: Json) -> Iterator[Problem]:
    """Yield the problems of ``apiVersion`` and ``kind``."""
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


def unknown_fields(value: object, schema: Schema, location: Location = ()) -> Iterator[Problem]:
    """Yield a problem for each field that the schema does not declare."""
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
    """Return the schema of a field of a mapping; an empty schema if the field is not declared."""
    known: Schema = schema.get("properties", {}).get(key) or schema.get("additionalProperties") or {}
    return known


def _suggestion(key: str, properties: Schema) -> str:
    """Return the end of a sentence about an unknown field: what to do instead."""
    owners = [name for name, schema in properties.items() if key in schema.get("properties", {})]
    if owners:
        return f" at this level; it belongs below {owners[0]}"
    folded = {name.lower().replace("_", ""): name for name in properties}
    close = difflib.get_close_matches(key.lower().replace("_", ""), folded, n=1, cutoff=0.7)
    return f"; did you mean {folded[close[0]]}?" if close else "; remove it"


def _required(_: object, names: list[str], value: object, _schema: object) -> _Errors:
    """Check required fields as in JSON Schema, but report the missing field as the location of the error."""
    if isinstance(value, Mapping):
        missing = "this field is missing; it must be set"
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
            yield ValidationError(f"{shown(identity)} is in this list twice; remove one of the entries", path=[index])
        seen.add(exactly)


KEYWORDS: Final[Mapping[str, Any]] = {
    "required": _required,
    "x-kubernetes-int-or-string": _int_or_string,
    "x-kubernetes-list-type": _unique,
    "x-kubernetes-list-map-keys": _unique,
}
"""The keywords that jsonschema does not check as an API server does, each with its check."""

_Validator = extend(Draft202012Validator, KEYWORDS)


def _sentence(error: ValidationError) -> str:
    """Return what is wrong, and what to change if that is known."""
    if error.validator == "pattern":
        expected = str(error.schema.get("description", "")).removesuffix(".")
        return f"{shown(error.instance)} is not valid; expected: {expected}"
    if error.validator == "type" and "string" in error.validator_value and isinstance(error.instance, int | float):
        return f"{shown(error.instance)} is not a string; put it into quotes"
    return shorten(error.message, _MAX_SENTENCE)


def _broken_rules(value: object, schema: Schema, old: object, location: Location = ()) -> Iterator[Problem]:
    """Yield a problem for each CEL rule that is broken, at this level or below, by a valid value with its defaults.

    A rule sees the declared fields of its value as ``self``. A rule that names ``oldSelf`` compares it with the value
    before the change, and is skipped if there is none. With ``optionalOldSelf: true``, a rule is never skipped, and
    ``oldSelf`` is an optional value with ``hasValue()`` and ``value()``. List items have no value before the change.
    """
    if value is None:
        return
    if rules := schema.get("x-kubernetes-validations"):
        converted, before = _cel(value, schema), None if old is None else _cel(old, schema)
        for rule in rules:
            if not _holds(rule, converted, before):
                at = tuple(step for step in rule.get("fieldPath", "").split(".") if step)
                yield Problem((*location, *at), rule["message"])
    if isinstance(value, Mapping):
        for key, below in value.items():
            old_field = old.get(key) if isinstance(old, Mapping) else None
            yield from _broken_rules(below, field_schema(schema, key), old_field, (*location, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _broken_rules(item, schema.get("items", {}), None, (*location, index))


def _holds(rule: Mapping[str, Any], value: Value, old: Value | None) -> bool:
    """Return whether the value follows the rule; a rule that cannot be evaluated is broken."""
    variables = {"self": value}
    if _OLD_SELF.search(rule["rule"]):
        if rule.get("optionalOldSelf"):
            variables["oldSelf"] = celtypes.ListType([] if old is None else [old])
        elif old is not None:
            variables["oldSelf"] = old
        else:
            return True
    try:
        return bool(_program(rule["rule"])(variables))
    except CELEvalError:
        return False


@functools.cache
def _program(rule: str) -> Callable[[Context], Value]:
    environment = celpy.Environment()
    functions = {"hasValue": _has_value, "value": _optional_value}
    return environment.program(environment.compile(rule), functions=functions).evaluate


def _has_value(optional: Result) -> Result:
    """Return whether the optional value is present; celpy passes errors as values."""
    return celtypes.BoolType(len(optional) > 0) if isinstance(optional, celtypes.ListType) else optional


def _optional_value(optional: Result) -> Result:
    """Return the optional value, or an error as a value, because celpy evaluates both sides of ``&&``."""
    if not isinstance(optional, celtypes.ListType):
        return optional
    return optional[0] if optional else CELEvalError("there is no old value")


def _cel(value: object, schema: Schema) -> Value:
    """Return the declared part of a value in CEL's types."""
    if isinstance(value, Mapping):
        known = {key: field_schema(schema, key) for key in value if value[key] is not None}
        return celtypes.MapType({celtypes.StringType(k): _cel(value[k], below) for k, below in known.items() if below})
    if isinstance(value, list):
        return celtypes.ListType([_cel(item, schema.get("items", {})) for item in value])
    return json_to_cel(cast("str | int | float | bool", value))
