"""``torchrun --rdzv-backend=torchelastic``: torch's agent with torchelastic's rendezvous."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

from tests.support.agents import MEETING, AgentProcess

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.integration


PAGE = Path(__file__).parents[2] / "docs" / "launch.md"


class Torchrun(AgentProcess):
    """A ``torchrun`` process with its output."""

    program = ("-m", "torch.distributed.run")
    settings: ClassVar[Mapping[str, str]] = {}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "meeting.py"
    path.write_text(MEETING)
    return path


@pytest.fixture
def line(etcd: EtcdServer) -> list[str]:
    """The documented flags for nodes of one run on a real etcd; agents poll their workers 50 times a second."""
    [documented] = re.findall(r"^```sh\ntorchrun (.*) train.py\n```$", PAGE.read_text(), re.MULTILINE)
    flags = documented.replace("etcd:2379", etcd.endpoint).replace("digits-7", str(uuid.uuid4())).split()
    return [*flags, "--local-addr=127.0.0.1", "--rdzv-conf=last_call_timeout=20,lease=2", "--monitor-interval=0.02"]


@pytest.mark.usefixtures("each_torch")
async def test_two_agents_meet_restart_together_and_one_leaves(line: list[str], program: Path, stop: Path) -> None:
    nodes = [*line, "--nnodes=1:2", "--rdzv-conf=last_call_timeout=0,lease=2", "--max-restarts=9", program, stop]
    async with Torchrun(*nodes) as a:
        await a.wait_until_training(world=1)
        async with Torchrun(*nodes) as b:
            worker, _ = await asyncio.gather(a.wait_until_training(world=2), b.wait_until_training(world=2))
            os.kill(worker, signal.SIGKILL)
            for agent in (a, b):
                await agent.wait_for_line(r"round 3 rank \d of 2")
            seen = len(a.lines)
            b.kill(signal.SIGTERM)
            assert await b.code() != 0
        await a.wait_until_training(world=1, since=seen)
        stop.touch()
        assert await a.code() == 0
    assert "round 4 rank 0 of 1" in a.output
    assert "rank 0 is done" in a.lines


async def test_unsupported_options_are_refused_with_advice(line: list[str], program: Path, stop: Path) -> None:
    async with Torchrun(*line, "--nnodes=2", "--rdzv-conf=lesae=5", program, stop) as agent:
        assert await agent.code() == 1
    assert 'there is no key "lesae". Did you mean lease?' in agent.output
