"""The families of series, and the whole page of an agent's ``/metrics``."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Final

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from torchelastic.metrics import series
from torchelastic.metrics.series_handler import REASONS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

_log: Final = logging.getLogger(__name__)

_UNITS: Final = ("seconds", "bytes", "ratio")
"""Unit suffixes of names; OpenMetrics declares units."""


def families_of(values: Iterable[tuple[series.Series, dict[str, str], Sequence[float]]]) -> Iterable[Metric]:
    """Return the families of series, each given with its labels and its words."""
    families: dict[str, Metric] = {}
    for one, labels, words in values:
        name = one.name
        if (family := families.get(name)) is None:
            families[name] = family = Metric(name, one.help, one.form.kind)
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
    """Yield the series of what a handler has measured."""
    for source, words in sources.items():
        one = names.of(source)
        yield one, {**dict(one.labels), **labels}, words
    for reason, count in zip(REASONS, dropped, strict=True):
        if count:
            yield series.DROPPED, {"reason": reason, **labels}, (count,)


class MetricsPage(Collector):
    """Combines several collectors. A collector that raises is left out, and logged once.

    Args:
        collectors: the collectors; families of the same name are merged.
        labels: labels that are added to every series.
    """

    def __init__(self, collectors: Collection[Collector], labels: Mapping[str, str]) -> None:
        self._collectors = collectors
        self._labels = labels
        self._failed: set[Collector] = set()

    def collect(self) -> Iterable[Metric]:
        """Return the families with their current values; called by a registry at each scrape, from any thread."""
        families: dict[str, Metric] = {}
        for collector in self._collectors:
            for family in self._collected(collector):
                if not family.samples:
                    continue
                known = families.setdefault(family.name, family)
                if known is not family and known.type == family.type:
                    known.samples = [*known.samples, *family.samples]
        for family in families.values():
            stem, _, unit = family.name.rpartition("_")
            family.unit = unit if stem and unit in _UNITS else ""
            for sample in family.samples:
                sample.labels.update(self._labels)
        return families.values()

    def _collected(self, collector: Collector) -> list[Metric]:
        try:
            return list(collector.collect())
        except Exception:  # noqa: BLE001 - a failing collector must not hide the others
            if collector not in self._failed:
                self._failed.add(collector)
                _log.exception(
                    "What %s knows cannot be shown under /metrics. The rest is; further errors of it are not logged.",
                    type(collector).__name__,
                )
            return []
