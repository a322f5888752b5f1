"""Values that programs record through torch's own metrics, with the real torch."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest

pytestmark = pytest.mark.integration

RECORDER = """
from torchelastic import metrics as ours

class Recorder(ours.MetricHandler):
    def emit(self, metric_data):
        print("ours:", *metric_data[1:], flush=True)

ours.configure(Recorder())
"""


def said(program: str) -> list[str]:
    """Return the output lines of a program that treats each UserWarning as an error."""
    ended = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", dedent(program)], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


MEASURING = """
from torch.distributed.elastic import metrics as torchs
torchs.put_metric("loss", 3, "my_app")
stream = torchs.getStream("my_app")
torchs.configure(torchs.ConsoleMetricHandler(), group="my_app")
stream.add_value("loss", 2)
torchs.put_metric("loss", 1, "my_app")
"""


@pytest.mark.parametrize(
    "start",
    [
        f"import torch\n{RECORDER}",
        f"import torchelastic.metrics, torch\n{RECORDER}",
        f"{RECORDER}import torch\nours.getStream('my_app')",
    ],
    ids=["torch first", "torch before configure", "torch before getStream"],
)
def test_values_of_torchs_metrics_are_received_with_any_configuration(start: str) -> None:
    lines = said(f"{start}{MEASURING}")
    assert [line for line in lines if line.startswith("ours")] == [f"ours: my_app loss {value}" for value in (3, 2, 1)]
    assert [line.rpartition("]")[2] for line in lines if not line.startswith("ours")] == [": loss=1"]


@pytest.mark.parametrize("stub", ["None", "types.ModuleType('torch')"])
def test_a_program_with_an_incomplete_torch_can_use_metrics(stub: str) -> None:
    assert said(
        f"import sys, types\nsys.modules['torch'] = {stub}\n{RECORDER}ours.put_metric('loss', 3, 'my_app')"
    ) == ["ours: my_app loss 3"]


def test_the_metrics_of_torchs_agent_are_series_of_torchelastic() -> None:
    lines = said(
        """
        from prometheus_client import generate_latest
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch
        from torchelastic import metrics
        handler = metrics.PrometheusMetricHandler()
        metrics.configure(handler, group="torchelastic")

        config = LaunchConfig(1, 1, 1, run_id="run", rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", role="trainer")
        elastic_launch(config, "true")()
        print(generate_latest(handler.registry).decode())
        """
    )
    assert "torchelastic_workers_trainer_run_total_value 1.0" in lines
    assert "torchelastic_workers_trainer_succeeded 1.0" in lines
    assert 'torchelastic_operations_total{operation="start_workers",outcome="success"} 1.0' in lines
    assert 'torchelastic_operation_duration_seconds_count{operation="rendezvous"} 1.0' in lines


def test_tensors_and_arrays_with_one_element_are_numbers() -> None:
    lines = said(
        """
        import logging
        import numpy
        import torch
        from prometheus_client import generate_latest
        from torchelastic import metrics
        handler = metrics.PrometheusMetricHandler()
        metrics.configure(handler)
        logging.basicConfig(level=logging.CRITICAL)
        loss = (torch.ones(3, requires_grad=True) * 2).mean()
        for name, value in {
            "tensor": loss, "half": loss.half(), "boolean": torch.tensor(True), "array": numpy.ones(1),
            "scalar": numpy.float32(0.5), "whole": numpy.int64(7), "many": torch.ones(2), "vector": numpy.ones(2),
        }.items():
            metrics.put_metric(name, value, "my_app")
        print(generate_latest(handler.registry).decode())
        """
    )
    samples = dict(line.split(" ") for line in lines if line.startswith(("my_app", "torchelastic")))
    assert samples == {
        "my_app_tensor": "2.0",
        "my_app_half": "2.0",
        "my_app_boolean": "1.0",
        "my_app_array": "1.0",
        "my_app_scalar": "0.5",
        "my_app_whole": "7.0",
        'torchelastic_metrics_dropped_total{reason="not_a_number"}': "2.0",
    }
