"""Checks a value against a structural schema, as a Kubernetes API server does under strict field validation.

jsonschema does the checking. This module turns a CRD's schema, which is not quite JSON Schema, into one, adds what an
API server does besides (unknown fields, keys of list-maps), and says in a sentence what was found. Rules in CEL are the
matter of :mod:`elastic_operator.cel`.
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

from elastic_operator.problem import Location, Problem, shown

Schema = Mapping[str, Any]

KEYWORDS: Final = frozenset(
    {
        "enum",
        "maximum",
        "maxItems",
        "maxLength",
        "maxProperties",
        "minimum",
        "minItems",
        "minLength",
        "minProperties",
        "pattern",
        "required",
    }
)
"""Keywords of JSON Schema that are checked as they stand; type, properties, additionalProperties and items are too."""

_TYPES = {
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "object": "a mapping (fields with values)",
    "array": "a list",
}


def violations(value: object, schema: Schema, location: Location = ()) -> Iterator[Problem]:
    """What jsonschema finds in the value.

    Args:
        value: what to check, with the defaults applied.
        schema: a structural schema, as it stands in a CRD.
        location: where the value stands.
    """
    for error in _Validator(_json_schema(schema)).iter_errors(value):
        yield Problem((*location, *error.absolute_path), _sentence(error))


def unknown_fields(value: object, schema: Schema, location: Location = ()) -> Iterator[Problem]:
    """Fields that the schema does not name, in every mapping that must have no others."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown_fields(item, schema.get("items", {}), (*location, index))
    elif isinstance(value, Mapping):
        properties = schema.get("properties", {})
        for key, below in value.items():
            if key in properties:
                yield from unknown_fields(below, properties[key], (*location, key))
            elif "additionalProperties" in schema:
                yield from unknown_fields(below, schema["additionalProperties"], (*location, key))
            elif not schema.get("x-kubernetes-preserve-unknown-fields"):
                yield Problem((*location, key), f"there is no such field{_suggestion(key, properties)}")


def repeated_keys(value: object, schema: Schema, location: Location = ()) -> Iterator[Problem]:
    """Items that stand twice in a list whose items go by a key, or which is a set."""
    if isinstance(value, list):
        seen: set[str] = set()
        for index, item in enumerate(value):
            yield from repeated_keys(item, schema.get("items", {}), (*location, index))
            identity = _identity(item, schema)
            if (exactly := json.dumps(identity)) in seen:
                words = ", ".join(f"{key} {shown(part)}".lstrip() for key, part in identity.items())
                yield Problem((*location, index), f"{words} stands in this list already; remove one of the two")
            if identity:
                seen.add(exactly)
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from repeated_keys(below, field_schema(schema, key), (*location, key))


def _identity(item: object, schema: Schema) -> dict[str, Any]:
    """What no other item of the list may have in common with it, by name; nothing where they may be alike."""
    if schema.get("x-kubernetes-list-type") == "set":
        return {"": item}
    keys = schema.get("x-kubernetes-list-map-keys", ())
    return {key: item.get(key) for key in keys} if isinstance(item, Mapping) else {}


def field_schema(schema: Schema, key: str) -> Schema:
    """The schema of a mapping's field; empty where nothing is said of it."""
    known: Schema = schema.get("properties", {}).get(key) or schema.get("additionalProperties") or {}
    return known


def _suggestion(key: str, properties: Schema) -> str:
    """What was probably meant, as the end of a sentence."""
    owners = [name for name, schema in properties.items() if key in schema.get("properties", {})]
    if owners:
        return f" here; it belongs below {owners[0]}"
    folded = {name.lower().replace("_", ""): name for name in properties}
    close = difflib.get_close_matches(key.lower().replace("_", ""), folded, n=1, cutoff=0.7)
    if close:
        return f"; did you mean {folded[close[0]]}?"
    if not properties:
        return "; remove it"
    return f"; remove it, or write one of {_listed(sorted(properties), 'or')}"


