"""The conversion of series to the families of prometheus_client."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from prometheus_client import Metric
from prometheus_client.utils import floatToGoString

from torchelastic.metrics import series
from torchelastic.metrics.series_handler import REASONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_UNITS: Final = ("seconds", "bytes", "ratio")
"""Unit suffixes of names; OpenMetrics declares units."""


def families_of(values: Iterable[tuple[series.Series, dict[str, str], Sequence[float]]]) -> Iterable[Metric]:
    """Return the families of series, each given with its labels and its words."""
    families: dict[str, Metric] = {}
    for one, labels, words in values:
        name = one.name
        if (family := families.get(name)) is None:
            stem, _, unit = name.rpartition("_")
            families[name] = family = Metric(name, one.help, one.form.kind, unit if stem and unit in _UNITS else "")
        if one.form.kind is series.Kind.GAUGE:
            family.add_sample(name, labels, words[0])
        elif one.form.kind is series.Kind.COUNTER:
            family.add_sample(f"{name}_total", labels, words[0])
        else:
            count = 0.0
            for bound, number in zip((*one.form.buckets, math.inf), words, strict=False):
                count += number
                le = str(floatToGoString(bound))  # type: ignore[no-untyped-call]
                family.add_sample(f"{name}_bucket", {**labels, "le": le}, count)
            family.add_sample(f"{name}_count", dict(labels), count)
            if one.form.buckets[0] >= 0:  # Prometheus expects that a sum never decreases
                family.add_sample(f"{name}_sum", dict(labels), words[-1])
    return families.values()


def shown(
    sources: Mapping[series.Source, Sequence[float]],
    dropped: Sequence[float],
    names: series.SeriesNames,
    **labels: str,
) -> Iterator[tuple[series.Series, dict[str, str], Sequence[float]]]:
    """Yield the series of a handler."""
    for source, words in sources.items():
        one = names.of(source)
        yield one, {**dict(one.labels), **labels}, words
    for reason, count in zip(REASONS, dropped, strict=True):
        if count:
            yield series.DROPPED, {"reason": reason, **labels}, (count,)
