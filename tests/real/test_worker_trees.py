"""All processes of a worker end with the worker, and all end with the agent, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.crew import TELL, Crew, eventually, exit_of, gone, lives, told
from torchelastic.agent.workers.linux import is_subreaper, read_process, read_table
from torchelastic.agent.workers.pool import Workers, WorkerStart
from torchelastic.config.settings import LogSettings, Program, ProgramKind

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]

FAMILY = f"""
{TELL}
import signal, subprocess, sys
rank = os.environ["RANK"]
found = []

def forked(*, session, orphan):
    reading, writing = os.pipe()
    if os.fork() == 0:
        if session:
            os.setsid()
        if orphan and os.fork() != 0:
            os._exit(0)
        os.write(writing, str(os.getpid()).encode())
        while True:
            signal.pause()
    found.append(int(os.read(reading, 20)))
    if orphan:
        os.wait()

forked(session=False, orphan=False)
forked(session=True, orphan=False)
forked(session=False, orphan=True)
forked(session=True, orphan=True)
found.append(subprocess.Popen(["sleep", "600"]).pid)
found.append(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
found.append(int(subprocess.check_output(["sh", "-c", "setsid sleep 600 >/dev/null & echo $!"])))
if os.environ.get("THEN") == "desert":
    found.append(int(subprocess.check_output(["env", "-i", "sh", "-c", "setsid sleep 600 >/dev/null & echo $!"])))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tell(f"family.{{rank}}", found)
tell(f"up.{{rank}}")
if os.environ.get("THEN") == "leave":
    os._exit(0)
while True:
    signal.pause()
"""

FAMILY_SIZE = 7


async def family(here: Path, rank: int) -> list[int]:
    pids: list[int] = json.loads(await told(here / f"family.{rank}"))
    assert len(pids) >= FAMILY_SIZE
    return pids


@pytest.fixture
def driver(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "source.py").write_text(FAMILY)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.agent_driver", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **getattr(request, "param", {})},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


async def test_a_stop_ends_everything_that_the_workers_started(tmp_path: Path) -> None:
    async with Crew(tmp_path) as crew:
        group = await crew.start(FAMILY, 2)
        pids = [pid for rank in (0, 1) for pid in await family(crew.here, rank)]
        assert all(map(lives, pids))
        await group.stop(0)
        assert not [pid for pid in [*pids, *group.pids.values()] if read_process(pid)]


async def test_a_successful_worker_ends_with_all_its_processes(tmp_path: Path) -> None:
    async with Crew(tmp_path) as crew:
        group = await crew.start(FAMILY, THEN="leave")
        pids = await family(crew.here, 0)
        assert (await exit_of(group)).exit_code == 0
        await group.stop(0)
        assert not [pid for pid in pids if read_process(pid)]


async def test_a_killed_agent_leaves_no_process(driver: subprocess.Popen[str], tmp_path: Path) -> None:
    facts = json.loads(await told(tmp_path / "pids"))
    pids = [pid for rank in (0, 1) for pid in await family(tmp_path, rank)]
    helpers = [entry.pid for entry in read_table().values() if entry.parent == driver.pid]
    assert {*facts["workers"], facts["fork server"]} < {*helpers}
    driver.kill()
    for pid in {*helpers, *pids}:
        await gone(pid)


async def test_an_agent_killed_with_its_fork_server_leaves_no_process(
    driver: subprocess.Popen[str], tmp_path: Path
) -> None:
    facts = json.loads(await told(tmp_path / "pids"))
    pids = [pid for rank in (0, 1) for pid in await family(tmp_path, rank)]
    os.kill(facts["fork server"], signal.SIGKILL)
    driver.kill()
    for pid in [*pids, *facts["workers"]]:
        await gone(pid)


async def test_the_watchdog_is_restarted_however_soon_it_dies(driver: subprocess.Popen[str], tmp_path: Path) -> None:
    await told(tmp_path / "pids")

    def guards() -> set[int]:
        found = set()
        for child in (entry.pid for entry in read_table().values() if entry.parent == driver.pid):
            with contextlib.suppress(OSError):  # it has ended since
                if Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"torchelastic: watchdog"):
                    found.add(child)
        return found

    dead: set[int] = set()

    def living() -> set[int]:
        return guards() - dead

    for _ in range(3):
        await eventually(living)
        for guard in living():
            os.kill(guard, signal.SIGKILL)
            dead.add(guard)
    await eventually(living)
    driver.kill()
    for rank in (0, 1):
        for pid in await family(tmp_path, rank):
            await gone(pid)


async def test_orphans_are_reaped_by_a_single_agent(driver: subprocess.Popen[str], tmp_path: Path) -> None:
    await told(tmp_path / "pids")
    orphan = (await family(tmp_path, 0))[3]
    entry = read_process(orphan)
    assert entry is not None
    assert entry.parent == driver.pid
    os.kill(orphan, signal.SIGKILL)
    await eventually(lambda: read_process(orphan) is None)


@pytest.mark.parametrize("driver", [{"THEN": "desert"}], indirect=True)
async def test_a_single_agent_stops_processes_that_hide_from_their_parent(
    driver: subprocess.Popen[str], tmp_path: Path
) -> None:
    await told(tmp_path / "pids")
    pids = [pid for rank in (0, 1) for pid in await family(tmp_path, rank)]
    assert len(pids) == 2 * (FAMILY_SIZE + 1)
    assert driver.stdin is not None
    driver.stdin.write("stop\n")
    driver.stdin.flush()
    await told(tmp_path / "stopped")
    assert not [pid for pid in pids if read_process(pid)]


async def test_other_children_of_the_process_are_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as mine:  # noqa: ASYNC220 - a user's child
        async with Crew(tmp_path) as crew:
            group = await crew.start(FAMILY)
            await crew.told("up.0")
            await group.stop(0)
            assert is_subreaper()
        assert not is_subreaper()
        assert mine.poll() is None
        mine.kill()
        assert mine.wait() == -signal.SIGKILL


async def test_commands_end_with_all_their_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(ProgramKind.COMMAND, ("sh", "-c", "sleep 600 & echo $! > child.part; mv child.part child; wait"))
    monkeypatch.chdir(tmp_path)
    async with Workers(program, LogSettings(tmp_path / "logs")) as workers:
        group = await workers.start(1, [WorkerStart(0, 0, {})])
        child = int(await told(tmp_path / "child"))
        os.kill(group.pids[0], signal.SIGKILL)
        assert (await exit_of(group)).exit_code == -signal.SIGKILL
        await gone(child)


async def test_closed_workers_leave_nothing(tmp_path: Path) -> None:
    before = {entry.pid for entry in read_table().values() if entry.parent == os.getpid()}
    descriptors = len([*Path("/proc/self/fd").iterdir()])
    async with Crew(tmp_path) as crew:
        group = await crew.start_with_store(FAMILY)
        await crew.told("up.1")
        assert group.running == {0, 1}
        scratch = crew.workers.scratch
        assert scratch.exists()
    assert {entry.pid for entry in read_table().values() if entry.parent == os.getpid()} == before
    assert len([*Path("/proc/self/fd").iterdir()]) == descriptors
    assert not scratch.exists()
