"""Evaluates the CEL rules in the CRD as an API server does.

A rule is part of the schema of a value, and sees that value as ``self``. A rule that names ``oldSelf`` compares it
with the value before the change, and is skipped if there is none, unless it says ``optionalOldSelf: true``; then
``oldSelf`` is an optional value with ``hasValue()`` and ``value()``. Rules see declared fields only. Rules for items of
lists must not name ``oldSelf``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import celpy
from celpy import celtypes
from celpy.adapter import json_to_cel
from celpy.evaluation import CELEvalError

from elastic_operator.api.json_values import mapping
from elastic_operator.api.validation import Location, Problem

if TYPE_CHECKING:
    from celpy.celtypes import Value
    from celpy.evaluation import Context, Result

    from elastic_operator.api.spec import Json

_OLD_SELF = re.compile(r"\boldSelf\b")


def broken_rules(value: object, schema: Json, old: object = None, location: Location = ()) -> Iterator[Problem]:
    """Yield the rules that the value breaks, here and below.

    Args:
        value: what to check; it has passed the schema, and the defaults are applied.
        schema: its structural schema.
        old: the value before the change; None if there was none.
        location: the path of the value.
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
            yield from broken_rules(below, _field_schema(schema, key), old_field, (*location, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from broken_rules(item, schema.get("items", {}), None, (*location, index))


def _field_schema(schema: Json, key: str) -> Json:
    return mapping(schema, "properties", key) or mapping(schema, "additionalProperties")


def _holds(rule: Mapping[str, Any], value: Value, old: Value | None) -> bool:
    """Return whether the value keeps the rule; a rule that cannot be evaluated is broken."""
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
    """Return whether the optional value is there; celpy passes errors on as values."""
    return celtypes.BoolType(len(optional) > 0) if isinstance(optional, celtypes.ListType) else optional


def _optional_value(optional: Result) -> Result:
    """Return the optional value, or an error as a value: celpy evaluates both sides of an ``&&``."""
    if not isinstance(optional, celtypes.ListType):
        return optional
    return optional[0] if optional else CELEvalError("there is no old value")


def _cel(value: object, schema: Json) -> Value:
    """Return the declared part of a value in CEL's types."""
    if isinstance(value, Mapping):
        known = {key: _field_schema(schema, key) for key in value if value[key] is not None}
        return celtypes.MapType({celtypes.StringType(k): _cel(value[k], below) for k, below in known.items() if below})
    if isinstance(value, list):
        return celtypes.ListType([_cel(item, schema.get("items", {})) for item in value])
    return json_to_cel(cast("str | int | float | bool", value))
