"""Measure how much of its time training keeps through random faults: ``python -m benchmarks.storm --json``.

Two agents train with two workers each and a real etcd, first with ``@torchelastic.elastic``, then with restarts from
checkpoints. One fault happens in each interval. The goodput is the time that the completed steps take without faults,
divided by the time since the first step. See docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.support.command_line import at_least, duration, parser, run_to_end
from benchmarks.support.etcd import BreakableEtcd, choose_etcd
from benchmarks.support.processes import ProcessTree, until
from benchmarks.support.report import Measurement, Report, note
from elastic_operator.local.processes import free_ports

if TYPE_CHECKING:
    import argparse

    from torchelastic.agent.workers.processes import Child

HOWS: Final = {"in place": {60: 0.99, 20: 0.90}, "with restarts": {60: 0.96, 20: 0.75}}
"""The wanted goodput of each program, by the seconds between two faults."""

STEP: Final = 0.05
"""Seconds of a training step without faults."""

WORKERS: Final = 2
"""Workers of each agent."""

FAULTS: Final = ("worker killed", "agent killed", "agent leaves", "third agent", "etcd killed")
"""The names of the faults; a third agent joins and later leaves."""

_POLL: Final = 0.2
"""Seconds between two looks at the steps; more looks would disturb the training."""

_DOWN: Final = 1.0
"""Seconds until an agent that was killed or has left is started again, or etcd."""

_PROGRAM: Final = str(Path(__file__).with_name("program.py"))


@dataclass
class Storm:
    """Two agents and their etcd.

    Attributes:
        processes: the tree in which they are started.
        etcd: a running etcd.
        how: how the program trains.
        limit: the maximum seconds of each wait.
        agents: the agents that should run, by their names.
    """

    processes: ProcessTree
    etcd: BreakableEtcd
    how: str
    limit: float
    agents: dict[str, Child] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The folder with the steps of the processes."""
        return self.processes.folder / "steps"

    def start(self, name: str) -> None:
        """Start an agent."""
        command = [
            *(sys.executable, "-m", "torchelastic.run", "--nnodes=1:3", f"--nproc-per-node={WORKERS}"),
            *(f"--node-name={name}", f"--rdzv-endpoint={self.etcd.endpoint}", "--rdzv-id=storm"),
            *("--local-addr=127.0.0.1", "--max-restarts=1000"),
            *(_PROGRAM, str(self.folder), self.how.replace("in place", "in-place").replace("with ", "")),
        ]
        self.agents[name] = self.processes.start(
            command, self.log(name), {"OMP_NUM_THREADS": "1", "BENCHMARK_NODE": name}
        )

    def log(self, name: str) -> Path:
        """Return the log of an agent."""
        return self.processes.folder / f"{name}.log"

    def steps(self) -> list[tuple[float, int, int]]:
        """Return the time, the number and the world's size of each step so far, by time."""
        found = []
        for path in self.folder.iterdir():
            if path.suffix[1:].isdecimal():
                lines = (line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))
                found += [(float(at), int(step), int(size)) for at, step, size in map(str.split, lines)]
        return sorted(found)

    def done(self) -> int:
        """Return the number of unique steps so far."""
        return max(step for _, step, _ in self.steps())

    async def trains(self, size: int) -> None:
        """Wait until the last step is new and in a world of this size.

        Raises:
            TimeoutError: it is not within the limit.
        """
        since = time.monotonic()
        while not any(at > since and world == size for at, _, world in self.steps()[-1:]):
            if time.monotonic() > since + self.limit:
                raise TimeoutError(f"no step of {size} ranks within {self.limit:g} s")
            await asyncio.sleep(_POLL)

    async def stop(self, name: str, number: signal.Signals) -> None:
        """End an agent with a signal, and wait until it has exited.

        Raises:
            TimeoutError: it does not within the limit.
        """
        agent = self.agents.pop(name)
        agent.signal(number)
        await until(lambda: not agent.running, self.limit, f"agent {name} does not exit")

    async def inflict(self, fault: str, name: str, worker: int, interval: float) -> None:
        """Inflict a fault and repair it.

        Args:
            fault: one of :data:`FAULTS`.
            name: the name of the agent.
            worker: the index of the agent's worker.
            interval: seconds between two faults; a third agent stays for half of them.

        Raises:
            TimeoutError: an agent does not exit within the limit.
        """
        if fault == "worker killed":
            os.kill(self._worker(name, worker), signal.SIGKILL)
        elif fault == "third agent":
            self.start("c")
            await asyncio.sleep(interval / 2)
            await self.stop("c", signal.SIGTERM)
        elif fault == "etcd killed":
            await self.etcd.kill()
            await asyncio.sleep(_DOWN)
            await self.etcd.start()
        else:
            await self.stop(name, signal.SIGKILL if fault == "agent killed" else signal.SIGTERM)
            await asyncio.sleep(_DOWN)
            self.start(name)

    def _worker(self, name: str, index: int) -> int:
        """Return the process id of an agent's worker."""
        newest = max(self.folder.glob(f"{name}.{index}.*"), key=lambda path: path.stat().st_ctime)
        return int(newest.suffix[1:])


