"""The metrics API, as documented by torchelastic."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from torchelastic import metrics
from torchelastic.metrics.api import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Iterator


class Recorder(metrics.MetricHandler):
    """A handler that records every value."""

    def __init__(self) -> None:
        self.received: list[metrics.MetricData] = []

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.received.append(metric_data)

    @property
    def values(self) -> list[tuple[str, str, float]]:
        return [(data.group_name, data.name, data.value) for data in self.received]


class Broken(metrics.MetricHandler):
    def emit(self, metric_data: metrics.MetricData) -> None:
        raise RuntimeError("disk full")


@pytest.fixture
def everything() -> Iterator[Recorder]:
    """A handler that receives all values of the process-wide registry."""
    recorder = Recorder()
    REGISTRY.attach(recorder)
    yield recorder
    REGISTRY.detach(recorder)


@pytest.fixture(autouse=True)
def _fresh_default() -> Iterator[None]:
    yield
    metrics.configure(metrics.NullMetricHandler())
    metrics.configure(metrics.NullMetricHandler(), "my_app")


def test_the_default_handler_serves_groups_without_their_own_handler() -> None:
    before, default, own = time.time(), Recorder(), Recorder()
    metrics.configure(default)
    metrics.configure(own, "my_app")
    metrics.put_metric("a", 1)
    metrics.put_metric("b", 2, "my_app")
    metrics.put_metric("c", 3, "another")
    metrics.configure(metrics.NullMetricHandler(), "my_app")
    metrics.put_metric("d", 4, "my_app")
    assert default.values == [("torchelastic", "a", 1), ("another", "c", 3)]
    assert own.values == [("my_app", "b", 2)]
    assert before <= own.received[0].timestamp <= time.time()


def test_a_handler_that_raises_is_logged_once_and_blocks_nothing(
    everything: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken()
    metrics.configure(broken)
    metrics.configure(broken, "my_app")
    for step in range(3):
        metrics.put_metric("loss", step, "my_app")
        metrics.put_metric("loss", step, "another")
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "Broken" in errors[0].getMessage()
    assert "disk full" in str(errors[0].exc_info)
    assert len(everything.values) == 6


@pytest.mark.parametrize("wrong", [Recorder, "console", None])
def test_configure_refuses_an_object_that_is_not_a_handler(wrong: Any) -> None:
    with pytest.raises(TypeError, match="object with a method emit"):
        metrics.configure(wrong)


def test_prof_counts_successes_and_failures_and_measures_durations() -> None:
    recorder = Recorder()
    metrics.configure(recorder, "my_app")

    @metrics.prof(group="my_app")
    def halve(number: int) -> int:
        if number % 2:
            raise ValueError(number)
        return number // 2

    assert halve(4) == 2
    with pytest.raises(ValueError, match="3"):
        halve(number=3)
    name = "test_prof_counts_successes_and_failures_and_measures_durations.<locals>.halve"
    assert [entry[:2] for entry in recorder.values] == [
        ("my_app", f"{name}.success"),
        ("my_app", f"{name}.duration.ms"),
        ("my_app", f"{name}.failure"),
        ("my_app", f"{name}.duration.ms"),
    ]
    assert halve.__name__ == "halve"


async def test_prof_measures_a_coroutine_until_it_ends(everything: Recorder) -> None:
    gate = asyncio.Event()

    class Loader:
        @metrics.prof
        async def load(self) -> str:
            await gate.wait()
            return "loaded"

    loading = asyncio.create_task(Loader().load())
    await asyncio.sleep(0)
    assert everything.values == []
    gate.set()
    assert await loading == "loaded"
    assert [name.rpartition("Loader.")[2] for _, name, _ in everything.values] == ["load.success", "load.duration.ms"]


def test_an_interrupt_is_neither_success_nor_failure(everything: Recorder) -> None:
    @metrics.prof
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [name.rpartition("interrupted.")[2] for _, name, _ in everything.values] == ["duration.ms"]


def test_metrics_import_neither_torch_nor_the_prometheus_client() -> None:
    program = (
        "import sys; from torchelastic import metrics; metrics.put_metric('a', 1); "
        "print([name for name in ('torch', 'prometheus_client', 'aiohttp') if name in sys.modules]); "
        "metrics.PrometheusMetricHandler; print('prometheus_client' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert output.splitlines() == ["[]", "True"]


# -- the snippets of torchelastic's documentation, unchanged


PROFILING = """
import torchelastic.metrics as metrics

metrics.configure(metrics.ConsoleMetricsHandler(), "foobar")
metrics.configure(metrics.ConsoleMetricsHandler(), "Bar")

@metrics.prof
def foo():
    pass

class Bar():

    @metrics.prof
    def baz():
        pass
"""

CONFIGURING = """
metrics.configure(metrics.ConsoleMetricHandler(), group = "torchelastic")
metrics.configure(metrics.ConsoleMetricHandler(), group = "my_app")
"""


CUSTOMISING = """
import torchelastic.metrics as metrics

class MyMetricHandler(metrics.MetricHandler):
    def __init__(self):
        self.metrics = []

    def emit(self, metric_data: metrics.MetricData):
        self.metrics.append(metric_data)

def main():
    handler = MyMetricHandler()
    metrics.configure(handler)
    return handler
"""


@pytest.mark.parametrize(
    ("snippet", "use", "output"),
    [
        (
            PROFILING + CONFIGURING,
            "foo(); Bar.baz(); metrics.initialize_metrics(metrics.MetricsConfig({'a': 'b'}))",
            r"torchelastic\]: __main__\.foo\.success=1\n(.*\n)+.*Bar\.baz\.duration\.ms=[\d.e-]+$",
        ),
        (
            CUSTOMISING,
            "got = main(); metrics.put_metric('a', 1); metrics.put_metric('b', 2, 'my_app'); print(*got.metrics)",
            r"group_name='torchelastic', name='a', value=1\).*group_name='my_app', name='b', value=2\)$",
        ),
    ],
)
def test_the_snippets_of_torchelastics_documentation_run(snippet: str, use: str, output: str) -> None:
    ended = subprocess.run([sys.executable, "-c", f"{snippet}\n{use}"], check=True, capture_output=True, text=True)
    assert ended.stderr == ""
    assert re.search(output, ended.stdout.rstrip("\n"))
