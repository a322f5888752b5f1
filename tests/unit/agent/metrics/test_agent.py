"""The metrics of an agent: requests to the store, operations and totals of the run."""

from __future__ import annotations

from contextlib import aclosing
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector

from tests.support.scraping import Page
from torchelastic.config.settings import RendezvousSettings
from torchelastic.errors import LeaseLost, StoreRefused, StoreUnavailable
from torchelastic.metrics.agent import AgentMetrics
from torchelastic.protocol.records import OutcomeRecord, OutcomeState, RunState, SizeRecord, TimeBreakdown
from torchelastic.store.client import NodeStore
from torchelastic.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry, Metric

    from torchelastic.rendezvous.node import RendezvousNode

REQUESTS = "torchelastic_store_request_duration_seconds_count"


def page(registry: CollectorRegistry) -> Page:
    return Page(parse_text(generate_latest(registry).decode()))


@pytest.fixture
def agent() -> AgentMetrics:
    return AgentMetrics("default", job=("team", "digits"))


class Fixed(Collector):
    """A collector that yields fixed metrics, and then may fail."""

    def __init__(self, *families: Metric, error: Exception | None = None) -> None:
        self._families, self._error = families, error

    def collect(self) -> Iterator[Metric]:
        yield from self._families
        if self._error is not None:
            raise self._error


# -- the page


def test_openmetrics_has_units(agent: AgentMetrics) -> None:
    registry = agent.page()
    agent.store_answered("get", 0.1, succeeded=True)
    agent.workers_changed("healthy")
    units = {family.name: family.unit for family in parse_openmetrics(generate_openmetrics(registry).decode())}
    assert units == {"torchelastic_store_request_duration_seconds": "seconds", "torchelastic_worker_state": ""}


def test_a_failing_collector_is_left_out_and_logged_once(agent: AgentMetrics, caplog: pytest.LogCaptureFixture) -> None:
    loss = GaugeMetricFamily("my_app_loss", "Loss.", value=1)
    registry = agent.page(Fixed(loss, error=OSError("no such device")), Fixed(loss))
    for _ in range(3):
        assert page(registry).samples == {("my_app_loss", ()): 1}
    assert [record.message for record in caplog.records] == [
        "/metrics does not show the metrics of Fixed. Its further errors are not logged."
    ]
    assert "no such device" in caplog.text


# -- requests to the store


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(StoreUnavailable("away"), "failure"), (StoreRefused("no"), "failure"), (LeaseLost("over"), "success")],
)
async def test_a_request_that_the_store_does_not_answer_is_a_failure(
    agent: AgentMetrics, monkeypatch: pytest.MonkeyPatch, error: Exception, outcome: str
) -> None:
    registry, memory = agent.page(), MemoryStore()

    async def fail(_: int) -> None:
        raise error

    monkeypatch.setattr(memory, "keep_alive", fail)
    with pytest.raises(type(error)):
        await NodeStore(memory, agent.store_answered).keep_alive(7)
    assert page(registry).named(REQUESTS) == {(REQUESTS, (("outcome", outcome), ("request", "keep_alive"))): 1}


async def test_only_a_watch_that_never_starts_is_a_failure(
    agent: AgentMetrics,
) -> None:
    registry, memory = agent.page(), MemoryStore()
    store = NodeStore(memory, agent.store_answered)
    async with aclosing(store.watch("/a/")) as changes:
        assert await anext(changes) == ()
        memory.reachable = False
        with pytest.raises(StoreUnavailable):
            await anext(changes)
    with pytest.raises(StoreUnavailable):
        await anext(store.watch("/a/"))
    shown = page(registry)
    assert shown.value(REQUESTS, request="watch", outcome="success") == 1
    assert shown.value(REQUESTS, request="watch", outcome="failure") == 1


# -- operations


def operations(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Return the counts by operation and outcome."""
    found = page(registry).named("torchelastic_operations_total")
    return {(dict(labels)["operation"], dict(labels)["outcome"]): count for (_, labels), count in found.items()}


def test_a_failed_rendezvous_is_counted_once(agent: AgentMetrics) -> None:
    registry = agent.page()
    agent.rendezvous_ended(succeeded=False)
    assert operations(registry) == {}
    agent.rendezvous_began()
    agent.rendezvous_began()
    for _ in range(2):
        agent.rendezvous_ended(succeeded=False)
    assert operations(registry) == {("rendezvous", "failure"): 1}


# -- series of the agent


@pytest.mark.parametrize(
    ("succeeded", "restarts", "outcome", "retries", "flakiness"),
    [
        (True, 0, "success", "no", 0.0),
        (True, 2, "success", "yes", 0.2),
        (False, 0, "failure", "no", 1.0),
        (False, 9, "failure", "yes", 1.0),
    ],
)
def test_the_end_of_a_run_is_counted_by_outcome(
    agent: AgentMetrics, succeeded: bool, restarts: int, outcome: str, retries: str, flakiness: float
) -> None:
    registry = agent.page()
    state = OutcomeState.SUCCEEDED if succeeded else OutcomeState.FAILED
    agent.run_ended(OutcomeRecord(state, restarts=restarts), 9)
    shown = page(registry)
    outcomes = {
        labels for (name, labels), number in shown.samples.items() if number and name.endswith("outcomes_total")
    }
    assert outcomes == {(("outcome", outcome), ("retries", retries), ("role", "default"))}
    assert shown.value("torchelastic_runs_total", role="default") == 1
    assert shown.value("torchelastic_flakiness_ratio", role="default") == pytest.approx(flakiness)


# -- totals of the run


@given(st.lists(st.tuples(st.sampled_from(["train", "restore", "report"]), st.integers(0, 50)), max_size=20))
def test_seconds_by_state_never_decrease_and_add_up(steps: list[tuple[str, int]]) -> None:
    spent: dict[RunState, float] = {RunState.TRAINING: 0, RunState.RESTORING: 0}
    node = SimpleNamespace(
        is_leader=True,
        round=None,
        run=SimpleNamespace(size=None, settings=RendezvousSettings("digits", SizeRecord(min=1, max=1))),
        history=SimpleNamespace(breakdown=lambda: TimeBreakdown(seconds=dict(spent))),
    )
    agent = AgentMetrics("default")
    agent.follow(cast("RendezvousNode", node))
    before: dict[str, float] = {}
    for what, seconds in steps:
        if what == "report":  # a late report: some of the training time was restoring
            seconds = min(seconds, int(spent[RunState.TRAINING]))
            spent[RunState.TRAINING] -= seconds
        spent[RunState.TRAINING if what == "train" else RunState.RESTORING] += seconds
        [family] = [each for each in agent.collect() if each.name == "torchelastic_job_seconds"]
        shown = {sample.labels["state"]: sample.value for sample in family.samples}
        assert sum(shown.values()) == sum(spent.values())
        assert all(shown[state] >= value for state, value in before.items())
        before = shown
