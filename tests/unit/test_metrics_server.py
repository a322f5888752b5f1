"""The agent's /metrics over HTTP."""

from __future__ import annotations

import socket

import aiohttp
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from torchelastic.errors import SettingsError
from torchelastic.metrics import MetricData, PrometheusMetricHandler
from torchelastic.metrics.server import serve_metrics


async def get(address: str, path: str = "/metrics", accept: str = "*/*") -> tuple[int, str, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{address}{path}", headers={"Accept": accept}) as response,
    ):
        return response.status, response.headers["Content-Type"], await response.text()


@pytest.fixture
def handler() -> PrometheusMetricHandler:
    handler = PrometheusMetricHandler()
    handler.emit(MetricData(0.0, "my_app", "loss", 0.5))
    return handler


async def test_the_server_serves_prometheus_text_on_a_free_port(handler: PrometheusMetricHandler) -> None:
    async with serve_metrics(handler.registry, 0, host="127.0.0.1") as port:
        status, content_type, text = await get(f"127.0.0.1:{port}")
    assert status == 200
    assert content_type.startswith("text/plain; version=0.0.4")
    assert [(family.name, family.type) for family in parse_text(text)] == [("my_app_loss", "gauge")]


async def test_the_server_serves_openmetrics_on_request(handler: PrometheusMetricHandler) -> None:
    async with serve_metrics(handler.registry, 0, host="127.0.0.1") as port:
        _, content_type, text = await get(
            f"127.0.0.1:{port}", accept="application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
        )
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    assert [family.name for family in parse_openmetrics(text)] == ["my_app_loss"]


async def test_without_a_host_the_server_listens_on_all_addresses(handler: PrometheusMetricHandler) -> None:
    async with serve_metrics(handler.registry, 0) as port:
        status, _, _ = await get(f"127.0.0.1:{port}")
        assert status == 200
        # The server holds the port on all addresses.
        with pytest.raises(OSError, match=r"[Aa]ddress already in use"), socket.create_server(("", port)):
            pass


async def test_closing_the_server_frees_its_port(handler: PrometheusMetricHandler) -> None:
    async with serve_metrics(handler.registry, 0, host="127.0.0.1") as port:
        await get(f"127.0.0.1:{port}")
        with pytest.raises(SettingsError, match=f"on port {port} of 127.0.0.1: Address already in use. Choose another"):
            await serve_metrics(handler.registry, port, host="127.0.0.1").__aenter__()
    async with serve_metrics(handler.registry, port, host="127.0.0.1") as again:
        assert again == port
