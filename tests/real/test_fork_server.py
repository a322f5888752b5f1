"""The fork server may die at any time without effect on workers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.support.agents import MEETING, AgentProcess
from tests.support.crew import LIMIT, eventually, exit_of, gone
from tests.support.memory_limit import memory_limit
from tests.support.programs import script
from tests.support.puppets import Stage
from torchelastic.agent.workers import fork_server, processes
from torchelastic.agent.workers.linux import read_table, with_descendants
from torchelastic.agent.workers.pool import Workers, WorkerStart
from torchelastic.config.settings import LogSettings
from torchelastic.errors import StartError
from torchelastic.protocol import ExitCode, FailureKind, TerminationMessage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

pytestmark = pytest.mark.real


def fork_servers(agent: int) -> Sequence[int]:
    """The living fork servers of an agent."""
    return processes_of(agent, "fork server")


def processes_of(agent: int, title: str) -> Sequence[int]:
    """The living processes of an agent with this title."""
    table = read_table()
    return [pid for pid in with_descendants(table, [agent]) if not table[pid].dead and title_of(pid) == title]


def title_of(pid: int) -> str:
    """The title of a process; empty if it is gone."""
    with contextlib.suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
        return title.removeprefix("torchelastic: ").strip()
    return ""


async def process_of(agent: int, title: str) -> int:
    """The living process of an agent with this title, once there is one."""
    await eventually(lambda: processes_of(agent, title))
    [pid] = processes_of(agent, title)
    return pid


async def test_a_run_stays_in_its_round_when_the_fork_server_dies(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    [program] = script(tmp_path, MEETING).argv
    async with AgentProcess("--nproc-per-node", "2", program, stop) as agent:
        worker = await agent.trains(world=2)
        [server] = fork_servers(agent.pid)
        os.kill(server, signal.SIGKILL)
        await gone(server)
        os.kill(worker, signal.SIGKILL)
        await agent.said("round 2 rank 0 of 2")
        assert [*fork_servers(agent.pid)] != [server]
        assert not [line for line in agent.lines if "round 3" in line]
        stop.touch()
        assert await agent.code() == ExitCode.SUCCEEDED


async def test_an_idle_fork_server_that_dies_is_replaced_after_the_next_start_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fork_server, "REFILL_DELAY", 0.0)
    async with Workers(script(tmp_path, "pass"), LogSettings(tmp_path / "logs")) as workers:
        await workers.ready()
        first = workers.fork_server_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: workers.fork_server_pid is None)
        group = await workers.start(1, [WorkerStart(0, 0, {})])
        assert (await exit_of(group)).message == ""
        await eventually(lambda: workers.fork_server_pid not in {None, first})
    assert "The fork server died" in caplog.text


async def test_a_fork_server_that_dies_while_forking_blocks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = []

    def spawn(argv: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int]) -> int:
        if not ends:  # as a process does that is about to fork others
            ends.append(os.dup(descriptors[fork_server.CONTROL]))
        return processes.spawn(argv, environment, descriptors)

    monkeypatch.setattr(fork_server, "spawn", spawn)
    async with Workers(script(tmp_path, "pass"), LogSettings(tmp_path / "logs")) as workers:
        await workers.ready()
        first = workers.fork_server_pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        starting = asyncio.ensure_future(workers.start(1, [WorkerStart(rank, rank, {}) for rank in range(5)]))
        await asyncio.sleep(0)  # so that it has asked for more than there are in stock
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: workers.fork_server_pid != first)
        os.close(ends[0])
        group = await asyncio.wait_for(starting, LIMIT)
        assert [(await exit_of(group)).message for _ in range(5)] == [""] * 5


async def test_a_machine_that_refuses_a_new_fork_server_fails_only_that_start(
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
        starts = [WorkerStart(rank, rank, {}) for rank in range(5)]  # more than there are in stock
        with monkeypatch.context() as patch:
            patch.setattr(fork_server, "spawn", refused)
            with pytest.raises(StartError, match="the fork server cannot be started: Resource temporarily unavailable"):
                await workers.start(1, starts)
        group = await workers.start(2, starts)
        assert [(await exit_of(group)).message for _ in range(5)] == [""] * 5


@contextlib.contextmanager
def ended_before_they_begin(monkeypatch: pytest.MonkeyPatch, count: int) -> Iterator[None]:
    """Kill the next processes of the fork server before they have read their order."""
    fork, left = fork_server.ForkServer.fork, count

    async def forked(server: fork_server.ForkServer, number: int) -> list[fork_server.ForkedProcess]:
        nonlocal left
        taken = await fork(server, number)
        for process in taken[:left]:
            process.child.signal(signal.SIGSTOP)
            asyncio.get_running_loop().call_soon(process.child.signal, signal.SIGKILL)
            left -= 1
        return taken

    with monkeypatch.context() as patch:
        patch.setattr(fork_server.ForkServer, "fork", forked)
        yield
    assert left == 0


async def test_a_store_process_that_dies_before_its_start_is_replaced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Workers(script(tmp_path, "pass"), LogSettings(tmp_path / "logs")) as workers:
        await workers.ready()
        with (
            ended_before_they_begin(monkeypatch, 2),
            pytest.raises(StartError, match=r"was to serve the round's TCPStore was killed by SIGKILL$"),
        ):
            await asyncio.wait_for(workers.serve_store(socket.create_server(("127.0.0.1", 0))), LIMIT)
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        with ended_before_they_begin(monkeypatch, 1):
            store = await asyncio.wait_for(workers.serve_store(listener), LIMIT)
        socket.create_connection(address).close()
        assert not store.ended.done()


async def test_an_agent_replaces_a_spare_process_that_dies_while_becoming_the_store() -> None:
    async with AgentProcess("--standalone", "--no-python", "sleep", "600") as agent:
        store = await process_of(agent.pid, "store of the round")
        assert await process_of(agent.pid, "sleep")  # until then it is a spare process
        await eventually(lambda: len(processes_of(agent.pid, "spare process")) == 2)  # for a store and a worker
        spare = min(processes_of(agent.pid, "spare process"))  # the first one forked becomes the store
        os.kill(spare, signal.SIGSTOP)  # as a process on a machine without free memory is slow to read
        os.kill(store, signal.SIGKILL)
        await agent.said("round 2: .* the process that serves the round's TCPStore died")
        assert await process_of(agent.pid, "sleep")  # its store and its worker start side by side
        os.kill(spare, signal.SIGKILL)
        await agent.said("round 2: started")
        assert await process_of(agent.pid, "store of the round") not in {store, spare}
        agent.kill(signal.SIGTERM)
        assert await agent.code() == ExitCode.LEFT
        assert not [line for line in agent.lines if "round 3" in line or "Traceback" in line]


async def test_a_store_killed_for_memory_is_reported_as_such(tmp_path: Path) -> None:
    log = tmp_path / "termination"
    with memory_limit(600) as within:
        async with (
            Stage(tmp_path, None) as stage,
            stage.agent("one", "--standalone", "--max-restarts=0", f"--termination-log={log}", within=within) as agent,
        ):
            [worker] = await stage.round(1, world=1)
            store = await process_of(agent.pid, "store of the round")
            for pid in processes_of(agent.pid, "spare process"):
                Path(f"/proc/{pid}/oom_score_adj").write_text("999")
            Path(f"/proc/{store}/oom_score_adj").write_text("1000")  # the kernel's first choice
            worker.tell(
                f"""
                import select
                store, all = os.pidfd_open({store}), []
                while not select.select([store], [], [], 0)[0]:
                    all.append(bytes(1 << 16) + b'1')
                """
            )
            assert await agent.code() == ExitCode.FAILED
    died = "the process that serves the round's TCPStore was killed by SIGKILL: out of memory"
    assert f"rank 0 on one: {died}; it may not restart" in agent.lines[-1]
    words = msgspec.json.decode(log.read_bytes(), type=TerminationMessage)
    assert words.failure is not None
    assert (words.failure.kind, words.failure.message) == (FailureKind.PROGRAM, died)


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
