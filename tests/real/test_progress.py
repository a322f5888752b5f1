"""Progress that real programs report: the records in the store, at no cost to the program."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from contextlib import aclosing
from textwrap import dedent
from typing import TYPE_CHECKING, Self

import pytest

from tests.support.agents import PATIENCE, AgentProcess
from tests.support.ports import free_range
from tests.support.scraping import scraped
from torchelastic.protocol import NodeRecord, RunKeys, decode
from torchelastic.store import Listing, connect, follow

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from tests.support.etcd import EtcdServer
    from torchelastic.store.api import Store

pytestmark = pytest.mark.real

ROUNDING = 0.0015
"""Seconds by which a time in a record may be rounded."""

BEGINNING = """
import multiprocessing, os, signal, subprocess, sys, threading, time
import torchelastic
round, rank = int(os.environ.get("TORCHELASTIC_ROUND", 0)), os.environ.get("RANK")
"""


class Told:
    """The node records of a run, in the order in which they were written.

    Args:
        etcd: the server.
        run: the run's id.
    """

    def __init__(self, etcd: EtcdServer, run: str) -> None:
        self._etcd = etcd
        self._nodes = RunKeys.of(run).nodes
        self._more = asyncio.Condition()
        self._store: Store
        self._reading: asyncio.Task[None]
        self.records: list[NodeRecord] = []

    async def __aenter__(self) -> Self:
        self._store = await connect(self._etcd.settings)
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._store.close()

    async def _read(self) -> None:
        async with aclosing(follow(self._store, self._nodes)) as news:
            async for batch in news:
                entries = batch.entries if isinstance(batch, Listing) else [each.entry for each in batch]
                async with self._more:
                    self.records += [decode(entry.value, NodeRecord) for entry in entries if entry is not None]
                    self._more.notify_all()

    async def until(self, condition: Callable[[NodeRecord], object]) -> NodeRecord:
        """The first record that meets a condition."""
        async with asyncio.timeout(PATIENCE), self._more:
            while (found := next(filter(condition, self.records), None)) is None:
                await self._more.wait()
            return found


class Run:
    """A run on a real etcd, and the records of its nodes.

    Args:
        etcd: the server.
        folder: for the program.
    """

    def __init__(self, etcd: EtcdServer, folder: Path) -> None:
        self.id = str(uuid.uuid4())
        self.told = Told(etcd, self.id)
        self._folder = folder
        self._flags = (f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={self.id}", "--local-addr=127.0.0.1")

    def agent(self, source: str, *flags: str) -> AgentProcess:
        return AgentProcess(*self._flags, *flags, self.program(source))

    def command(self, *command: str | Path) -> AgentProcess:
        return AgentProcess(*self._flags, "--no-python", *command)

    def program(self, source: str) -> Path:
        program = self._folder / "program.py"
        program.write_text(BEGINNING + dedent(source))
        return program


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
            with torchelastic.checkpoint():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
        """
    async with run.told as told, run.agent(source) as agent:
        began = float((await agent.said(r"checkpoint of (\S+)"))[1])
        failed = await told.until(lambda record: record.failure)
        assert failed.round == 1
        assert failed.last_checkpoint_at > began - ROUNDING
        assert 0 < failed.first_step_at < failed.last_checkpoint_at - 0.04
        anew = await told.until(lambda record: record.round == 2 and record.first_step_at)
        assert anew.first_step_at > failed.last_checkpoint_at
        assert anew.last_checkpoint_at == 0


async def test_frequent_checkpoints_are_reported_in_the_background(run: Run) -> None:
    source = """
        for _ in range(5):
            time.sleep(0.01)
            began = time.time()
            with torchelastic.checkpoint():
                pass
        print(f"checkpoint of {began}", flush=True)
        signal.pause()
        """
    async with run.told as told, run.agent(source) as agent:
        began = float((await agent.said(r"checkpoint of (\S+)"))[1])
        await told.until(lambda record: record.last_checkpoint_at > began - ROUNDING)
        assert 2 <= len({record.last_checkpoint_at for record in told.records} - {0}) < 5


async def test_rank_0_reports_run_metrics_on_any_node(run: Run) -> None:
    source = """
        torchelastic.step()
        with torchelastic.checkpoint():
            pass
        print("told", flush=True)
        signal.pause()
        """
    flags = ("--nnodes=2", "--nproc-per-node=2")
    async with (
        run.told as told,
        run.agent(source, "--node-name=one", *flags) as one,
        run.agent(source, "--node-name=two", *flags) as two,
    ):
        for agent, local_rank in ((one, 0), (one, 1), (two, 0), (two, 1)):
            await agent.said(rf"\[rank ({local_rank}|{local_rank + 2})\] told")
        first = "one" if "[rank 0] told" in one.lines else "two"
        assert (await told.until(lambda record: record.first_step_at and record.last_checkpoint_at)).name == first
        assert {record.name for record in told.records if record.first_step_at or record.last_checkpoint_at} == {first}


