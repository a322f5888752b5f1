"""Common tools for torch work in a worker as in a plain program."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.programs import by_hand, output_of, script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

COMPILES = """
import os
import torch
from torch._inductor.async_compile import AsyncCompile

def layer(x):
    return torch.sin(x) * 2 + x

def main():
    x = torch.randn(1000)
    print(torch.allclose(torch.compile(layer)(x), layer(x), atol=1e-5))
    print(AsyncCompile.process_pool().submit(os.getpid).result(timeout=60) != os.getpid())

if __name__ == "__main__":
    main()
"""


async def test_a_function_is_compiled_in_process_and_in_compile_workers(tmp_path: Path) -> None:
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        "TORCHINDUCTOR_VEC_ISA_OK": "0",  # torch compiles programs to detect the features of the processor
    }
    assert await output_of(script(tmp_path, COMPILES), tmp_path / "logs", env) == "True\nTrue\n"


TRAINS = """
import torch

def step(x):
    y = x * 2
    return y.sum()

def never(x):
    return x

print(step(torch.ones(2)).item())
"""


def measured(data: Path) -> str:
    """Return the lines of the program that did not run, according to coverage."""
    report = by_hand([sys.executable, "-m", "coverage", "report", f"--data-file={data}", "--show-missing"], {})
    lines = [line for line in report.stdout.splitlines() if "program.py" in line]
    assert lines, report.stdout
    return lines[0].split()[-1]


async def test_coverage_measures_a_worker_as_a_subprocess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    data = tmp_path / "measured"
    settings = tmp_path / "coveragerc"
    settings.write_text(f"[run]\ndata_file = {data}\ninclude = {tmp_path}/*\n")
    monkeypatch.setenv("COVERAGE_PROCESS_START", str(settings))
    assert await output_of(script(tmp_path, TRAINS), tmp_path / "logs") == "4.0\n"
    assert measured(data) == "9"


PROFILES = """
import sys, torch
from torch.profiler import ProfilerActivity, profile, record_function

with profile(activities=[ProfilerActivity.CPU]) as profiler:
    with record_function("my step"):
        torch.ones(64, 64) @ torch.ones(64, 64)
names = {event.key for event in profiler.key_averages()}
print("my step" in names, "aten::mm" in names)
profiler.export_chrome_trace(sys.argv[1])
"""


async def test_the_torch_profiler_sees_what_a_worker_computes(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    printed = await output_of(script(tmp_path, PROFILES, str(trace)), tmp_path / "logs")
    assert printed.splitlines()[-1] == "True True"
    assert "my step" in {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