@dataclass
class Result:
    """The result of one program.

    Attributes:
        goodput: the part of the time that was not lost.
        usual: the median seconds between two steps.
        steps: the number of unique steps.
        seconds: the time since the first step.
        history: one sentence for each fault.
        failed: why the storm ended early; empty if it did not.
    """

    goodput: float = 0.0
    usual: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    history: list[str] = field(default_factory=list)
    failed: str = ""


async def play(how: str, arguments: argparse.Namespace, binary: Path) -> Result:
    """Train through the faults of a seed; return the result."""
    choose = random.Random(arguments.seed)
    result = Result()
    async with ProcessTree() as tree:
        (tree.folder / "steps").mkdir()
        etcd = BreakableEtcd(tree, binary, free_ports(2))
        await etcd.start()
        storm = Storm(tree, etcd, how, arguments.limit)
        for name in "ab":
            storm.start(name)
        try:
            await storm.trains(2 * WORKERS)
            first, end = storm.steps()[0], time.monotonic() + arguments.minutes * 60
            left: list[str] = []
            while (next_at := time.monotonic() + arguments.interval) < end:
                faults = arguments.faults
                left = left or choose.sample(faults, len(faults))  # each fault occurs once in as many intervals
                fault, name, worker = left.pop(), choose.choice("ab"), choose.randrange(WORKERS)
                before, began = storm.done(), time.monotonic()
                await storm.inflict(fault, name, worker, arguments.interval)
                await asyncio.sleep(next_at - time.monotonic())
                await storm.trains(2 * WORKERS)
                lost = time.monotonic() - began - (storm.done() - before) * STEP
                what = fault if fault in {"third agent", "etcd killed"} else f"{fault} ({name})"
                result.history.append(f"{what}: {lost:.2f} s lost")
                note(f"{how}: {result.history[-1]}")
            await asyncio.sleep(end - time.monotonic())
            await storm.trains(2 * WORKERS)
        except TimeoutError as why:
            logs = (storm.log(name).read_text(errors="replace")[-1500:] for name in "abc" if storm.log(name).exists())
            result.failed = "\n".join([f"{why}", *logs])
            return result
        steps = storm.steps()
        result.seconds = steps[-1][0] - first[0]
        result.steps = storm.done() - first[1]
        result.goodput = result.steps * STEP / result.seconds
        result.usual = statistics.median(after[0] - before[0] for before, after in pairwise(steps))
    return result


async def run(arguments: argparse.Namespace) -> tuple[Report, bool]:
    """Play the faults with each program; return the report, and whether each program trained to the end."""
    binary = await choose_etcd(arguments.etcd)
    settings = {name: getattr(arguments, name) for name in ("minutes", "interval", "seed", "faults", "limit")}
    report = Report("storm", settings=settings, etcd=binary)
    rows: list[dict[str, Any]] = []
    histories = {}
    complete = True
    for how, by_interval in HOWS.items():
        if arguments.only and how != arguments.only:
            continue
        wanted = by_interval.get(arguments.interval)
        result = await play(how, arguments, binary)
        complete = complete and not result.failed
        if result.failed:
            note(f"{how}: {result.failed}")
        report.add(
            Measurement(
                f"lost time, {how}",
                ours=[] if result.failed else [100 * (1 - result.goodput)],
                ours_never=[result.failed] if result.failed else [],
                unit="%",
                includes="from the first step to the last",
                ours_at_most=None if wanted is None else 100 * (1 - wanted),
            )
        )
        rows.append(
            {
                "program": how,
                "goodput": result.goodput,
                "wanted": wanted,
                "steps": result.steps,
                "seconds": result.seconds,
                "median step (s)": result.usual,
                "faults": len(result.history),
            }
        )
        histories[how] = result.history
    report.add_value("goodput", rows)
    report.add_value("history", histories)
    return report, complete


def main() -> int:
    """Measure and print; fail if a program did not train to the end."""
    flags = parser("storm", __doc__, limit=60.0)
    flags.add_argument(
        "--minutes", type=duration, default=20.0, metavar="N", help="for each program (default: %(default)g)"
    )
    text = "time between two faults (default: %(default)g)"
    flags.add_argument("--interval", type=duration, default=60.0, metavar="SECONDS", help=text)
    seed = time.time_ns() % 1_000_000
    flags.add_argument("--seed", type=at_least(0), default=seed, metavar="N", help="default: random")
    flags.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS, help="only these (default: all of them)")
    flags.add_argument("--only", choices=HOWS, help="only this program")
    arguments = flags.parse_args()
    report, complete = run_to_end("storm", run(arguments))
    report.show(as_json=arguments.json)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
