"""What one agent shows under /metrics, read with Prometheus' own parser."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from prometheus_client.parser import text_string_to_metric_families

from elastic_operator.errors import ClusterError
from elastic_operator.showing import words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client import Metric
    from prometheus_client.samples import Sample

_LONGEST_LABEL: Final = 60
"""Characters; what is shown of a value that is longer."""
_MOST_DIGITS: Final = 9
"""Of a rank."""


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


class Page:
    """What one agent tells.

    Args:
        pod: its pod.
        text: what it shows.

    Raises:
        ClusterError: that is no page of metrics.
    """

    def __init__(self, pod: str, text: str) -> None:
        self.pod = pod
        try:
            self.families = {family.name: family for family in text_string_to_metric_families(text)}
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise ClusterError(f"what it shows cannot be read as metrics ({error})") from None

    @property
    def leads(self) -> bool:
        """Whether its agent tells of the whole job."""
        return "torchelastic_job_seconds" in self.families

    def value(self, name: str) -> float | None:
        """The only value of this name, the smallest where there are several; None where there is none."""
        return min((value for _, value in self.values(name)), default=None)

    def count(self, name: str) -> int | None:
        """The same, where it is a whole number."""
        return whole_number(self.value(name))

    def values(self, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """All values of this sample's name that are numbers, with their labels."""
        family = self.families.get(name) or self.families.get(name.removesuffix("_total"))
        for sample in family.samples if family else ():
            value = number(sample)
            if sample.name == name and math.isfinite(value):
                yield labels_of(sample), value

    def tallies(self, name: str, label: str) -> dict[str, Tally]:
        """What a histogram says, by the value of one label; series without that label are left out."""
        return tallies_of(self.families.get(name), label)


def whole_number(value: float | None) -> int | None:
    """The same without what is behind the point."""
    return None if value is None else int(value)


def labels_of(sample: Sample) -> dict[str, str]:
    """Its labels as a terminal may show them: a pod writes there what it likes."""
    return {key: words.printed(value)[:_LONGEST_LABEL] for key, value in sample.labels.items()}


def number(sample: Sample) -> float:
    """Its value; the parser gives some as whole numbers, of any size."""
    try:
        return float(sample.value)
    except OverflowError:
        return math.inf if sample.value > 0 else -math.inf


def is_rank(label: str) -> bool:
    """Whether that is the number of a worker."""
    return label.isdecimal() and len(label) <= _MOST_DIGITS


def tallies_of(family: Metric | None, label: str, **only: str) -> dict[str, Tally]:
    """What a histogram says, by the value of one label, of the series with these labels."""
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for sample in family.samples if family else ():
        labels = labels_of(sample)
        if label not in labels or any(labels.get(key) != value for key, value in only.items()):
            continue
        if family and sample.name == f"{family.name}_sum":
            sums[labels[label]] = number(sample)
        elif family and sample.name == f"{family.name}_count":
            counts[labels[label]] = number(sample)
    return {key: Tally(sums[key], counts[key]) for key in sums.keys() & counts.keys()}
