"""Measure what metrics cost: ``python -m benchmarks.metrics --json``.

Real workers of a real agent record values, while the agent is scraped. See docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import sys
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from benchmarks.metrics.worker import FLOOD
from benchmarks.support.command_line import at_least, parser, run_to_end
from benchmarks.support.processes import ProcessTree
from benchmarks.support.report import Measurement, Report, note
from elastic_operator.errors import BadInput
from elastic_operator.local.processes import free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from torchelastic.agent.workers.processes import Child

WORKERS: Final = 10
NAMES: Final = 1000
"""The number of gauges of each of the :data:`WORKERS` when scrapes are measured."""

SCRAPES: Final = 10

INTERVAL: Final = 1.0
"""Seconds between scrapes during other measurements. The default of Prometheus is a minute."""

_STOP_LIMIT: Final = 30.0
"""Seconds within which an agent must exit after SIGTERM."""

_PROGRAM: Final = ("-m", "benchmarks.metrics.worker")


@dataclass(frozen=True, slots=True)
class RunningAgent:
    """One agent with workers.

    Attributes:
        process: the agent's process.
        log: the file with the agent's output.
        url: the URL of the agent's /metrics.
        session: the HTTP session for scrapes.
    """

    process: Child
    log: Path
    url: str
    session: aiohttp.ClientSession

    async def scrape(self) -> bytes:
        """Return the page of /metrics."""
        async with self.session.get(self.url) as response:
            response.raise_for_status()
            return await response.read()

    async def scrape_regularly(self) -> None:
        """Scrape until canceled, like Prometheus."""
        while True:
            with suppress(aiohttp.ClientError):  # the agent does not listen yet
                await self.scrape()
            await asyncio.sleep(INTERVAL)

    def failed(self, why: str) -> BadInput:
        """Return an error with the end of the log."""
        return BadInput(f"{why}\n{self.log.read_text(errors='replace')[-2000:]}")


@asynccontextmanager
async def running_agent(processes: ProcessTree, workers: int, *arguments: str) -> AsyncIterator[RunningAgent]:
    """Run an agent within the block; its workers run the program with these arguments."""
    [port] = free_ports(1)
    log = processes.folder / f"log.{port}"
    agent = (sys.executable, "-m", "torchelastic.run", "--standalone", "--local-addr=127.0.0.1", "--max-restarts=0")
    flags = (f"--metrics-port={port}", f"--nproc-per-node={workers}")
    process = processes.start((*agent, *flags, *_PROGRAM, *arguments), log)
    async with aiohttp.ClientSession() as session:
        try:
            yield RunningAgent(process, log, f"http://127.0.0.1:{port}/metrics", session)
        finally:
            process.signal(signal.SIGTERM)  # the agent then removes the shared memory of its workers
            await asyncio.wait([process.ended], timeout=_STOP_LIMIT)


async def cost(processes: ProcessTree, *, steps: int, limit: float) -> dict[str, Any]:
    """Run one worker, and return its measurements."""
    file = processes.folder / "found"
    file.unlink(missing_ok=True)
    async with running_agent(processes, 1, "cost", str(file), str(steps)) as here:
        scraping = asyncio.create_task(here.scrape_regularly())
        try:
            await asyncio.wait_for(asyncio.shield(here.process.ended), limit)
        except TimeoutError:
            raise here.failed(f"the worker was not done within {limit:g} s") from None
        finally:
            scraping.cancel()
        if not file.is_file():
            raise here.failed("the worker has no results")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


async def scrapes(processes: ProcessTree, *, limit: float) -> tuple[list[float], int]:
    """Return the seconds of each scrape of a large page, and the bytes of the page."""
    async with running_agent(processes, WORKERS, "names", str(NAMES)) as here:
        try:
            async with asyncio.timeout(limit):
                page = b""
                while page.count(b"\nmy_app_layer_") < WORKERS * NAMES:
                    with suppress(aiohttp.ClientError):
                        page = await here.scrape()
                    await asyncio.sleep(INTERVAL)
        except TimeoutError:
            raise here.failed(f"some series were missing after {limit:g} s") from None
        took = []
        for _ in range(SCRAPES):
            began = time.perf_counter()
            page = await here.scrape()
            took.append(time.perf_counter() - began)
    return took, len(page)


async def measure(*, repeat: int, steps: int, limit: float) -> Report:
    """Take all measurements."""
    report = Report("metrics", settings={"repeat": repeat, "steps": steps, "scrape_interval": INTERVAL})
    found = []
    async with ProcessTree() as processes:
        for number in range(repeat):
            found.append(await cost(processes, steps=steps, limit=limit))
            note(f"{number + 1}/{repeat}: {_overhead(found[-1]):.2f} % of a step")
        took, size = await scrapes(processes, limit=limit)
    timed = "the median of 20,000 calls, each of which includes the reading of the clock"
    calls = (
        ("loss", "add_value, a gauge", timed, 5.0),
        ("samples", "add_value, a counter", timed, 5.0),
        ("step.ms", "add_value, a histogram", timed, 5.0),
        ("no handler", "add_value, no handler", "the same without a handler: mostly the reading of the clock", None),
        ("step", "torchelastic.step()", "the same for a call at the beginning of a training step", 5.0),
    )
    for call, name, includes, at_most in calls:
        report.add(
            Measurement(
                name,
                ours=[each["calls"][call]["median"] * 1e6 for each in found],
                unit="us",
                includes=includes,
                ours_at_most=at_most,
                details={"p99": [each["calls"][call]["p99"] * 1e6 for each in found]},
            )
        )
    report.add(
        Measurement(
            f"{FLOOD:,} values of a counter",
            ours=[each["flood"] for each in found],
            includes="one thread, without a pause; all are counted",
            ours_at_most=1.0,
        )
    )
    report.add(
        Measurement(
            "training step, metrics on",
            ours=[_overhead(each) for each in found],
            unit="%",
            includes="the median of steps that measure four values, compared with the alternating steps in which the "
            "values are dropped",
            ours_at_most=0.5,
            details={name: [statistics.median(each[name]) for each in found] for name in ("on", "off")},
        )
    )
    report.add(
        Measurement(
            f"scrape of {WORKERS * NAMES:,} series",
            ours=took,
            includes=f"the whole page over HTTP, {size:,} bytes",
            details={"bytes": size},
        )
    )
    return report


def _overhead(found: dict[str, Any]) -> float:
    on, off = (statistics.median(map(float, found[name])) for name in ("on", "off"))
    return 100 * (on / off - 1)


def main() -> int:
    """Measure and print."""
    flags = parser("metrics", __doc__, etcd=False, repeat=5, limit=300.0)
    text = "number of training steps with metrics, and of steps without (default: %(default)s)"
    flags.add_argument("--steps", type=at_least(1), default=2000, metavar="N", help=text)
    arguments = flags.parse_args()
    work = measure(repeat=arguments.repeat, steps=arguments.steps, limit=arguments.limit)
    run_to_end("metrics", work).show(as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
