"""A real Prometheus for tests, with its promtool. Tests that use it have the mark ``prometheus``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
import yaml

from elastic_operator.local.pdeathsig import with_pdeathsig
from tests.support.ports import free_range
from tests.support.testbed.packages import unpacked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

LIMIT: Final = 120.0
"""The limit of each wait in seconds, even on a busy machine."""
READY: Final = "Server is ready to receive web requests."
EVERY: Final = 0.5
"""Seconds between two scrapes, and between two queries while waiting for an answer."""


@dataclass(frozen=True)
class Sample:
    """One series of an answer.

    Attributes:
        labels: its labels, its name among them as __name__.
        value: now, or at the time asked for.
    """

    labels: Mapping[str, str]
    value: float


Answer = list[Sample]


def program(name: str) -> Path:
    """Prometheus, or its promtool."""
    return unpacked("prometheus") / "usr" / "bin" / name


def promtool(*arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run promtool; returns its output and its exit code."""
    return subprocess.run(
        [program("promtool"), *arguments], input=stdin, capture_output=True, text=True, check=False, timeout=LIMIT
    )


def answer_of(vector: Iterable[Mapping[str, Any]]) -> Answer:
    """The answer that Prometheus gives as an instant vector."""
    return [Sample(entry["metric"], float(entry["value"][1])) for entry in vector]


def prometheus_command(
    folder: Path, port: int, scrape: Sequence[Mapping[str, Any]], *, rules: Iterable[Path] = ()
) -> list[str]:
    """Write a Prometheus configuration, and return the command line.

    Args:
        folder: for its configuration and its data.
        port: its port on loopback.
        scrape: its scrape_configs.
        rules: files of rules.
    """
    configuration = folder / "prometheus.yml"
    intervals = {"scrape_interval": f"{EVERY * 1000:.0f}ms", "evaluation_interval": "1s"}
    configuration.write_text(
        yaml.safe_dump({"global": intervals, "rule_files": [str(path) for path in rules], "scrape_configs": [*scrape]})
    )
    return [
        str(program("prometheus")),
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]


class Prometheus:
    """One Prometheus on loopback; within ``async with`` it runs.

    Args:
        folder: for its data, its configuration and its log; it is not removed.
        rules: files of rules that it evaluates.
    """

    def __init__(self, folder: Path, *, rules: Iterable[Path] = ()) -> None:
        self._folder = folder
        self._rules = tuple(rules)
        self._port = 0
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._port = free_range(1).first
        self.scrape([])
        targets = {"job_name": "elastic", "file_sd_configs": [{"files": [str(self._targets)]}]}
        command = prometheus_command(self._folder, self._port, [targets], rules=self._rules)
        self._log = self._folder / "prometheus.log"
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *with_pdeathsig(command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._session = aiohttp.ClientSession(base_url=f"http://127.0.0.1:{self._port}")
        try:
            await self._becomes_ready()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    def scrape(self, targets: Iterable[str | tuple[str, Mapping[str, str]]]) -> None:
        """Scrape only these targets: host:port, or that with labels."""
        entries = [(target, {}) if isinstance(target, str) else target for target in targets]
        unfinished = self._targets.with_suffix(".new")
        unfinished.write_text(json.dumps([{"targets": [where], "labels": dict(labels)} for where, labels in entries]))
        unfinished.rename(self._targets)

    async def query(self, expr: str, *, at: float | None = None) -> Answer:
        """The answer to a query.

        Args:
            expr: in PromQL.
            at: the time in seconds since the Unix epoch; None for now.

        Raises:
            AssertionError: the query is invalid.
        """
        found = await self._get("/api/v1/query", query=expr, **({} if at is None else {"time": str(at)}))
        if found["resultType"] == "scalar":
            return [Sample({}, float(found["result"][1]))]
        return answer_of(found["result"])

    async def value(self, expr: str, *, at: float | None = None) -> float:
        """The value of a query with at most one series; NaN without a series."""
        answer = await self.query(expr, at=at)
        assert len(answer) <= 1, f"{expr} has {len(answer)} answers"
        return answer[0].value if answer else math.nan

    async def moments(self, expr: str, *, since: float, until: float, step: float) -> list[float]:
        """The moments at which a query has an answer.

        Args:
            expr: in PromQL; one series is enough.
            since: the first moment, in seconds since the Unix epoch.
            until: the last moment.
            step: seconds from one moment to the next.
        """
        found = await self._get("/api/v1/query_range", query=expr, start=str(since), end=str(until), step=str(step))
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
                    answer = await self.query(expr)
                    if condition(answer):
                        return answer
                    await asyncio.sleep(EVERY)
        except TimeoutError:
            raise AssertionError(f"{expr} did not become what it should; last: {answer}") from None

    async def series(self, selector: str) -> set[str]:
        """The names of all series so far."""
        found = await self._get("/api/v1/series", **{"match[]": selector})
        return {labels["__name__"] for labels in found}

    async def firing(self) -> dict[str, Mapping[str, str]]:
        """The labels of the firing alerts, by name."""
        found = await self._get("/api/v1/alerts")
        return {
            alert["labels"]["alertname"]: alert["labels"] for alert in found["alerts"] if alert["state"] == "firing"
        }

    @property
    def _targets(self) -> Path:
        return self._folder / "targets.json"

    async def _get(self, path: str, **parameters: str) -> Any:
        assert self._session is not None
        async with self._session.post(path, data=parameters) if parameters else self._session.get(path) as response:
            answer = await response.json()
        assert answer["status"] == "success", f"{parameters}: {answer}"
        return answer["data"]

    async def _becomes_ready(self) -> None:
        assert self._process is not None
        async with asyncio.timeout(LIMIT):
            while True:
                assert self._process.returncode is None, self._log.read_text()
                if READY in self._log.read_text():
                    return
                await asyncio.sleep(EVERY / 10)

    async def _end(self) -> None:
        if self._session is not None:
            await self._session.close()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
