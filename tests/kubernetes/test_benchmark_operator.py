"""The operator benchmark runs on the real parts and prints its measurements."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.control_plane, pytest.mark.simulated_nodes, pytest.mark.timeout(600)]

TINY = (
    *("--pods=3,9", "--repeat=1", "--deletions=2", "--scale=2,6", "--many=4,2"),
    *("--large=3,2", "--idle=2", "--changes=2"),
)


async def test_every_operator_metric_is_measured_and_documented() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.operator", "--json", *TINY),
        cwd=Path(__file__).parents[2],
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, notes = await process.communicate()
    assert process.returncode == 0, notes.decode()
    report = json.loads(output)

    measured = {each["name"]: each for each in report["measurements"]}
    assert list(measured) == [
        "3 pods exist",
        "9 pods exist",
        "a deleted pod is replaced, p95 of 2",
        "a deleted pod is replaced while the old one stays Terminating, p95 of 2",
        "scaled from 2 to 6 pods",
        "scaled from 6 to 2 pods",
        "all pods of 4 jobs of 2 exist",
        "the slowest of them against the median",
        "3 jobs, 6 running pods: writes in 2 s of rest",
        "3 jobs, 6 running pods: reaction to a pod's change, median of 2",
        "3 jobs, 6 running pods: memory of the operator",
        "3 jobs, 6 running pods: from the operator's start until all jobs are reconciled",
    ]
    assert not any(each["ours"]["never"] for each in measured.values())
    assert measured["3 jobs, 6 running pods: writes in 2 s of rest"]["ours"]["median"] == 0
    assert measured["9 pods exist"]["peer"]["samples"] == [0.25]
    assert "once" in measured["9 pods exist"]["peer"]["name"]

    for row in report["requests"]:
        assert row["creates"] == row["pods"], "the operator creates a pod with one request"
        assert row["per_pod"] < 6, "the requests of a job grow faster than its pods"
