"""Commands in a second terminal while a job runs, the live view, and the demo."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.local_runs import LIMIT, LocalRun, manifest, processes_of, training
from tests.support.terminals import FIRST_SCREEN, SECOND_SCREEN, Terminal, answer, typed

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.mark.parametrize("command", ["run", "get"])
def test_a_user_without_a_home_directory_learns_what_to_set(command: str, tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_STATE_HOME")}
    command_line = [*("unshare", "--user", "--map-user=54321"), sys.executable, "-m", "elastic_operator.cli.main"]
    arguments = [command, *([str(manifest(tmp_path, "digits"))] if command == "run" else [])]
    done = subprocess.run([*command_line, *arguments], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        "elasticjob: the home directory cannot be found: "
        "set ELASTICJOB_HOME to the full path of a folder for the runs\n"
    )


async def test_a_second_terminal_shows_follows_scales_and_deletes_the_job(home: Path, tmp_path: Path) -> None:
    async with LocalRun(home, manifest(tmp_path, "digits")) as run:
        before = await run.wait_until_training(2)
        _, listed, _ = await answer(home, "get")
        assert listed.splitlines()[1].split()[:6] == ["digits", "Running", "2/2", "1", "3", "0"]

        async with typed(home, "logs", "digits", "--rank", "0", "-f") as following, asyncio.timeout(LIMIT):
            assert following.stdout is not None
            assert await following.stdout.readline() == b"rank 0 of 2\n"
            scaled = await answer(home, "scale", "digits", "--replicas", "3")
            assert scaled == (0, "elasticjob digits scaled to 3\n", "")
            after = await run.wait_until_training(3)
            assert await following.stdout.readline() == b"rank 0 of 3\n"
            _, everyone, _ = await answer(home, "logs", "digits")
            assert everyone == "[rank 0] rank 0 of 3\n[rank 1] rank 1 of 3\n[rank 2] rank 2 of 3\n"
            described = " ".join((await answer(home, "describe", "digits"))[1].split())
            for pod in training(after):
                assert f"{pod['name']} State: training" in described
                assert f"Agent: process {pod['pid']} Ranks: {pod['ranks'][0]}" in described
            round = after["status"]["round"]
            assert f"Round: {round}, world size 3" in described
            assert "scaled from 2 to 3 pods" in described

            code, _, refusal = await answer(home, "scale", "digits", "--replicas", "4")
            assert code == 2
            assert refusal.startswith("elasticjob: ")
            assert "maxReplicas" in refusal
            assert refusal.count("\n") == 1

            _, shown, _ = await answer(home, "get", "digits", "-o", "json")
            assert json.loads(shown)["status"]["worldSize"] == 3
            assert json.loads(shown)["metadata"]["uid"] == before["manifest"]["metadata"]["uid"]

            assert await answer(home, "delete", "digits") == (0, "elasticjob digits deleted\n", "")
            out, err = await following.communicate()
            assert (following.returncode, out) == (0, b"")
            assert err.decode() == f"elasticjob: round {round} begins\n"
        assert await run.exit_code() == 3
        assert "digits was deleted after" in run.output
    _, listed, _ = await answer(home, "get")
    assert listed.splitlines()[1].split()[:2] == ["digits", "Deleted"]
    assert (await answer(home, "logs", "digits", "--rank", "1", "--round", "1"))[1] == "rank 1 of 2\n"
    assert "round 1" in (await answer(home, "logs", "digits", "--agent"))[1]


async def test_an_unfinished_line_is_followed(home: Path, tmp_path: Path) -> None:
    os.mkfifo(answered := tmp_path / "answered")
    asks = ["sh", "-c", f"printf half; read line < {answered}; echo $line"]
    async with LocalRun(home, manifest(tmp_path, "digits", command=asks, replicas=1)) as run:
        await run.wait_until_training(1)
        async with typed(home, "logs", "digits", "-f") as following, asyncio.timeout(LIMIT):
            assert following.stdout is not None
            assert await following.stdout.readexactly(13) == b"[rank 0] half"
            await asyncio.to_thread(answered.write_text, " and end\n")
            assert await following.stdout.read() == b"and end\n"
        assert await run.exit_code() == 0


async def test_the_live_view_is_replaced_by_the_outcome(home: Path, tmp_path: Path) -> None:
    async with Terminal(home, "run", str(manifest(tmp_path, "digits", replicas=1))) as terminal:
        await terminal.shows("rank 0 of 1")
        assert SECOND_SCREEN in terminal.screen
        assert FIRST_SCREEN not in terminal.screen
        await terminal.shows("training")
        (tmp_path / "finish").touch()
        await terminal.shows("digits succeeded after")
        assert await terminal.exit_code() == 0
        live, _, rest = terminal.screen.partition(FIRST_SCREEN)
        assert "digits succeeded after" not in live
        assert "checkpoints" in rest


async def test_bad_input_is_shown_on_the_live_screen(home: Path, tmp_path: Path) -> None:
    async with Terminal(home, "run", str(manifest(tmp_path, "digits", minReplicas=9))) as terminal:
        assert await terminal.exit_code() == 2
        await terminal.shows("elasticjob: ")
        assert SECOND_SCREEN not in terminal.screen
        assert "Traceback" not in terminal.screen


STORY = """\
import os, pathlib, sys, time
import torchelastic
world, rank, seen = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
print(f"started with {world} workers", flush=True)
if world == 3 and rank == 0:
    (seen / f"large-{time.time_ns()}").touch()
