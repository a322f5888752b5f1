"""``torchelastic-run`` with real agents, a real etcd and real torch workers."""

from __future__ import annotations

import asyncio
import json
import signal
import uuid
from typing import TYPE_CHECKING

import pytest

from tests.support import etcd_kinds
from tests.support.agents import MEETING, AgentProcess

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.integration


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "meeting.py"
    path.write_text(MEETING)
    return path


@pytest.fixture
def stop(tmp_path: Path) -> Path:
    """The path of a file; the workers finish when it exists."""
    return tmp_path / "stop"


async def test_a_program_that_always_fails_at_start_fails_the_run_with_its_exception(
    tmp_path: Path,
) -> None:
    program = tmp_path / "broken.py"
    program.write_text("def work():\n    raise ValueError('the data are broken')\nwork()\n")
    log = tmp_path / "termination"
    async with AgentProcess("--standalone", "--termination-log", log, program) as agent:
        assert await agent.code() == 1
    last = agent.lines[-1]
    assert "ValueError: the data are broken" in last
    assert "failed 3 times in a row within 10 s of their start" in last
    message = json.loads(log.read_text())
    assert message["reason"] == "WorkerFailed"
    assert "ValueError: the data are broken" in message["failure"]["message"]


async def test_a_signal_before_etcd_is_available_stops_the_agent_at_once(program: Path, stop: Path) -> None:
    async with AgentProcess("--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=x", "--nnodes=2", program, stop) as agent:
        await agent.wait_for_line("127.0.0.1:1")
        agent.kill(signal.SIGINT)
        assert await agent.code() == 130


async def test_an_etcd_that_never_starts_is_reported_in_one_sentence(program: Path, stop: Path) -> None:
    async with AgentProcess(
        "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=x", "--nnodes=2", "--rdzv-conf=join_timeout=1", program, stop
    ) as agent:
        assert await agent.code() == 3
    assert "127.0.0.1:1" in agent.lines[-1]
    assert "Traceback" not in agent.output


async def test_a_log_folder_that_cannot_be_created_is_reported_before_the_node_joins(program: Path, stop: Path) -> None:
    folder = stop.with_name("x" * 300)
    async with AgentProcess("--standalone", f"--log-dir={folder}", program, stop) as agent:
        assert await agent.code() == 2
    [line] = agent.lines
    assert line.endswith(f"output cannot be written to {folder}: File name too long. Choose another folder.")


FINAL = """
from torchelastic import NonRetryableException

class NoSuchDataSet(NonRetryableException):
    def __init__(self, name):
        self.name = name

    def __str__(self):
        return f"there is no data set {self.name}"
"""

RAISED = f"""{FINAL}
import os
try:
    raise NoSuchDataSet("caught")
except NoSuchDataSet:
    if os.environ["TORCHELASTIC_ROUND"] == "1":
        raise OSError("another failure") from None
raise NoSuchDataSet("mnist")
"""

RECORDED = f"""{FINAL}
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise NoSuchDataSet("mnist")

main()
"""


@pytest.mark.parametrize(("method", "source", "rounds"), [("fork-server", RAISED, 2), ("exec", RECORDED, 1)])
async def test_a_non_retryable_exception_ends_the_run_unless_it_is_caught(
    tmp_path: Path, method: str, source: str, rounds: int
) -> None:
    program = tmp_path / "final.py"
    program.write_text(source)
    log = tmp_path / "last-words"
    async with AgentProcess(
        "--standalone", f"--start-method={method}", program, env={"PET_TERMINATION_LOG": str(log)}
    ) as agent:
        assert await agent.code() == 1
    assert "NoSuchDataSet: there is no data set mnist" in agent.lines[-1]
    assert f'File "{program}", line ' in agent.output
    assert (f"round {rounds}" in agent.output, f"round {rounds + 1}" in agent.output) == (True, False)
    failure = json.loads(log.read_text())["failure"]
    assert (failure["exit_code"], failure["non_retryable"]) == (1, True)


@pytest.mark.parametrize("method", ["fork-server", "exec"])
async def test_a_wrong_variable_of_the_workers_is_one_sentence(tmp_path: Path, method: str) -> None:
    (program := tmp_path / "trains.py").write_text(
        "import torchelastic\ntorchelastic.elastic(print)(torchelastic.TorchState(step=0))"
    )
    wrong = {"TORCHELASTIC_NCCL_IN_PLACE": "true"}
    async with AgentProcess("--standalone", f"--start-method={method}", program, env=wrong) as agent:
        assert await agent.code() == 1
    sentence = "NonRetryableException: TORCHELASTIC_NCCL_IN_PLACE=true: must be 1 for on or 0 for off."
    assert f"[rank 0] torchelastic.training.errors.{sentence}" in agent.lines
    assert sentence in agent.lines[-1]
    assert "Traceback" not in agent.output


async def test_a_temporary_folder_with_too_long_a_path_is_refused(tmp_path: Path, program: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    async with AgentProcess("--standalone", program, env={"TMPDIR": str(deep)}) as agent:
        assert await agent.code() == 2
    assert "path too long. Set TMPDIR to a writable folder with a short path." in agent.output
    assert [*deep.iterdir()] == []


async def test_a_run_on_etcd_v2_survives_the_loss_of_a_node_and_of_etcd_and_succeeds(
    tmp_path: Path, program: Path, stop: Path
) -> None:
    async with etcd_kinds.V2[0].server(tmp_path) as server:
        flags = [
            "--rdzv-backend=etcd-v2",
            f"--rdzv-endpoint={server.endpoint}",
            f"--rdzv-id={uuid.uuid4()}",
            "--local-addr=127.0.0.1",
            "--nnodes=1:2",
            "--rdzv-conf=lease=60",
        ]
        async with (
            AgentProcess(*flags, "--node-name=one", program, stop) as a,
            AgentProcess(*flags, "--node-name=two", program, stop) as b,
        ):
            await asyncio.gather(a.wait_until_training(world=2), b.wait_until_training(world=2))
            a.kill()
            await b.wait_for_line("round 2: one died")
            await b.wait_until_training(world=1)
            await server.kill()
            await b.wait_for_line("the watch of the run's keys broke")
            await server.start()
            async with AgentProcess(*flags, "--node-name=three", program, stop) as c:
                await asyncio.gather(b.wait_until_training(world=2, since=len(b.lines)), c.wait_until_training(world=2))
                stop.touch()
                assert [await b.code(), await c.code()] == [0, 0]
        assert "round 4" not in b.output
