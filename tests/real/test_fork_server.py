"""The fork server may die at any time, and nobody but the agent takes notice."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import MEETING, AgentProcess
from tests.support.crew import LIMIT, eventually, exit_of, gone
from tests.support.programs import script
from torchelastic.agent import fork_server, messages, processes
from torchelastic.agent.process_table import read_table, with_descendants
from torchelastic.agent.workers import Workers, WorkerStart
from torchelastic.contract import ExitCode
from torchelastic.errors import StartError
from torchelastic.settings import LogSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

pytestmark = pytest.mark.real


def fork_servers(agent: int) -> Sequence[int]:
    """The fork servers of an agent that live."""
    table = read_table()
    return [
        pid
        for pid in with_descendants(table, [agent])
        if not table[pid].dead and Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"torchelastic: fork server")
    ]


async def test_a_run_goes_on_in_its_epoch_when_the_fork_server_dies(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    [program] = script(tmp_path, MEETING).argv
    async with AgentProcess("--nproc-per-node", "2", program, stop) as agent:
        worker = await agent.trains(world=2)
        [server] = fork_servers(agent.pid)
        os.kill(server, signal.SIGKILL)
        await gone(server)
        os.kill(worker, signal.SIGKILL)
        await agent.said("epoch 2 rank 0 of 2")
        assert [*fork_servers(agent.pid)] != [server]
        assert not [line for line in agent.lines if "epoch 3" in line]
        stop.touch()
        assert await agent.code() == ExitCode.SUCCEEDED


async def test_a_fork_server_that_dies_when_all_is_calm_is_replaced_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fork_server, "_STEADY", 0.0)
    async with Workers(script(tmp_path, "pass"), LogSettings(tmp_path / "logs")) as workers:
        await workers.ready()
        first = workers.fork_server_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: workers.fork_server_pid not in {None, first})
        group = await workers.start(1, [WorkerStart(0, 0, {})])
        assert (await exit_of(group)).message == ""
    assert "The fork server died" in caplog.text


async def test_a_fork_server_that_dies_while_it_forks_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "_STEADY", 0.0)
    ends: list[int] = []

    def spawn(argv: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int]) -> int:
        if not ends:  # as a process has it that is about to fork others
            ends.append(os.dup(descriptors[messages.CONTROL]))
        return processes.spawn(argv, environment, descriptors)

    monkeypatch.setattr(fork_server, "spawn", spawn)
    async with Workers(script(tmp_path, "pass"), LogSettings(tmp_path / "logs")) as workers:
        await workers.ready()
        first = workers.fork_server_pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        starting = asyncio.ensure_future(workers.start(1, [WorkerStart(rank, rank, {}) for rank in range(5)]))
        await asyncio.sleep(0)  # so that it has asked, for more than there are in store
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: workers.fork_server_pid != first)
        os.close(ends[0])
        group = await asyncio.wait_for(starting, LIMIT)
        assert [(await exit_of(group)).message for _ in range(5)] == [""] * 5


async def test_a_machine_that_allows_no_new_fork_server_for_a_while_fails_that_start_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    async with Workers(script(tmp_path, "pass"), LogSettings(tmp_path / "logs")) as workers:
        await workers.ready()
        server = workers.fork_server_pid
        assert server is not None
        os.kill(server, signal.SIGKILL)
        await eventually(lambda: workers.fork_server_pid is None)
        starts = [WorkerStart(rank, rank, {}) for rank in range(5)]  # more than there are in store
        with monkeypatch.context() as patch:
            patch.setattr(fork_server, "spawn", refused)
            with pytest.raises(StartError, match="the fork server cannot be started: Resource temporarily unavailable"):
                await workers.start(1, starts)
        group = await workers.start(2, starts)
        assert [(await exit_of(group)).message for _ in range(5)] == [""] * 5


START_METHODS = [("fork-server", True), ("forkserver", True), ("fork", True), ("exec", False), ("spawn", False)]


@pytest.mark.parametrize(("name", "forked"), START_METHODS)
async def test_start_methods_have_the_names_that_people_know(name: str, forked: bool, tmp_path: Path) -> None:
    [program] = script(tmp_path, "import sys; print('forked:', 'torch' in sys.modules)").argv
    async with AgentProcess("--start-method", name, program) as agent:
        assert await agent.code() == ExitCode.SUCCEEDED
    assert f"forked: {forked}" in agent.output