def _json_schema(schema: Schema) -> dict[str, Any]:
    """The part of a structural schema that jsonschema understands, as it understands it."""
    converted: dict[str, Any] = {key: schema[key] for key in KEYWORDS & schema.keys()}
    if schema.get("x-kubernetes-int-or-string"):
        # An API server knows no integers beyond 64 bits, and CEL on this machine stumbles over them.
        converted = {"type": ["integer", "string"], "minimum": -(2**63), "maximum": 2**63 - 1, **converted}
    elif "type" in schema:
        converted["type"] = [schema["type"]]
    if "pattern" in schema:
        converted["description"] = schema.get("description", "")
    if schema.get("nullable") and "type" in converted:
        converted["type"].append("null")
    if "properties" in schema:
        converted["properties"] = {key: _json_schema(below) for key, below in schema["properties"].items()}
    for key in ("additionalProperties", "items"):
        if key in schema:
            converted[key] = _json_schema(schema[key])
    return converted


def _required(_validator: object, names: list[str], instance: object, _schema: object) -> Iterator[ValidationError]:
    """As JSON Schema's own, but the error stands at the field that is missing."""
    if isinstance(instance, Mapping):
        for name in names:
            if name not in instance:
                yield ValidationError("missing", path=[name])


def _pattern(_validator: object, pattern: str, instance: object, _schema: object) -> Iterator[ValidationError]:
    """As JSON Schema's own, but ``$`` is the end of the text and not of its last line, as for the API server."""
    if isinstance(instance, str) and not re.search(re.sub(r"\$$", r"\\Z", pattern), instance):
        yield ValidationError("does not match")


_Validator = extend(Draft202012Validator, {"required": _required, "pattern": _pattern})


def _sentence(error: ValidationError) -> str:
    """What is wrong and what to change."""
    value, limit = error.instance, error.validator_value
    match error.validator:
        case "required":
            return "this field is missing; it must be given"
        case "type":
            return _type_sentence(value, limit)
        case "enum":
            return f"{shown(value)} is not possible here; write {_listed([shown(one) for one in limit], 'or')}"
        case "pattern":
            return f"{shown(value)} is not possible here; expected is: {error.schema['description']}".removesuffix(".")
        case "minimum":
            return f"{shown(value)} is too small; the smallest number possible is {limit}"
        case "maximum":
            return f"{shown(value)} is too large; the largest number possible is {limit}"
        case "minLength" | "minItems":
            return "must not be empty" if limit == 1 else f"is too short; {limit} is the least"
        case "maxLength":
            return f"has {len(value)} characters; at most {limit} are possible"
        case "maxItems":
            return f"has {len(value)} items; at most {limit} are possible"
        case "minProperties":
            return "must not be empty" if limit == 1 else f"has too few fields; {limit} is the least"
        case "maxProperties":
            number = "only one is" if limit == 1 else f"at most {limit} are"
            return f"has {len(value)} fields, {shown(list(value))}; {number} possible"
        case _:
            return str(error.message)


def _type_sentence(value: object, expected: list[str]) -> str:
    """What to do about a value of the wrong type."""
    wanted = _listed([_TYPES[name] for name in expected if name != "null"], "or")
    if value is None:
        return f"nothing is given; {wanted} is expected"
    if "string" in expected and isinstance(value, int | float):
        return f"{shown(value)} is not {wanted}; write it in quotes"
    if "integer" in expected and isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
        return f"{shown(value)} is a text and not {wanted}; write it without quotes"
    if expected == ["array"] and not isinstance(value, Mapping):
        return f"{shown(value)} is not a list; write it in brackets"
    return f"{shown(value)} is not {wanted}"


def _listed(words: list[str], conjunction: str) -> str:
    """Words as an enumeration: "a, b or c"."""
    return f" {conjunction} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
