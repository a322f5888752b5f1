"""The agent's /metrics over HTTP."""

from __future__ import annotations

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from torchelastic.errors import SettingsError
from torchelastic.metrics import MetricData, PrometheusMetricHandler
from torchelastic.metrics.prometheus import serve_metrics


async def test_a_server_listens_until_it_is_closed() -> None:
    handler = PrometheusMetricHandler()
    handler.emit(MetricData(0.0, "my_app", "loss", 0.5))
    async with serve_metrics(handler.registry, 0, "127.0.0.1") as port:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            async with session.get("/metrics") as response:
                assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                families = [*text_string_to_metric_families(await response.text())]
            openmetrics = "application/openmetrics-text; version=1.0.0"
            async with session.get("/metrics", headers={"Accept": openmetrics}) as response:
                assert response.headers["Content-Type"].startswith(openmetrics)
        assert [(family.name, family.type) for family in families] == [("my_app_loss", "gauge")]
        with pytest.raises(SettingsError, match=f"on port {port} of 127.0.0.1: Address already in use. Choose another"):
            await serve_metrics(handler.registry, port, "127.0.0.1").__aenter__()
    async with serve_metrics(handler.registry, port, "127.0.0.1") as again:
        assert again == port
