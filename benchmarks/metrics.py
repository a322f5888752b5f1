"""What metrics cost: ``python -m benchmarks.metrics --json``.

One value in a worker, a hundred thousand of them at once, a training step with them and without, and a scrape of many
series; in real workers of a real agent, whose page is scraped meanwhile. See docs/benchmarks.md.
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

from benchmarks.command_line import at_least, duration, parser, run_to_end
from benchmarks.processes import Household
from benchmarks.programs.metrics_worker import FLOOD
from benchmarks.report import Measurement, Report
from elastic_operator.errors import BadInput
from elastic_operator.local.etcd import free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from torchelastic.agent.workers.processes import Child

WORKERS: Final = 10
NAMES: Final = 1000
"""Of each of those workers, when a page of WORKERS * NAMES series is scraped."""

SCRAPES: Final = 10

INTERVAL: Final = 1.0
"""Seconds between scrapes while something else is measured; Prometheus' own default is a minute."""

_PATIENCE: Final = 30.0
"""Seconds for which the end of an agent that was asked to go is waited for."""

_PROGRAM: Final = ("-m", "benchmarks.programs.metrics_worker")


@dataclass(frozen=True, slots=True)
class Scene:
    """One agent with workers.

    Attributes:
        agent: its process.
        log: what it says.
        url: of its page.
        session: with which that is asked for.
    """

    agent: Child
    log: Path
    url: str
    session: aiohttp.ClientSession

    async def scrape(self) -> bytes:
        """The page."""
        async with self.session.get(self.url) as response:
            response.raise_for_status()
            return await response.read()

    async def scrape_regularly(self) -> None:
        """Do that until cancelled, as Prometheus does."""
        while True:
            with suppress(aiohttp.ClientError):  # the agent is not there yet
                await self.scrape()
            await asyncio.sleep(INTERVAL)

    def failed(self, why: str) -> BadInput:
        """The error to raise where it does not do what it should."""
        return BadInput(f"{why}\n{self.log.read_text(errors='replace')[-2000:]}")


@asynccontextmanager
async def scene(household: Household, workers: int, *arguments: str) -> AsyncIterator[Scene]:
    """Start an agent whose workers run the program with these arguments; in the end it is asked to go."""
    [port] = free_ports(1)
    log = household.folder / f"log.{port}"
    agent = (sys.executable, "-m", "torchelastic.run", "--standalone", "--local-addr=127.0.0.1", "--max-restarts=0")
    flags = (f"--metrics-port={port}", f"--nproc-per-node={workers}")
    process = household.start((*agent, *flags, *_PROGRAM, *arguments), log)
    async with aiohttp.ClientSession() as session:
        try:
            yield Scene(process, log, f"http://127.0.0.1:{port}/metrics", session)
        finally:
            process.signal(signal.SIGTERM)  # so that it takes the memory of its workers with it
            await asyncio.wait([process.ended], timeout=_PATIENCE)


async def cost(household: Household, *, steps: int, limit: float) -> dict[str, Any]:
    """Let one worker measure what metrics cost it."""
    file = household.folder / "found"
    file.unlink(missing_ok=True)
    async with scene(household, 1, "cost", str(file), str(steps)) as here:
        scraping = asyncio.create_task(here.scrape_regularly())
        try:
            await asyncio.wait_for(asyncio.shield(here.agent.ended), limit)
        except TimeoutError:
            raise here.failed(f"the worker was not done within {limit:g} s") from None
        finally:
            scraping.cancel()
        if not file.is_file():
            raise here.failed("the worker has found nothing")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


async def scrapes(household: Household, *, limit: float) -> tuple[list[float], int]:
    """Seconds that each of several scrapes of a large page takes, and the page's bytes."""
    async with scene(household, WORKERS, "names", str(NAMES)) as here:
        try:
            async with asyncio.timeout(limit):
                page = b""
                while page.count(b"\nmy_app_layer_") < WORKERS * NAMES:
                    with suppress(aiohttp.ClientError):
                        page = await here.scrape()
                    await asyncio.sleep(INTERVAL)
        except TimeoutError:
            raise here.failed(f"not all series were there within {limit:g} s") from None
        took = []
        for _ in range(SCRAPES):
            began = time.perf_counter()
            page = await here.scrape()
            took.append(time.perf_counter() - began)
    return took, len(page)


async def measure(*, repeat: int, steps: int, limit: float) -> Report:
    """Measure all of it."""
    report = Report("metrics", settings={"repeat": repeat, "steps": steps, "scrape_interval": INTERVAL})
    found = []
    async with Household() as household:
        for number in range(repeat):
            found.append(await cost(household, steps=steps, limit=limit))
            print(f"{number + 1}/{repeat}: {_overhead(found[-1]):.2f} % of a step", file=sys.stderr, flush=True)
        took, size = await scrapes(household, limit=limit)
    for name, text in (("loss", "a gauge"), ("samples", "a counter"), ("step.ms", "a histogram")):
        report.add(
            Measurement(
                f"add_value, {text}",
                ours=[each["calls"][name]["median"] * 1e6 for each in found],
                unit="us",
                includes="the median of 20,000 calls, each with the reading of the clock",
                ours_at_most=5.0,
                details={"p99": [each["calls"][name]["p99"] * 1e6 for each in found]},
            )
        )
    report.add(
        Measurement(
            "add_value, no handler",
            ours=[each["calls"]["no handler"]["median"] * 1e6 for each in found],
            unit="us",
            includes="the same where nobody is told: hardly more than the reading of the clock",
        )
    )
    report.add(
        Measurement(
            "torchelastic.step()",
            ours=[each["calls"]["step"]["median"] * 1e6 for each in found],
            unit="us",
            includes="the same for a call at the beginning of a step, which measures the time since the one before",
            ours_at_most=5.0,
            details={"p99": [each["calls"]["step"]["p99"] * 1e6 for each in found]},
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
            includes="the median of steps in which four values are measured, over that of the steps between them, in "
            "which they are dropped",
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
    """Measure, and print."""
    flags = parser("metrics", __doc__, etcd=False)
    flags.add_argument("--repeat", type=at_least(1), default=5, metavar="N", help="measure so often (default: 5)")
    flags.add_argument(
        "--steps", type=at_least(1), default=2000, metavar="N", help="training steps with metrics, and without each"
    )
    flags.add_argument(
        "--limit", type=duration, default=300.0, metavar="SECONDS", help="longer is never (default: 300)"
    )
    arguments = flags.parse_args()
    work = measure(repeat=arguments.repeat, steps=arguments.steps, limit=arguments.limit)
    run_to_end("metrics", work).show(as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
