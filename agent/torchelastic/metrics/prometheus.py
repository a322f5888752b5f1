"""A metric handler whose values Prometheus can scrape.

Usable in any program::

    metrics.configure(PrometheusMetricHandler(port=9100), group="my_app")

and, attached to the registry, what stands behind an agent's ``/metrics``. :mod:`torchelastic.metrics.names` decides
what a name becomes; here are the series themselves, and what keeps them sound: no two names share one, there is a limit
to how many there are, and a value that would spoil a series is not taken. What was not taken is logged once for each
reason and counted in ``torchelastic_metrics_dropped_total``.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.registry import Collector

from torchelastic.metrics.api import PLATFORM_GROUP, MetricHandler
from torchelastic.metrics.names import Kind, Series, tagged, user_series
from torchelastic.metrics.platform_names import DROPPED, PLATFORM_SAMPLES, platform_series
from torchelastic.metrics.server import unusable_port

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from threading import Thread
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import Metric

    from torchelastic.metrics.api import MetricData

_log: Final = logging.getLogger(__name__)

_Family = Gauge | Counter | Histogram
_Sink = Callable[[float], None]
"""Takes a value, as it was measured, into its series."""


class PrometheusMetricHandler(MetricHandler, Collector):
    """Turns values into Prometheus' series.

    Args:
        port: where to serve them, in a thread; 0 for any free port, None for not at all.
        address: on which of the machine's addresses; the default is all (of IPv4).
        counters: names whose values are added up, such as a number of samples.
        histograms: names whose values are counted in buckets, and the buckets' upper bounds. Where the name ends in
            ``.ms`` or ``_ms`` the series, and so the bounds, are in seconds.
        max_series: how many different names are taken; the platform's own have a limit of the same size beside it.

    Attributes:
        registry: holds this handler's series and nothing else. ``registry.register(handler)`` puts them into another.

    Raises:
        SettingsError: the port cannot be used.
        ValueError: the buckets are not ascending numbers, or a name is both a counter and a histogram.
    """

    def __init__(
        self,
        port: int | None = None,
        *,
        address: str = "0.0.0.0",  # noqa: S104 - to be scraped from elsewhere is what it is for
        counters: Collection[str] = (),
        histograms: Mapping[str, Sequence[float]] | None = None,
        max_series: int = 1000,
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._counters = frozenset(counters)
        self._histograms = {name: tuple(map(float, bounds)) for name, bounds in (histograms or {}).items()}
        _check(self._counters, self._histograms)
        self._max_series = max_series
        # Reentrant, since what is logged below may itself be measured.
        self._lock = threading.RLock()
        self._sinks: dict[tuple[str, ...], _Sink] = {}
        self._platform_sinks = 0
        self._families: dict[str, _Family] = {}
        self._sources: dict[str, str] = {}
        self._dropped = Counter(DROPPED.name, DROPPED.help, ("reason",), registry=None)
        self._told: set[str] = set()
        self._server = None if port is None else _serve(port, address, self.registry)

    @property
    def port(self) -> int | None:
        """The port on which it serves, None where it does not."""
        return None if self._server is None else self._server[0].server_port

    def close(self) -> None:
        """Stop serving; the series stay."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join()

    def emit(self, metric_data: MetricData) -> None:
        """Take one value into its series."""
        group, value = metric_data.group_name, metric_data.value
        name: object = metric_data.name
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            self._drop(
                "not_a_number", f"The value of {name!r:.100} is of the type {type(value).__qualname__} and no number"
            )
            return
        key = (group, name) if isinstance(name, str) else (str(group), str(name), type(name).__qualname__)
        sink = self._sinks.get(key) or self._new_sink(key)
        if sink is not None:
            sink(number)

    def collect(self) -> Iterator[Metric]:
        """The families with their present values; called by the registry at each scrape."""
        with self._lock:
            families = [*self._families.values(), self._dropped]
        for family in families:
            for metric in family.collect():
                # When a series began is of no use to anybody here, and adds a series to each.
                began = f"{metric.name}_created"
                metric.samples = [sample for sample in metric.samples if sample.name != began]
                if metric.samples:
                    yield metric

    def _new_sink(self, key: tuple[str, ...]) -> _Sink | None:
        """Make the series of a source that is new; None where there may be no more."""
        group, name = key[:2]
        with self._lock:
            if (sink := self._sinks.get(key)) is not None:
                return sink
            series = platform_series(name) if group == PLATFORM_GROUP and len(key) == 2 else None
            of_platform = series is not None
            count = self._platform_sinks if of_platform else len(self._sinks) - self._platform_sinks
            if count >= self._max_series:
                self._drop(
                    "too_many_names",
                    f"There are {count} different names already, and {name!r:.100} of the group {group!r:.100} is one "
                    "more; put what changes all the time (a step, a file) into the value and not into the name",
                )
                return None
            if series is None:
                series = self._apart(
                    user_series(group, name, counters=self._counters, histograms=self._histograms), key
                )
            self._platform_sinks += of_platform
            self._sinks[key] = sink = self._sink_of(series)
            return sink

    def _apart(self, series: Series, key: tuple[str, ...]) -> Series:
        """The series under a name that no other source has."""
        source = "\0".join(key)
        plain = series.name
        while not PLATFORM_SAMPLES.isdisjoint(series.samples) or not self._sources.keys().isdisjoint(series.samples):
            series = tagged(series, source)
        self._sources |= dict.fromkeys(series.samples, source)
        if series.name != plain:
            _log.warning(
                "%r of the group %r would be %s, which is taken by another name; it is %s.",
                key[1],
                key[0],
                plain,
                series.name,
            )
        return series

    def _sink_of(self, series: Series) -> _Sink:
        if (family := self._families.get(series.name)) is None:
            self._families[series.name] = family = _family_of(series)
        values = [value for _, value in series.labels]
        divisor = series.divisor
        if isinstance(family, Gauge):
            if series.one_of:
                return _switch({state: family.labels(*values[:-1], state) for state in series.one_of}, values[-1])
            gauge = family.labels(*values) if values else family
            return lambda number: gauge.set(number / divisor)
        child = family.labels(*values) if values else family
        take = child.inc if isinstance(child, Counter) else child.observe
        below_zero = bool(series.buckets) and series.buckets[0] < 0

        def add(number: float) -> None:
            # One such value would spoil the sum for good.
            if not math.isfinite(number):
                self._drop("not_finite", f"{series.name} got the value {number}")
            elif number < 0 and not below_zero:
                self._drop("negative", f"{series.name} got the value {number}, and takes none below 0")
            else:
                take(number / divisor)

        return add

    def _drop(self, reason: str, what: str) -> None:
        self._dropped.labels(reason).inc()
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("%s. It is dropped; further ones like it are counted but not reported.", what)


