"""The series of programs, read back with Prometheus' own parsers."""

from __future__ import annotations

import enum
import math
import re
import urllib.request
from array import array
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics_exposition
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.support.scraping import Page, Samples
from torchelastic import metrics
from torchelastic.errors import SettingsError
from torchelastic.metrics import MetricData, PrometheusMetricHandler
from torchelastic.metrics.series import Kind, MetricKey, MetricType, user_family


def put(handler: PrometheusMetricHandler, name: Any, value: Any, group: str = "my_app") -> None:
    handler.emit(MetricData(0.0, group, name, value))


def page(handler: PrometheusMetricHandler) -> Page:
    """Scrape the handler, and check that both formats parse and agree."""
    found = Page(parse_text(generate_latest(handler.registry).decode()))
    openmetrics = openmetrics_exposition.generate_latest(handler.registry).decode()
    assert Page(parse_openmetrics(openmetrics)).samples.keys() == found.samples.keys()
    return found


def scrape(handler: PrometheusMetricHandler) -> Samples:
    """Return all samples by name and labels."""
    return page(handler).samples


@pytest.fixture
def handler() -> PrometheusMetricHandler:
    return PrometheusMetricHandler()


# -- names


@pytest.mark.parametrize(
    ("group", "name", "put_value", "series", "seen"),
    [
        ("my_app", "train.loss", 0.5, "my_app_train_loss", 0.5),
        ("my_app", "stepTime", 2, "my_app_step_time", 2),
        ("MyApp", "HTTPRequests", 2, "my_app_http_requests", 2),
        ("my-app", "gpu 0/memory", 2, "my_app_gpu_0_memory", 2),
        ("my_app", "step.duration.ms", 250, "my_app_step_duration_seconds", 0.25),
        ("my_app", "latency_ms", 1, "my_app_latency_seconds", 0.001),
        ("my_app", "samples_total", 7, "my_app_samples_total_value", 7),
        ("my_app", "word.count", 7, "my_app_word_count_value", 7),
        ("my_app", "build_info", 7, "my_app_build_info_value", 7),
        ("2024", "loss", 7, "group_2024_loss", 7),
        ("process", "ms", 7000, "group_process_seconds", 7),
        ("elastic", "operator.job.ready_pods", 7, "group_elastic_operator_job_ready_pods", 7),
        ("elastic", "operator_ms", 7000, "group_elastic_operator_seconds", 7),
        ("elastic", "operators", 7, "elastic_operators", 7),
        ("torchelastic", "my.own", 7, "torchelastic_my_own", 7),
    ],
)
def test_a_name_becomes_a_gauge_named_by_prometheus_conventions(
    handler: PrometheusMetricHandler, group: str, name: str, put_value: float, series: str, seen: float
) -> None:
    put(handler, name, put_value, group)
    assert scrape(handler) == {(series, ()): pytest.approx(seen)}
    assert page(handler).types == {series: "gauge"}


def test_names_with_the_same_series_name_get_separate_series(handler: PrometheusMetricHandler) -> None:
    names = ["step.time", "stepTime", "step_time", "step-time", "STEP__TIME", "step.time.", "step_time\n"]
    for number, name in enumerate(names):
        put(handler, name, number)
    put(handler, "time", 99, group="my_app_step")
    samples = scrape(handler)
    assert sorted(samples.values()) == [0, 1, 2, 3, 4, 5, 6, 99]
    assert samples["my_app_step_time", ()] == 0
    assert all(name.startswith("my_app_step_time") for name, _ in samples)
    again = PrometheusMetricHandler()
    put(again, "step.time", 0)
    put(again, "stepTime", 1)
    assert scrape(again).items() <= samples.items(), "the digest is the same in every process"