async def test_a_child_of_a_worker_cannot_report_for_it_but_an_executed_program_can(run: Run) -> None:
    source = """
        def train():
            torchelastic.step()
            torchelastic.step()
            with torchelastic.checkpoint():
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
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            print("nothing is kept", flush=True)
            time.sleep(0.2)
            executed = "import torchelastic, signal\\nwith torchelastic.checkpoint(): pass\\nsignal.pause()"
            os.execv(sys.executable, [sys.executable, "-c", executed])
        """
    async with run.told as told, run.agent(source) as agent:
        await agent.said("nothing is kept")
        stepped = (await told.until(lambda record: record.first_step_at)).first_step_at
        assert {record.last_checkpoint_at for record in told.records} == {0}
        assert (await told.until(lambda record: record.last_checkpoint_at)).first_step_at == stepped


async def test_a_program_started_by_a_shell_script_can_report(run: Run, tmp_path: Path) -> None:
    source = """
        torchelastic.step()
        with torchelastic.checkpoint():
            pass
        signal.pause()
        """
    script = tmp_path / "program.sh"
    script.write_text(f"set -e\n{sys.executable} {run.program(source)}\necho done\n")
    async with run.told as told, run.command("sh", script):
        record = await told.until(lambda record: record.last_checkpoint_at)
        assert 0 < record.first_step_at <= record.last_checkpoint_at


async def test_frequent_steps_are_measured_with_few_store_writes(run: Run) -> None:
    port = free_range(1).first
    source = """
        began = time.monotonic()
        for _ in range(100_001):
            torchelastic.step()
        for _ in range(20_000):
            with torchelastic.checkpoint():
                pass
        print(f"all of it took {time.monotonic() - began}", flush=True)
        torchelastic.ask_for_notice(5)
        signal.pause()
        """
    async with run.told as told, run.agent(source, f"--metrics-port={port}") as agent:
        took = float((await agent.said(r"all of it took (\S+)"))[1])
        await told.until(lambda record: record.notice)
        page = await scraped(port)
        written = {(record.first_step_at, record.last_checkpoint_at) for record in told.records}
    name = "torchelastic_operation_duration_seconds_count"
    assert page.value(name, operation="train_step", rank="0") == 100_000
    assert page.value("torchelastic_checkpoint_write_latency_seconds_count", rank="0") == 20_000
    assert 2 <= len(written) <= took + 4


async def test_signal_handlers_and_saving_threads_block_nothing(run: Run) -> None:
    source = """
        handled = 0

        def handle(*_):
            global handled
            handled += 1
            with torchelastic.checkpoint():
                pass

        def work():
            for _ in range(5_000):
                torchelastic.step()
                with torchelastic.checkpoint():
                    pass

        torchelastic.step()  # so that it is imported: no import bears to be interrupted by another one of the same
        sys.setswitchinterval(1e-5)
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            work()
        for thread in threads:
            thread.join()
        signal.setitimer(signal.ITIMER_REAL, 0)
        began = time.time()
        with torchelastic.checkpoint():
            pass
        print(f"{handled} handled, the last began at {began}", flush=True)
        signal.pause()
        """
    async with run.told as told, run.agent(source) as agent:
        said = await agent.said(r"(\d+) handled, the last began at (\S+)")
        assert int(said[1]) > 0
        await told.until(lambda record: record.last_checkpoint_at > float(said[2]) - ROUNDING)


async def test_a_paused_agent_does_not_block_training(run: Run) -> None:
    source = """
        os.kill(os.getppid(), signal.SIGSTOP)
        for _ in range(1000):
            torchelastic.step()
            with torchelastic.checkpoint():
                pass
        time.sleep(0.01)
        began = time.time()
        with torchelastic.checkpoint():
            pass
        print(f"checkpoint of {began}", flush=True)
        os.kill(os.getppid(), signal.SIGCONT)
        signal.pause()
        """
    async with run.told as told, run.agent(source) as agent:
        began = float((await agent.said(r"checkpoint of (\S+)"))[1])
        await told.until(lambda record: record.first_step_at and record.last_checkpoint_at > began - ROUNDING)


def test_a_program_runs_unchanged_without_an_agent(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    calls = """
        for _ in range(1000):
            torchelastic.step()
            with torchelastic.checkpoint():
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
