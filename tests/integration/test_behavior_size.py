"""The number of nodes in a round: agents join, leave, and wait as spares."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import TIMEOUT
from tests.support.controlled_workers import ControlledRun
from torchelastic.protocol.codec import encode
from torchelastic.protocol.pod import Env
from torchelastic.protocol.records import SizeRecord

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.integration

NO_TIMERS = "--rdzv-conf=last_call_timeout=3600,lease=3600,join_debounce=3600"
"""Settings that make every timer very long, so that a node that waits for a timer instead of an event hangs."""


def wanted(number: int | None, *, generation: int = 0) -> SizeRecord:
    return SizeRecord(min=1, max=3, desired=number, generation=generation)


async def test_a_spare_replaces_a_node_at_once_with_stable_ranks_and_no_charge(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    env = {Env.SIZE: encode(wanted(2)).decode()}
    async with (
        ControlledRun(tmp_path, etcd) as run,
        run.agent("one", NO_TIMERS, env=env) as one,
        run.agent("two", NO_TIMERS, env=env) as two,
        run.agent("three", NO_TIMERS, env=env) as three,
    ):
        agents = {"one": one, "two": two, "three": three}
        first = await run.round(1, world=2)
        [spare] = agents.keys() - {worker.node for worker in first}
        await agents[spare].wait_for_line("round 1: not needed now; waiting as a spare")
        store = "torch.distributed.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))"
        await first[1].execute(f"import torch.distributed; {store}.set('who', 'round 1')")
        assert await first[0].execute(f"import torch.distributed; answer = {store}.check(['who'])")

        connection, writer = await asyncio.open_connection("127.0.0.1", int(first[0].env["MASTER_PORT"]))

        agents[first[0].node].kill()
        second = await run.round(2, world=2)
        assert [worker.node for worker in second] == [first[1].node, spare]
        # The new TCPStore has no key of the earlier round, whose TCPStore ends.
        assert not await second[0].execute(f"import torch.distributed; answer = {store}.check(['who'])")
        async with asyncio.timeout(TIMEOUT):
            with contextlib.suppress(ConnectionResetError):
                assert await connection.read() == b""
        writer.close()

        writing = await run.store()
        async with run.agent("four", NO_TIMERS, env=env) as four:
            agents["four"] = four
            await four.wait_for_line("round 2: not needed now; waiting as a spare")
            await writing.put(run.keys.size, encode(wanted(3, generation=1)))
            third = await run.round(3, world=3)
            assert [worker.node for worker in third] == [first[1].node, spare, "four"]
            await writing.put(run.keys.size, encode(wanted(1, generation=2)))
            [last] = await run.round(4, world=1)
            assert last.node == first[1].node
            assert last.env["TORCHELASTIC_RESTART_COUNT"] == "0"
            last.send("raise SystemExit(0)")
            assert [await agents[name].code() for name in (last.node, spare, "four")] == [0, 0, 0]
        await writing.close()


async def test_a_run_below_the_minimum_waits_reports_this_and_continues_when_nodes_join(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    flags = ("--nnodes=2", NO_TIMERS)
    async with ControlledRun(tmp_path, etcd) as run, run.agent("one", *flags) as one:
        await one.wait_for_line(r"1 node \(one\) of at least 2 is present; waiting for more")
        async with run.agent("two", *flags) as two:
            before = await run.round(1, world=2)
            two.kill()
            await one.wait_for_line(r"round 2: two died; 1 node \(one\) of at least 2 is present; waiting for more")
            await asyncio.gather(*(worker.wait_ended() for worker in before))
        async with run.agent("three", *flags) as three:
            after = await run.round(3, world=2)
            assert [worker.node for worker in after] == ["one", "three"]
            for worker in after:
                worker.send("raise SystemExit(0)")
            assert [await one.code(), await three.code()] == [0, 0]
