"""docs/metrics.md lists exactly the existing functions, series, reasons and limits."""

from __future__ import annotations

import re
from pathlib import Path

from torchelastic import metrics
from torchelastic.metrics.series import BUILT_IN_SAMPLES, MetricKey, MetricType, user_family
from torchelastic.metrics.series_handler import MAX_NAMES, REASONS

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "metrics.md").read_text()


def test_every_function_is_listed() -> None:
    aliases_and_types = {"ConsoleMetricsHandler", "NullMetricsHandler", "MetricData", "MetricStream", "MetricsConfig"}
    table = PAGE.split("\n## The API\n")[1].split("\n## ")[0]
    for name in {*metrics.__all__} - aliases_and_types:
        assert re.search(rf"\b{name}\b", table), name


def test_the_tables_list_exactly_the_platform_series() -> None:
    named = set(re.findall(r"`(torchelastic_\w+)", PAGE))
    assert named <= BUILT_IN_SAMPLES
    families = {re.sub(r"_(total|created|bucket|count|sum)$", "", name) for name in BUILT_IN_SAMPLES}
    assert {re.sub(r"_total$", "", name) for name in named} == families


def test_reasons_and_limits_are_listed() -> None:
    for reason in REASONS:
        assert f"`{reason}`" in PAGE
    assert f"**{MAX_NAMES:,} names**" in PAGE
    assert f"inherits at most {MAX_NAMES:,} counters" in PAGE


def test_the_table_of_series_names_is_correct() -> None:
    rows = re.findall(r"^\| `(\w+)`, `([^`]+)`(?: or `([^`]+)`)?[^|]*\| `(\w+?)(?:<digest>)?`", PAGE, re.MULTILINE)
    assert len(rows) == 6
    for group, *names, series in rows:
        for name in filter(None, names):
            assert user_family(MetricKey(group, name, MetricType())).name.startswith(series)
