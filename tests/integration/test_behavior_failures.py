"""A failed worker is named, with its reason, in the log, in the store and in the agent's termination message."""

from __future__ import annotations

import contextlib
import json
import signal
from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.support.controlled_workers import ControlledRun
from tests.support.isolation import memory_limit
from torchelastic.protocol.codec import decode
from torchelastic.protocol.pod import TerminationMessage
from torchelastic.protocol.records import FailureKind, FailureRecord, LeaderRecord, RoundRecord

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.support.etcd import EtcdServer
    from torchelastic.store.api import Entry

pytestmark = pytest.mark.integration

CLOCKS = {"ahead": 10, "right": 0, "behind": -10}
"""The offsets of the clocks in seconds, from the latest to the earliest."""

PATIENT = "--rdzv-conf=lease=60,crash_loop_limit=100"

RAISES_IN_RECORD = """
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise KeyError("no such layer")

main()
"""

BROKEN_COLLECTIVE = """
raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
"""


def failures(state: Mapping[str, Entry], run: ControlledRun) -> dict[str, FailureRecord]:
    """Return the failure that each node has reported, by the name of the node."""
    return {node.name: node.failure for node in run.nodes(state) if node.failure is not None}


@pytest.fixture
def skewed(tmp_path: Path) -> dict[str, dict[str, str]]:
    """Environments by the name of a clock; a process sees the time of the clock of its environment."""
    made = {}
    for name, seconds in CLOCKS.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(
            f"import time\nreal, time.time = time.time, lambda: real() + {seconds}\n"
        )
        made[name] = {"PYTHONPATH": str(folder)}
    return made


async def test_the_root_cause_follows_failure_kind_and_store_order_not_clocks(
    tmp_path: Path, etcd: EtcdServer, skewed: dict[str, dict[str, str]]
) -> None:
    flags = ("--nnodes=3", "--max-restarts=1", PATIENT)
    async with ControlledRun(tmp_path, etcd) as run, contextlib.AsyncExitStack() as stack:
        agents = {
            name: await stack.enter_async_context(run.agent(name, *flags, env=env)) for name, env in skewed.items()
        }

        async def fail_in_this_order(round: int, orders: list[str]) -> list[str]:
            """Make two nodes fail while the leader is paused, and return their names in the order of the failures."""
            workers = await run.round(round, world=3)
            state = await run.until(lambda state: run.keys.leader in state)
            leader = decode(state[run.keys.leader].value, LeaderRecord).node.rpartition(".")[0]
            # The clock of the first node is ahead of the other one, so by the clocks the second node fails first.
            others = [worker for name in CLOCKS for worker in workers if worker.node == name != leader]
            times = [await worker.execute("import time; answer = time.time()") for worker in others]
            assert times[0] > times[1] + 5
            agents[leader].kill(signal.SIGSTOP)
            for number, (worker, order) in enumerate(zip(others, orders, strict=True), 1):
                worker.send(order)
                await run.until(lambda state, number=number: len(failures(state, run)) >= number)
            agents[leader].kill(signal.SIGCONT)
            return [worker.node for worker in others]

        first, second = await fail_in_this_order(1, ["raise ValueError('first')", "raise ValueError('second')"])
        committed = await run.committed_round(2)
        assert committed.cause == f"rank {rank_of(committed, first)} on {first}: ValueError: first (order.py:1)"

        first, second = await fail_in_this_order(2, [BROKEN_COLLECTIVE, "raise ValueError('what broke it')"])
        for agent in agents.values():
            assert await agent.code() == 1
            assert f"on {second}: ValueError: what broke it (order.py:1)" in agent.lines[-1]


