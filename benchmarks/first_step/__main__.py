"""Measure how long users wait for a training step: ``python -m benchmarks.first_step --json``.

- A worker of ``examples/digits.py``, which is not changed and has no flags, is killed one second after its first step;
  the time ends with the next step.
- Two launchers with ``--nnodes 1:3`` start; the time ends with the first collective operation of both workers.
- ``elasticjob run examples/digits.yaml`` starts; the time ends with the first step. The peer is ``python digits.py``,
  which has no launcher and no second worker.

Each program prints a line at the end of the time.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from benchmarks.support.command_line import parser, run_to_end
from benchmarks.support.report import Measurement, Report, note
from elastic_operator.local.processes import free_ports

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

OURS: Final = "torchelastic.run"
TORCHRUN: Final = "torch.distributed.run"
_EXAMPLES: Final = Path(__file__).parents[2] / "examples"
_DIGITS: Final = str(_EXAMPLES / "digits.py")
_STEP: Final = rb"step \d+/"


class Process:
    """A process in a folder of its own, and its output."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def line(self, pattern: bytes) -> bytes:
        """Return the next line that matches; raise EOFError if the process ends without one."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if re.search(pattern, line):
                return line
        raise EOFError(f"process {self.pid} has ended")

    async def end(self) -> None:
        """End the process, and wait until it has exited."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        await self._process.communicate()


@asynccontextmanager
async def started(*command: str) -> AsyncIterator[Process]:
    """Start a process of this Python, and end it when the context is left."""
    with TemporaryDirectory(prefix="benchmark-") as folder:
        process = Process(
            await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                cwd=folder,
                env={**os.environ, "XDG_STATE_HOME": folder},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        )
        try:
            yield process
        finally:
            await process.end()


def descendants(pid: int) -> Iterator[int]:
    """Yield the ids of all processes that a process and its descendants have started."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from descendants(child)


def _runs(pid: int, program: str) -> bool:
    return program.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:3]


async def kill_of_a_worker(launcher: str) -> float:
    """Return the seconds from the kill of rank 1 until the next step."""
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=3")
    async with started("-m", launcher, *flags, _DIGITS, "--epochs=400") as agent:
        await agent.line(_STEP)
        await asyncio.sleep(1)
        _, second = sorted(pid for pid in descendants(agent.pid) if _runs(pid, _DIGITS))
        began = time.monotonic()
        os.kill(second, signal.SIGKILL)
        await agent.line(rb"(resumed|started)")
        await agent.line(_STEP)
        return time.monotonic() - began


async def start_of_two_nodes(launcher: str) -> float:
    """Return the seconds from the start of two launchers until the first collective operation."""
    [port] = free_ports(1)
    flags = ("--nnodes=1:3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=benchmark")
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        command = ("-m", launcher, *flags, "--nproc-per-node=1", str(Path(__file__).with_name("worker.py")))
        nodes = [await stack.enter_async_context(started(*command)) for _ in range(2)]
        await asyncio.gather(*(node.line(b"a world of 2") for node in nodes))
        return time.monotonic() - began


async def start_of_digits(command: str) -> float:
    """Return the seconds from the start of a command until the first step."""
    of_job = ("-m", "elastic_operator.cli.main", "run", "--plain", str(_EXAMPLES / "digits.yaml"))
    began = time.monotonic()
    async with started(*(of_job if command == "elasticjob" else (_DIGITS,))) as process:
        await process.line(_STEP)
        return time.monotonic() - began


SCENARIOS: Final[dict[str, tuple[str, Callable[[str], Awaitable[float]], tuple[str, str], float]]] = {
    "kill": ("a worker of digits.py is killed", kill_of_a_worker, (OURS, TORCHRUN), 0.5),
    "nodes": ("two nodes start with --nnodes 1:3", start_of_two_nodes, (OURS, TORCHRUN), 2.5),
    "run": ("elasticjob run digits.yaml", start_of_digits, ("elasticjob", "python digits.py"), 3.0),
}


async def run(arguments: argparse.Namespace) -> Report:
    """Take all samples by turns."""
    report = Report("first_step", settings={"repeat": arguments.repeat})
    for name in arguments.only or SCENARIOS:
        what, measure, peers, wanted = SCENARIOS[name]
        samples: dict[str, list[float]] = {peer: [] for peer in peers}
        never: dict[str, list[str]] = {peer: [] for peer in peers}
        for number in range(1, arguments.repeat + 1):
            for peer in peers:
                try:
                    async with asyncio.timeout(arguments.limit):
                        samples[peer].append(await measure(peer))
                    note(f"{what} {number}/{arguments.repeat}: {peer}: {samples[peer][-1]:.3f} s")
                except (TimeoutError, EOFError) as error:
                    never[peer].append(str(error) or f"no step within {arguments.limit:g} s")
        report.add(_measurement(what, samples, never, peers, wanted))
    return report


def _measurement(
    what: str,
    samples: dict[str, list[float]],
    never: dict[str, list[str]],
    peers: Sequence[str],
    wanted: float,
) -> Measurement:
    ours, peer = peers
    name = "torchrun" if peer == TORCHRUN else peer
    return Measurement(what, samples[ours], samples[peer], never[ours], never[peer], name, ours_at_most=wanted)


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
