"""A real Prometheus for tests, with its promtool. Tests that use it have the mark ``prometheus``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
import yaml

from elastic_operator.local.pdeathsig import with_pdeathsig
from testbed.packages import unpacked
from tests.support.ports import free_range

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
    from pathlib import Path

LIMIT: Final = 120.0
"""The limit of each wait in seconds, even on a busy machine."""
READY: Final = "Server is ready to receive web requests."
EVERY: Final = 0.5
"""Seconds between two scrapes, and between two queries while waiting for an answer."""


@dataclass(frozen=True)
class Sample:
    """One series in an answer of Prometheus.

    Attributes:
        labels: the labels of the series, with its name as __name__.
        value: the value now, or at the requested time.
    """

    labels: Mapping[str, str]
    value: float


Answer = list[Sample]


def promtool(*arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run promtool, and return its output and its exit code."""
    return subprocess.run(
        [_programs() / "promtool", *arguments], input=stdin, capture_output=True, text=True, check=False, timeout=LIMIT
    )


def _programs() -> Path:
    return unpacked("prometheus") / "usr" / "bin"


def prometheus_command(
    folder: Path, port: int, scrape: Sequence[Mapping[str, Any]], *, rules: Iterable[Path] = ()
) -> list[str]:
    """Write a Prometheus configuration, and return the command line.

    Args:
        folder: the folder for the configuration and the data.
        port: the port of Prometheus on loopback.
        scrape: the scrape_configs.
        rules: the files with rules.
    """
    configuration = folder / "prometheus.yml"
    intervals = {"scrape_interval": f"{EVERY * 1000:.0f}ms", "evaluation_interval": "1s"}
    configuration.write_text(
        yaml.safe_dump({"global": intervals, "rule_files": [str(path) for path in rules], "scrape_configs": [*scrape]})
    )
    return [
        str(_programs() / "prometheus"),
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]


class Prometheus:
    """A Prometheus on loopback.

    Args:
        folder: the folder for the data, the configuration and the log; it is not removed.
        port: the port of Prometheus.
        session: the session for requests to Prometheus.
    """

    def __init__(self, folder: Path, port: int, session: aiohttp.ClientSession) -> None:
        self.targets = folder / "targets.json"
        self._url = f"http://127.0.0.1:{port}/"
        self._session = session

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path, *, rules: Iterable[Path] = ()) -> AsyncIterator[Self]:
        """Run a Prometheus within the block, with files of rules that it evaluates."""
        folder.mkdir(parents=True, exist_ok=True)
        port, log = free_range(1).first, folder / "prometheus.log"
        async with aiohttp.ClientSession() as session:
            prometheus = cls(folder, port, session)
            prometheus.scrape([])
            targets = {"job_name": "elastic", "file_sd_configs": [{"files": [str(prometheus.targets)]}]}
            command = with_pdeathsig(prometheus_command(folder, port, [targets], rules=rules))
            with log.open("wb") as output:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
            try:
                async with asyncio.timeout(LIMIT):
                    while READY not in log.read_text():
                        assert process.returncode is None, log.read_text()
                        await asyncio.sleep(EVERY / 10)
                yield prometheus
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    def scrape(self, targets: Iterable[str]) -> None:
        """Scrape only these targets (host:port) from now on."""
        unfinished = self.targets.with_suffix(".new")
        unfinished.write_text(json.dumps([{"targets": [*targets]}]))
        unfinished.rename(self.targets)

    async def query(self, expr: str, *, at: float | None = None) -> Answer:
        """Return the answer to a query.

        Args:
            expr: the query in PromQL.
            at: the time in seconds since the Unix epoch; None for now.

        Raises:
            AssertionError: the query is invalid.
        """
        found = await self._get("query", query=expr, **({} if at is None else {"time": str(at)}))
        if found["resultType"] == "scalar":
            return [Sample({}, float(found["result"][1]))]
        return [Sample(entry["metric"], float(entry["value"][1])) for entry in found["result"]]

    async def moments(self, expr: str, *, since: float, until: float, step: float) -> list[float]:
        """Return the times between ``since`` and ``until``, in steps, at which a query returns at least one series."""
        found = await self._get("query_range", query=expr, start=str(since), end=str(until), step=str(step))
        return sorted({float(moment) for series in found["result"] for moment, _ in series["values"]})

    async def until(self, expr: str, condition: Callable[[Answer], object] = bool) -> Answer:
        """Query until the answer meets a condition; Prometheus has no event for that.

        Raises:
            AssertionError: it took too long.
        """
        answer: Answer = []
        try:
            async with asyncio.timeout(LIMIT):
                while True:
                    if condition(answer := await self.query(expr)):
                        return answer
                    await asyncio.sleep(EVERY)
        except TimeoutError:
            raise AssertionError(f"{expr} did not meet the condition; last answer: {answer}") from None

    async def series(self, selector: str) -> set[str]:
        """Return the names of all series so far that match a selector."""
        return {labels["__name__"] for labels in await self._get("series", **{"match[]": selector})}

    async def _get(self, what: str, **parameters: str) -> Any:
        async with self._session.post(f"{self._url}api/v1/{what}", data=parameters) as response:
            answer = await response.json()
        assert answer["status"] == "success", f"{parameters}: {answer}"
        return answer["data"]
