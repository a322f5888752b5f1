"""The time breakdown of a run: correct under every leader, and available after the run's end."""

from __future__ import annotations

import os
import signal
import time
import uuid
from typing import TYPE_CHECKING, Final

import pytest

from tests.support.agents import AgentProcess
from tests.support.ports import free_range
from tests.support.scraping import scraped
from torchelastic.protocol.codec import decode, encode
from torchelastic.protocol.keys import RunKeys
from torchelastic.protocol.pod import Env
from torchelastic.protocol.records import (
    DepartureReason,
    HistoryRecord,
    ResumeRecord,
    RoundReason,
    RunState,
    TimeBreakdown,
)
from torchelastic.store.client import connect

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.etcd import EtcdServer
    from tests.support.scraping import Page
    from torchelastic.store.api import Store

pytestmark = pytest.mark.integration

BEFORE = 100.0
"""Seconds from the creation of the job until the first pod."""

CLOCKS: Final = 0.1
"""Seconds by which the monotonic clocks of processes may differ."""

PROGRAM = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import torchelastic

dist.init_process_group("gloo")
round, rank, world = os.environ["TORCHELASTIC_ROUND"], dist.get_rank(), dist.get_world_size()


def save_and_end(*_):
    with torchelastic.report_checkpoint():
        pass
    sys.exit()


if "--save-at-the-end" in sys.argv:
    signal.signal(signal.SIGTERM, save_and_end)
time.sleep(0.5)  # restoring
for step in range(1_000_000):
    torchelastic.step()
    stop = torch.tensor([float(os.path.exists(sys.argv[1]))])
    dist.all_reduce(stop)
    if stop.item():
        break
    if step % 50 == 10:
        with torchelastic.report_checkpoint():
            time.sleep(0.01)
        print(f"round {round} rank {rank} of {world} pid {os.getpid()}", flush=True)
    time.sleep(0.01)
