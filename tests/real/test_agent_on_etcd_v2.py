"""Agents on an etcd with API v2 behave as on v3, with the same messages."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

import pytest

from tests.support import etcd_kinds
from tests.support.agents import MEETING, AgentProcess

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.real


async def test_agents_on_etcd_v2_survive_losing_a_node_and_etcd_and_succeed(tmp_path: Path) -> None:
    program, stop = tmp_path / "meeting.py", tmp_path / "stop"
    program.write_text(MEETING)
    async with etcd_kinds.V2[0].server(tmp_path) as server:
        flags = [
            "--rdzv-backend=etcd-v2",
            f"--rdzv-endpoint={server.endpoint}",
            f"--rdzv-id={uuid.uuid4()}",
            "--local-addr=127.0.0.1",
            "--nnodes=1:2",
            "--rdzv-conf=lease=60",
        ]
        async with (
            AgentProcess(*flags, "--node-name=one", program, stop) as a,
            AgentProcess(*flags, "--node-name=two", program, stop) as b,
        ):
            await asyncio.gather(a.trains(world=2), b.trains(world=2))
            a.kill()
            await b.said("round 2: one died")
            await b.trains(world=1)
            await server.kill()
            await b.said("lost sight of")
            await server.start()
            async with AgentProcess(*flags, "--node-name=three", program, stop) as c:
                await asyncio.gather(b.trains(world=2, since=len(b.lines)), c.trains(world=2))
                stop.touch()
                assert [await b.code(), await c.code()] == [0, 0]
        assert "round 4" not in b.output


async def test_an_etcd_without_v2_is_refused_with_advice(tmp_path: Path) -> None:
    program = tmp_path / "meeting.py"
    program.write_text(MEETING)
    async with etcd_kinds.V3[1].server(tmp_path) as server:
        place = f"--rdzv-endpoint={server.endpoint}"
        async with AgentProcess("--rdzv-backend=etcd-v2", place, "--rdzv-id=x", "--nnodes=2", program) as agent:
            assert await agent.code() == 5
    assert (
        f"{server.endpoint} is not etcd, or etcd without its API v2 (--enable-v2=true, until etcd 3.5)"
        in agent.lines[-1]
    )
    assert "Traceback" not in agent.output
