"""No process of a worker outlives the worker, and none outlives the agent."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.support.agents import until_gone
from tests.support.crew import eventually
from tests.support.memory_limit import memory_limit
from tests.support.namespaces import first_process
from tests.support.puppets import Stage
from torchelastic.agent.workers.linux import read_process, read_table

pytestmark = pytest.mark.real

FAMILY = """
import os, signal, subprocess

def forked(*, session, orphan):
    reading, writing = os.pipe()
    if os.fork() == 0:
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

answer = [forked(session=session, orphan=orphan) for session in (False, True) for orphan in (False, True)]
answer.append(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
answer.append(int(subprocess.check_output(["sh", "-c", "setsid sleep 600 >/dev/null & echo $!"])))
"""
"""An order: start children and orphans, inside and outside of the worker's session."""


async def test_workers_and_their_processes_end_with_the_agent(tmp_path: Path) -> None:
    async with (
        Stage(tmp_path, None) as stage,
        stage.agent("one", "--standalone", "--nproc-per-node=2") as agent,
    ):
        workers = await stage.round(1, world=2)
        families = [pid for worker in workers for pid in await worker.does(FAMILY)]
        helpers = [entry.pid for entry in read_table().values() if entry.parent == agent.pid]
        agent.kill()
        assert await agent.process.wait() == -signal.SIGKILL
        await asyncio.gather(*(until_gone(pid) for pid in {*helpers, *families, *(worker.pid for worker in workers)}))


async def test_an_agent_killed_for_memory_leaves_no_process(tmp_path: Path) -> None:
    with memory_limit(600) as within:
        async with (
            Stage(tmp_path, None) as stage,
            stage.agent("one", "--standalone", within=within) as agent,
        ):
            [worker] = await stage.round(1, world=1)
            family = await worker.does(FAMILY)
            pids = [*family, *(entry.pid for entry in read_table().values() if entry.parent == agent.pid)]
            Path(f"/proc/{agent.pid}/oom_score_adj").write_text("1000")
            worker.tell("all = []\nwhile True: all.append(bytes(16 << 20) + b'1')")
            assert await agent.process.wait() == -signal.SIGKILL
            await asyncio.gather(*(until_gone(pid) for pid in {*pids, worker.pid}))


async def test_a_restart_leaves_nothing_of_the_earlier_workers(tmp_path: Path) -> None:
    async with (
        Stage(tmp_path, None) as stage,
        stage.agent("one", "--standalone", "--nproc-per-node=2") as agent,
    ):
        workers = await stage.round(1, world=2)
        families = [pid for worker in workers for pid in await worker.does(FAMILY)]
        workers[0].tell("raise SystemExit(7)")
        for worker in await stage.round(2, world=2):
            assert not [pid for pid in [*families, *(worker.pid for worker in workers)] if read_process(pid)]
            assert await worker.does("answer = os.getsid(0) == os.getpid() == os.getpgid(0)")
            worker.tell("raise SystemExit(0)")
        assert await agent.code() == 0


async def test_the_first_process_of_a_container_reaps_orphans_and_leaves_on_sigterm(
    tmp_path: Path,
) -> None:
    async with (
        Stage(tmp_path, None) as stage,
        stage.agent("one", "--standalone", within=first_process()) as outside,
    ):
        [worker] = await stage.round(1, world=1)
        assert await worker.does("answer = os.getppid()") == 1
        # An orphan of another session, which the agent does not know, ends too.
        order = """
            import signal, subprocess, time
            orphan = int(subprocess.check_output(["sh", "-c", "setsid sleep 600 >/dev/null & echo $!"]))
            parent = open(f"/proc/{orphan}/stat").read().rpartition(")")[2].split()[1]
            os.kill(orphan, signal.SIGKILL)
            while os.path.exists(f"/proc/{orphan}"):
                time.sleep(0.005)
            answer = parent
        """
        assert await worker.does(order) == "1"
        [first] = [entry.pid for entry in read_table().values() if entry.parent == outside.pid]
        os.kill(first, signal.SIGTERM)
        await worker.gone()
        await eventually(lambda: read_process(first) is None)
        await outside.said("SIGTERM: leaving the run")
        assert await outside.code() == 143
