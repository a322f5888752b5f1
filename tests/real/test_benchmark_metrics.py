"""The metrics benchmark completes and reports every measurement."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]


async def test_a_short_benchmark_reports_every_measurement() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.metrics", "--json", "--repeat=1", "--steps=20", "--limit=120"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    told = {each["name"]: each["ours"]["samples"] for each in json.loads(out)["measurements"]}
    assert {name: len(samples) for name, samples in told.items()} == {
        "add_value, a gauge": 1,
        "add_value, a counter": 1,
        "add_value, a histogram": 1,
        "add_value, no handler": 1,
        "torchelastic.step()": 1,
        "100,000 values of a counter": 1,
        "training step, metrics on": 1,
        "scrape of 10,000 series": 10,
    }
    assert min(sample for name, samples in told.items() if "training step" not in name for sample in samples) > 0