def test_user_names_cannot_take_platform_series(handler: PrometheusMetricHandler) -> None:
    put(handler, "state", 5, group="torchelastic_worker")
    put(handler, "round_", 6, group="torchelastic")
    put(handler, "round", 7, group="torchelastic")
    samples = scrape(handler)
    assert samples["torchelastic_round", ()] == 7
    assert sorted(number for (name, labels), number in samples.items() if not labels) == [5, 6, 7]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["process", "python", "scrape", "elastic", "operator", "up", "ALERTS", "ms", ".", ""])),
    st.lists(st.sampled_from(["process", "operator", "job", "up", "ALERTS", "ms", "total", "seconds", ".", ""])),
    st.sampled_from([MetricType(), MetricType(Kind.COUNTER), MetricType(Kind.HISTOGRAM, (1.0,))]),
)
def test_no_name_becomes_a_series_of_prometheus_or_the_operator(
    group: list[str], name: list[str], metric_type: MetricType
) -> None:
    of_others = ("process_", "python_", "scrape_", "elastic_operator_")
    samples = user_family(MetricKey("_".join(group), "_".join(name), metric_type)).samples
    assert not any(sample.startswith(of_others) or sample in ("up", "ALERTS") for sample in samples)


def test_counters_cannot_take_the_samples_of_a_histogram(handler: PrometheusMetricHandler) -> None:
    metrics.declare("test_samples", histograms={"size": [1, 10]}, counters=["size_count", "size_sum"])
    for name, value in {"size": 5, "size_count": 3, "size_sum": 4}.items():
        put(handler, name, value, "test_samples")
    samples = scrape(handler)
    assert samples["test_samples_size_count", ()] == 1
    assert samples["test_samples_size_sum", ()] == 5
    others = {name: number for (name, _), number in samples.items() if name.endswith("_total")}
    assert sorted(others.values()) == [3, 4]


ODD_NAMES = st.sampled_from(["損失", "", "...", "\udc80", "a" * 5000, 'quote " and \\ and \n', "{}", "café"])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.text(max_size=12), st.text("aB._1-ms é", max_size=8) | st.text(max_size=12) | ODD_NAMES),
        unique=True,
        max_size=12,
    )
)
def test_no_two_names_share_a_series(sources: list[tuple[str, str]]) -> None:
    handler = PrometheusMetricHandler()
    for number, (group, name) in enumerate(sources):
        # A multiple of 1000 stays whole when it is converted to seconds, and only then is below 1000.
        put(handler, name, (number + 1) * 1000, group=f"g{group}")
    samples = scrape(handler)
    assert len(samples) == len(sources)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]{1,220}", series) for series, _ in samples)
    seen = sorted(number if number >= 1000 else number * 1000 for number in samples.values())
    assert seen == [(number + 1) * 1000 for number in range(len(sources))]


# -- counters and histograms


def test_a_declared_counter_sums_its_values(handler: PrometheusMetricHandler) -> None:
    metrics.declare("test_sums", counters=["samples", "tokens_total", "busy.ms"])
    for _ in range(3):
        for name, value in {"samples": 64, "tokens_total": 10, "busy.ms": 500}.items():
            put(handler, name, value, "test_sums")
    assert scrape(handler) == {
        ("test_sums_samples_total", ()): 192,
        ("test_sums_tokens_total", ()): 30,
        ("test_sums_busy_seconds_total", ()): 1.5,
    }
    assert set(page(handler).types.values()) == {"counter"}


def test_a_declaration_applies_to_its_group_in_every_handler() -> None:
    group = "test_what_was_declared"
    metrics.declare(group, counters=["samples"], histograms={"step.ms": [0.1, 1]})
    for handler in (PrometheusMetricHandler(), PrometheusMetricHandler()):
        for name in ("samples", "step.ms", "loss"):
            put(handler, name, 5, group)
        put(handler, "samples", 5)
        assert page(handler).types == {
            f"{group}_samples": "counter",
            f"{group}_step_seconds": "histogram",
            f"{group}_loss": "gauge",
            "my_app_samples": "gauge",
        }


def test_a_late_declaration_is_ignored_and_logged(
    handler: PrometheusMetricHandler, caplog: pytest.LogCaptureFixture
) -> None:
    group = "test_what_is_declared_late"
    metrics.declare(group, counters=["samples"])
    for name in ("samples", "tokens"):
        put(handler, name, 5, group)
    metrics.declare(group, counters=["samples", "unseen"])
    assert caplog.messages == []
    metrics.declare(group, counters=["tokens"])
    [message] = caplog.messages
    assert message == f"'tokens' of group '{group}' has values of type gauge; declare it before its first value."
    put(handler, "tokens", 2, group)
    assert page(handler).value(f"{group}_tokens") == 2


