"""From the names that programs measure under to series that Prometheus accepts and people can query.

Pure: what a (group, name) is called, of which kind it is, which labels and unit it has. A user's name becomes a gauge
``<group>_<name>``, or the histogram or counter that the handler was asked for. Prometheus' conventions hold:
snake_case, base units (what ends in ``.ms`` or ``_ms`` is given in seconds), and endings that mean something
(``_total``, ``_count``, ``_bucket``, …) only where they mean it. The platform's own names have a table, in
:mod:`torchelastic.metrics.platform_names`.

Different names can come out alike (``stepTime``, ``step.time``). Whoever holds the series keeps them apart, with
:class:`~torchelastic.metrics.taken_names.TakenNames`.
"""

from __future__ import annotations

import enum
import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, SupportsFloat, SupportsIndex

if TYPE_CHECKING:
    from collections.abc import Sequence


class Kind(enum.StrEnum):
    """What a series is, with the word that the exposition has for it."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


_SAMPLES: Final[Mapping[Kind, Sequence[str]]] = {
    Kind.GAUGE: ("",),
    Kind.COUNTER: ("", "_total", "_created"),
    Kind.HISTOGRAM: ("", "_bucket", "_count", "_sum", "_created"),
}


@dataclass(frozen=True, slots=True)
class Form:
    """What the values of a user's name are to become.

    Attributes:
        kind: of series.
        buckets: upper bounds of a histogram, in seconds where the name is in milliseconds; ascending, and finite.

    Raises:
        ValueError: the buckets are none.
    """

    kind: Kind = Kind.GAUGE
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        ascending = all(map(math.isfinite, self.buckets)) and sorted(set(self.buckets)) == list(self.buckets)
        if not ascending or bool(self.buckets) != (self.kind is Kind.HISTOGRAM):
            raise ValueError(f"must be finite numbers, each above the one before: {self.buckets}")


def forms_of(counters: object, histograms: object) -> dict[str, Form]:
    """The forms that are asked for, by name.

    Args:
        counters: names whose values are added up; what a program has given, whatever that is.
        histograms: names whose values are counted in buckets, and the buckets' upper bounds.

    Raises:
        ValueError: they are not that, the buckets are not ascending numbers, or a name is asked for as both.
    """
    # To callers a wrong type is one error with all others of what they ask for, hence TRY004.
    if isinstance(counters, str):
        raise ValueError(f"counters is a collection of names, as [{counters!r}], and not one name.")  # noqa: TRY004
    if isinstance(counters, bytes | bytearray) or not isinstance(counters, Iterable):
        raise ValueError(f"counters is a collection of names, as ['samples'], and not {_a_thing(counters)}.")  # noqa: TRY004
    if not isinstance(histograms, Mapping):
        example = "{'size': [0.1, 1.0]}"
        raise ValueError(f"histograms maps names to buckets, as {example}, and is not {_a_thing(histograms)}.")  # noqa: TRY004
    names = list(counters)
    for name in (*names, *histograms):
        if not isinstance(name, str):
            raise ValueError(f"The names of counters and histograms are texts, and not {_a_thing(name)}.")  # noqa: TRY004
    if both := sorted(set(names) & histograms.keys()):
        raise ValueError(f"{both[0]!r} is asked for both as a counter and as a histogram.")
    forms = dict.fromkeys(names, Form(Kind.COUNTER))
    for name, bounds in histograms.items():
        try:
            forms[name] = Form(Kind.HISTOGRAM, _numbers(bounds))
        except ValueError as error:
            raise ValueError(f"The buckets of {name!r} {error}.") from None
    return forms


def _numbers(bounds: object) -> tuple[float, ...]:
    must = "must be finite numbers, each above the one before"
    if isinstance(bounds, str | bytes | bytearray) or not isinstance(bounds, Iterable):
        raise ValueError(f"{must}, as [0.1, 1.0], and not {_a_thing(bounds)}")  # noqa: TRY004 - as above
    try:
        return tuple(map(to_number, bounds))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # the last one is torch's
        raise ValueError(f"{must}: {error}") from None


def _a_thing(thing: object) -> str:
    return f"something of the type {type(thing).__qualname__}"


def to_number(value: object) -> float:
    """A value as a number: of whatever is one, and of an array or a tensor with one element; of no text.

    Raises:
        TypeError, ValueError, RuntimeError: it is none.
        OverflowError: it is too large for a float.
    """
    if not isinstance(value, int | float) and callable(item := getattr(value, "item", None)):
        value = item()  # torch and numpy would warn of what a plain conversion might hide
    # A text or bytes would be read by float(), and nobody has meant that.
    if not isinstance(value, SupportsFloat | SupportsIndex):
        raise TypeError(f"{_a_thing(value)} is no number")
    return float(value)


@dataclass(frozen=True, slots=True)
class Series:
    """What becomes of one source name.

    Attributes:
        name: of the family, without the ending that its kind adds (``_total``, ``_bucket``, …).
        kind: what it is.
        help: for the exposition.
        labels: names and values; the names are the same for every series of a family.
        one_of: where not empty, the values of the last label of which one holds: it is 1 there and 0 at the others.
        divisor: what a value is divided by: 1000 where it is in milliseconds.
        buckets: upper bounds of a histogram, in the unit of the series.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    one_of: tuple[str, ...] = ()
    divisor: float = 1.0
    buckets: tuple[float, ...] = ()

    @property
    def samples(self) -> frozenset[str]:
        """All names that the family takes up; no other family may have any of them."""
        return frozenset(self.name + ending for ending in _SAMPLES[self.kind])


