"""Prometheus: conversion of series to families of prometheus_client, a metric handler, and an HTTP server.

Any program can use the handler::

    metrics.configure(PrometheusMetricHandler(port=9100), group="my_app")
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from torchelastic.connections import serve_http
from torchelastic.errors import SettingsError
from torchelastic.metrics.api import REGISTRY
from torchelastic.metrics.series import DROPPED, Kind, SeriesNames
from torchelastic.metrics.series_handler import REASONS, MetricMemory, SeriesHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence

    from aiohttp import web

    from torchelastic.metrics.series import MetricFamily, MetricKey

_UNITS: Final = ("seconds", "bytes", "ratio")
"""Unit suffixes of names; OpenMetrics declares units."""


def families_of(rows: Iterable[tuple[MetricFamily, dict[str, str], Sequence[float]]]) -> Iterable[Metric]:
    """Return the families of series; each row is a series with its labels and values."""
    families: dict[str, Metric] = {}
    for one, labels, values in rows:
        name = one.name
        if (family := families.get(name)) is None:
            stem, _, unit = name.rpartition("_")
            families[name] = family = Metric(name, one.help, one.type.kind, unit if stem and unit in _UNITS else "")
        if one.type.kind is Kind.GAUGE:
            family.add_sample(name, labels, values[0])
        elif one.type.kind is Kind.COUNTER:
            family.add_sample(f"{name}_total", labels, values[0])
        else:
            count = 0.0
            for bound, number in zip((*one.type.buckets, math.inf), values, strict=False):
                count += number
                le = str(floatToGoString(bound))  # type: ignore[no-untyped-call]
                family.add_sample(f"{name}_bucket", {**labels, "le": le}, count)
            family.add_sample(f"{name}_count", dict(labels), count)
            if one.type.buckets[0] >= 0:  # Prometheus expects that a sum never decreases
                family.add_sample(f"{name}_sum", dict(labels), values[-1])
    return families.values()


def exposed(
    values_by_key: Mapping[MetricKey, Sequence[float]],
    dropped: Sequence[float],
    names: SeriesNames,
    **labels: str,
) -> Iterator[tuple[MetricFamily, dict[str, str], Sequence[float]]]:
    """Yield the series of a handler."""
    for key, values in values_by_key.items():
        one = names.of(key)
        yield one, {**dict(one.labels), **labels}, values
    for reason, count in zip(REASONS, dropped, strict=True):
        if count:
            yield DROPPED, {"reason": reason, **labels}, (count,)


class PrometheusMetricHandler(SeriesHandler, Collector):
    """Converts values to Prometheus series.

    Args:
        port: the port on which a thread serves the series; 0 for any free port, None to serve nothing.
        address: the address to listen on; all IPv4 addresses by default.

    Attributes:
        registry: a registry that has only this handler's series. ``other.register(handler)`` adds them to another one.

    Raises:
        SettingsError: the port or the address cannot be used.
    """

    def __init__(
        self,
        port: int | None = None,
        *,
        address: str = "0.0.0.0",  # noqa: S104 - Prometheus scrapes from another machine
    ) -> None:
        super().__init__(MetricMemory(), REGISTRY.type_of)
        self._names = SeriesNames()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        try:
            self._server = None if port is None else start_http_server(port, address, self.registry)
        except (OSError, OverflowError, UnicodeError) as error:
            raise _unusable_port(port or 0, error, address) from None

    @property
    def port(self) -> int | None:
        """The port of the server, which runs until the process ends; None without one."""
        return None if self._server is None else self._server[0].server_port

    def collect(self) -> Iterable[Metric]:
        """Return the families with their current values; the registry calls this at each scrape."""
        with self._lock:
            return families_of(exposed(self._memory.values_by_key(), self._memory.dropped, self._names))


@asynccontextmanager
async def serve_metrics(registry: CollectorRegistry, port: int, host: str) -> AsyncIterator[int]:
    """Serve series under ``/metrics`` until the block ends, and yield the port; port 0 means any free port.

    The response is OpenMetrics or Prometheus' text format, as requested. A thread generates it, so that a scrape of
    many series does not block the event loop.

    Raises:
        SettingsError: the port or the host cannot be used.
    """
    from aiohttp import web
    from prometheus_client.exposition import choose_encoder

    async def answer(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        body = await asyncio.to_thread(encode, registry)
        return web.Response(body=body, headers={"Content-Type": content_type})

    try:
        family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(found[:2], family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        raise _unusable_port(port, error, host) from None
    with listening:
        app = web.Application()
        app.router.add_get("/metrics", answer)
        async with serve_http(app, sock=listening) as served_on:
            yield served_on


def _unusable_port(port: int, error: Exception, host: str) -> SettingsError:
    """Return the error to raise if /metrics cannot be served."""
    why = "a port is a number from 0 to 65535" if isinstance(error, OverflowError) else str(error)
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror):
        why = os.strerror(error.errno or 0)
    return SettingsError(
        f"/metrics cannot be served on port {port} of {host}: {why}. Choose another port, or 0 for any free one, or "
        "another address."
    )
