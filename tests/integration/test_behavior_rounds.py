"""Round numbers and restart counts continue if an agent or the data of etcd survives."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.controlled_workers import TRAINING, ControlledRun
from tests.support.workers import poll_until, titled
from torchelastic.protocol.codec import encode
from torchelastic.protocol.pod import Env
from torchelastic.protocol.records import OutcomeRecord, OutcomeState, SizeRecord

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.agents import AgentProcess
    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.integration


CONF = "--rdzv-conf=lease=1,last_call_timeout=0"


async def test_round_numbers_and_charged_restarts_never_decrease(tmp_path: Path, own_etcd: EtcdServer) -> None:
    async with (
        ControlledRun(tmp_path, own_etcd) as run,
        run.agent("a", "--nnodes=1:2", "--rdzv-conf=lease=1,last_call_timeout=3600") as a,
        run.agent("b", "--nnodes=1:2", "--rdzv-conf=lease=1,last_call_timeout=3600") as b,
    ):
        [_, failing] = await run.round(1, world=2)
        failing.send("raise SystemExit(7)")
        before = await run.round(2, world=2)

        # etcd restarts empty, and a new agent connects as early as the agents that know the earlier state.
        await own_etcd.kill()
        own_etcd.wipe()
        size = encode(SizeRecord(min=1, max=3, generation=1)).decode()
        async with run.agent("c", CONF, env={Env.SIZE: size}) as c:
            await c.wait_for_line("trying again")
            await poll_until(lambda: titled(c.pid, "spare"))  # the new agent now waits only for etcd
            assert [await worker.execute("answer = 'alive'") for worker in before] == ["alive"] * 2
            await own_etcd.start()
            after = await run.round(3, world=3)
            assert [worker.node for worker in after] == [*(worker.node for worker in before), "c"]
            assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in after} == {"1"}

            # Of the agents that know the state, only the new one survives.
            await own_etcd.kill()
            own_etcd.wipe()
            a.kill()
            b.kill()
            await own_etcd.start()
            [alone] = await run.round(4, world=1)
            assert (alone.node, alone.env["TORCHELASTIC_RESTART_COUNT"]) == ("c", "1")
            c.kill()

        # Only the data of etcd survive.
        async with run.agent("d", "--nnodes=1:1", CONF) as d:
            [last] = await run.round(5, world=1)
            last.send("raise SystemExit(0)")
            assert await d.code() == 0
        assert run.rounds == {1, 2, 3, 4, 5}


async def test_a_run_that_ends_while_etcd_loses_its_data_is_not_restarted(tmp_path: Path, own_etcd: EtcdServer) -> None:
    flags = ("--nnodes=2", CONF)
    async with (
        ControlledRun(tmp_path, own_etcd) as run,
        run.agent("a", *flags) as a,
        run.agent("b", *flags) as b,
    ):
        workers = await run.round(1, world=2)
        await own_etcd.kill()
        own_etcd.wipe()
        for worker in workers:
            worker.send("raise SystemExit(0)")
            await worker.wait_ended()
        await own_etcd.start()
        assert await run.outcome() == OutcomeRecord(OutcomeState.SUCCEEDED, round=1)
        assert [await a.code(), await b.code()] == [0, 0]
        assert run.rounds == {1}


NONSENSE = (b"\x80\x04nonsense", b'{"x": ' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"o":"succeeded"', b"")


def warnings(agent: AgentProcess, key: str) -> int:
    return sum(f"ignoring {key}:" in line or f"ignoring the node {key}:" in line for line in agent.lines)


async def test_unreadable_records_are_reported_once_and_stop_no_agent(tmp_path: Path, etcd: EtcdServer) -> None:
    flags = ("--nnodes=2", "--rdzv-conf=lease=60,crash_loop_limit=100")
    async with ControlledRun(tmp_path, etcd) as run, run.agent("a", *flags) as a, run.agent("b", *flags) as b:
        workers = await run.round(1, world=2)
        await asyncio.gather(*(worker.execute(TRAINING) for worker in workers))
        keys = run.keys
        of_all = (keys.size, keys.notice, keys.state)
        store = await run.store()
        for value in NONSENSE:
            for key in (*of_all, keys.node("evil.0"), f"{keys.control}unknown", f"{keys.root}else/where"):
                await store.put(key, value)
        # The agents have seen the keys when a later change takes effect.
        workers[1].send("os._exit(7)")
        after = await run.round(2, world=2)
        assert run.rounds == {1, 2}
        assert [worker.node for worker in after] == [worker.node for worker in workers]
        assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in after} == {"1"}
        for worker in after:
            worker.send("raise SystemExit(0)")
        assert [await a.code(), await b.code()] == [0, 0]
        await store.close()
    for agent in (a, b):
        assert [warnings(agent, key) for key in of_all] == [1, 1, 1]
        assert not [line for line in agent.lines if "Traceback" in line and not line.startswith("[rank")]
    assert sorted(warnings(agent, "evil.0") for agent in (a, b)) == [0, 1], "only the leader reads the keys of nodes"
