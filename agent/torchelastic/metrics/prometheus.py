"""A metric handler for Prometheus.

Any program can use it::

    metrics.configure(PrometheusMetricHandler(port=9100), group="my_app")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from torchelastic.metrics.api import REGISTRY
from torchelastic.metrics.exposition import families_of, shown
from torchelastic.metrics.series import SeriesNames, forms_of
from torchelastic.metrics.series_handler import Memory, SeriesHandler
from torchelastic.metrics.server import unusable_port

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from prometheus_client import Metric


class PrometheusMetricHandler(SeriesHandler, Collector):
    """Converts values to Prometheus series.

    Args:
        port: the port on which a thread serves the series; 0 for any free port, None to serve nothing.
        address: the address to listen on; all IPv4 addresses by default.
        counters: names whose values are added up, such as a number of samples; in addition to the names that
            :func:`torchelastic.metrics.declare` declares.
        histograms: names whose values are counted in buckets, with the upper bounds of the buckets. If a name ends in
            ``.ms`` or ``_ms``, the series and the bounds are in seconds.

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
    ) -> None:
        forms = forms_of(counters, {} if histograms is None else histograms)
        super().__init__(Memory(), lambda group, name: forms.get(name) or REGISTRY.form(group, name))
        self._names = SeriesNames()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        try:
            self._server = None if port is None else start_http_server(port, address, self.registry)
        except (OSError, OverflowError, UnicodeError) as error:
            raise unusable_port(port or 0, error, host=address) from None

    @property
    def port(self) -> int | None:
        """The port of the server, which runs until the process ends; None without one."""
        return None if self._server is None else self._server[0].server_port

    def collect(self) -> Iterable[Metric]:
        """Return the families with their current values; the registry calls this at each scrape."""
        with self._lock:
            return families_of(shown(self._memory.sources(), self._memory.dropped, self._names))
