"""The exit of the fork server at any time has no effect on running workers."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.support.agents import MEETING, AgentProcess, until_gone
from tests.support.isolation import memory_limit
from tests.support.programs import script
from tests.support.workers import LIMIT, next_exit, poll_until, start_workers, titled, workers_of
from torchelastic.agent.workers import fork_server
from torchelastic.errors import StartError
from torchelastic.protocol.pod import ExitCode, TerminationMessage

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration


async def process_of(agent: int, title: str) -> int:
    """Wait for a process of an agent with this title, and return its process id."""
    await poll_until(lambda: titled(agent, title))
    [pid] = titled(agent, title)
    return pid


async def test_a_run_stays_in_its_round_when_the_fork_server_is_killed(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    [program] = script(tmp_path, MEETING).argv
    async with AgentProcess("--nproc-per-node", "2", program, stop) as agent:
        worker = await agent.wait_until_training(world=2)
        [server] = titled(agent.pid, "fork server")
        os.kill(server, signal.SIGKILL)
        await until_gone(server)
        os.kill(worker, signal.SIGKILL)
        await agent.wait_for_line("round 2 rank 0 of 2")
        assert titled(agent.pid, "fork server") != [server]
        assert not [line for line in agent.lines if "round 3" in line]
        stop.touch()
        assert await agent.code() == ExitCode.SUCCEEDED


async def test_a_fork_server_that_is_killed_during_imports_or_when_idle_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fork_server, "REFILL_DELAY", 0.0)
    async with workers_of(script(tmp_path, "pass")) as workers:
        first = await process_of(os.getpid(), "fork server")
        ready = asyncio.ensure_future(workers.fork_server.ready())
        await asyncio.sleep(0)  # lets the call wait for the fork server before it is killed
        os.kill(first, signal.SIGKILL)
        await ready
        group = await start_workers(workers, {})
        assert (await next_exit(group)).exit_code == 0
        await group.stop(0)
        await poll_until(lambda: len(titled(os.getpid(), "spare process")) == 2)
        [second] = titled(os.getpid(), "fork server")
        os.kill(second, signal.SIGKILL)
        await poll_until(lambda: not titled(os.getpid(), "fork server"))
        group = await start_workers(workers, {}, round=2)
        assert (await next_exit(group)).exit_code == 0
        assert await process_of(os.getpid(), "fork server") not in {first, second}
    assert caplog.text.count("The fork server died") == 2


async def test_a_fork_server_that_is_killed_or_cannot_be_replaced_fails_at_most_the_current_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    many = [dict[str, str]()] * 5  # more than the number of spare processes
    async with workers_of(script(tmp_path, "pass")) as workers:
        await workers.fork_server.ready()
        [first] = titled(os.getpid(), "fork server")
        os.kill(first, signal.SIGSTOP)
        starting = asyncio.ensure_future(start_workers(workers, *many))
        await asyncio.sleep(0)  # lets the call request the processes
        os.kill(first, signal.SIGKILL)
        group = await asyncio.wait_for(starting, LIMIT)
        assert [(await next_exit(group)).exit_code for _ in many] == [0] * 5
        await group.stop(0)

        os.kill(await process_of(os.getpid(), "fork server"), signal.SIGKILL)
        await poll_until(lambda: not titled(os.getpid(), "fork server"))
        with monkeypatch.context() as patch:
            patch.setattr(fork_server, "spawn", refused)
            with pytest.raises(StartError, match="the fork server cannot be started: Resource temporarily unavailable"):
                await start_workers(workers, *many, round=2)
        group = await start_workers(workers, *many, round=3)
        assert [(await next_exit(group)).exit_code for _ in many] == [0] * 5


async def test_the_round_ends_if_its_store_process_is_killed() -> None:
    async with AgentProcess("--standalone", "--no-python", "sleep", "600") as agent:
        store = await process_of(agent.pid, "TCPStore of a round")
        os.kill(store, signal.SIGKILL)
        await agent.wait_for_line("round 2: .* the process that serves the round's TCPStore died")
        await agent.wait_for_line("round 2: started")
        await poll_until(lambda: titled(agent.pid, "TCPStore of a round") not in ([], [store]))
        agent.kill(signal.SIGTERM)
        assert await agent.code() == ExitCode.LEFT
        assert not [line for line in agent.lines if "round 3" in line or "Traceback" in line]


async def test_a_fork_server_without_memory_to_import_torch_is_reported_as_such(tmp_path: Path) -> None:
    log = tmp_path / "termination"
    [program] = script(tmp_path, "").argv
    with memory_limit(60) as within:
        async with AgentProcess("--standalone", f"--termination-log={log}", program, within=within) as agent:
            assert await agent.code() == ExitCode.BAD_INPUT
    said = msgspec.json.decode(log.read_bytes(), type=TerminationMessage).message
    assert said.startswith("the fork server dies repeatedly while it imports torch")
    assert said.endswith("killed by SIGKILL: out of memory; raise the memory limit")
    assert said in agent.lines[-1]
