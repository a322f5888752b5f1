"""The start and the exit of an agent process: no needless wait, and no lost message."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import MEETING, TIMEOUT, AgentProcess
from tests.support.etcd import until_keys
from tests.support.idle_connections import idle_connections
from tests.support.ports import free_range
from tests.support.scraping import scraped
from tests.support.workers import poll_until, text_of
from torchelastic.agent.workers.process_tree import read_table
from torchelastic.protocol.codec import decode
from torchelastic.protocol.keys import RunKeys
from torchelastic.protocol.records import NodeRecord

if TYPE_CHECKING:
    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.integration

WATCHED_SPAWN = """
import posix, sys

spawn = posix.posix_spawn

def telling(path, argv, *rest, **more):
    if any("fork_server_main" in word for word in argv):
        heavy = ("aiohttp", "prometheus_client", "torchelastic.agent.agent", "torchelastic.rendezvous.node")
        print("imported before torch:", [name for name in heavy if name in sys.modules], flush=True)
    return spawn(path, argv, *rest, **more)

posix.posix_spawn = telling
"""


async def test_the_import_of_torch_waits_for_no_other_import(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WATCHED_SPAWN)
    (program := tmp_path / "program.py").touch()
    env = {"PYTHONPATH": str(tmp_path)}
    async with AgentProcess("--standalone", "--metrics-port=0", program, env=env) as agent:
        assert await agent.code() == 0
    assert "imported before torch: []" in agent.lines


async def test_an_agent_paused_during_its_exit_keeps_its_last_message_and_exit_code(tmp_path: Path) -> None:
    program, last_words = tmp_path / "program.py", tmp_path / "last-words"
    program.write_text(
        f"""if True:
            import os, sys
            os.write(2, b"x" * {1 << 20})
            open(sys.argv[1], "w").close()
            sys.exit(7)
        """
    )
    agent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "torchelastic.run", "--standalone", "--prefix"),
        *(f"--termination-log={last_words}", program, tmp_path / "up"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        limit=16,  # the reader buffers this number of bytes; the rest stays in the pipe
    )
    assert agent.stderr
    try:
        await text_of(tmp_path / "up")
        # After the exit of the processes that start workers, the run has ended, and only messages remain to be written.
        await poll_until(lambda: not [entry for entry in read_table().values() if entry.parent == agent.pid])
        assert json.loads(last_words.read_text())["reason"] == "WorkerFailed"
        agent.send_signal(signal.SIGTERM)
        agent.send_signal(signal.SIGINT)
        async with asyncio.timeout(TIMEOUT):
            await agent.stderr.read()
            assert await agent.wait() == 1
    finally:
        if agent.returncode is None:
            agent.kill()
            await agent.communicate()


async def test_an_agent_with_closed_standard_streams_works(tmp_path: Path, etcd: EtcdServer) -> None:
    program = tmp_path / "program.py"
    program.write_text("for number in range(10_000): print('line', number)\n")
    flags = (f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={uuid.uuid4()}", "--local-addr=127.0.0.1")
    closed = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    async with AgentProcess(*flags, program, within=closed) as agent:
        assert await agent.code() == 0


async def test_an_agent_that_gets_sigterm_after_a_failure_does_not_wait_for_the_stop_timeout(
    tmp_path: Path,
) -> None:
    program = tmp_path / "stubborn.py"
    program.write_text(
        """if True:
            import os, signal, sys
            signal.signal(signal.SIGTERM, lambda *_: print("got SIGTERM", flush=True))
            print("up", flush=True)
            if os.environ["RANK"] == "0":
                open(sys.argv[1]).read()
                sys.exit(5)
            while True:
                signal.pause()
        """
    )
    os.mkfifo(tmp_path / "go")
    flags = ("--standalone", "--nproc-per-node=2", "--stop-timeout=600", "--shutdown-timeout=0.1")
    async with AgentProcess(*flags, program, tmp_path / "go") as agent:
        for rank in (0, 1):
            await agent.wait_for_line(rf"\[rank {rank}\] up")
        await asyncio.to_thread((tmp_path / "go").write_text, "")
        await agent.wait_for_line(r"\[rank 1\] got SIGTERM")
        agent.kill(signal.SIGTERM)
        assert await agent.code() == 143


@pytest.mark.parametrize(
    ("limit", "code", "reason"),
    [
        (120, 2, "too many files are open: raise the limit (ulimit -n)"),
        (64, 1, "the limit of open files is too low; raise it (ulimit -n)"),
    ],
)
async def test_a_limit_of_open_files_that_is_too_low_is_reported(
    limit: int, code: int, reason: str, tmp_path: Path
) -> None:
    (program := tmp_path / "program.py").touch()
    within = ("sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh")
    async with AgentProcess("--standalone", "--nproc-per-node=32", program, within=within) as agent:
        assert await agent.code() == code
    assert reason in agent.lines[-1]
    assert "Traceback" not in agent.output


async def test_an_agent_runs_without_a_home_directory_and_an_entry_of_its_user(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").touch()
    within = ("env", "-u", "HOME", "unshare", "--user", "--map-user=54321")
    async with AgentProcess("--standalone", program, within=within) as agent:
        assert await agent.code() == 0, agent.output
    assert "Traceback" not in agent.output


async def test_idle_connections_to_its_ports_do_not_stop_an_agent(tmp_path: Path, etcd: EtcdServer, stop: Path) -> None:
    (program := tmp_path / "program.py").write_text(MEETING)
    ports, run = free_range(2), uuid.uuid4().hex
    common = ("--nnodes=2", f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run}", "--local-addr=127.0.0.1")
    low = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")
    async with (
        AgentProcess(*common, f"--metrics-port={ports.first}", program, stop, within=low) as one,
        AgentProcess(*common, f"--metrics-port={ports.last}", program, stop, within=low) as other,
    ):
        worker = await one.wait_until_training(world=2)
        keys = await until_keys(etcd.settings, RunKeys(run).nodes, lambda keys: len(keys) == 2)
        peer_ports = [decode(entry.value, NodeRecord).peer_port for entry in keys.values()]
        with contextlib.ExitStack() as stack:
            for port in (ports.first, ports.last, *peer_ports):
                await stack.enter_context(idle_connections(port, 3000)).until_closed()
            for port in (ports.first, ports.last):
                page = await scraped(port, source="127.0.0.2")  # one address has at most half of the connections
                assert page.value("torchelastic_round") == 1
            assert max(len([*Path(f"/proc/{each.pid}/fd").iterdir()]) for each in (one, other)) < 200
            os.kill(worker, signal.SIGKILL)
            for agent in (one, other):
                await agent.wait_for_line("round 2 rank . of 2")
        stop.touch()
        assert (await one.code(), await other.code()) == (0, 0), one.output + other.output
