"""Benchmark reports: a failed repetition is never hidden."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

import pytest

from benchmarks.support import command_line
from benchmarks.support.report import Measurement, Report
from elastic_operator.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable


def row_of(measurement: Measurement) -> list[str]:
    """Return the measurement's row of the text report."""
    report = Report("recovery", settings={})
    report.add(measurement)
    return re.split(" {2,}", report.as_text().splitlines()[-1])


def test_a_row_has_both_columns_the_ratio_and_the_target() -> None:
    made = Measurement(
        "killed", ours=(0.11, 0.13, 0.12), baseline=(3.9, 4.1, 3.6), ours_at_most=0.15, ratio_at_least=25
    )
    wanted = "≤ 150 ms, ratio ≥ 25"
    assert row_of(made) == ["killed", "120 ms", "110 ms … 130 ms", "3.9 s", "32.5", wanted, "reached"]


def test_a_repetition_that_times_out_is_shown_and_misses_the_target() -> None:
    made = Measurement("killed", ours=(0.1,) * 4, ours_never=["not within 60 s"], ours_at_most=0.15)
    assert row_of(made)[1] == "100 ms, 1 of 5 never"
    assert row_of(made)[-1] == "NOT REACHED"
    document = made.as_json()
    assert document["ours"]["never"] == ["not within 60 s"]
    assert document["reached"] is False


def test_a_measurement_that_always_times_out_is_shown_as_never() -> None:
    made = Measurement("lost", ours=(), ours_never=["a", "b"], baseline_never=["c"], ratio_at_least=25)
    assert row_of(made) == ["lost", "never", "-", "never", "-", "ratio ≥ 25", "NOT REACHED"]
    assert made.as_json()["baseline"] == {"name": "torchrun", "samples": [], "median": None, "never": ["c"]}


@pytest.mark.parametrize(
    ("measurement", "reached"),
    [
        (Measurement("", ours=[1.0]), None),
        (Measurement("", ours=[1.0], ratio_at_least=2), None),
        (Measurement("", ours=[1.0], baseline=[2.0], ratio_at_least=2), True),
        (Measurement("", ours=[1.0], baseline=[1.9], ratio_at_least=2), False),
        (Measurement("", ours=[1.0], baseline=[1.9], ours_at_most=1, ratio_at_least=2), True),
        (Measurement("", ours=[1.1], baseline=[9.9], ours_at_most=1, ratio_at_least=2), False),
        (Measurement("", ours=[1.0], baseline_never=["x"], ours_at_most=1, ratio_at_least=2), True),
    ],
)
def test_a_target_is_reached_if_both_the_time_and_the_ratio_are(
    measurement: Measurement, *, reached: bool | None
) -> None:
    assert measurement.reached is reached


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (command_line.at_least(1), "0", "'0' should be a number, 1 or more"),
        (command_line.at_least(2), "two", "'two' should be a number, 2 or more"),
        (command_line.duration, "-1", "'-1' should be a time in seconds, 0 or more"),
        (command_line.duration, "nan", "'nan' should be a time in seconds, 0 or more"),
        (command_line.existing, "/nowhere/etcd", "there is no file /nowhere/etcd"),
    ],
)
def test_an_invalid_argument_is_explained(kind: Callable[[str], object], text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{message}$"):
        kind(text)


def test_a_missing_requirement_is_reported_without_a_traceback() -> None:
    async def work() -> None:
        raise BadInput("there is no etcd")

    with pytest.raises(SystemExit, match=r"^python -m benchmarks\.recovery: there is no etcd$"):
        command_line.run_to_end("recovery", work())
