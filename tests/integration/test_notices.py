"""Notices give workers that ask for them time to save before a planned change of the round."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.agents import AgentProcess, until_gone
from tests.support.etcd import until_keys
from tests.support.workers import lives
from torchelastic.protocol.codec import decode, encode
from torchelastic.protocol.keys import RunKeys
from torchelastic.protocol.pod import Env
from torchelastic.protocol.records import NodeRecord, SizeRecord

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.support.etcd import EtcdServer
    from torchelastic.store.api import Entry

pytestmark = pytest.mark.integration

POLLING = """
import os, signal, sys, time
from pathlib import Path
import torchelastic as worker

here, asked = Path(sys.argv[1]), float(sys.argv[2])
round, rank = os.environ["TORCHELASTIC_ROUND"], os.environ["RANK"]

def go(*_):
    print(f"rank {rank} goes", flush=True)
    raise SystemExit(0)

signal.signal(signal.SIGTERM, go)
if rank in sys.argv[3:] or not sys.argv[3:]:
    worker.ask_for_notice(asked)
print(f"round {round} rank {rank} of {os.environ['WORLD_SIZE']} pid {os.getpid()}", flush=True)
saving = False
while not (here / "stop").exists():
    notice = worker.notice()
    if notice and not saving:
        print(f"rank {rank} got the notice {notice.reason}: {notice.cause}", flush=True)
    if saving and not notice:
        print(f"rank {rank}: the notice was withdrawn", flush=True)
    saving = notice is not None
    if saving and (here / f"save.{rank}").exists():
        print(f"round {round} rank {rank} has saved", flush=True)
        time.sleep(0.3)  # so that the test reads this line before its effects
        worker.answer_notice()
        saving = False
    time.sleep(0.01)
"""
"""A program that asks for notice, and reports that it has saved when a file exists. Arguments: a folder, the seconds of
notice, and the ranks that ask (default: all ranks)."""

CALLED = """
import os, sys, threading, time
from pathlib import Path
import torchelastic as worker

def save(notice):
    print(f"called in a thread of its own: {threading.current_thread() is not threading.main_thread()}", flush=True)
    time.sleep(0.2)
    print(f"saved for {notice.reason}", flush=True)
    if os.environ["TORCHELASTIC_ROUND"] == "2":
        raise OSError("the disk is full")

worker.ask_for_notice(60, callback=save)
print(f"round {os.environ['TORCHELASTIC_ROUND']} of {os.environ['WORLD_SIZE']}", flush=True)
while not (Path(sys.argv[1]) / "stop").exists():
    time.sleep(0.01)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "polling.py"
    path.write_text(POLLING)
    return path


@dataclass(frozen=True)
class Run:
    """A run of one to three nodes on a real etcd; its workers have ten minutes to save."""

    etcd: EtcdServer
    id: str = field(default_factory=lambda: str(uuid.uuid4()))

    def node(self, *arguments: str | Path) -> AgentProcess:
        """Return a node that forms a round with the present nodes after a second, or joins them."""
        return self._node("--nnodes=1:3", "--rdzv-conf=last_call_timeout=1,lease=2", *arguments)

    def node_of_two(self, *arguments: str | Path) -> AgentProcess:
        """Return a node that waits for a second node before it starts."""
        size = SizeRecord(min=1, max=3, desired=2)
        return self._node("--rdzv-conf=last_call_timeout=60", *arguments, env={Env.SIZE: encode(size).decode()})

    def _node(self, *arguments: str | Path, **more: Any) -> AgentProcess:
        line = (f"--rdzv-endpoint={self.etcd.endpoint}", f"--rdzv-id={self.id}", "--local-addr=127.0.0.1")
        return AgentProcess(*line, "--notice=600", *arguments, **more)

    async def wait_until_training(self, *agents: AgentProcess, round: int = 1, asking: int | None = None) -> list[int]:
        """Wait until these nodes train together, and a number of these nodes (default: all) asks for notices.

        Returns:
            The process ids of the nodes' workers.
        """
        workers = [await agent.wait_until_training(world=len(agents)) for agent in agents]

        def asked(keys: Mapping[str, Entry]) -> bool:
            nodes = [decode(entry.value, NodeRecord) for entry in keys.values()]
            have = [node for node in nodes if node.round >= round and node.notice > 0]
            return len(have) >= (len(agents) if asking is None else asking)

        await until_keys(self.etcd.settings, RunKeys(self.id).nodes, asked)
        return workers


@pytest.fixture
def run(etcd: EtcdServer) -> Run:
    return Run(etcd)


def before(agent: AgentProcess, first: str, then: str) -> bool:
    """Return whether an agent printed one text before another."""
    numbers = [next(i for i, line in enumerate(agent.lines) if text in line) for text in (first, then)]
    return numbers[0] < numbers[1]


