"""A metric handler for Prometheus.

Any program can use it::

    metrics.configure(PrometheusMetricHandler(port=9100), group="my_app")

The agent attaches it to the registry for its ``/metrics``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.registry import Collector

from torchelastic.metrics.api import REGISTRY
from torchelastic.metrics.series import DROPPED, Kind, NameRegistry, forms_of
from torchelastic.metrics.server import unusable_port
from torchelastic.metrics.validation import ValidatingHandler

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from prometheus_client import Metric

    from torchelastic.metrics.api import MetricRegistry
    from torchelastic.metrics.series import Form, Series
    from torchelastic.metrics.validation import Sink


class PrometheusMetricHandler(ValidatingHandler, Collector):
    """Converts values to Prometheus series.

    Args:
        port: the port on which a thread serves the series; 0 for any free port, None to serve nothing.
        address: the address to listen on; all IPv4 addresses by default.
        counters: names whose values are added up, such as a number of samples; in addition to the names that
            :func:`torchelastic.metrics.declare` declares.
        histograms: names whose values are counted in buckets, with the upper bounds of the buckets. If a name ends in
            ``.ms`` or ``_ms``, the series and the bounds are in seconds.
        max_series: maximum number of names.
        declared: the registry with the declarations.

    Attributes:
        registry: has only this handler's series. ``registry.register(handler)`` adds them to another registry.

    Raises:
        SettingsError: the port or the address cannot be used.
        ValueError: :func:`torchelastic.metrics.declare` would refuse the counters or histograms.
    """

    def __init__(
        self,
        port: int | None = None,
        *,
        address: str = "0.0.0.0",  # noqa: S104 - Prometheus scrapes from another machine
        counters: Collection[str] = (),
        histograms: Mapping[str, Sequence[float]] | None = None,
        max_series: int = 1000,
        declared: MetricRegistry = REGISTRY,
    ) -> None:
        forms = forms_of(counters, {} if histograms is None else histograms)

        def form(group: str, name: str) -> Form | Series:
            return forms.get(name) or declared.form(group, name)

        super().__init__(form, max_series)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._families: dict[str, Gauge | Counter | Histogram] = {}
        self._taken = NameRegistry()
        self._dropped = Counter(DROPPED.name, DROPPED.help, ("reason",), registry=None)
        try:
            self._server = None if port is None else start_http_server(port, address, self.registry)
        except (OSError, OverflowError, UnicodeError) as error:
            raise unusable_port(port or 0, error, host=address) from None

    @property
    def port(self) -> int | None:
        """The port of the server; None without one."""
        return None if self._server is None else self._server[0].server_port

    def close(self) -> None:
        """Stop the server; the series stay."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join()

    def collect(self) -> Iterator[Metric]:
        """Return the families with their current values; the registry calls this at each scrape."""
        with self._lock:
            families = [*self._families.values(), self._dropped]
        for family in families:
            for metric in family.collect():
                # Without the creation times, which would be an additional series for each.
                began = f"{metric.name}_created"
                metric.samples = [sample for sample in metric.samples if sample.name != began]
                if metric.samples:
                    yield metric

    def _open(self, series: Series, source: tuple[str, str], *, of_platform: bool) -> Sink:
        if not of_platform:
            series = self._taken.take(series, source)
        if (family := self._families.get(series.name)) is None:
            self._families[series.name] = family = _family_of(series)
        values = [value for _, value in series.labels]
        divisor = series.divisor
        if series.one_of:
            states = {state: family.labels(*values[:-1], state) for state in series.one_of}

            def switch(_: float) -> None:
                for state, child in states.items():
                    child.set(state == values[-1])  # type: ignore[union-attr] # those are gauges

            return switch
        child = family.labels(*values) if values else family
        match child:
            case Gauge():
                return lambda number: child.set(number / divisor)
            case Counter():
                return lambda number: child.inc(number / divisor)
            case _:
                return lambda number: child.observe(number / divisor)

    def _count_dropped(self, reason: str) -> None:
        self._dropped.labels(reason).inc()


def _family_of(series: Series) -> Gauge | Counter | Histogram:
    labels = [label for label, _ in series.labels]
    match series.kind:
        case Kind.GAUGE:
            return Gauge(series.name, series.help, labels, registry=None)
        case Kind.COUNTER:
            return Counter(series.name, series.help, labels, registry=None)
        case Kind.HISTOGRAM:
            return Histogram(series.name, series.help, labels, registry=None, buckets=series.buckets)
