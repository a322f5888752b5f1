"""The agent's /metrics, scraped over HTTP."""

from __future__ import annotations

import socket

import aiohttp
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from torchelastic.errors import SettingsError
from torchelastic.metrics import MetricData, PrometheusMetricHandler
from torchelastic.metrics.server import MetricsServer


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


async def test_it_serves_prometheus_text_on_any_free_port(handler: PrometheusMetricHandler) -> None:
    async with MetricsServer(handler.registry, 0, host="127.0.0.1") as server:
        status, content_type, text = await get(f"127.0.0.1:{server.port}")
    assert status == 200
    assert content_type.startswith("text/plain; version=0.0.4")
    assert [(family.name, family.type) for family in parse_text(text)] == [("my_app_loss", "gauge")]


async def test_it_serves_openmetrics_to_who_asks_for_it(handler: PrometheusMetricHandler) -> None:
    async with MetricsServer(handler.registry, 0, host="127.0.0.1") as server:
        _, content_type, text = await get(
            f"127.0.0.1:{server.port}", accept="application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
        )
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    assert [family.name for family in parse_openmetrics(text)] == ["my_app_loss"]


async def test_without_a_host_it_serves_on_all_addresses_under_one_port(handler: PrometheusMetricHandler) -> None:
    async with MetricsServer(handler.registry, 0) as server:
        status, _, _ = await get(f"127.0.0.1:{server.port}")
        assert status == 200
        # The port is the same one that was asked for, so nobody else can have it.
        with pytest.raises(OSError, match=r"[Aa]ddress already in use"), socket.create_server(("", server.port)):
            pass


async def test_there_is_nothing_but_metrics(handler: PrometheusMetricHandler) -> None:
    async with MetricsServer(handler.registry, 0, host="127.0.0.1") as server:
        assert (await get(f"127.0.0.1:{server.port}", "/"))[0] == 404


async def test_the_port_is_free_again_after_the_block(handler: PrometheusMetricHandler) -> None:
    async with MetricsServer(handler.registry, 0, host="127.0.0.1") as first:
        port = first.port
        await get(f"127.0.0.1:{port}")
    with pytest.raises(RuntimeError, match="within its block"):
        assert first.port
    async with MetricsServer(handler.registry, port, host="127.0.0.1") as second:
        assert second.port == port


async def test_a_taken_port_is_told_in_a_sentence(handler: PrometheusMetricHandler) -> None:
    async with MetricsServer(handler.registry, 0, host="127.0.0.1") as server:
        with pytest.raises(SettingsError, match=rf"on port {server.port} of 127.0.0.1: another process has it. Choose"):
            await MetricsServer(handler.registry, server.port, host="127.0.0.1").__aenter__()


@pytest.mark.parametrize(
    ("host", "port", "why"),
    [
        ("192.0.2.7", 0, "no such address. Choose an address of this machine"),
        ("127.0.0.1", 65536, "from 0 to 65535. Choose another port"),
        ("no.such.host.invalid", 0, "nor a name that is known. Choose an address of this machine"),
    ],
)
async def test_an_address_that_cannot_be_used_is_told_in_a_sentence(
    handler: PrometheusMetricHandler, host: str, port: int, why: str
) -> None:
    with pytest.raises(SettingsError, match=why):
        await MetricsServer(handler.registry, port, host=host).__aenter__()
