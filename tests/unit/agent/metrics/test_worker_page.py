"""The workers' metrics on the agent's page, through restarts and changes of ranks."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics_exposition
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.support.scraping import Page
from torchelastic.metrics import MetricStream
from torchelastic.metrics.agent import AgentMetrics
from torchelastic.metrics.api import MetricRegistry
from torchelastic.metrics.series_handler import MAX_NAMES, MetricMemory, SeriesHandler
from torchelastic.metrics.worker import open_memory
from torchelastic.metrics.worker_collector import WorkerCollector
from torchelastic.protocol.records import Member, OutcomeRecord, OutcomeState, RoundRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchelastic.metrics.series import MetricKey


class Node:
    """One node and its workers' metric streams."""

    def __init__(self) -> None:
        self.agent, self.metrics = AgentMetrics("default"), WorkerCollector()
        self.registry = self.agent.page(self.metrics)

    def begin(self, *ranks: int) -> Sequence[MetricStream]:
        """Start a round with workers of these ranks; the workers of the previous round end."""
        self.workers = self.metrics.begin(dict(enumerate(ranks)))
        return [_stream(self.workers[local_rank].path) for local_rank in range(len(ranks))]

    def page(self) -> Page:
        text = generate_latest(self.registry).decode()
        page = Page(parse_text(text))
        openmetrics = openmetrics_exposition.generate_latest(self.registry).decode()
        assert Page(parse_openmetrics(openmetrics)).samples.keys() == page.samples.keys()
        return page

    def samples(self) -> dict[str, float]:
        """Return the counter `samples` by rank."""
        return {dict(labels)["rank"]: value for (_, labels), value in self.page().named("my_app_samples").items()}


def _stream(path: str) -> MetricStream:
    registry = MetricRegistry()
    registry.declare("my_app", counters=["samples"], histograms={"size": [1, 10]})
    registry.attach(SeriesHandler(open_memory(path), registry.type_of))
    return MetricStream("my_app", registry=registry)


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((0, 1), (0, 1), {"0": 1, "1": 2}),
        ((2, 3), (0, 1), {"0": 1, "1": 2}),
        ((1, 2), (0, 1), {"0": 2, "1": 1}),  # rank 1 keeps its own count, so no counter decreases
        ((0, 1), (1, 2), {"1": 2, "2": 1}),
    ],
)
def test_counters_continue_after_a_change_of_ranks(
    node: Node, before: tuple[int, int], after: tuple[int, int], expected: dict[str, float]
) -> None:
    for number, worker in enumerate(node.begin(*before), start=1):
        worker.add_value("samples", number)
    node.begin(*after)
    assert node.samples() == expected


DECLARATIONS: list[Callable[[str], dict[str, Any]]] = [
    lambda _: {},
    lambda name: {"counters": [name]},
    lambda name: {"histograms": {name: [1, 10]}},
]
NAMES = st.text(max_size=8) | st.sampled_from(
    [
        "round",
        "world_size",
        "checkpoint.write_latency_ms",
        "SimpleElasticAgent.run.success",
        "train_step.duration.ms",
        "metrics.dropped",
        "metrics_dropped_total",
    ]
)


@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(["torchelastic", "my_app", "é"]), NAMES, st.sampled_from(DECLARATIONS)),
            max_size=8,
            unique_by=lambda each: each[:2],
        ),
        min_size=1,
        max_size=4,
    )
)
def test_the_page_is_well_formed_for_any_names(
    rounds: list[list[tuple[str, str, Callable[[str], dict[str, Any]]]]],
) -> None:
    node = Node()
    node.agent.round_began(RoundRecord(number=1, members=(Member("a.1", "10.0.0.1", 2),)), 0)
    node.agent.run_ended(OutcomeRecord(OutcomeState.SUCCEEDED), 3)
    for measured in rounds:
        for worker in node.begin(0, 1):
            for group, name, declaration in measured:
                worker._registry.declare(group, **declaration(name))
                worker._registry.add(group, name, 3)
    page = node.page()
    for rank in ("0", "1"):
        assert sum(("rank", rank) in labels for _, labels in page.samples) >= len(rounds[-1])


def test_rounds_leak_no_file_descriptors() -> None:
    metrics = WorkerCollector()
    open_after = []
    for _ in range(5):
        metrics.begin({0: 0, 1: 1})
        open_after.append(sum(1 for _ in Path("/proc/self/fd").iterdir()))
    assert len(set(open_after)) == 1


def test_a_signal_handler_may_measure_a_new_name(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    (worker,) = node.begin(0)
    values, came = MetricMemory.values, []

    def interrupted(memory: MetricMemory, key: MetricKey) -> object:
        if not came:
            came.append(key)
            worker.add_value("of.handler", 7)
        return values(memory, key)

    monkeypatch.setattr(MetricMemory, "values", interrupted)
    worker.add_value("loss", 1)
    rank = (("rank", "0"),)
    assert node.page().samples == {("my_app_loss", rank): 1, ("my_app_of_handler", rank): 7}


def test_a_partly_written_name_is_read_when_it_is_complete(node: Node) -> None:
    (worker,) = node.begin(0)
    worker.add_value("loss", 1)
    worker.add_value("samples", 64)
    path = Path(node.workers[0].path)
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(whole.index(b"samples"))
        file.write(bytes(40))
    assert (len(node.page().samples), node.samples()) == (1, {})
    with path.open("r+b") as file:
        file.write(whole)
    assert node.samples() == {"0": 64}


def test_full_metrics_memory_refuses_only_large_histograms(node: Node) -> None:
    (worker,) = node.begin(0)
    worker._registry.declare("my_app", histograms={f"size {number}": range(2000) for number in range(20)})
    for number in range(20):
        worker.add_value(f"size {number}", 1)
    worker.add_value("loss", 1)
    page = node.page()
    refused = page.value("torchelastic_metrics_dropped_total", reason="too_many_names", rank="0")
    assert refused is not None
    assert len([name for name, _ in page.samples if name.endswith("_count")]) == 20 - refused > 0
    assert page.value("my_app_loss", rank="0") == 1


def test_new_names_and_inherited_counters_have_a_limit(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    (worker,) = node.begin(0)
    for number in range(MAX_NAMES + 100):
        worker.add_value(f"loss at step {number}", number)
    page = node.page()
    assert len(page.named("my_app")) == MAX_NAMES
    assert page.value("torchelastic_metrics_dropped_total", reason="too_many_names", rank="0") == 100
    assert [f"exceeds the limit of {MAX_NAMES} metric names" in message for message in caplog.messages] == [True]
    for round in range(3):
        (worker,) = node.begin(0)
        worker._registry.declare("my_app", counters=[f"{round}.{number}" for number in range(900)])
        for number in range(900):
            worker.add_value(f"{round}.{number}", 1)
    assert len(node.page().named("my_app")) == MAX_NAMES + 900
    node.begin(0)
    assert len(node.page().named("my_app")) == MAX_NAMES


def test_a_worker_without_memory_has_no_metrics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    metrics = WorkerCollector()
    for _ in range(2):
        assert metrics.begin({0: 0, 1: 1}) == {}
    assert list(metrics.collect()) == []
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "No space left" in caplog.text
