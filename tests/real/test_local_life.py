"""A job's life on this machine: it is suspended and resumed, exceeds its deadline, and reports its end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from elastic_operator.api.report import decode_report
from elastic_operator.api.status import JobState
from elastic_operator.client.local import LocalJobs
from tests.support.local_runs import LocalRun, gone, manifest, processes_of, reasons
from torchelastic.protocol import RunState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from elastic_operator.api.report import Report

pytestmark = pytest.mark.real


@pytest_asyncio.fixture
async def home(tmp_path: Path) -> AsyncIterator[Path]:
    """A home folder for one test; after the test, no process of it may be left."""
    home = tmp_path / "home"
    yield home
    assert await gone(processes_of(home), within=60), processes_of(home)


def report_of(snapshot: dict[str, Any]) -> Report:
    """The record of a run in its folder."""
    return decode_report((Path(snapshot["run"]["directory"]) / "report.json").read_bytes())


def numbers(report: Report) -> list[int]:
    return [round.number for round in report.history.rounds]


def rests(snapshot: dict[str, Any]) -> bool:
    """Whether no process of the job runs."""
    etcd = snapshot["etcd"]  # the endpoint is given up after the process
    ended = etcd["pid"] is None and not etcd["endpoint"]
    return snapshot["status"]["state"] == "Suspended" and not snapshot["pods"] and ended


async def test_a_resumed_job_continues_with_the_changed_spec(home: Path, tmp_path: Path) -> None:
    says = "echo {word} in $TORCHELASTIC_ROUND; while [ ! -e {finish} ]; do sleep 0.05; done"
    programs = [
        ["sh", "-c", says.format(word=word, finish=tmp_path / "finish")] for word in ("first words", "other words")
    ]
    async with LocalRun(home, manifest(tmp_path, command=programs[0])) as run:
        before = await run.trains(2)
        jobs = LocalJobs(home=home)
        await asyncio.to_thread(jobs.suspend, "job", suspended=True)
        asleep = await run.until(rests)
        assert asleep["status"]["round"] >= before["status"]["round"]
        assert [*processes_of(home)] == [run.process.pid]
        kept = report_of(asleep)
        assert (kept.state, numbers(kept)) == (JobState.SUSPENDED, list(range(1, asleep["status"]["round"] + 1)))
        manifest(tmp_path, command=programs[1])
        await run.until(lambda snapshot: "Applied" in reasons(snapshot))
        await asyncio.to_thread(jobs.suspend, "job", suspended=False)
        after = await run.trains(2, after=asleep["status"]["round"])
        words = f"other words in {after['status']['round']}"
        await run.until(lambda snapshot: snapshot["progress"] and snapshot["progress"]["line"] == words)
        (tmp_path / "finish").touch()
        assert await run.exit_code() == 0, run.output
        report = report_of(run.record)
        assert (report.state, numbers(report)) == (
            JobState.SUCCEEDED,
            list(range(1, run.record["status"]["round"] + 1)),
        )
        assert report.outcome is not None
        split = report.time_breakdown
        assert split is not None
        assert split.seconds.keys() >= {RunState.TRAINING, RunState.STARTING, RunState.SUSPENDED}
        assert split.joined == 4
        assert report.completed == split.until
        assert sum(split.seconds.values()) == pytest.approx(split.until - report.created, abs=0.01)


async def test_a_job_that_exceeds_its_deadline_fails(home: Path, tmp_path: Path) -> None:
    async with LocalRun(home, manifest(tmp_path, activeDeadlineSeconds=1, replicas=1)) as run:
        assert await run.exit_code() == 1, run.output
        status = run.record["status"]
        assert status["state"] == "Failed"
        assert {each["reason"] for each in status["conditions"] if each["type"] == "Failed"} == {"DeadlineExceeded"}
