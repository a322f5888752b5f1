"""Checks a value against the structural schema of a CRD, as an API server does under strict field validation.

jsonschema checks; Kubernetes' keywords are added to its own. Each problem is described in a sentence.
Rules in CEL are in :mod:`elastic_operator.manifest.cel`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

from elastic_operator.api.json_values import shown
from elastic_operator.api.validation import Location, Problem

Schema = Mapping[str, Any]
_Errors = Iterator[ValidationError]

_INT_OR_STRING: Final = {"type": ["integer", "string"], "minimum": -(2**63), "maximum": 2**63 - 1}
"""An API server has no integers beyond 64 bits, and celpy fails on them."""

_TYPES: Final = {
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "object": "a mapping (fields with values)",
    "array": "a list",
}


def violations(value: object, schema: Schema) -> Iterator[Problem]:
    """Yield what is wrong with a value whose defaults are applied; the schema is that of a CRD."""
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
    """Return what was probably meant, as the end of a sentence."""
    owners = [name for name, schema in properties.items() if key in schema.get("properties", {})]
    if owners:
        return f" here; it belongs below {owners[0]}"
    folded = {name.lower().replace("_", ""): name for name in properties}
    close = difflib.get_close_matches(key.lower().replace("_", ""), folded, n=1, cutoff=0.7)
    if close:
        return f"; did you mean {folded[close[0]]}?"
    return f"; remove it, or write one of {_listed(sorted(properties))}" if properties else "; remove it"


def _required(_: object, names: list[str], value: object, _schema: object) -> _Errors:
    """As in JSON Schema, but the location of the error is the missing field."""
    if isinstance(value, Mapping):
        yield from (ValidationError("missing", path=[name]) for name in names if name not in value)


def _pattern(_: object, pattern: str, value: object, _schema: object) -> _Errors:
    """As in JSON Schema, but ``$`` matches only at the end of the text."""
    if isinstance(value, str) and not re.search(re.sub(r"\$$", r"\\Z", pattern), value):
        yield ValidationError("does not match")


def _int_or_string(_: object, _keyword: object, value: object, _schema: object) -> _Errors:
    yield from Draft202012Validator(_INT_OR_STRING).iter_errors(value)


def _unique(_: object, keys: object, items: object, _schema: object) -> _Errors:
    """Check that the items of a set, or of a list that goes by keys, differ."""
    seen: set[str] = set()
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if keys == "set":
            identity: dict[str, Any] = {"": item}
        elif isinstance(keys, list) and isinstance(item, Mapping):
            identity = {key: item.get(key) for key in keys}
        else:
            continue
        if (exactly := json.dumps(identity)) in seen:
            words = ", ".join(f"{key} {shown(part)}".lstrip() for key, part in identity.items())
            yield ValidationError(f"{words} is in this list already; remove one of the two", path=[index])
        seen.add(exactly)


KEYWORDS: Final[Mapping[str, Any]] = {
    **{
        name: Draft202012Validator.VALIDATORS[name]
        for name in (
            *("type", "properties", "additionalProperties", "items", "enum", "minimum", "maximum"),
            *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "propertyNames"),
        )
    },
    "required": _required,
    "pattern": _pattern,
    "x-kubernetes-int-or-string": _int_or_string,
    "x-kubernetes-list-type": _unique,
    "x-kubernetes-list-map-keys": _unique,
}
"""The keywords that :func:`violations` checks."""

_Validator = extend(Draft202012Validator, KEYWORDS)


def _sentence(error: ValidationError) -> str:
    """Return what is wrong and what to change."""
    value, limit = error.instance, error.validator_value
    match error.validator:
        case "required":
            return "this field is missing; it must be given"
        case "type":
            return _type_sentence(value, [limit] if isinstance(limit, str) else limit)
        case "enum":
            return f"{shown(value)} is not possible here; write {_listed([shown(one) for one in limit])}"
        case "pattern":
            expected = str(error.schema.get("description", "")).removesuffix(".")
            return f"{shown(value)} is not possible here; expected is: {expected}"
        case "minimum" | "maximum" as bound:
            small, smallest = ("small", "smallest") if bound == "minimum" else ("large", "largest")
            return f"{shown(value)} is too {small}; the {smallest} number possible is {limit}"
        case "minLength" | "minItems" | "minProperties":
            return "must not be empty" if limit == 1 else f"has {len(value)} entries; at least {limit} are needed"
        case "maxLength" | "maxItems" as bound:
            return f"has {len(value)} {'items' if bound == 'maxItems' else 'characters'}; at most {limit} are possible"
        case "maxProperties":
            number = "only one is" if limit == 1 else f"at most {limit} are"
            return f"has {len(value)} fields, {shown(list(value))}; {number} possible"
        case _:
            return str(error.message)


def _type_sentence(value: object, expected: list[str]) -> str:
    """Return what to do about a value of the wrong type."""
    wanted = _listed([_TYPES[name] for name in expected])
    if value is None:
        return f"nothing is given; {wanted} is expected"
    if "string" in expected and isinstance(value, int | float):
        return f"{shown(value)} is not {wanted}; write it in quotes"
    if "integer" in expected and isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
        return f"{shown(value)} is a text and not {wanted}; write it without quotes"
    if expected == ["array"] and not isinstance(value, Mapping):
        return f"{shown(value)} is not a list; write it in brackets"
    return f"{shown(value)} is not {wanted}"


def _listed(words: list[str]) -> str:
    """Return words as an enumeration: "a, b or c"."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
