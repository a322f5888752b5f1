"""No process of a worker outlives the worker or the agent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.agents import until_gone
from tests.support.controlled_workers import ControlledRun
from tests.support.isolation import first_process
from tests.support.workers import (
    TELL,
    WorkerRunner,
    lives,
    next_exit,
    poll_until,
    start_workers,
    text_of,
    titled,
    workers_of,
)
from torchelastic.agent.workers.process_tree import TREE_MARK, has_mark, read_process, read_table
from torchelastic.agent.workers.processes import python_code
from torchelastic.config.settings import LogSettings, Program, ProgramKind

pytestmark = pytest.mark.integration

FAMILY = """
import os, signal, subprocess

def forked(*, session, orphan):
    reading, writing = os.pipe()
    if os.fork() == 0:
        if "link" in globals():
            link.close()
        if session:
            os.setsid()
        if orphan and os.fork() != 0:
            os._exit(0)
        os.write(writing, str(os.getpid()).encode())
        while True:
            signal.pause()
    if orphan:
        os.wait()
    return int(os.read(reading, 20))

def of_a_shell(*before):
    return int(subprocess.check_output([*before, "sh", "-c", "setsid sleep 600 >/dev/null & echo $!"]))

answer = [forked(session=session, orphan=orphan) for session in (False, True) for orphan in (False, True)]
answer.append(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
answer.append(of_a_shell())
"""
"""Code that starts children and orphans of a worker, inside and outside of the worker's session."""

WITHOUT_ENVIRONMENT = f"""
{FAMILY}
answer.append(subprocess.Popen(["env", "-i", "sleep", "600"]).pid)
while b"env" in open(f"/proc/{{answer[-1]}}/cmdline", "rb").read():
    pass
"""
"""Code that starts the processes of FAMILY and a child without the worker's environment."""

HIDDEN = f"{FAMILY}\nanswer.append(of_a_shell('env', '-i'))"
"""Code that starts the processes of FAMILY and an orphan with neither the worker's session nor its environment."""


async def test_workers_and_their_processes_exit_with_the_agent_even_if_its_helpers_are_killed(tmp_path: Path) -> None:
    async with (
        ControlledRun(tmp_path, None) as run,
        run.agent("one", "--standalone", "--nproc-per-node=2") as agent,
    ):
        workers = await run.round(1, world=2)
        families = [pid for worker in workers for pid in await worker.execute(WITHOUT_ENVIRONMENT)]
        [watchdog] = titled(agent.pid, "watchdog")
        os.kill(watchdog, signal.SIGKILL)
        await poll_until(lambda: titled(agent.pid, "watchdog") not in ([], [watchdog]))
        helpers = [entry.pid for entry in read_table().values() if entry.parent == agent.pid]
        [server] = titled(agent.pid, "fork server")
        os.kill(server, signal.SIGKILL)
        agent.kill()
        assert await agent.process.wait() == -signal.SIGKILL
        await asyncio.gather(*(until_gone(pid) for pid in {*helpers, *families, *(worker.pid for worker in workers)}))


async def test_a_restart_leaves_no_process_of_the_earlier_workers(tmp_path: Path) -> None:
    async with (
        ControlledRun(tmp_path, None) as run,
        run.agent("one", "--standalone", "--nproc-per-node=2") as agent,
    ):
        workers = await run.round(1, world=2)
        families = [pid for worker in workers for pid in await worker.execute(HIDDEN)]
        workers[0].send("raise SystemExit(7)")
        for worker in await run.round(2, world=2):
            assert not [pid for pid in [*families, *(worker.pid for worker in workers)] if read_process(pid)]
            assert await worker.execute("answer = os.getsid(0) == os.getpid() == os.getpgid(0)")
            worker.send("raise SystemExit(0)")
        assert await agent.code() == 0


async def test_an_agent_that_is_the_first_process_of_a_container_reaps_orphans_and_leaves_the_run_on_sigterm(
    tmp_path: Path,
) -> None:
    async with (
        ControlledRun(tmp_path, None) as run,
        run.agent("one", "--standalone", within=first_process()) as outside,
    ):
        [worker] = await run.round(1, world=1)
        assert await worker.execute("answer = os.getppid()") == 1
        # The agent also kills an orphan in another session.
        order = """
            import signal, subprocess, time
            orphan = int(subprocess.check_output(["sh", "-c", "setsid sleep 600 >/dev/null & echo $!"]))
            parent = open(f"/proc/{orphan}/stat").read().rpartition(")")[2].split()[1]
            os.kill(orphan, signal.SIGKILL)
            while os.path.exists(f"/proc/{orphan}"):
                time.sleep(0.005)
            answer = parent
        """
        assert await worker.execute(order) == "1"
        [first] = [entry.pid for entry in read_table().values() if entry.parent == outside.pid]
        os.kill(first, signal.SIGTERM)
        await worker.wait_ended()
        await poll_until(lambda: read_process(first) is None)
        await outside.wait_for_line("SIGTERM: leaving the run")
        assert await outside.code() == 143


async def test_an_agent_in_a_program_kills_its_processes_and_no_other_children(tmp_path: Path) -> None:
    source = (
        f"{TELL}\n{FAMILY}\ntell('family.' + os.environ['RANK'], answer)\nif 'LEAVE' not in os.environ: signal.pause()"
    )
    descriptors = len([*Path("/proc/self/fd").iterdir()])
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as mine, contextlib.ExitStack() as stack:  # noqa: ASYNC220
        stack.callback(mine.kill)
        before = {entry.pid for entry in read_table().values() if entry.parent == os.getpid()}
        async with WorkerRunner(tmp_path) as runner:
            for leave in ({"LEAVE": "1"}, {}):
                group = await runner.start(source, **leave)
                family = json.loads(await runner.text_of("family.0"))
                if leave:
                    assert (await next_exit(group)).exit_code == 0
                else:
                    assert all(map(lives, family))
                await group.stop(0)
                assert not [pid for pid in [*family, group.workers[0].child.pid] if read_process(pid)]
            await runner.start_with_store(source)
            for rank in (0, 1):  # a worker that is killed while it starts processes may leave an exited one
                await runner.text_of(f"family.{rank}")
            scratch = runner.workers.scratch
            assert scratch.exists()
        assert {entry.pid for entry in read_table().values() if entry.parent == os.getpid()} == before
        assert not scratch.exists()
        assert mine.poll() is None
    assert len([*Path("/proc/self/fd").iterdir()]) == descriptors


def test_a_process_keeps_its_mark_while_it_executes_a_new_program(tmp_path: Path) -> None:
    (script := tmp_path / "again.sh").write_text('exec sh "$0"\n')
    with (
        subprocess.Popen(["sh", script], env={**os.environ, TREE_MARK: "this"}) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert sum(has_mark(process.pid, "this") for _ in range(1000)) > 990  # the kernel's answers are not atomic
        assert not has_mark(process.pid, "other")


async def test_a_command_is_killed_with_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(ProgramKind.COMMAND, ("sh", "-c", "sleep 600 & echo $! > child.part; mv child.part child; wait"))
    monkeypatch.chdir(tmp_path)
    async with workers_of(program, LogSettings(tmp_path / "logs", combined=True)) as workers:
        group = await start_workers(workers, {})
        child = int(await text_of(tmp_path / "child"))
        os.kill(group.workers[0].child.pid, signal.SIGKILL)
        assert (await next_exit(group)).exit_code == -signal.SIGKILL
        await until_gone(child)


def test_a_watchdog_removes_shared_memory_even_if_the_agent_exits_while_it_starts(tmp_path: Path) -> None:
    folder = tmp_path / "a name\nof two lines"
    folder.mkdir()
    (folder / "file").touch()
    agent = subprocess.Popen([sys.executable, "-c", ""])
    agent.wait(60)
    watchdog = python_code("torchelastic.agent.workers.process_tree", minimal=True)
    subprocess.run(
        [*watchdog, str(agent.pid), "a mark that nothing carries", folder], input=b"", timeout=60, check=True
    )
    assert not folder.exists()