BUCKETS = "buckets of 'x' must be finite numbers, each above the previous one"


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ({"counters": "samples"}, r"counters must be a collection of names, like \['samples'\]"),
        ({"counters": 5}, r"counters must be a collection of names, like \['samples'\]"),
        *(({"histograms": wrong}, "histograms must map names to buckets") for wrong in (["size"], [], 0)),
        *(({"histograms": {"x": buckets}}, BUCKETS) for buckets in ([], [2, 1], [1, 1], [math.nan], [None], 1, "high")),
    ],
)
def test_invalid_counters_and_histograms_are_refused(asked: Any, answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        metrics.declare("my_app", **asked)


# -- values


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1])
def test_an_invalid_value_of_a_sum_is_dropped_and_logged_once(
    handler: PrometheusMetricHandler, wrong: float, caplog: pytest.LogCaptureFixture
) -> None:
    metrics.declare("test_values", counters=["samples"], histograms={"size": [1, 10]})
    for name in ("samples", "size"):
        for value in (2, wrong, 3):
            put(handler, name, value, "test_values")
    samples = scrape(handler)
    assert samples["test_values_samples_total", ()] == 5
    assert samples["test_values_size_sum", ()] == 5
    assert samples["test_values_size_count", ()] == 2
    reason = "negative" if wrong == -1 else "not_finite"
    assert samples["torchelastic_metrics_dropped_total", (("reason", reason),)] == 2
    assert len(caplog.records) == 1


class OneElement:
    """An array or tensor with one element; tests/integration tests real arrays and tensors."""

    def __init__(self, element: object) -> None:
        self._element = element

    def item(self) -> object:
        return self._element


class Size(enum.IntEnum):
    TWO = 2


@pytest.mark.parametrize(
    "wrong",
    [
        *("high", None, [1], object(), 10**400, 1j),
        *("5", b"3", array("b", b"3"), OneElement("5")),
    ],
)
def test_a_value_that_is_not_a_number_is_dropped_and_logged_once(
    handler: PrometheusMetricHandler, wrong: object, caplog: pytest.LogCaptureFixture
) -> None:
    put(handler, "loss", 1)
    put(handler, "loss", wrong)
    put(handler, "accuracy", wrong)
    assert scrape(handler) == {
        ("my_app_loss", ()): 1,
        ("torchelastic_metrics_dropped_total", (("reason", "not_a_number"),)): 2,
    }
    assert len(caplog.records) == 1
    assert "loss" in caplog.text


@pytest.mark.parametrize("number", [2, 2.0, Decimal(2), Fraction(2), Size.TWO, OneElement(2), OneElement(Decimal(2))])
def test_every_kind_of_number_is_accepted(handler: PrometheusMetricHandler, number: Any) -> None:
    put(handler, "loss", number)
    assert scrape(handler) == {("my_app_loss", ()): 2}


# -- HTTP


def test_a_handler_serves_its_series_over_http() -> None:
    handler = PrometheusMetricHandler(port=0, address="127.0.0.1")
    put(handler, "loss", 0.5)
    with urllib.request.urlopen(f"http://127.0.0.1:{handler.port}/metrics") as response:
        assert "my_app_loss 0.5" in response.read().decode()


@pytest.mark.parametrize(
    ("address", "port", "answer"),
    [
        ("192.0.2.7", 0, r"annot assign requested address. Choose another port, or 0 .*, or another address"),
        ("no.such.host.invalid", 0, r"\w. Choose another port"),
        ("127.0.0.1", 65536, "a port is a number from 0 to 65535. Choose another port"),
    ],
)
def test_an_unusable_address_is_explained(address: str, port: int, answer: str) -> None:
    with pytest.raises(SettingsError, match=answer):
        PrometheusMetricHandler(port=port, address=address)
