"""Evaluates the rules in CEL that stand in the CRD, as a Kubernetes API server does.

A rule stands at a place in the schema and sees the value there as ``self``. One that names ``oldSelf`` compares with
the value before the change: it is left out where there is none, unless it says ``optionalOldSelf: true``; then
``oldSelf`` is an optional value, asked by ``hasValue()`` and ``value()``. Rules see declared fields only, never the
inside of what is opaque.
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

from elastic_operator.problem import Location, Problem, shown
from elastic_operator.structural import Schema, field_schema

if TYPE_CHECKING:
    from celpy.celtypes import Value
    from celpy.evaluation import Context, Result

_OLD_SELF = re.compile(r"\boldSelf\b")
_REFERENCE = re.compile(r"\bself((?:\.\w+)*)")
_LONGEST_VALUE_TOLD = 80

Old = tuple[()] | tuple[object]
"""The value before the change, or nothing where there was none."""


def broken_rules(value: object, schema: Schema, old: Old = (), location: Location = ()) -> Iterator[Problem]:
    """The rules that the value breaks, here and below.

    Args:
        value: what to check; it has passed the schema, and the defaults are applied.
        schema: its structural schema.
        old: the value before the change.
        location: where the value stands.
    """
    if value is None:
        return
    for rule in schema.get("x-kubernetes-validations", ()):
        if not _holds(rule, value, schema, old):
            at = tuple(step for step in rule.get("fieldPath", "").split(".") if step)
            yield Problem((*location, *at), rule["message"] + _told(rule["rule"], value))
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from broken_rules(below, field_schema(schema, key), _old_field(old, key), (*location, key))
    elif isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys", ())
        for index, item in enumerate(value):
            before = _old_item(old, item, keys)
            yield from broken_rules(item, schema.get("items", {}), before, (*location, index))


def _holds(rule: Mapping[str, Any], value: object, schema: Schema, old: Old) -> bool:
    """Whether the value keeps the rule; one that cannot be evaluated is broken."""
    variables = {"self": _cel(value, schema)}
    if _OLD_SELF.search(rule["rule"]):
        before = [_cel(one, schema) for one in old]
        if rule.get("optionalOldSelf"):
            variables["oldSelf"] = celtypes.ListType(before)
        elif before:
            variables["oldSelf"] = before[0]
        else:
            return True
    try:
        return bool(_program(rule["rule"])(variables))
    except CELEvalError:
        return False


@functools.cache
def _program(rule: str) -> Callable[[Context], Value]:
    """The rule, compiled."""
    environment = celpy.Environment()
    program = environment.program(environment.compile(rule), functions={"hasValue": _has_value, "value": _value})
    return program.evaluate


def _has_value(optional: Result) -> Result:
    """Whether the optional value is there; celpy hands errors on as values."""
    return celtypes.BoolType(len(optional) > 0) if isinstance(optional, celtypes.ListType) else optional


def _value(optional: Result) -> Result:
    """The optional value; an error as a value where it is not there, since celpy evaluates both sides of an ``&&``."""
    if not isinstance(optional, celtypes.ListType):
        return optional
    return optional[0] if optional else CELEvalError("there is no old value")


def _cel(value: object, schema: Schema) -> Value:
    """The declared part of a value, in CEL's types."""
    if isinstance(value, Mapping):
        known = {key: field_schema(schema, key) for key in value if value[key] is not None}
        return celtypes.MapType({celtypes.StringType(k): _cel(value[k], below) for k, below in known.items() if below})
    if isinstance(value, list):
        return celtypes.ListType([_cel(item, schema.get("items", {})) for item in value])
    return json_to_cel(cast("str | int | float | bool", value))


def _old_field(old: Old, key: str) -> Old:
    """The value of a mapping's field before the change."""
    return (old[0][key],) if old and isinstance(old[0], Mapping) and old[0].get(key) is not None else ()


def _old_item(old: Old, item: object, keys: list[str]) -> Old:
    """The item of the same key before the change; only items that go by a key can be told apart."""
    if not keys or not old or not isinstance(old[0], list) or not isinstance(item, Mapping):
        return ()
    mappings = [one for one in old[0] if isinstance(one, Mapping)]
    same = [one for one in mappings if all(one.get(key) == item.get(key) for key in keys)]
    return (same[0],) if same else ()


def _told(rule: str, value: object) -> str:
    """The values that the rule speaks of, as the end of a sentence: what an API server's message leaves out."""
    told: dict[str, str] = {}
    for reference in _REFERENCE.findall(rule):
        current, name = value, "it"
        for step in reference.split(".")[1:]:
            if isinstance(current, Mapping) and step in current:
                current, name = current[step], step
        if isinstance(current, str | int | float) and len(shown(current)) <= _LONGEST_VALUE_TOLD:
            told[name] = f"{name} is {shown(current)}"
    return f" ({', '.join(told.values())})" if told else ""
