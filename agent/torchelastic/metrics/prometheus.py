"""A metric handler for Prometheus.

Any program can use it::

    metrics.configure(PrometheusMetricHandler(port=9100), group="my_app")

The agent attaches it to the registry for its ``/metrics``.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from torchelastic.metrics.api import REGISTRY
from torchelastic.metrics.collectors import families_of
from torchelastic.metrics.series import DROPPED, NameRegistry, forms_of
from torchelastic.metrics.server import unusable_port
from torchelastic.metrics.validation import DROPPED_AT, MAX_NAMES, REASONS, SeriesHandler

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from prometheus_client import Metric

    from torchelastic.metrics.api import MetricRegistry
    from torchelastic.metrics.series import Form, Series
    from torchelastic.metrics.validation import Sink


class PrometheusMetricHandler(SeriesHandler, Collector):
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
        max_series: int = MAX_NAMES,
        declared: MetricRegistry = REGISTRY,
    ) -> None:
        forms = forms_of(counters, {} if histograms is None else histograms)

        def form(group: str, name: str) -> Form | Series:
            return forms.get(name) or declared.form(group, name)

        self._values = array("d", [0.0] * (DROPPED_AT + len(REASONS)))
        super().__init__(self._values, form, max_series)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._series: list[tuple[Series, int]] = []  # each with the index of its first word
        self._states: dict[tuple[str, tuple[tuple[str, str], ...]], dict[str, int]] = {}
        self._taken = NameRegistry()
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

    def collect(self) -> Iterable[Metric]:
        """Return the families with their current values; the registry calls this at each scrape."""
        with self._lock:
            words = tuple(self._values)
            shown = [(series, words[place : place + series.size]) for series, place in self._series]
        for number, reason in enumerate(REASONS, DROPPED_AT):
            if words[number]:
                shown.append((DROPPED.labelled(reason=reason), words[number : number + 1]))
        return families_of((series, dict(series.labels), values) for series, values in shown)

    def _open(self, series: Series, group: str, name: str, *, of_platform: bool) -> Sink:
        if not of_platform:
            series = self._taken.take(series, (group, name))
        if not series.one_of:
            return self._sink_at(self._added(series), series)
        *others, (label, state) = series.labels
        key = series.name, tuple(others)
        if key not in self._states:
            each = {one: replace(series, labels=(*others, (label, one))) for one in series.one_of}
            self._states[key] = {one: self._added(its) for one, its in each.items()}
        places, words = self._states[key], self._values

        def switch(_: float) -> None:
            for one, place in places.items():
                words[place] = one == state

        return switch

    def _added(self, series: Series) -> int:
        place = len(self._values)
        self._values.extend([0.0] * series.size)
        self._series.append((series, place))
        return place
