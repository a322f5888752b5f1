"""Measure how long users wait for a training step: ``python -m benchmarks.first_step --json``.

- A worker of ``examples/digits.py``, which is not changed and has no flags, is killed one second after its first step;
  the time ends with the next step.
- Two launchers with ``--nnodes 1:3`` start; the time ends with the first collective operation of both workers.
- ``elasticjob run examples/digits.yaml`` starts; the time ends with the first step. The baseline is
  ``python digits.py``, which has no launcher and no second worker.

Each program prints a line at the end of the time.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.recovery.launchers import TORCHRUN
from benchmarks.support.command_line import parser, run_to_end
from benchmarks.support.processes import ProcessTree, until
from benchmarks.support.report import Measurement, Report, note
from elastic_operator.local.processes import free_ports

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable

LAUNCHERS: Final = ("torchelastic.run", "torch.distributed.run")
_EXAMPLES: Final = Path(__file__).parents[2] / "examples"
_DIGITS: Final = str(_EXAMPLES / "digits.py")
_WORKER: Final = str(Path(__file__).with_name("worker.py"))
_START: Final = "started with 2 workers"
_AGAIN: Final = r"(started|resumed at step \d+) with \d workers"
_STEP: Final = r"step \d+/"


def _command(launcher: str, *arguments: str) -> list[str]:
    return [sys.executable, "-u", "-m", launcher, *arguments]


def _has(log: Path, pattern: str) -> bool:
    return re.search(pattern, log.read_text(errors="replace"), re.DOTALL) is not None


async def kill_of_a_worker(launcher: str, limit: float) -> float:
    """Return the seconds from the kill of rank 1 until rank 0 prints its next step."""
    async with ProcessTree() as tree:
        log, flags = tree.folder / "log", ("--standalone", "--nproc-per-node=2", "--max-restarts=3")
        agent = tree.start(_command(launcher, *flags, _DIGITS, "--epochs=400"), log, TORCHRUN.environment)
        await until(lambda: _has(log, _STEP), limit, "no step")
        await asyncio.sleep(1)
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in tree.living([agent.pid])}
        _, second = sorted(pid for pid, command in commands.items() if _DIGITS.encode() in command[:3])
        began = time.monotonic()
        os.kill(second, signal.SIGKILL)
        # Rank 0 prints a line when it begins or continues, and each first step after that.
        await until(lambda: _has(log, f"{_START}.*{_AGAIN}.*{_STEP}"), limit, "no next step")
        return time.monotonic() - began


async def start_of_two_nodes(launcher: str, limit: float) -> float:
    """Return the seconds from the start of two launchers until the first collective operation."""
    [port] = free_ports(1)
    flags = ("--nnodes=1:3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=benchmark")
    async with ProcessTree() as tree:
        began, logs = time.monotonic(), [tree.folder / f"log-{number}" for number in range(2)]
        for log in logs:
            tree.start(_command(launcher, *flags, "--nproc-per-node=1", _WORKER), log, TORCHRUN.environment)
        await until(lambda: all(_has(log, "a world of 2") for log in logs), limit, "no collective operation")
        return time.monotonic() - began


async def start_of_digits(command: str, limit: float) -> float:
    """Return the seconds from the start of a command until the first step is printed."""
    async with ProcessTree() as tree:
        log, began = tree.folder / "log", time.monotonic()
        of_job = _command("elastic_operator.cli.main", "run", "--plain", str(_EXAMPLES / "digits.yaml"))
        argv = of_job if command == "elasticjob" else [sys.executable, "-u", _DIGITS]
        tree.start(argv, log, {"XDG_STATE_HOME": str(tree.folder)})
        await until(lambda: _has(log, _STEP), limit, "no step")
        return time.monotonic() - began


SCENARIOS: Final[dict[str, tuple[str, Callable[[str, float], Awaitable[float]], tuple[str, str], float]]] = {
    "kill": ("a worker of digits.py is killed", kill_of_a_worker, LAUNCHERS, 0.5),
    "nodes": ("two nodes start with --nnodes 1:3", start_of_two_nodes, LAUNCHERS, 2.5),
    "run": ("elasticjob run digits.yaml", start_of_digits, ("elasticjob", "python digits.py"), 3.0),
}


async def run(arguments: argparse.Namespace) -> Report:
    """Take all samples by turns."""
    report = Report("first_step", settings={"repeat": arguments.repeat})
    for name in arguments.only or SCENARIOS:
        what, measure, baselines, wanted = SCENARIOS[name]
        samples: dict[str, list[float]] = {baseline: [] for baseline in baselines}
        never: dict[str, list[str]] = {baseline: [] for baseline in baselines}
        for number in range(1, arguments.repeat + 1):
            for baseline in baselines:
                try:
                    samples[baseline].append(await measure(baseline, arguments.limit))
                    note(f"{what} {number}/{arguments.repeat}: {baseline}: {samples[baseline][-1]:.3f} s")
                except TimeoutError as error:
                    never[baseline].append(f"{error}")
        ours, baseline = baselines
        shown = baseline.replace("torch.distributed.run", "torchrun")
        report.add(
            Measurement(
                what, samples[ours], samples[baseline], never[ours], never[baseline], shown, ours_at_most=wanted
            )
        )
    return report


def main() -> int:
    """Run the benchmark."""
    flags = parser("first_step", __doc__, etcd=False, repeat=5, limit=60)
    flags.add_argument("--only", action="append", metavar="SCENARIO", choices=[*SCENARIOS])
    arguments = flags.parse_args()
    report = run_to_end("first_step", run(arguments))
    report.show(as_json=arguments.json)
    return int(any(each["ours"]["never"] for each in report.as_json()["measurements"]))


if __name__ == "__main__":
    sys.exit(main())