async def test_the_round_changes_when_the_rank_that_asked_for_notice_has_saved(
    run: Run, program: Path, tmp_path: Path
) -> None:
    save, nodes = tmp_path / "save.0", ("--stop-timeout=60", program, tmp_path, "300", "0")
    async with run.node("--node-name=one", *nodes) as a:
        await run.wait_until_training(a)

        # A node joins, and leaves again before the workers have saved.
        async with run.node("--node-name=gone", *nodes) as b:
            await a.wait_for_line("rank 0 got the notice node_joined: gone joined")
            b.kill(signal.SIGTERM)
            assert await b.code() == 143
        await a.wait_for_line("rank 0: the notice was withdrawn")
        assert "round 2" not in a.output

        async with run.node("--node-name=two", *nodes) as b:
            await a.wait_for_line("rank 0 got the notice node_joined: two joined")
            save.touch()
            _, worker = await run.wait_until_training(a, b, round=2, asking=1)
            assert before(a, "round 1 rank 0 has saved", "round 2: two joined")
            assert before(a, "round 1 rank 0 has saved", "rank 0 goes")
            save.unlink()

            # A failure ends the wait for the workers.
            seen = len(a.lines)
            async with run.node("--node-name=three", *nodes) as c:
                await a.wait_for_line("rank 0 got the notice node_joined: three joined", since=seen)
                os.kill(worker, signal.SIGKILL)
                assert "killed by SIGKILL" in (await a.wait_for_line("round 3: ")).string
                *_, worker = await run.wait_until_training(a, b, c, round=3, asking=1)
                assert "round 2 rank 0 has saved" not in a.output

                # A leaving node waits for workers of other nodes, although its own workers have not asked for notice.
                seen = len(a.lines)
                c.kill(signal.SIGTERM)
                await a.wait_for_line("rank 0 got the notice node_left: three left", since=seen)
                assert lives(worker)
                save.touch()
                assert await c.code() == 143
                assert "got the notice" not in c.output
            await asyncio.gather(a.wait_until_training(world=2, since=seen), b.wait_for_line("round 4 rank . of 2"))
            (tmp_path / "stop").touch()
            assert [await a.code(), await b.code()] == [0, 0]


async def test_the_round_changes_after_a_callback_returns_or_raises(run: Run, tmp_path: Path) -> None:
    program = tmp_path / "called.py"
    program.write_text(CALLED)
    async with run.node(program, tmp_path) as a:
        await a.wait_for_line("round 1 of 1")
        async with run.node(program, tmp_path) as b:
            await asyncio.gather(a.wait_for_line("round 2 of 2"), b.wait_for_line("round 2 of 2"))
            b.kill(signal.SIGTERM)
            assert await b.code() == 143
        await a.wait_for_line("round 3 of 1")
        (tmp_path / "stop").touch()
        assert await a.code() == 0
    assert "called in a thread of its own: True" in a.output
    assert before(a, "saved for node_joined", "round 2: ")
    assert "OSError: the disk is full" in a.output


async def test_all_workers_save_before_a_node_leaves_unless_it_gets_a_second_signal(
    run: Run, program: Path, tmp_path: Path
) -> None:
    async with run.node_of_two("--node-name=one", program, tmp_path, "300") as a:
        async with run.node_of_two("--node-name=two", program, tmp_path, "300") as b:
            workers = await run.wait_until_training(a, b)
            ranks = [(await agent.wait_for_line(r"round \d rank (\d)"))[1] for agent in (a, b)]
            b.kill(signal.SIGTERM)
            await a.wait_for_line("got the notice node_left: two left")
            await b.wait_for_line(r"got the notice node_left: two leaves \(SIGTERM\)")
            (tmp_path / f"save.{ranks[1]}").touch()
            await b.wait_for_line("has saved")
            assert lives(workers[1])
            (tmp_path / f"save.{ranks[0]}").touch()
            await a.wait_for_line("round 2: two left")
            assert await b.code() == 143
            assert before(a, "has saved", "round 2: two left")
            assert before(b, "has saved", f"rank {ranks[1]} goes")

        # The only node also waits until its worker has saved.
        (tmp_path / "save.0").unlink()
        [worker] = await run.wait_until_training(a, round=2)
        seen = len(a.lines)
        a.kill(signal.SIGTERM)
        await a.wait_for_line("rank 0 got the notice node_left: one leaves", since=seen)
        assert lives(worker)
        a.kill(signal.SIGTERM)
        assert await a.code() == 143
        await until_gone(worker)
        assert "round 2 rank 0 has saved" not in a.output
        assert "rank 0 goes" not in "\n".join(a.lines[seen:])


async def test_a_node_leaves_without_the_store_when_its_workers_have_saved(
    own_etcd: EtcdServer, program: Path, tmp_path: Path
) -> None:
    nodes = [f"--rdzv-endpoint={own_etcd.endpoint}", "--rdzv-id=outage", "--local-addr=127.0.0.1", "--nnodes=2"]
    async with (
        AgentProcess(*nodes, "--notice=600", program, tmp_path, "300") as a,
        AgentProcess(*nodes, "--notice=600", program, tmp_path, "300") as b,
    ):
        await Run(own_etcd, "outage").wait_until_training(a, b)
        await own_etcd.kill()
        await b.wait_for_line("the watch of the run's keys broke")
        b.kill(signal.SIGTERM)
        await b.wait_for_line("got the notice node_left")
        for rank in range(2):
            (tmp_path / f"save.{rank}").touch()
        assert await b.code() == 143
        assert "has saved" in b.output
