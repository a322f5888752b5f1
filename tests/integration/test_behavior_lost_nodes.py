"""Which nodes count as lost: partitioned, paused, killed and stopped agents, and agents without leases."""

from __future__ import annotations

import base64
import contextlib
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.controlled_workers import ControlledRun
from tests.support.ports import accepted_connections, cut
from tests.support.workers import poll_until
from torchelastic.protocol.codec import decode
from torchelastic.protocol.records import LeaderRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.support.controlled_workers import ControlledWorker
    from tests.support.etcd import EtcdServer
    from torchelastic.store.api import Entry

pytestmark = pytest.mark.integration

PATIENT = "--rdzv-conf=last_call_timeout=3600,lease=6"


def leader_in(state: Mapping[str, Entry], run: ControlledRun) -> LeaderRecord:
    return decode(state[run.keys.leader].value, LeaderRecord)


def nodes_in(state: Mapping[str, Entry], run: ControlledRun) -> set[str]:
    """Return the names of all nodes that have a key and can start workers."""
    return {node.name for node in run.nodes(state)}


async def end_leases(etcd: EtcdServer, below: str) -> int:
    """Revoke all leases of keys below a prefix, and return their number."""
    ended = 0
    for lease in (await etcd.post("lease/leases"))["leases"]:
        keys = (await etcd.post("lease/timetolive", ID=lease["ID"], keys=True)).get("keys", [])
        if any(base64.b64decode(key).decode().startswith(below) for key in keys):
            await etcd.post("lease/revoke", ID=lease["ID"])
            ended += 1
    return ended


def nodes_of(workers: Sequence[ControlledWorker]) -> list[str]:
    return [worker.node for worker in workers]


async def test_cut_connections_and_expired_leases_lose_no_node_and_a_killed_leader_is_lost(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    flags = ("--nnodes=1:3", PATIENT)
    async with ControlledRun(tmp_path, etcd) as run, contextlib.AsyncExitStack() as stack:
        agents = {name: await stack.enter_async_context(run.agent(name, *flags)) for name in ("a", "b", "c")}
        first = await run.round(1, world=3)
        leader = leader_in(await run.until(lambda state: run.keys.leader in state), run)
        leading, port = leader.node.rpartition(".")[0], int(leader.address.rpartition(":")[2])

        # The connections between healthy agents are cut.
        pid = agents[leading].pid
        await poll_until(lambda: len(accepted_connections(pid, port)) == 2)
        before = accepted_connections(pid, port)
        for descriptor in before.values():
            cut(pid, descriptor)
        await poll_until(lambda: len(accepted_connections(pid, port).keys() - before.keys()) == 2)

        # All leases are revoked, although all agents run.
        assert await end_leases(etcd, run.keys.nodes) == 3
        await run.until(lambda state: nodes_in(state, run) == {"a", "b", "c"} and run.keys.leader in state)
        assert [await worker.execute("answer = 'alive'") for worker in first] == ["alive"] * 3
        assert run.rounds == {1}

        # The leader is killed, and is removed at once.
        [heir, other] = [worker.node for worker in first if worker.node != leading]
        agents[leading].kill()
        second = await run.round(2, world=2)
        assert nodes_of(second) == [heir, other]
        await agents[other].wait_for_line(f"round 2: {leading} died")

        # The current leader is stopped; the other agents continue.
        leader = leader_in(await run.until(lambda state: leader_in(state, run) != leader), run)
        leading = leader.node.rpartition(".")[0]
        agents[leading].kill(signal.SIGTERM)
        assert await agents[leading].code() == 143
        [last] = await run.round(3, world=1)
        await agents[last.node].wait_for_line(f"round 3: {leading} left")
        async with run.agent("d", *flags) as d:
            fourth = await run.round(4, world=2)
            assert nodes_of(fourth) == [last.node, "d"]
            assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in fourth} == {"0"}
            for worker in fourth:
                worker.send("raise SystemExit(0)")
            assert [await d.code(), await agents[last.node].code()] == [0, 0]


async def test_a_silent_node_with_an_expired_lease_is_lost_and_stops_its_workers_when_it_returns(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    flags = ("--nnodes=1:2", "--rdzv-conf=last_call_timeout=3600,lease=1")
    async with (
        ControlledRun(tmp_path, etcd) as run,
        run.agent("a", *flags) as a,
        run.agent("b", *flags) as b,
    ):
        agents = {"a": a, "b": b}
        staying, stopped = await run.round(1, world=2)
        agents[stopped.node].kill(signal.SIGSTOP)
        [alone] = await run.round(2, world=1)
        assert alone.node == staying.node
        # The worker of the paused agent continues, and is informed that it must not commit anything.
        stands = "import torchelastic; answer = torchelastic.is_round_current(timeout=0.5)"
        assert not await stopped.execute(stands)
        assert await alone.execute(stands.replace("0.5", "30"))
        agents[stopped.node].kill(signal.SIGCONT)
        together = await run.round(3, world=2)
        assert nodes_of(together) == [staying.node, stopped.node]
        await stopped.wait_ended()
        for worker in together:
            worker.send("raise SystemExit(0)")
        assert [await a.code(), await b.code()] == [0, 0]
