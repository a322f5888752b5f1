"""One page of several collectors: whose job it is stands at each series, and nothing that fails costs the rest."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from prometheus_client import Metric

_log: Final = logging.getLogger(__name__)

_UNITS: Final = ("seconds", "bytes", "ratio")
"""Units that the page's names end with; OpenMetrics has a line for them."""


class MetricsPage(Collector):
    """Several collectors as one.

    Args:
        collectors: what they have; where two have a family of the same name, its series stand in one.
        labels: of every series, beside its own.
    """

    def __init__(self, collectors: Collection[Collector], labels: Mapping[str, str]) -> None:
        self._collectors = collectors
        self._labels = labels
        self._failed: set[int] = set()

    def collect(self) -> Iterable[Metric]:
        """The families with their present values; called by a registry at each scrape, from any thread."""
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
            if self._labels:
                family.samples = [Sample(each[0], {**self._labels, **each[1]}, *each[2:]) for each in family.samples]
        return families.values()

    def _collected(self, collector: Collector) -> list[Metric]:
        try:
            return list(collector.collect())
        except Exception:  # noqa: BLE001 - whatever is wrong with one of them, the others are shown
            if id(collector) not in self._failed:
                self._failed.add(id(collector))
                _log.exception(
                    "What %s knows cannot be shown under /metrics. The rest is; further errors of it are not told.",
                    type(collector).__name__,
                )
            return []