def _check(counters: Collection[str], histograms: Mapping[str, Sequence[float]]) -> None:
    if both := sorted(set(counters) & histograms.keys()):
        raise ValueError(f"{both[0]!r} is asked for both as a counter and as a histogram.")
    for name, bounds in histograms.items():
        if not bounds or not all(map(math.isfinite, bounds)) or sorted(set(bounds)) != list(bounds):
            raise ValueError(f"The buckets of {name!r} must be finite numbers, each above the one before: {bounds}.")


def _serve(port: int, address: str, registry: CollectorRegistry) -> tuple[WSGIServer, Thread]:
    try:
        return start_http_server(port, address, registry)
    except (OSError, OverflowError) as error:
        raise unusable_port(port, error) from None


def _family_of(series: Series) -> _Family:
    labels = [label for label, _ in series.labels]
    match series.kind:
        case Kind.GAUGE:
            return Gauge(series.name, series.help, labels, registry=None)
        case Kind.COUNTER:
            return Counter(series.name, series.help, labels, registry=None)
        case Kind.HISTOGRAM:
            return Histogram(series.name, series.help, labels, registry=None, buckets=series.buckets)


def _switch(gauges: Mapping[str, Gauge], held: str) -> _Sink:
    """Of several states the one that holds is 1; a value of 0 says that it holds no longer."""

    def switch(number: float) -> None:
        if number > 0:
            for state, gauge in gauges.items():
                gauge.set(state == held)
        else:
            gauges[held].set(0)

    return switch
