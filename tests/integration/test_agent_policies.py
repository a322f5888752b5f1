"""Job policies in an agent: uncharged and non-retryable exit codes, port ranges, resumed runs."""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
from typing import TYPE_CHECKING

import pytest

from tests.support.controlled_workers import ControlledRun
from tests.support.ports import descendants, free_range, sockets
from torchelastic.protocol.codec import encode
from torchelastic.protocol.records import ResumeRecord

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.support.etcd import EtcdServer
    from torchelastic.store.api import Entry

pytestmark = pytest.mark.integration

PATIENT = "--rdzv-conf=crash_loop_limit=100"


async def test_uncharged_exits_cost_no_restart_and_non_retryable_exits_end_the_run(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    flags = (
        "--nproc-per-node=2",
        "--max-restarts=0",
        "--uncharged-exit-codes=70-79,137",
        "--non-retryable-exit-codes=3",
        PATIENT,
    )
    async with ControlledRun(tmp_path, etcd) as run, run.agent("one", *flags) as agent:
        [first, _] = await run.round(1, world=2)
        first.send("import os; os._exit(75)")
        [_, second] = await run.round(2, world=2)
        second.send(f"import os; os.kill(os.getpid(), {signal.SIGKILL:d})")
        workers = await run.round(3, world=2)
        record = await run.committed_round(3)
        assert (record.restarts, record.uncharged_restarts) == (0, 2)
        assert record.cause == "rank 1 on one: killed by SIGKILL"
        assert [worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in workers] == ["0", "0"]
        workers[0].send("import os; os._exit(3)")
        assert await agent.code() == 1
        assert "rank 0 on one: exit code 3; this failure is non-retryable" in agent.lines[-1]


async def test_agents_listen_only_within_their_port_range_and_report_when_it_is_exhausted(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    allowed = free_range(16)
    flags = ("--nnodes=2", "--max-restarts=9", f"--port-range={allowed}", PATIENT)
    async with (
        ControlledRun(tmp_path, etcd) as run,
        run.agent("one", *flags) as one,
        run.agent("two", *flags) as two,
    ):
        stores = []
        for number in range(1, 4):
            workers = await run.round(number, world=2)
            record = await run.committed_round(number)
            # Both agents have noted the round, and have written their offers for the next round.
            state = await run.until(lambda state, number=number: nodes_that_know(state, run, number) == 2)
            offered = [port for node in run.nodes(state) for port in (node.peer_port, node.tcp_store_port)]
            stores.append(int(record.tcp_store.rpartition(":")[2]))
            pids = descendants([one.pid, two.pid])
            open_ports = {each.port for pid in pids for each in sockets(pid) if each.listens}
            assert {*offered, stores[-1]} <= open_ports
            assert all(allowed.first <= port <= allowed.last for port in open_ports)
            workers[0].send("raise ValueError('another round')")
        assert all(before != after for before, after in itertools.pairwise(stores))
        await run.round(4, world=2)

    with contextlib.ExitStack() as stack:
        for port in allowed.after(0):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        async with ControlledRun(tmp_path, etcd) as run, run.agent("late", *flags) as late:
            assert await late.code() == 4
            assert f"No port of --port-range {allowed} is free on this node: set a wider range" in late.lines[-1]


async def test_a_resumed_run_continues_with_the_next_round_and_the_charged_restarts(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    known = encode(ResumeRecord(round=7, restarts=2, uncharged_restarts=5)).decode()
    env = {"TORCHELASTIC_RESUME": known, "TORCHELASTIC_UNIQUE_RUN": "1"}
    flags = ("--nnodes=2", "--max-restarts=3", PATIENT)
    async with (
        ControlledRun(tmp_path, etcd) as run,
        run.agent("one", *flags, env=env) as one,
        run.agent("two", *flags, env=env) as two,
    ):
        workers = await run.round(8, world=2)
        record = await run.committed_round(8)
        assert (record.restarts, record.uncharged_restarts) == (2, 6)
        assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in workers} == {"2"}
        workers[0].send("raise ValueError('the third')")
        workers = await run.round(9, world=2)
        workers[1].send("raise ValueError('the fourth')")
        assert (await one.code(), await two.code()) == (1, 1)
        assert "the fourth (order.py:1); no restarts are left (the limit is 3)" in one.lines[-1]


# -- observation through the store


def nodes_that_know(state: Mapping[str, Entry], run: ControlledRun, number: int) -> int:
    """Return the number of nodes that know a round."""
    return sum(node.round == number for node in run.nodes(state))