_RESERVED_ENDINGS: Final = ("_total", "_created", "_count", "_sum", "_bucket", "_info", "_gcount", "_gsum")
_RESERVED_BEGINNINGS: Final = ("process_", "python_", "scrape_", "elastic_operator_")
"""Beginnings of series that Prometheus, its client library and the operator make themselves. ``up`` and ``ALERTS``
need no guard: every name here has a group, an underscore and no capitals. Of the platform's own group the single names
are guarded, by :class:`~torchelastic.metrics.taken_names.TakenNames`, since programs may measure in it."""
_LONGEST_NAME: Final = 200
_AS_GAUGE: Final = Form()


def source_of(group: str, name: object) -> tuple[str, ...]:
    """What tells a (group, name) from all others; a name that is no string is another one than its text."""
    return (group, name) if isinstance(name, str) else (str(group), str(name), type(name).__qualname__)


def user_series(group: str, name: str, form: Form = _AS_GAUGE) -> Series:
    """What a name becomes that is not in the platform's table.

    Args:
        group: the group.
        name: the name.
        form: what its values are to become.
    """
    body = snake_case(name)
    in_milliseconds = body == "ms" or body.endswith("_ms")
    if in_milliseconds:
        body = body[:-2].rstrip("_")
    elif not body:
        body = f"metric_{_digest(name)}"
    full = f"{_prefix(group)}_{body}".rstrip("_")
    if f"{full}_".startswith(_RESERVED_BEGINNINGS):  # an ending may follow
        full = f"group_{full}"
    while form.kind is Kind.COUNTER and full.endswith("_total"):
        full = full.removesuffix("_total")
    if len(full) > _LONGEST_NAME:
        full = f"{full[:_LONGEST_NAME]}_{_digest(name)}"
    if full.endswith(_RESERVED_ENDINGS) and form.kind is not Kind.COUNTER and not in_milliseconds:
        full += "_value"
    return Series(
        full + "_seconds" * in_milliseconds,
        form.kind,
        f"{printable(name):.200} of the group {printable(group):.200}, as the program measures it.",
        divisor=1000 if in_milliseconds else 1,
        buckets=form.buckets,
    )


def _prefix(group: str) -> str:
    """The group as the beginning of a name: not empty, and not a digit first."""
    prefix = snake_case(group)
    if not prefix:
        return f"group_{_digest(group)}"
    return f"group_{prefix}" if prefix[0].isdigit() else prefix


def tagged(series: Series, source: str) -> Series:
    """The series under a name that only this source has, for where another source has taken the plain one."""
    stem = series.name.removesuffix("_seconds") if series.divisor == 1000 else series.name
    return replace(series, name=f"{stem}_{_digest(source)}{series.name[len(stem) :]}")


def snake_case(text: str) -> str:
    """Lower-case letters, digits and single underscores, none of these at an end: ``trainLoss.7`` is train_loss_7."""
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", text)
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_").lower()


def printable(text: str) -> str:
    """The text with what UTF-8 cannot hold spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:8]
