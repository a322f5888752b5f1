"""What one agent shows under /metrics, read with Prometheus' own parser.

A pod writes there what it likes. The parser's time grows with the square of a line's length, so it is given no line
that is longer than an agent's can be, and of all lines no more than can be read within a moment.
"""

from __future__ import annotations

import io
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TextIO, cast

from prometheus_client.parser import text_fd_to_metric_families

from elastic_operator.errors import ClusterError
from elastic_operator.showing import words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_LEADER_TELLS: Final = "torchelastic_job_seconds_total"
_READING: Final = 2.0
"""Seconds of computing; the largest page that agents show in earnest takes a fifth of that, most a hundredth."""
_LONGEST_LINE: Final = 2048
"""Characters. What an agent says of a name of the program's own has 1200 at most, all else less."""
_NOT_READ: Final = ("_bucket", "_created")
"""What series end with of which nothing is shown; most of an agent's page."""
_LONGEST_LABEL: Final = 60
"""Characters; what is shown of a value that is longer."""
_LONGEST_REASON: Final = 100
_MOST_DIGITS: Final = 9
"""Of a rank."""
_LARGEST_WHOLE: Final = 2**53
"""Above it, a float stands for several whole numbers."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What a histogram says at a moment.

    Attributes:
        total: of all values.
        count: how many.
    """

    total: float
    count: float

    @property
    def mean(self) -> float | None:
        """Of all values; None where there is none."""
        return self.total / self.count if self.count > 0 else None

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.total + other.total, self.count + other.count)


class Series(NamedTuple):
    """One number of a page.

    Attributes:
        name: of the sample, such as x_total of the family x.
        labels: as a terminal may show them.
        value: at that moment.
    """

    name: str
    labels: Mapping[str, str]
    value: float


class Family(NamedTuple):
    """What stands on a page under one name.

    Attributes:
        name: without what samples add to it.
        kind: gauge, counter, histogram or whatever the page says.
        about: what is said of it, as the page has it.
        series: its numbers.
    """

    name: str
    kind: str
    about: str
    series: Sequence[Series]


def leads(text: str) -> bool:
    """Whether a page is that of an agent which tells of the whole job; it is not read for that."""
    return _LEADER_TELLS in text


class Page:
    """What one agent tells.

    Args:
        pod: its pod.
        text: what it shows.
        patience: seconds of computing that reading it may take.

    Raises:
        ClusterError: that is no page of metrics, or it takes too long to read.
    """

    def __init__(self, pod: str, text: str, *, patience: float = _READING) -> None:
        self.pod = pod
        try:
            self.families = {family.name: family for family in _families(text, patience)}
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            reason = words.shortened(str(error), _LONGEST_REASON)
            raise ClusterError(f"what it shows cannot be read as metrics{reason and f' ({reason})'}") from None

    def value(self, name: str) -> float | None:
        """The only value of this name, the smallest where there are several; None where there is none."""
        return min((value for _, value in self.values(name)), default=None)

    def count(self, name: str) -> int | None:
        """The same, where it is a whole number."""
        return whole_number(self.value(name))

    def values(self, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """All values of this sample's name that are numbers, with their labels."""
        family = self.families.get(name) or self.families.get(name.removesuffix("_total"))
        for series in family.series if family else ():
            if series.name == name and math.isfinite(series.value):
                yield series.labels, series.value

    def tallies(self, name: str, label: str) -> dict[str, Tally]:
        """What a histogram says, by the value of one label; series without that label are left out."""
        return tallies_of(self.families.get(name), label)


def whole_number(value: float | None) -> int | None:
    """The same without what is behind the point; None where it counts nothing, being negative or far too large."""
    return int(value) if value is not None and 0 <= value <= _LARGEST_WHOLE else None


def is_rank(label: str) -> bool:
    """Whether that is the number of a worker."""
    return label.isdecimal() and len(label) <= _MOST_DIGITS


def tallies_of(family: Family | None, label: str, **only: str) -> dict[str, Tally]:
    """What a histogram says, by the value of one label, of the series with these labels."""
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for name, labels, value in family.series if family else ():
        if label not in labels or any(labels.get(key) != wanted for key, wanted in only.items()):
            continue
        if family and name == f"{family.name}_sum":
            sums[labels[label]] = value
        elif family and name == f"{family.name}_count":
            counts[labels[label]] = value
    return {key: Tally(sums[key], counts[key]) for key in sums.keys() & counts.keys()}


def _lines(text: str, patience: float) -> Iterator[str]:
    """The lines of a page that are read; the others are passed over.

    Raises:
        ClusterError: it takes too long.
    """
    until = time.thread_time() + patience
    for line in io.StringIO(text):
        if time.thread_time() > until:
            raise ClusterError("its page of metrics takes too long to read")
        if len(line) <= _LONGEST_LINE and not line.partition("{")[0].endswith(_NOT_READ):
            yield line


def _families(text: str, patience: float) -> Iterator[Family]:
    """What stands on a page; an error where it is none."""
    known: dict[str, str] = {}

    def shown(label: str) -> str:
        """The value of a label as a terminal may show it; most values come again and again."""
        if label not in known:
            known[label] = words.printed(label)[:_LONGEST_LABEL]
        return known[label]

    # Of the file that the parser wants, it takes one line after the other.
    for family in text_fd_to_metric_families(cast("TextIO", _lines(text, patience))):
        yield Family(
            family.name,
            family.type,
            family.documentation,
            [
                Series(
                    sample.name,
                    {key: shown(value) for key, value in sample.labels.items()},
                    _number(sample.value),
                )
                for sample in family.samples
            ],
        )


def _number(value: float) -> float:
    """The parser gives some values as whole numbers, of any size."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
