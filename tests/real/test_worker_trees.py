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

from tests.support.agents import AgentProcess
from tests.support.crew import TELL, Crew, eventually, exit_of, gone, lives, told
from tests.support.programs import script
from torchelastic.agent.workers.linux import is_subreaper, read_process, read_table
from torchelastic.agent.workers.pool import Workers, WorkerStart
from torchelastic.agent.workers.processes import python_code
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


async def test_ended_and_stopped_workers_leave_nothing_and_other_children_are_left_alone(tmp_path: Path) -> None:
    descriptors = len([*Path("/proc/self/fd").iterdir()])
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as mine:  # noqa: ASYNC220 - a user's child
        before = {entry.pid for entry in read_table().values() if entry.parent == os.getpid()}
        async with Crew(tmp_path) as crew:
            group = await crew.start(FAMILY, THEN="leave")
            pids = await family(crew.here, 0)
            assert (await exit_of(group)).exit_code == 0
            await group.stop(0)
            assert not [pid for pid in pids if read_process(pid)]

            group = await crew.start(FAMILY, 2)
            pids = [pid for rank in (0, 1) for pid in await family(crew.here, rank)]
            assert all(map(lives, pids))
            await group.stop(0)
            assert not [pid for pid in [*pids, *group.pids.values()] if read_process(pid)]
            assert is_subreaper()

            group = await crew.start_with_store(FAMILY)
            await crew.told("up.1")
            assert group.running == {0, 1}
            scratch = crew.workers.scratch
            assert scratch.exists()
        assert not is_subreaper()
        assert {entry.pid for entry in read_table().values() if entry.parent == os.getpid()} == before
        assert not scratch.exists()
        assert mine.poll() is None
        mine.kill()
        assert mine.wait() == -signal.SIGKILL
    assert len([*Path("/proc/self/fd").iterdir()]) == descriptors


async def test_the_watchdog_is_restarted_and_ends_all_if_the_agent_dies_with_its_fork_server(
    driver: subprocess.Popen[str], tmp_path: Path
) -> None:
    facts = json.loads(await told(tmp_path / "pids"))

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
    pids = [pid for rank in (0, 1) for pid in await family(tmp_path, rank)]
    os.kill(facts["fork server"], signal.SIGKILL)
    driver.kill()
    for pid in [*pids, *facts["workers"]]:
        await gone(pid)


@pytest.mark.parametrize("driver", [{"THEN": "desert"}], indirect=True)
async def test_a_single_agent_reaps_orphans_and_stops_processes_that_hide_from_their_parent(
    driver: subprocess.Popen[str], tmp_path: Path
) -> None:
    await told(tmp_path / "pids")
    pids = [pid for rank in (0, 1) for pid in await family(tmp_path, rank)]
    assert len(pids) == 2 * (FAMILY_SIZE + 1)
    orphan = pids[3]
    entry = read_process(orphan)
    assert entry is not None
    assert entry.parent == driver.pid
    os.kill(orphan, signal.SIGKILL)
    await eventually(lambda: read_process(orphan) is None)
    assert driver.stdin is not None
    driver.stdin.write("stop\n")
    driver.stdin.flush()
    await told(tmp_path / "stopped")
    assert not [pid for pid in pids if read_process(pid)]


async def test_commands_end_with_all_their_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(ProgramKind.COMMAND, ("sh", "-c", "sleep 600 & echo $! > child.part; mv child.part child; wait"))
    monkeypatch.chdir(tmp_path)
    async with Workers(program, LogSettings(tmp_path / "logs")) as workers:
        group = await workers.start(1, [WorkerStart(0, 0, {})])
        child = int(await told(tmp_path / "child"))
        os.kill(group.pids[0], signal.SIGKILL)
        assert (await exit_of(group)).exit_code == -signal.SIGKILL
        await gone(child)


def test_a_watchdog_removes_memory_even_if_its_agent_died_during_its_start(tmp_path: Path) -> None:
    folder = tmp_path / "a name\nof two lines"
    folder.mkdir()
    (folder / "file").touch()
    agent = subprocess.Popen([sys.executable, "-c", ""])
    agent.wait(60)
    watchdog = python_code("torchelastic.agent.workers.watchdog", minimal=True)
    subprocess.run(
        [*watchdog, str(agent.pid), "a mark that nothing carries", folder], input=b"", timeout=60, check=True
    )
    assert not folder.exists()


CHILD_WITHOUT_ENVIRONMENT = """
import subprocess
child = subprocess.Popen(["env", "-i", "sleep", "600"])
while "sleep" not in open(f"/proc/{child.pid}/cmdline").read().split("\\0")[0]:
    pass
print("child", child.pid, flush=True)
child.wait()
"""


async def test_a_killed_agent_leaves_no_child_of_a_worker_without_its_environment(tmp_path: Path) -> None:
    [program] = script(tmp_path, CHILD_WITHOUT_ENVIRONMENT).argv
    async with AgentProcess("--standalone", program) as agent:
        child = int((await agent.said(r"child (\d+)"))[1])
        agent.kill()
        await gone(child)
