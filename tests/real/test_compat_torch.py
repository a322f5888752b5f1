"""The agent with the oldest supported torch; all other tests use the newest."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from typing import TYPE_CHECKING

import pytest

from tests.support import oldest_torch
from tests.support.agents import MEETING, AgentProcess

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.etcd import EtcdServer

pytestmark = [pytest.mark.real, pytest.mark.oldest_torch, pytest.mark.usefixtures("with_oldest_torch")]

RECORDED = """
import os, torch
from torchelastic.multiprocessing.errors import record

@record
def main():
    print("with torch", torch.__version__, flush=True)
    raise ValueError(f"rank {os.environ['RANK']} has had enough")

main()
"""


async def test_two_nodes_train_lose_a_worker_and_succeed(tmp_path: Path, etcd: EtcdServer) -> None:
    program, stop = tmp_path / "meeting.py", tmp_path / "stop"
    program.write_text(MEETING)
    line = [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={uuid.uuid4()}", "--local-addr=127.0.0.1", "--nnodes=2"]
    async with AgentProcess(*line, program, stop) as a, AgentProcess(*line, program, stop) as b:
        worker, _ = await asyncio.gather(a.wait_until_training(world=2), b.wait_until_training(world=2))
        os.kill(worker, signal.SIGKILL)
        for agent in (a, b):
            await agent.wait_for_line(r"round 2 rank \d of 2")
        stop.touch()
        assert [await a.code(), await b.code()] == [0, 0]


@pytest.mark.parametrize("method", ["fork-server", "exec"])
async def test_a_recorded_exception_is_the_last_message_of_the_run(tmp_path: Path, method: str) -> None:
    program = tmp_path / "recorded.py"
    program.write_text(RECORDED)
    async with AgentProcess("--standalone", f"--start-method={method}", "--max-restarts=0", program) as agent:
        assert await agent.code() == 1
    assert f"[rank 0] with torch {oldest_torch.VERSION}" in agent.output
    assert "ValueError: rank 0 has had enough (recorded.py" in agent.lines[-1]
