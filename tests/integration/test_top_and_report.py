"""``elasticjob top`` and ``elasticjob report`` on a real job: scaled, after a failure, and at its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from elastic_operator.api.status import decode_report
from elastic_operator.reports.page import facts
from tests.support.local_runs import LIMIT, LocalRun, manifest, processes_of
from tests.support.terminals import FIRST_SCREEN, SECOND_SCREEN, Terminal, answer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

PROGRAM = """\
import os, pathlib, sys, time
import torchelastic

finish, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
step = 0
while not finish.exists():
    torchelastic.step()
    step += 1
    time.sleep(0.02 + 0.05 * rank)
    if step == 5 and rank == 0:
        with torchelastic.report_checkpoint():
            time.sleep(0.05)
    if step == 10:
        print(f"ten steps of {os.environ['WORLD_SIZE']} workers", flush=True)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    """A program that takes steps until the file ``finish`` exists; the steps of rank 1 are slow."""
    (tmp_path / "steps.py").write_text(PROGRAM)
    return [sys.executable, str(tmp_path / "steps.py"), str(tmp_path / "finish")]


def stepped(workers: int, round: int) -> Any:
    """Return a condition on a snapshot: rank 0 has taken ten steps in this round."""

    def has(snapshot: dict[str, Any]) -> bool:
        line = (snapshot["progress"] or {}).get("line")
        return snapshot["status"]["round"] == round and line == f"ten steps of {workers} workers"

    return has


def a_worker(home: Path) -> int:
    return max(
        pid for pid, command in processes_of(home).items() if "steps.py" in command and "torchelastic" not in command
    )


async def wait_for_top(home: Path, words: str) -> list[str]:
    """Wait until the output of ``elasticjob top`` contains these words, and return the output."""
    async with asyncio.timeout(LIMIT):
        while words not in (printed := (await answer(home, "top", "digits", "--once"))[1]):
            pass
    return printed.splitlines()


async def test_top_and_report_show_a_demo_job_with_a_killed_pod(home: Path, tmp_path: Path, program: list[str]) -> None:
    page = tmp_path / "page.html"
    async with LocalRun(home, manifest(tmp_path, "digits", command=program)) as run:
        await run.until(stepped(2, 1))
        lines = await wait_for_top(home, "   lost 0s")
        assert lines[0].startswith("digits  Running  ")
        assert lines[1].startswith(
            "round 1   world size 2 on 2 nodes   pods ready 2/2   restarts 0 charged, 0 uncharged, "
        )
        assert lines[3].startswith("goodput ")
        for state in ("training", "restoring", "starting", "rendezvous", "waiting"):
            assert f"{state} " in lines[4]
        [rank0, rank1] = [line for line in lines if line.startswith(("0 ", "1 "))]
        assert rank0.split()[1].startswith("digits-")
        assert "MiB" in rank0
        assert " 1, " in rank0, "there was one checkpoint"
        assert rank1.endswith("straggles")

        os.kill(a_worker(home), signal.SIGKILL)
        await run.until(stepped(2, 2))
        lines = await wait_for_top(home, "worker failed ")
        assert "restarts 1 charged, 0 uncharged" in lines[1]
        [recovered] = [line for line in lines if line.startswith("worker failed ")]
        assert recovered.split()[2] == "1"
        _, listed, _ = await answer(home, "top")
        assert listed.splitlines()[1].split()[:3] == ["digits", "Running", "2/2"]
        assert " % " in listed.splitlines()[1]

        (tmp_path / "finish").touch()
        assert await run.exit_code() == 0

    assert await answer(home, "report", "digits", "-o", str(page)) == (0, f"the report of digits is in {page}\n", "")
    text = page.read_text()
    assert ">Succeeded<" in text
    [kept] = home.glob("runs/*/report.json")
    found = facts(decode_report(kept.read_bytes()))
    assert [span.round.number for span in found.spans] == [1, 2]
    [failure] = found.failures
    assert (failure.what, failure.round, failure.lost is not None) == ("SIGKILL", 1, True)
    assert f"rank {failure.rank}, {failure.pod}" in text
    assert found.spans[0].round.workers == 2
    took = json.loads(next(home.glob("runs/*/job.json")).read_text())["run"]["ended"]["time"] - found.begin
    accounted = sum(found.report.time_breakdown.seconds.values() if found.report.time_breakdown else ())
    assert took - 10 < accounted <= took, "the whole time, except for stopping the pods"


async def test_top_on_a_terminal_refreshes_until_ctrl_c_or_the_jobs_end(
    home: Path, tmp_path: Path, program: list[str]
) -> None:
    async with LocalRun(home, manifest(tmp_path, "digits", command=program)) as run:
        await run.until(stepped(2, 1))
        for words, shown in ((["digits"], "world size"), ([], "GOODPUT")):
            async with Terminal(home, "top", *words) as terminal:
                await terminal.shows(shown)
                os.kill(terminal.process.pid, signal.SIGINT)
                assert await terminal.exit_code() == 130
                await terminal.shows(FIRST_SCREEN)
                assert "Traceback" not in terminal.screen
        async with Terminal(home, "top", "digits") as terminal:
            await terminal.shows("straggles")
            assert SECOND_SCREEN in terminal.screen
            assert FIRST_SCREEN not in terminal.screen
            assert (await answer(home, "scale", "digits", "--replicas", "3"))[0] == 0
            await terminal.shows("on 3 nodes")
            (tmp_path / "finish").touch()
            assert await terminal.exit_code() == 0
            await terminal.shows(FIRST_SCREEN)
            assert "Succeeded" in terminal.screen.partition(FIRST_SCREEN)[2]
            assert "Traceback" not in terminal.screen
        assert await run.exit_code() == 0
