"""The collectors of an agent's ``/metrics``: the whole page, the agent's own series, and the totals of the run."""

from __future__ import annotations

import logging
import math
import threading
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from torchelastic.metrics import series
from torchelastic.metrics.series_handler import REASONS
from torchelastic.protocol import NodeEnd, RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torchelastic.protocol import TimeBreakdown
    from torchelastic.rendezvous.node import RendezvousNode

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


class PlatformCollector(Collector):
    """Series of the platform, to which the agent adds values."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._words: dict[series.Series, list[float]] = {}

    def add(self, one: series.Series, value: float) -> None:
        """Add one value to a series."""
        value /= one.divisor
        with self._lock:
            words = self._words.setdefault(one, [0.0] * one.form.size)
            if one.form.kind is series.Kind.HISTOGRAM:
                words[bisect_left(one.form.buckets, value)] += 1
                words[-1] += value
            else:
                words[0] = value + (words[0] if one.form.kind is series.Kind.COUNTER else 0.0)

    def collect(self) -> Iterable[Metric]:
        """Return the families with their current values; called by a registry at each scrape, from any thread."""
        with self._lock:
            return families_of((one, dict(one.labels), words) for one, words in self._words.items())


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


class RunCollector(Collector):
    """The totals of a run. Only the leader's agent shows them, because a sum over several agents would be wrong.

    Args:
        run: returns this node in the run; None before it joins.
    """

    def __init__(self, run: Callable[[], RendezvousNode | None]) -> None:
        self._run = run
        self._trained = 0.0

    def collect(self) -> Iterable[Metric]:
        """Return the families with their current values; a registry calls this at each scrape, from any thread."""
        run = self._run()
        if run is None or not run.is_leader:
            self._trained = 0.0
            return []
        times, size, round = run.time_breakdown, run.size, run.round
        totals: list[tuple[series.Series, dict[str, str], float]] = [
            *((series.JOB_SECONDS, {"state": str(state)}, spent) for state, spent in self._rising(times).items()),
            *((series.JOB_LOST, {}, lost) for lost in (times.lost,) if lost is not None),
            (series.JOB_JOINED, {}, times.joined),
            *((series.JOB_GONE, {"cause": str(end)}, times.gone.get(end, 0)) for end in NodeEnd),
            (series.JOB_RESTARTS, {"charged": "yes"}, run.restarts),
            (series.JOB_RESTARTS, {"charged": "no"}, run.uncharged_restarts),
            (series.JOB_NODES, {}, 0 if round is None else len(round.members)),
            (series.JOB_WANTED_NODES, {}, size.target),
            (series.JOB_MIN_NODES, {}, size.min),
        ]
        return families_of((family, labels, (value,)) for family, labels, value in totals)

    def _rising(self, times: TimeBreakdown) -> dict[RunState, float]:
        """Return the seconds by state, which add up to the elapsed time and never decrease.

        A late report of the first step moves seconds from training to restoring. The counter of training then stays
        constant, and that of restoring lags behind, until both are right again.
        """
        states = [state for state in RunState if state in times.seconds or state is not RunState.RESTORING]
        shown = {state: times.seconds.get(state, 0.0) for state in states}
        if ahead := min(max(self._trained - shown[RunState.TRAINING], 0.0), shown.get(RunState.RESTORING, 0.0)):
            shown[RunState.TRAINING] += ahead
            shown[RunState.RESTORING] -= ahead
        self._trained = shown[RunState.TRAINING]
        return shown
