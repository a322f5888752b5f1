"""The success of a run is reported once and immediately, and also to nodes that join late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.controlled_workers import ControlledRun
from torchelastic.protocol.codec import decode
from torchelastic.protocol.pod import Env
from torchelastic.protocol.records import LeaderRecord, OutcomeRecord, OutcomeState

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.integration


async def test_a_node_may_finish_early_and_a_later_failure_restarts_all_nodes(tmp_path: Path, etcd: EtcdServer) -> None:
    flags = ("--rdzv-conf=last_call_timeout=3600,lease=60",)
    two, three = (
        {Env.SIZE: size, Env.UNIQUE_RUN: "1"} for size in ('{"min":1,"max":2}', '{"generation":1,"min":1,"max":3}')
    )
    async with (
        ControlledRun(tmp_path, etcd) as run,
        run.agent("a", *flags, env=two) as a,
        run.agent("b", *flags, env=two) as b,
    ):
        early, late = await run.round(1, world=2)
        state = await run.until(lambda state: run.keys.leader in state)
        leader = decode(state[run.keys.leader].value, LeaderRecord).node
        early.send("raise SystemExit(0)")
        await early.wait_ended()
        async with run.agent("c", *flags, env=three) as c:
            await (a if leader.startswith("a.") else b).wait_for_line("the run is about to finish; new nodes wait")
            assert run.rounds == {1}
            late.send("raise SystemExit(7)")
            workers = await run.round(2, world=3)
            assert [worker.node for worker in workers] == [early.node, late.node, "c"]
            assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in workers} == {"1"}
            for worker in workers:
                worker.send("raise SystemExit(0)")
            assert [await agent.code() for agent in (a, b, c)] == [0, 0, 0]

            assert await run.outcome() == OutcomeRecord(OutcomeState.SUCCEEDED, round=2, restarts=1)

        async with run.agent("d", *flags, env=three) as d:
            assert await d.code() == 0
            assert d.lines[-1].endswith("the run has succeeded")
            assert "started rank" not in d.output