async def test_a_late_root_cause_is_found_on_one_node(tmp_path: Path) -> None:
    # On a busy machine, a worker may exit after the default waiting time of an agent, so this agent waits a minute.
    (tmp_path / "sitecustomize.py").write_text(
        "from torchelastic.rendezvous.policy import plan\nplan.REPORT_WINDOW = 60.0\n"
    )
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", PATIENT)
    async with (
        ControlledRun(tmp_path, None) as run,
        run.agent("one", *flags, env={"PYTHONPATH": str(tmp_path)}) as agent,
    ):
        workers = await run.round(1, world=2)
        workers[0].send(BROKEN_COLLECTIVE)
        workers = await run.round(2, world=2)  # this failure is reported, because no other failure follows
        await agent.wait_for_line(r"round 2: rank 0 on one: RuntimeError: \[gloo.*Connection closed by peer")
        workers[1].send(f"""
            import os, select, time
            select.select([os.pidfd_open({workers[0].pid})], [], [])
            time.sleep(0.15)  # longer than agents wait for the cause of a failure that costs a restart
            raise ValueError('what broke it')
        """)
        workers[0].send(BROKEN_COLLECTIVE)
        assert await agent.code() == 1
    assert (
        "rank 1 on one: ValueError: what broke it (order.py:5); no restarts are left (the limit is 1)"
        in agent.lines[-1]
    )


def rank_of(round: RoundRecord, node: str) -> int:
    return [member.node.rpartition(".")[0] for member in round.members].index(node)


async def test_a_failure_is_reported_with_its_reason_in_the_log_the_store_and_the_termination_message(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    last_words = tmp_path / "termination-log"
    flags = ("--nnodes=1:1", "--max-restarts=4", PATIENT, f"--termination-log={last_words}")
    async with ControlledRun(tmp_path, etcd) as run, run.agent("one", *flags) as agent:
        for round, (order, reason, end) in enumerate(
            [
                (RAISES_IN_RECORD, "KeyError: 'no such layer' (order.py:6)", "exit code 1"),
                ("raise ValueError('bad input')", "ValueError: bad input (order.py:1)", "exit code 1"),
                ("os.write(2, b'no space left'); os._exit(4)", "it last printed: no space left", "exit code 4"),
                ("import signal; os.kill(os.getpid(), signal.SIGBUS)", "killed by SIGBUS", "SIGBUS"),
            ],
            1,
        ):
            [worker] = await run.round(round, world=1)
            since = len(agent.lines)
            worker.send(order)
            await run.round(round + 1, world=1)
            said = (await agent.wait_for_line(r"rank 0 on one.*", since=since))[0]
            assert reason in said
            assert end in said
            assert str(worker.pid) in said
            assert reason in (await run.committed_round(round + 1)).cause

        [worker] = await run.round(5, world=1)
        worker.send("raise ValueError('\\udcff' + 'großes Pech 🧯' * 2000)")
        assert await agent.code() == 1
        failure = (await run.outcome()).failure
        assert failure is not None
        assert (failure.round, failure.rank, failure.local_rank, failure.host) == (5, 0, 0, "127.0.0.1")
        assert (failure.pid, failure.exit_code, failure.kind) == (worker.pid, 1, FailureKind.PROGRAM)
        assert failure.message.startswith("ValueError: ")
        assert failure.message.endswith("großes Pech 🧯 (order.py:1)")

    text = last_words.read_bytes()
    assert len(text) <= 4096
    assert len(text) > 3000
    words = msgspec.json.decode(text, type=TerminationMessage)
    assert json.loads(text.decode())["reason"] == words.reason == "WorkerFailed"
    assert words.failure is not None
    assert msgspec.structs.replace(words.failure, message="") == msgspec.structs.replace(failure, message="")
    assert words.failure.message.startswith("ValueError: ")
    assert words.failure.message.endswith("großes Pech 🧯 (order.py:1)")
    assert "no restarts are left (the limit is 4)" in words.message


async def test_a_worker_killed_for_memory_is_reported_as_such(tmp_path: Path) -> None:
    with memory_limit(600) as within:
        async with (
            ControlledRun(tmp_path, None) as run,
            run.agent("one", "--standalone", "--nproc-per-node=2", "--max-restarts=1", within=within) as agent,
        ):
            workers = await run.round(1, world=2)
            workers[1].send("all = []\nwhile True: all.append(bytes(16 << 20) + b'1')")
            workers = await run.round(2, world=2)
            await agent.wait_for_line(r"rank 1 on one.*: killed by SIGKILL: out of memory")
            workers[0].send("import signal; os.kill(os.getpid(), signal.SIGKILL)")
            assert await agent.code() == 1
        assert "rank 0 on one: killed by SIGKILL; no restarts are left (the limit is 1)" in agent.lines[-1]
