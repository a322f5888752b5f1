"""``torchrun --rdzv-backend=torchelastic``: torch's own agent on our rendezvous, found by its entry point."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import MEETING, AgentProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.real


class Torchrun(AgentProcess):
    """One ``torchrun`` with its output."""

    program = ("-m", "torch.distributed.run")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "meeting.py"
    path.write_text(MEETING)
    return path


@pytest.fixture
def stop(tmp_path: Path) -> Iterator[Path]:
    """The file whose appearance lets the workers finish, also those that torchrun left running."""
    path = tmp_path / "stop"
    yield path
    path.touch()


@pytest.fixture
def line(etcd: EtcdServer) -> list[str]:
    """Flags for nodes of one run on a real etcd; agents poll their workers 50 times a second."""
    return [
        "--rdzv-backend=torchelastic",
        f"--rdzv-endpoint={etcd.endpoint}",
        f"--rdzv-id={uuid.uuid4()}",
        "--local-addr=127.0.0.1",
        "--rdzv-conf=last_call_timeout=20,lease=2",
        "--monitor-interval=0.02",
        "--max-restarts=3",
    ]


@pytest.mark.usefixtures("each_torch")
async def test_two_agents_train_and_succeed(line: list[str], program: Path, stop: Path) -> None:
    async with (
        Torchrun(*line, "--nnodes=2", "--nproc-per-node=2", program, stop) as a,
        Torchrun(*line, "--nnodes=2", "--nproc-per-node=2", program, stop) as b,
    ):
        await asyncio.gather(a.trains(world=4), b.trains(world=4))
        stop.touch()
        assert [await a.code(), await b.code()] == [0, 0]
    ranks = {text for agent in (a, b) for text in agent.lines if "is done" in text}
    assert ranks == {f"rank {rank} is done" for rank in range(4)}


async def test_a_finished_runs_id_can_be_reused(line: list[str], program: Path, stop: Path) -> None:
    stop.touch()
    for _ in range(2):
        async with Torchrun(*line, "--nnodes=1", program, stop) as agent:
            await agent.trains(world=1)
            assert await agent.code() == 0


@pytest.mark.usefixtures("each_torch")
async def test_a_killed_worker_restarts_both_agents_in_one_new_round(
    line: list[str], program: Path, stop: Path
) -> None:
    async with (
        Torchrun(*line, "--nnodes=2", program, stop) as a,
        Torchrun(*line, "--nnodes=2", program, stop) as b,
    ):
        workers = await asyncio.gather(a.trains(world=2), b.trains(world=2))
        os.kill(workers[0], signal.SIGKILL)
        for agent in (a, b):
            await agent.said(r"round 2 rank \d of 2")
        stop.touch()
        assert [await a.code(), await b.code()] == [0, 0]
    assert "round 3" not in a.output + b.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("going", [0, 1])
async def test_the_remaining_agent_continues_when_the_other_leaves(
    line: list[str], program: Path, stop: Path, number: signal.Signals, going: int
) -> None:
    nodes = [*line, "--nnodes=1:2"]
    async with Torchrun(*nodes, program, stop) as a, Torchrun(*nodes, program, stop) as b:
        agents = {int((await agent.said(r"round 1 rank (\d) of 2"))[1]): agent for agent in (a, b)}
        gone, left = agents[going], agents[1 - going]
        worker = await gone.trains(world=2)
        gone.kill(number)
        if number is signal.SIGKILL:  # torchrun's workers outlive it
            os.kill(worker, signal.SIGKILL)
        await left.trains(world=1)
        stop.touch()
        assert await left.code() == 0
        assert await gone.code() != 0


async def test_a_third_agent_joins_while_two_train(line: list[str], program: Path, stop: Path) -> None:
    nodes = [*line, "--nnodes=2:3", "--rdzv-conf=last_call_timeout=0.5,lease=2"]
    async with Torchrun(*nodes, program, stop) as a, Torchrun(*nodes, program, stop) as b:
        await asyncio.gather(a.trains(world=2), b.trains(world=2))
        async with Torchrun(*nodes, program, stop) as c:
            await asyncio.gather(*(agent.trains(world=3) for agent in (a, b, c)))
            stop.touch()
            assert [await agent.code() for agent in (a, b, c)] == [0, 0, 0]


async def test_agents_that_join_and_leave_at_once_leave_no_agent_waiting_in_a_finished_round(
    line: list[str], program: Path, stop: Path
) -> None:
    nodes = [*line, "--nnodes=1:3", "--rdzv-conf=last_call_timeout=0,lease=2"]
    async with Torchrun(*nodes, program, stop) as a:
        await a.trains(world=1)
        async with Torchrun(*nodes, program, stop) as b, Torchrun(*nodes, program, stop) as c:
            await b.trains(world=3)
            c.kill(signal.SIGKILL)
            os.kill(await c.trains(world=3), signal.SIGKILL)
            since = len(b.lines)
            async with Torchrun(*nodes, program, stop) as d:
                await asyncio.gather(
                    a.trains(world=3, since=len(a.lines)), b.trains(world=3, since=since), d.trains(world=3)
                )
                stop.touch()
                assert [await agent.code() for agent in (a, b, d)] == [0, 0, 0]


async def test_too_few_agents_give_up_after_torchs_last_call_timeout(
    line: list[str], program: Path, stop: Path
) -> None:
    async with Torchrun(*line, "--nnodes=2", "--rdzv-conf=timeout=1", program, stop) as agent:
        assert await agent.code() == 1
    assert "RendezvousTimeoutError: no more nodes came within 1 s: 1 node" in agent.output


async def test_unsupported_options_are_refused_with_advice(line: list[str], program: Path, stop: Path) -> None:
    async with Torchrun(*line, "--nnodes=2", "--rdzv-conf=lesae=5", program, stop) as agent:
        assert await agent.code() == 1
    assert 'there is no key "lesae"; did you mean lease?' in agent.output
