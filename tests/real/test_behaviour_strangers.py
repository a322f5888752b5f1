"""Foreign keys below a run's prefix are reported once and otherwise ignored."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.puppets import TRAINING, Stage

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.agents import AgentProcess
    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.real

NONSENSE = (b"\x80\x04nonsense", b'{"x": ' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"o":"succeeded"', b"")


def warnings(agent: AgentProcess, key: str) -> int:
    return sum(f"ignoring {key}:" in line or f"ignoring the node {key}:" in line for line in agent.lines)


async def test_unreadable_records_are_reported_once_and_end_nothing(tmp_path: Path, etcd: EtcdServer) -> None:
    flags = ("--nnodes=2", "--rdzv-conf=lease=60,crash_loop_limit=100")
    async with Stage(tmp_path, etcd) as stage, stage.agent("a", *flags) as a, stage.agent("b", *flags) as b:
        workers = await stage.round(1, world=2)
        await asyncio.gather(*(worker.does(TRAINING) for worker in workers))
        keys = stage.keys
        of_all = (keys.size, keys.notice, keys.state)
        store = await stage.store()
        for value in NONSENSE:
            for key in (*of_all, keys.node("evil.0"), f"{keys.control}unknown", f"{keys.root}else/where"):
                await store.put(key, value)
        # The agents have seen the keys when a later change takes effect.
        workers[1].tell("os._exit(7)")
        after = await stage.round(2, world=2)
        assert stage.rounds == {1, 2}
        assert [worker.node for worker in after] == [worker.node for worker in workers]
        assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in after} == {"1"}
        for worker in after:
            worker.tell("raise SystemExit(0)")
        assert [await a.code(), await b.code()] == [0, 0]
        await store.close()
    for agent in (a, b):
        assert [warnings(agent, key) for key in of_all] == [1, 1, 1]
        assert not [line for line in agent.lines if "Traceback" in line and not line.startswith("[rank")]
    assert sorted(warnings(agent, "evil.0") for agent in (a, b)) == [0, 1], "the leader alone reads the nodes' keys"
