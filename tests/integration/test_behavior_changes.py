"""Planned changes of a run: workers have a grace period; spares wait and take over."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.controlled_workers import ControlledRun
from torchelastic.protocol.codec import encode
from torchelastic.protocol.records import SizeRecord

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.integration

NO_TIMERS = "--rdzv-conf=last_call_timeout=3600,lease=3600,join_debounce=3600"

SAVES_ON_SIGTERM = """
    import signal, time
    def end(*_):
        time.sleep(0.5)  # saving takes time
        open({path!r}, "w").write("all of it")
        os._exit(0)
    signal.signal(signal.SIGTERM, end)
"""

IGNORES_SIGTERM = """
    import signal
    signal.signal(signal.SIGTERM, lambda *_: print("got SIGTERM", flush=True))
"""


async def test_a_spare_takes_over_at_once_and_workers_of_a_leaving_node_have_the_grace_period(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    flags = ("--nnodes=1:2", NO_TIMERS, "--shutdown-timeout=60")
    saved = [tmp_path / "left", tmp_path / "removed"]
    async with (
        ControlledRun(tmp_path, etcd) as run,
        run.agent("one", *flags) as one,
        run.agent("two", *flags) as two,
        run.agent("three", *flags) as three,
    ):
        agents = {"one": one, "two": two, "three": three}
        staying, going = await run.round(1, world=2)
        [spare] = agents.keys() - {staying.node, going.node}
        # All nodes have noted the round, so that also a new leader waits for the spare.
        await run.until(lambda state: len(nodes := run.nodes(state)) == 3 and all(node.round == 1 for node in nodes))
        assert [await worker.execute("answer = 'alive'") for worker in (staying, going)] == ["alive"] * 2

        # A node leaves; the other nodes do not wait for the workers of that node.
        await going.execute(SAVES_ON_SIGTERM.format(path=str(saved[0])))
        agents[going.node].kill(signal.SIGTERM)
        second = await run.round(2, world=2)
        assert [worker.node for worker in second] == [staying.node, spare]
        assert await agents[going.node].code() == 143
        assert saved[0].read_text() == "all of it"

        # The new size is written before the draining node gets its signal.
        staying, going = second
        await going.execute(SAVES_ON_SIGTERM.format(path=str(saved[1])))
        store = await run.store()
        size = SizeRecord(min=1, max=2, desired=1, generation=1, draining=(going.node,))
        await store.put(run.keys.size, encode(size))
        await store.close()
        [alone] = await run.round(3, world=1)
        agents[going.node].kill(signal.SIGTERM)
        assert await agents[going.node].code() == 143
        assert saved[1].read_text() == "all of it"
        alone.send("raise SystemExit(0)")
        assert await agents[staying.node].code() == 0


@pytest.mark.parametrize(("grace", "signals"), [("0.5", 1), ("600", 2)])
async def test_workers_that_ignore_a_stop_are_killed_after_the_grace_period_or_at_a_second_signal(
    tmp_path: Path, grace: str, signals: int
) -> None:
    async with (
        ControlledRun(tmp_path, None) as run,
        run.agent("one", "--standalone", f"--shutdown-timeout={grace}") as agent,
    ):
        [worker] = await run.round(1, world=1)
        await worker.execute(IGNORES_SIGTERM)
        agent.kill(signal.SIGTERM)
        await agent.wait_for_line(r"\[rank 0\] got SIGTERM")
        for _ in range(signals - 1):
            agent.kill(signal.SIGTERM)
        assert await agent.code() == 143
        await worker.wait_ended()
