"""Progress reports of real programs: the records in the store, and no delays of the program."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import TIMEOUT, AgentProcess
from tests.support.ports import free_range
from tests.support.scraping import scraped
from torchelastic.protocol.codec import decode
from torchelastic.protocol.keys import RunKeys
from torchelastic.protocol.records import NodeRecord
from torchelastic.store.api import Listing
from torchelastic.store.client import connect, follow

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.support.etcd import EtcdServer
    from torchelastic.store.api import Store

pytestmark = pytest.mark.integration

ROUNDING = 0.0015
"""Seconds by which a time in a record may be rounded."""

BEGINNING = """
import multiprocessing, os, signal, subprocess, sys, threading, time
import torchelastic
round, rank = int(os.environ.get("TORCHELASTIC_ROUND", 0)), os.environ.get("RANK")
"""


class NodeRecords:
    """The node records of a run, in the order in which they were written."""

    def __init__(self) -> None:
        self._more = asyncio.Condition()
        self.records: list[NodeRecord] = []

    async def read(self, store: Store, run: str) -> None:
        async with aclosing(follow(store, RunKeys(run).nodes)) as news:
            async for batch in news:
                entries = batch.entries if isinstance(batch, Listing) else [each.entry for each in batch]
                async with self._more:
                    self.records += [decode(entry.value, NodeRecord) for entry in entries if entry is not None]
                    self._more.notify_all()

    async def until(self, condition: Callable[[NodeRecord], object]) -> NodeRecord:
        """Wait for a record that meets a condition, and return it."""
        async with asyncio.timeout(TIMEOUT), self._more:
            while (found := next(filter(condition, self.records), None)) is None:
                await self._more.wait()
            return found


@dataclass(frozen=True)
class Run:
    """A run on a real etcd, and a folder for its program."""

    etcd: EtcdServer
    folder: Path
    id: str = field(default_factory=lambda: str(uuid.uuid4()))

    def agent(self, source: str, *flags: str) -> AgentProcess:
        program = self.folder / "program.py"
        program.write_text(BEGINNING + dedent(source))
        rendezvous = (f"--rdzv-endpoint={self.etcd.endpoint}", f"--rdzv-id={self.id}", "--local-addr=127.0.0.1")
        return AgentProcess(*rendezvous, *flags, program)

    @property
    @asynccontextmanager
    async def records(self) -> AsyncIterator[NodeRecords]:
        records, store = NodeRecords(), await connect(self.etcd.settings)
        reading = asyncio.create_task(records.read(store, self.id))
        try:
            yield records
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await store.close()


@pytest.fixture
def run(etcd: EtcdServer, tmp_path: Path) -> Run:
    return Run(etcd, tmp_path)


async def test_a_report_before_a_sigkill_is_kept_with_the_failure(run: Run) -> None:
    source = """
        time.sleep(0.05)  # restoring
        torchelastic.step()
        if round == 1:
            time.sleep(0.05)
            print(f"checkpoint of {time.time()}", flush=True)
            with torchelastic.report_checkpoint():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
        """
    async with run.records as records, run.agent(source) as agent:
        began = float((await agent.wait_for_line(r"checkpoint of (\S+)"))[1])
        failed = await records.until(lambda record: record.failure)
        assert failed.round == 1
        assert failed.last_checkpoint_at > began - ROUNDING
        assert 0 < failed.first_step_at < failed.last_checkpoint_at - 0.04
        restarted = await records.until(lambda record: record.round == 2 and record.first_step_at)
        assert restarted.first_step_at > failed.last_checkpoint_at
        assert restarted.last_checkpoint_at == 0


async def test_a_child_of_a_worker_cannot_report_for_it_but_an_executed_program_can(run: Run) -> None:
    port = free_range(1).first
    source = """
        def train():
            torchelastic.step()
            torchelastic.step()
            with torchelastic.report_checkpoint():
                pass

        if __name__ == "__main__":
            for method in ("fork", "spawn", "forkserver"):
                child = multiprocessing.get_context(method).Process(target=train)
                child.start()
                child.join()
                assert child.exitcode == 0
            torchelastic.step()
            if (pid := os.fork()) == 0:
                train()
                sys.unraisablehook = lambda _: os._exit(9)
                if (pid := os.fork()) == 0:
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            print("nothing is kept", flush=True)
            time.sleep(0.2)
            executed = "import torchelastic, signal\\nwith torchelastic.report_checkpoint(): pass\\nsignal.pause()"
            os.execv(sys.executable, [sys.executable, "-c", executed])
        """
    async with run.records as records, run.agent(source, f"--metrics-port={port}") as agent:
        await agent.wait_for_line("nothing is kept")
        stepped = (await records.until(lambda record: record.first_step_at)).first_step_at
        assert {record.last_checkpoint_at for record in records.records} == {0}
        assert (await records.until(lambda record: record.last_checkpoint_at)).first_step_at == stepped
        page = await scraped(port)
    assert page.value("torchelastic_checkpoint_write_latency_seconds_count", rank="0") == 1
    assert page.value("torchelastic_operation_duration_seconds_count", operation="train_step", rank="0") is None


async def test_each_checkpoint_of_concurrent_signal_handlers_and_threads_is_counted_with_few_store_writes(
    run: Run,
) -> None:
    port = free_range(1).first
    source = """
        handled, worked, started = 0, 0, time.monotonic()

        def handle(*_):
            global handled
            handled += 1
            with torchelastic.report_checkpoint():
                pass

        def work():
            for _ in range(5_000):
                torchelastic.step()
                with torchelastic.report_checkpoint():
                    pass

        torchelastic.step()  # imports modules, which a signal handler must not import meanwhile
        sys.setswitchinterval(1e-5)
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            work()
            worked += 1
        for thread in threads:
            thread.join()
        signal.setitimer(signal.ITIMER_REAL, 0)
        began = time.time()
        with torchelastic.report_checkpoint():
            pass
        took = time.monotonic() - started
        print(f"{handled} handled, {handled + 5_000 * (3 + worked) + 1} in {took} s, the last at {began}", flush=True)
        while True:
            torchelastic.step()
            time.sleep(0.1)
        """
    async with run.records as records, run.agent(source, f"--metrics-port={port}") as agent:
        said = await agent.wait_for_line(r"(\d+) handled, (\d+) in (\S+) s, the last at (\S+)")
        assert int(said[1]) > 0
        await records.until(lambda record: record.last_checkpoint_at > float(said[4]) - ROUNDING)
        page = await scraped(port)
        written = {record.last_checkpoint_at for record in records.records}
    assert page.value("torchelastic_checkpoint_write_latency_seconds_count", rank="0") == int(said[2])
    assert 2 <= len(written) <= float(said[3]) + 4


def test_a_program_runs_unchanged_without_an_agent(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    calls = """
        for _ in range(1000):
            torchelastic.step()
            with torchelastic.report_checkpoint():
                pass
        print(os.listdir("/proc/self/task") == [str(os.getpid())], len(os.listdir("/proc/self/fd")))
        """
    program.write_text(
        BEGINNING + "descriptors = len(os.listdir('/proc/self/fd'))\n" + dedent(calls) + "print(descriptors)"
    )
    ended = subprocess.run([sys.executable, "-X", "dev", program], check=True, capture_output=True, text=True)
    alone, before, after = ended.stdout.split()
    assert alone == "True"
    assert before == after
    assert ended.stderr == ""


async def test_a_run_that_fails_again_and_again_before_a_step_ends(tmp_path: Path) -> None:
    (program := tmp_path / "train.py").write_text(
        "import os, torchelastic\n"
        "os.write(1, b'starts\\n')\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    torchelastic.step()\n"
        "torchelastic.step()\n"
        "raise ValueError('a bad batch')\n"
    )
    async with AgentProcess("--standalone", "--rdzv-conf=crash_loop_seconds=0", program) as agent:
        assert await agent.code() == 1
    assert agent.lines[-1].endswith(
        "ValueError: a bad batch (train.py:6); its workers failed 3 times in a row before they had completed a step"
    )
    assert sum(line.endswith("starts") for line in agent.lines) == 4