dist.destroy_process_group()
"""
"""A program that reports its steps and checkpoints, and prints a line after each checkpoint."""


class Run:
    """Nodes of one run, each with a metrics page; the job was created some time ago.

    Args:
        etcd: the server.
        folder: the folder of the program.
        before: seconds since the job was created.
    """

    def __init__(self, etcd: EtcdServer, folder: Path, before: float = BEFORE) -> None:
        self.keys = RunKeys(run_id := str(uuid.uuid4()))
        self.created = time.time() - before
        self.stop = folder / "stop"
        self._program = folder / "program.py"
        self._program.write_text(PROGRAM)
        self._etcd = etcd
        self._asked = 0.0
        self._line = (f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--local-addr=127.0.0.1")
        first = free_range(2).first
        self._ports = {"a": first, "b": first + 1}

    def node(self, name: str, nnodes: str, *arguments: str, resume: ResumeRecord | None = None) -> AgentProcess:
        resumed = {} if resume is None else {Env.RESUME: encode(resume).decode()}
        return AgentProcess(
            *self._line,
            f"--nnodes={nnodes}",
            f"--node-name={name}",
            f"--metrics-port={self._ports[name]}",
            self._program,
            self.stop,
            *arguments,
            env={Env.JOB_CREATED: str(self.created), Env.JOB: "here/digits", **resumed},
        )

    async def page(self, name: str) -> Page:
        self._asked = time.time()
        return await scraped(self._ports[name])

    def covers(self, seconds: dict[str, float]) -> bool:
        """Return whether the seconds on the last page add up to the age of the job at that time."""
        return self._asked - CLOCKS < self.created + sum(seconds.values()) < time.time() + CLOCKS

    async def breakdown(self, store: Store) -> TimeBreakdown:
        entry = await store.get(self.keys.time_breakdown)
        assert entry is not None
        return decode(entry.value, TimeBreakdown)

    async def history(self, store: Store) -> HistoryRecord:
        entry = await store.get(self.keys.history)
        assert entry is not None
        return decode(entry.value, HistoryRecord)

    async def wait_for_checkpoint(self, agent: AgentProcess, *, leader: str) -> Page:
        """Wait until the leader knows of a checkpoint in the agent's round, and return the leader's page."""
        while True:
            page = await self.page(leader)
            if page.value("torchelastic_job_lost_seconds_total") is not None:
                return page
            await agent.wait_for_line("round", since=len(agent.lines))

    def adds_up(self, breakdown: TimeBreakdown) -> bool:
        return sum(breakdown.seconds.values()) == pytest.approx(breakdown.until - self.created, rel=0.01)


def seconds_on(page: Page) -> dict[str, float]:
    """Return the seconds by state on a page."""
    shown = page.named("torchelastic_job_seconds_total")
    return {dict(labels)["state"]: value for (_, labels), value in shown.items()}


async def test_the_time_breakdown_adds_up_even_if_workers_and_leaders_are_killed(
    own_etcd: EtcdServer, tmp_path: Path
) -> None:
    run = Run(own_etcd, tmp_path)
    store = await connect(own_etcd.settings)
    async with run.node("a", "1:2") as a, run.node("b", "1:2") as b:
        worker = await b.wait_until_training(world=2)
        pages = {name: await run.page(name) for name in "ab"}
        [leader] = [name for name, page in pages.items() if page.named("torchelastic_job_")]
        assert {page.job for page in pages.values()} == {("here", "digits")}
        shown = seconds_on(await run.wait_for_checkpoint(b, leader=leader))
        assert shown["waiting"] == pytest.approx(BEFORE, abs=20)
        assert run.covers(shown)

        agents = {"a": a, "b": b}
        heir = "b" if leader == "a" else "a"
        said = len(agents[heir].lines)
        os.kill(worker, signal.SIGKILL)
        await agents[heir].wait_until_training(world=2, since=said)
        said = len(agents[heir].lines)
        agents[leader].kill()
        await agents[heir].wait_until_training(world=1, since=said)
        page = await run.page(heir)
        assert run.covers(seconds_on(page))
        assert page.value("torchelastic_job_nodes_departed_total", cause="died") == 1
        assert page.value("torchelastic_job_nodes_joined_total") == 2
        assert page.value("torchelastic_job_restarts_total", charged="yes") == 1

        run.stop.touch()
        assert await agents[heir].code() == 0

    breakdown, history = await run.breakdown(store), await run.history(store)
    await store.close()
    assert run.adds_up(breakdown)
    assert breakdown.state is RunState.STOPPING
    assert 3 * 0.5 - CLOCKS < breakdown.seconds[RunState.RESTORING] < 15, (
        "half a second in each round, and more on a busy machine"
    )
    assert breakdown.seconds[RunState.TRAINING] > 0
    assert breakdown.lost is not None
    assert 0 < breakdown.lost < breakdown.seconds[RunState.TRAINING]
    assert breakdown.departures == {DepartureReason.DIED: 1}
    assert history.created == pytest.approx(run.created)
    assert [past.reason for past in history.rounds][-2:] == [RoundReason.WORKER_FAILED, RoundReason.NODE_LOST]
    assert [past.failure is not None for past in history.rounds][-2:] == [True, False]
    assert [past.workers for past in history.rounds][-2:] == [2, 1]


async def test_a_store_that_lost_its_data_gets_the_time_breakdown_back_and_a_new_leader_continues_it(
    own_etcd: EtcdServer, tmp_path: Path
) -> None:
    run = Run(own_etcd, tmp_path)
    async with run.node("a", "1:2") as a, run.node("b", "1:2") as b:
        await a.wait_until_training(world=2)
        [leader] = [name for name in "ab" if seconds_on(await run.page(name))]
        heir, agents = ("b" if leader == "a" else "a"), {"a": a, "b": b}
        await own_etcd.kill()
        own_etcd.wipe()
        await own_etcd.start()
        store = await connect(own_etcd.settings)

        async def written() -> bool:
            return await store.get(run.keys.time_breakdown) is not None

        while not await written():
            await agents[leader].wait_for_line("rank", since=len(agents[leader].lines))  # training continues meanwhile
        said = len(agents[heir].lines)
        agents[leader].kill()
        await agents[heir].wait_until_training(world=1, since=said)
        breakdown, history = await run.breakdown(store), await run.history(store)
        assert run.adds_up(breakdown)
        assert breakdown.seconds[RunState.WAITING] == pytest.approx(BEFORE, abs=20)
        assert [past.number for past in history.rounds] == list(range(1, len(history.rounds) + 1))
        run.stop.touch()
        assert await agents[heir].code() == 0
        breakdown = await run.breakdown(store)
        await store.close()
        assert run.adds_up(breakdown)
        assert breakdown.seconds[RunState.WAITING] < BEFORE + 20


async def test_the_last_record_of_agents_that_all_leave_has_their_final_state_and_checkpoint(
    own_etcd: EtcdServer, tmp_path: Path
) -> None:
    run = Run(own_etcd, tmp_path, before=0.0)
    store = await connect(own_etcd.settings)
    save = "--save-at-the-end"
    async with run.node("a", "2", save) as a, run.node("b", "2", save) as b:
        await a.wait_until_training(world=2)
        [leader] = [name for name in "ab" if seconds_on(await run.page(name))]
        await run.wait_for_checkpoint(a, leader=leader)
        left_at = time.time()
        for agent in (a, b):
            agent.kill(signal.SIGTERM)
        assert [await a.code(), await b.code()] == [143, 143]
    breakdown = await run.breakdown(store)
    await store.close()
    assert breakdown.until >= left_at - 0.1, "the last record was written at the end, and not some seconds earlier"
    assert run.adds_up(breakdown)
    assert breakdown.lost is not None
    assert 0 <= breakdown.lost < breakdown.until - left_at, (
        "the training before the request to leave is in a checkpoint"
    )


async def test_a_resumed_run_shows_earlier_counts_while_it_waits_for_its_first_round(
    own_etcd: EtcdServer, tmp_path: Path
) -> None:
    run = Run(own_etcd, tmp_path)
    breakdown = TimeBreakdown(
        until=run.created + 90, seconds={RunState.TRAINING: 90.0}, nodes_joined=2, departures={DepartureReason.LEFT: 2}
    )
    async with run.node(
        "a", "2", resume=ResumeRecord(round=7, restarts=5, uncharged_restarts=2, time_breakdown=breakdown)
    ) as a:
        await a.wait_for_line("of at least 2 is present")
        while not seconds_on(page := await run.page("a")):
            continue
        restarts = {
            charged: page.value("torchelastic_job_restarts_total", charged=charged) for charged in ("yes", "no")
        }
        assert restarts == {"yes": 5, "no": 2}
        assert page.value("torchelastic_job_nodes_departed_total", cause="left") == 2
        assert seconds_on(page)["training"] == 90
