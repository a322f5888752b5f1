"""Hanging workers are detected by missing heartbeats, and the place where they hang is reported."""

from __future__ import annotations

import json
import os
import signal
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import AgentProcess

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

ONCE = ("--standalone", "--max-restarts=0", "--heartbeat-timeout=3")
PATIENT = (*ONCE[:2], "--heartbeat-timeout=8")
"""Flags with a heartbeat timeout that live workers meet even on a busy machine."""


def program_of(folder: Path, source: str) -> Path:
    path = folder / "program.py"
    path.write_text(dedent(source))
    return path


STUCK = """
    import time
    import torchelastic as worker

    def stuck():
        while True:
            time.sleep(60)

    def train():
        worker.heartbeat()
        print("training", flush=True)
        stuck()

    train()
    """


@pytest.mark.parametrize(("method", "prefix"), [("fork-server", "[rank 0] "), ("exec", "")])
async def test_a_hanging_worker_fails_with_the_place_where_it_hangs(tmp_path: Path, method: str, prefix: str) -> None:
    program = program_of(tmp_path, STUCK)
    log = tmp_path / "last-words"
    flags, env = (f"--start-method={method}", f"--termination-log={log}"), {"PET_PREFIX": f"{int(bool(prefix))}"}
    async with AgentProcess(*ONCE, *flags, program, env=env) as agent:
        assert await agent.code() == 1
    failure = json.loads(log.read_text())["failure"]
    where = "it was in stuck (program.py:7), called by train (program.py:12), called by <module> (program.py:14)"
    assert failure["message"] == f"no heartbeat for 3 s; {where}"
    assert failure["exit_code"] == -signal.SIGABRT
    assert f"{prefix}Fatal Python error: Aborted" in agent.lines


async def test_a_stopped_process_is_reported_as_stopped(tmp_path: Path) -> None:
    program = program_of(
        tmp_path,
        """
        import os, time
        import torchelastic as worker
        print(f"pid {os.getpid()}", flush=True)
        while True:
            worker.heartbeat()
            time.sleep(0.05)
        """,
    )
    async with AgentProcess(*ONCE, program) as agent:
        os.kill(int((await agent.wait_for_line(r"pid (\d+)"))[1]), signal.SIGSTOP)
        assert await agent.code() == 1
    assert "rank 0 on " in agent.lines[-1]
    assert "stopped (SIGSTOP): no heartbeat for 3 s" in agent.lines[-1]


async def test_a_non_python_program_sends_heartbeats_by_touching_a_file(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        'for step in 1 2 3 4 5 6 7 8 9 10; do touch "$TORCHELASTIC_HEARTBEAT_FILE"; sleep 1; done\n'
        "echo trained; exec sleep 60\n"
    )
    async with AgentProcess(*PATIENT, "--no-python", "sh", script) as agent:
        assert await agent.code() == 1
    assert "[rank 0] trained" in agent.output
    assert agent.lines[-1].endswith(": no heartbeat for 8 s; restarts are not allowed")


async def test_a_worker_that_never_sends_a_heartbeat_counts_as_hanging_and_is_killed_if_it_ignores_signals(
    tmp_path: Path,
) -> None:
    program = program_of(
        tmp_path, "import signal, time; signal.signal(signal.SIGABRT, signal.SIG_IGN); time.sleep(300)"
    )
    async with AgentProcess(*ONCE, program) as agent:
        assert await agent.code() == 1
    assert "no heartbeat for 3 s" in agent.lines[-1]


async def test_the_hanging_rank_is_named_instead_of_the_waiting_ranks(tmp_path: Path) -> None:
    program = program_of(
        tmp_path,
        """
        import time, torch, torch.distributed as dist
        import torchelastic as worker

        dist.init_process_group("gloo")

        def stuck():
            time.sleep(300)

        for step in range(5):
            worker.heartbeat()
            if step == 4 and dist.get_rank() == 2:
                stuck()
            dist.all_reduce(torch.ones(1))
        """,
    )
    async with AgentProcess(*ONCE[:2], "--heartbeat-timeout=10", "--nproc-per-node=3", program) as agent:
        assert await agent.code() == 1
    assert "rank 2 on " in agent.lines[-1]
    assert "no heartbeat for 10 s; it was in stuck (program.py:8)" in agent.lines[-1]