if len(sys.argv) > 2:
    time.sleep(float(sys.argv[2]))
    torchelastic.step()
# The demo grows the job, kills a worker and an agent, and shrinks the job. Then the program ends.
while world == 3 or len(list(seen.glob("large-*"))) < 3:
    print("a step", flush=True)
    time.sleep(0.1)
if rank == 0:
    print("test accuracy 0.999", flush=True)
"""


def demo_job(folder: Path, *, first_step_after: float | None) -> Path:
    """Write the manifest of a job that finishes after all steps of the demo, and return its path.

    The program makes a training step so many seconds after it prints its first line, or none.
    """
    seen = folder / "seen"
    seen.mkdir()
    (folder / "story.py").write_text(STORY)
    arguments = [str(folder / "story.py"), str(seen), *([] if first_step_after is None else [str(first_step_after)])]
    return manifest(folder, "digits", command=["env", sys.executable, *arguments])


@pytest.mark.parametrize("first_step_after", [0.4, None], ids=["steps", "no steps"])
async def test_the_demo_runs_every_step_and_prints_its_duration(
    home: Path, tmp_path: Path, first_step_after: float | None
) -> None:
    job = demo_job(tmp_path, first_step_after=first_step_after)
    code, out, err = await answer(home, "demo", "--plain", str(job))
    assert (code, err) == (0, ""), out
    acts = ["start with 2 pods", "scale to 3", "kill -9 a worker", "kill -9 an agent", "scale back to 2", "success"]
    announced = [line.partition("--- ")[2] for line in out.splitlines() if "--- " in line]
    assert [line for line in announced if ": " not in line] == acts
    table = out[out.index(" STEP ") :].splitlines()
    assert [act for act in acts for line in table if line.strip().startswith(act)] == acts
    assert any("kill -9 a worker" in line and "rank 2, process " in line for line in table)
    if first_step_after is None:
        assert sum("no steps reported" in line for line in table) >= 5
    else:
        rows = [re.search(r"  ([\d.]+) s  +([\d.]+) s", line) for line in table]
        times = [(float(row[1]), float(row[2])) for row in rows if row]
        assert len(times) >= 5, table
        assert all(trains >= agent + first_step_after for trains, agent in times)
    assert any("success" in line and "test accuracy 0.999" in line for line in table)
    assert "failed" not in out
    assert processes_of(home) == {}


async def test_a_demo_job_is_deleted_when_a_step_fails(home: Path, tmp_path: Path) -> None:
    left = tmp_path / "left"
    left.mkdir()
    hidden = f"""\
cd {left}
if [ $RANK = 0 ]; then
    until [ $(ls | grep -c "^$WORLD_SIZE-") = $((WORLD_SIZE - 1)) ]; do sleep 0.05; done
    for line in 1 2 3 4; do echo $line; done
else
    exec > /dev/null
    touch $WORLD_SIZE-$RANK
fi
sleep 600
"""
    code, out, err = await answer(
        home, "demo", "--plain", str(manifest(tmp_path, "digits", command=["sh", "-c", hidden]))
    )
    assert (code, err) == (1, "")
    assert "--- kill -9 a worker: the process of rank 2 was not found" in out
    assert "digits was deleted after" in out
    assert processes_of(home) == {}


async def test_the_demo_refuses_a_job_that_cannot_grow(home: Path, tmp_path: Path) -> None:
    code, out, err = await answer(
        home, "demo", str(manifest(tmp_path, "digits", maxReplicas=2, replicas=2, minReplicas=2))
    )
    assert (code, out) == (2, "")
    assert "spec.maxReplicas must be at least 3, not 2" in err
