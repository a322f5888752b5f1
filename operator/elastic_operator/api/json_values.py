"""Reads values of unchecked JSON, and converts statuses and reports to and from JSON.

The functions that read a value of unchecked JSON always return the declared type, whatever the JSON contains.

Statuses and reports have camelCase keys and RFC 3339 times. The times of a status are in whole seconds, as is usual in
Kubernetes. The times of a report and of a time breakdown are in milliseconds, because their durations must add up.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

import msgspec

from elastic_operator.errors import BadInput

Json = Mapping[str, Any]

_T = TypeVar("_T")

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_TIME: Final = 253_402_300_799.999
"""The end of the year 9999."""

_NAMES: Final = {
    "until": "asOf",
    "lost": "lostSeconds",
    "started": "startTime",
    "active": "activeSince",
    "completed": "completionTime",
    "completed_at": "completed",
    "since": "lastTransitionTime",
    "counted_pod_uids": "countedPodUIDs",
}
"""By field, the keys that are not the camelCase form of the field's name."""

_FIELDS: Final = {key: name for name, key in _NAMES.items()}
_SECONDS: Final = frozenset({"startTime", "activeSince", "completionTime", "lastTransitionTime", "time"})
_MILLISECONDS: Final = frozenset(
    {"asOf", "began", "ended", "startedAt", "firstStepAt", "created", "completed", "suspensions"}
)
_OMITTED_IF_EMPTY: Final = frozenset(
    {"countedPodUIDs", "excludedNodes", "pod", "signal", "ended", "startedAt", "firstStepAt"}
)
_VERBATIM: Final = frozenset({"appliedSpec", "seconds", "departures"})
_NOT_WRITTEN: Final = {"TimeBreakdown": frozenset({"state", "round", "first_step_at", "last_checkpoint_at", "present"})}

_SHOWN_CHARACTERS: Final = 60


def get_dict(value: object, *path: str) -> Json:
    """Return the dict at the path; empty if there is none."""
    found = get_value(value, *path)
    return found if isinstance(found, dict) else {}


def get_dicts(value: object, *path: str) -> tuple[Json, ...]:
    """Return the dicts in the list at the path."""
    return tuple(entry for entry in get_list(value, *path) if isinstance(entry, dict))


def get_list(value: object, *path: str) -> tuple[object, ...]:
    """Return the items of the list at the path; empty if there is none."""
    found = get_value(value, *path)
    return tuple(found) if isinstance(found, list) else ()


def get_str(value: object, *path: str) -> str:
    """Return the string at the path; empty if there is none."""
    found = get_value(value, *path)
    return found if isinstance(found, str) else ""


def get_int(value: object, *path: str) -> int | None:
    """Return the integer at the path; None if there is none."""
    found = get_value(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def get_time(value: object, *path: str) -> float | None:
    """Return the RFC 3339 time at the path in seconds since the Unix epoch; None if there is none."""
    try:
        return seconds_of(datetime.fromisoformat(get_str(value, *path)))
    except (ValueError, OverflowError):
        return None


def get_value(value: object, *path: str) -> object:
    """Return the value at the path; None if there is none."""
    for key in path:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def shown(value: object) -> str:
    """Quote a value as JSON, and shorten it if it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 2]} …"


def to_json(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a record as a document; fields that are None are left out."""
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    fields = _fields_of(value.__class__)
    if not fields:
        plain = msgspec.to_builtins(value, order="deterministic")
        return round(plain, 3) if isinstance(plain, float) else plain
    document: dict[str, Any] = {}
    for name, key in fields:
        held = getattr(value, name)
        if held is None or (not held and key in _OMITTED_IF_EMPTY):
            continue
        if key in _SECONDS:
            document[key] = rfc3339(held)
        elif key in _MILLISECONDS:
            document[key] = [moment(time) for time in held] if isinstance(held, tuple) else moment(held)
        elif key in _VERBATIM:
            document[key] = msgspec.to_builtins(held, order="deterministic")
        else:
            document[key] = to_json(held)
    return document


def from_json(document: object, kind: type[_T]) -> _T:
    """Return the record in a document.

    Raises:
        BadInput: the document does not have the form that :func:`to_json` writes.
    """
    try:
        return msgspec.convert(_read(document), kind)
    except (msgspec.ValidationError, OverflowError) as error:
        raise BadInput(str(error)) from None


def rfc3339(seconds: float) -> str:
    """Format a Unix time in RFC 3339, rounded down to whole seconds and clamped to the years 1970 to 9999."""
    return f"{_EPOCH + timedelta(seconds=math.floor(_clamped(seconds))):%Y-%m-%dT%H:%M:%SZ}"


def moment(seconds: float) -> str:
    """Format a Unix time in RFC 3339, rounded to milliseconds and clamped to the years 1970 to 9999."""
    time = _EPOCH + timedelta(milliseconds=round(_clamped(seconds) * 1000))
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_of(time: datetime) -> float:
    """Return the seconds since the Unix epoch; a time without a zone is in UTC."""
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _clamped(seconds: float) -> float:
    return min(max(0.0, seconds), _LAST_TIME)  # in this order, NaN gives 0


@functools.cache
def _fields_of(kind: type) -> tuple[tuple[str, str], ...]:
    """Return the fields of a dataclass or of a record of the protocol, with their keys; empty for other types."""
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    elif issubclass(kind, msgspec.Struct) and kind.__module__.startswith("torchelastic"):
        names = [name for name in kind.__struct_fields__ if name not in _NOT_WRITTEN.get(kind.__name__, ())]
    else:
        return ()
    return tuple((name, _NAMES.get(name) or _camel(name)) for name in names)


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(part.capitalize() for part in others)


def _read(value: object, key: str = "") -> object:
    """Convert a value of a document to the value of its field; an item of a list has the key of the list."""
    if key in _VERBATIM:
        return value
    if isinstance(value, list):
        return [_read(item, key) for item in value if item is not None or key not in _MILLISECONDS]
    if value is not None and key in _SECONDS | _MILLISECONDS:
        return seconds_of(msgspec.convert(value, datetime))
    if not isinstance(value, dict):
        return value
    return {_FIELDS.get(name) or _snake(name): _read(held, name) for name, held in value.items()}


def _snake(key: str) -> str:
    return re.sub(r"[A-Z]", lambda letter: f"_{letter[0].lower()}", key)
