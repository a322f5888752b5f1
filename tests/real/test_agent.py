"""``torchelastic-run`` with real agents, a real etcd and real torch workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import uuid
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import MEETING, AgentProcess, until_gone
from tests.support.crew import told
from torchelastic.machine import interface_of, own_address

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.real


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "meeting.py"
    path.write_text(MEETING)
    return path


@pytest.fixture
def stop(tmp_path: Path) -> Path:
    """The file whose appearance lets the workers finish."""
    return tmp_path / "stop"


@pytest.fixture
def line(etcd: EtcdServer) -> list[str]:
    """Flags for nodes of one run on a real etcd."""
    return [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={uuid.uuid4()}", "--local-addr=127.0.0.1"]


async def test_two_nodes_train_together_and_succeed(line: list[str], program: Path, stop: Path) -> None:
    async with (
        AgentProcess(*line, "--nnodes=2", "--nproc-per-node=2", program, stop) as a,
        AgentProcess(*line, "--nnodes=2", "--nproc-per-node=2", program, stop) as b,
    ):
        for agent in (a, b):
            await agent.trains(world=4)
        stop.touch()
        assert [await a.code(), await b.code()] == [0, 0]
    ranks = {text for agent in (a, b) for text in agent.lines if "is done" in text}
    assert ranks == {f"[rank {rank}] rank {rank} is done" for rank in range(4)}


async def test_a_killed_worker_restarts_the_round_on_all_nodes_and_is_named(
    line: list[str], program: Path, stop: Path
) -> None:
    async with (
        AgentProcess(*line, "--nnodes=2", program, stop) as a,
        AgentProcess(*line, "--nnodes=2", program, stop) as b,
    ):
        worker = await a.trains(world=2)
        await b.trains(world=2)
        os.kill(worker, signal.SIGKILL)
        for agent in (a, b):
            await agent.said(r"round 2 rank \d of 2")
            await agent.said(r"round 2: rank \d on \S+: .*SIGKILL")
        stop.touch()
        assert [await a.code(), await b.code()] == [0, 0]


async def test_the_workers_of_a_killed_agent_die_with_it_and_the_others_continue(
    line: list[str], program: Path, stop: Path
) -> None:
    nodes = [*line, "--nnodes=1:2", "--rdzv-conf=lease=60"]
    async with (
        AgentProcess(*nodes, "--node-name=one", program, stop) as a,
        AgentProcess(*nodes, "--node-name=two", program, stop) as b,
    ):
        workers = [await agent.trains(world=2) for agent in (a, b)]
        a.kill()
        await until_gone(workers[0])
        await b.said("round 2: one died")
        await b.trains(world=1)
        stop.touch()
        assert await b.code() == 0


async def test_a_stopping_agent_says_so_and_the_others_continue(line: list[str], program: Path, stop: Path) -> None:
    nodes = [*line, "--nnodes=1:2"]
    async with (
        AgentProcess(*nodes, "--node-name=one", program, stop) as a,
        AgentProcess(*nodes, "--node-name=two", program, stop) as b,
    ):
        workers = [await agent.trains(world=2) for agent in (a, b)]
        a.kill(signal.SIGTERM)
        assert await a.code() == 143
        await until_gone(workers[0])
        await b.said("round 2: one left")
        await b.trains(world=1)
        stop.touch()
        assert await b.code() == 0


async def test_a_third_node_joins_a_running_run(line: list[str], program: Path, stop: Path) -> None:
    nodes = [*line, "--nnodes=1:3", "--rdzv-conf=last_call_timeout=1,lease=1"]
    async with AgentProcess(*nodes, program, stop) as a:
        await a.trains(world=1)
        async with AgentProcess(*nodes, program, stop) as b:
            await asyncio.gather(a.trains(world=2), b.trains(world=2))
            stop.touch()
            assert [await a.code(), await b.code()] == [0, 0]


async def test_training_continues_while_etcd_is_down_and_changes_follow_after_it(
    own_etcd: EtcdServer, program: Path, stop: Path
) -> None:
    nodes = [
        f"--rdzv-endpoint={own_etcd.endpoint}",
        "--rdzv-id=outage",
        "--local-addr=127.0.0.1",
        "--nnodes=1:2",
        "--rdzv-conf=last_call_timeout=1,lease=2",
    ]
    async with AgentProcess(*nodes, program, stop) as a:
        await a.trains(world=1)
        await own_etcd.kill()
        await a.said("lost sight of")
        await own_etcd.start()
        async with AgentProcess(*nodes, program, stop) as b:
            await asyncio.gather(a.trains(world=2), b.trains(world=2))
            stop.touch()
            assert [await a.code(), await b.code()] == [0, 0]
    assert "round 3" not in a.output


async def test_a_program_that_keeps_failing_at_start_fails_the_run_with_its_own_exception(
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


async def test_the_restart_budget_belongs_to_the_run(line: list[str], tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text("import sys; sys.exit(7)\n")
    nodes = [*line, "--nnodes=2", "--max-restarts=1"]
    async with AgentProcess(*nodes, program) as a, AgentProcess(*nodes, program) as b:
        assert [await a.code(), await b.code()] == [1, 1]
    for agent in (a, b):
        assert "exit code 7; no restart is left of the 1 that it may have" in agent.lines[-1]
        assert "round 2" in agent.output
        assert "round 3" not in agent.output


async def test_the_id_of_a_finished_run_does_not_block_the_next_run(line: list[str], program: Path, stop: Path) -> None:
    stop.touch()
    for _ in range(2):
        async with AgentProcess(*line, "--nnodes=1:1", program, stop) as agent:
            await agent.trains(world=1)
            assert await agent.code() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_signal_before_etcd_is_available_ends_the_agent_at_once(
    program: Path, stop: Path, number: signal.Signals, code: int
) -> None:
    async with AgentProcess("--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=x", "--nnodes=2", program, stop) as agent:
        await agent.said("127.0.0.1:1")
        agent.kill(number)
        assert await agent.code() == code


async def test_an_etcd_that_never_starts_fails_with_one_sentence(program: Path, stop: Path) -> None:
    async with AgentProcess(
        "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=x", "--nnodes=2", "--rdzv-conf=join_timeout=1", program, stop
    ) as agent:
        assert await agent.code() == 3
    assert "127.0.0.1:1" in agent.lines[-1]
    assert "Traceback" not in agent.output


async def test_bad_input_gets_one_sentence(tmp_path: Path) -> None:
    async with AgentProcess("--standalone", tmp_path / "missing.py") as agent:
        assert await agent.code() == 2
    assert len(agent.lines) == 1
    assert "missing.py" in agent.lines[0]


async def test_a_log_folder_that_cannot_be_created_is_reported_before_the_node_joins(program: Path, stop: Path) -> None:
    folder = stop.with_name("x" * 300)
    async with AgentProcess("--standalone", f"--log-dir={folder}", program, stop) as agent:
        assert await agent.code() == 2
    [line] = agent.lines
    assert line.endswith(f"output cannot be written below {folder}: File name too long. Choose another --log-dir.")


async def test_a_non_retryable_exit_code_ends_the_run_at_once(line: list[str], tmp_path: Path) -> None:
    program = tmp_path / "final.py"
    program.write_text("import os, sys, time\ntime.sleep(600) if os.environ['RANK'] == '0' else sys.exit(64)\n")
    nodes = [*line, "--nnodes=2", "--final-exit-codes=3,64"]
    log = tmp_path / "last-words"
    async with (
        AgentProcess(*nodes, program, env={"PET_TERMINATION_LOG": str(log)}) as a,
        AgentProcess(*nodes, program) as b,
    ):
        assert [await a.code(), await b.code()] == [1, 1]
    for agent in (a, b):
        assert "rank 1 on " in agent.lines[-1]
        assert "exit code 64; " in agent.lines[-1]
        assert "round 2" not in agent.output
    failure = json.loads(log.read_text())["failure"]
    assert (failure["exit_code"], failure["non_retryable"]) == (64, True)


FINAL = """
from torchelastic import NonRetryableException

class NoSuchDataSet(NonRetryableException):
    def __init__(self, name):
        self.name = name

    def __str__(self):
        return f"there is no data set {self.name}"
"""

RAISED = f"""{FINAL}
try:
    raise NoSuchDataSet("ignored")
except NoSuchDataSet:
    pass
raise NoSuchDataSet("mnist")
"""

RECORDED = f"""{FINAL}
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise NoSuchDataSet("mnist")

main()
"""


@pytest.mark.parametrize("source", [RAISED, RECORDED], ids=["raised", "recorded"])
@pytest.mark.parametrize("method", ["fork-server", "exec"])
async def test_a_non_retryable_exception_ends_the_run(tmp_path: Path, source: str, method: str) -> None:
    program = tmp_path / "final.py"
    program.write_text(source)
    log = tmp_path / "last-words"
    async with AgentProcess("--standalone", f"--start-method={method}", f"--termination-log={log}", program) as agent:
        assert await agent.code() == 1
    assert "NoSuchDataSet: there is no data set mnist" in agent.lines[-1]
    assert "round 2" not in agent.output
    assert json.loads(log.read_text())["failure"]["non_retryable"] is True


async def test_a_caught_non_retryable_exception_does_not_count(tmp_path: Path) -> None:
    program = tmp_path / "caught.py"
    program.write_text(
        f"{FINAL}\ntry:\n    raise NoSuchDataSet('a')\nexcept NoSuchDataSet:\n    raise OSError('b') from None\n"
    )
    async with AgentProcess("--standalone", "--max-restarts=1", "--start-method=exec", program) as agent:
        assert await agent.code() == 1
    assert "OSError: b" in agent.lines[-1]
    assert "round 2" in agent.output


STANDS = """
import json, multiprocessing, os, sys, time
from pathlib import Path
import torchelastic as worker

def ask(whose):
    print(f"{whose}: {worker.round_stands(timeout=1)}", flush=True)

if __name__ == "__main__":
    ask("worker")
    child = multiprocessing.get_context("spawn").Process(target=ask, args=("child",))
    child.start()
    child.join()
    names = ("TORCHELASTIC_WORKER_CHANNEL", "TORCHELASTIC_ROUND", "LOCAL_RANK")
    print(json.dumps({name: os.environ[name] for name in names}), os.getpid(), flush=True)
    while not (Path(sys.argv[1]) / "ask").exists():
        time.sleep(0.01)
    ask("worker of an agent that does not answer")
    (Path(sys.argv[1]) / "asked").touch()
    time.sleep(600)
"""

ASK = "import torchelastic as worker; print(worker.round_stands())"


async def _asked_with(environment: str) -> str:
    """The answer to a process that has a worker's environment but was started by another process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ASK), env={**os.environ, **json.loads(environment)}, stdout=asyncio.subprocess.PIPE
    )
    return (await process.communicate())[0].decode().strip()


async def test_a_round_is_current_for_its_workers_until_it_ends(tmp_path: Path) -> None:
    program = tmp_path / "stands.py"
    program.write_text(STANDS)
    async with AgentProcess("--standalone", program, tmp_path, env={"TMPDIR": str(tmp_path)}) as agent:
        await agent.said("worker: True")
        await agent.said("child: True")
        first = await agent.said(r"(\{.*\}) (\d+)")
        os.kill(int(first[2]), signal.SIGKILL)
        await agent.said("round 2: ")
        seen = len(agent.lines)
        second = await agent.said(r"(\{.*\}) (\d+)", since=seen)
        assert json.loads(second[1])["TORCHELASTIC_ROUND"] == "2"
        assert await _asked_with(first[1]) == "False"
        assert await _asked_with(second[1]) == "True"  # it has the environment of a worker of this round
        agent.kill(signal.SIGSTOP)
        (tmp_path / "ask").touch()
        await told(tmp_path / "asked")
        agent.kill(signal.SIGCONT)
        await agent.said("worker of an agent that does not answer: False")
    assert await _asked_with(second[1]) == "False"


@pytest.mark.parametrize(("seconds", "cleaned"), [("60", True), ("0", False)])
async def test_workers_of_a_failed_round_have_the_stop_timeout(tmp_path: Path, seconds: str, cleaned: bool) -> None:
    program = tmp_path / "stopping.py"
    program.write_text(
        """
import os, signal, sys, time
from pathlib import Path
here, rank = Path(sys.argv[1]), os.environ["RANK"]
if os.environ["TORCHELASTIC_ROUND"] == "2":
    sys.exit(0)
if rank == "1":
    while not (here / "up").exists():
        time.sleep(0.01)
    sys.exit(5)

def clean(*_):
    (here / "cleaned").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, clean)
(here / "up").touch()
time.sleep(600)
"""
    )
    async with AgentProcess(
        "--standalone", "--nproc-per-node=2", f"--stop-timeout={seconds}", program, tmp_path
    ) as agent:
        assert await agent.code() == 0
    assert "exit code 5" in agent.output
    assert (tmp_path / "cleaned").exists() is cleaned


async def test_a_long_temporary_directory_path_works(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100) / ("y" * 100)
    deep.mkdir(parents=True)
    program = tmp_path / "asking.py"
    program.write_text(
        "import torchelastic as worker\nworker.ask_for_notice(5)\nprint('stands:', worker.round_stands())\n"
    )
    async with AgentProcess("--standalone", program, env={"TMPDIR": str(deep)}) as agent:
        assert await agent.code() == 0
    assert "stands: True" in agent.output
    assert [*deep.iterdir()] == []


NETWORK = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
print("gloo", os.environ.get("GLOO_SOCKET_IFNAME", "chooses"), "nccl", os.environ.get("NCCL_SOCKET_IFNAME", "chooses"))
"""


async def test_gloo_and_nccl_use_the_interface_of_the_chosen_address(tmp_path: Path) -> None:
    program = tmp_path / "network.py"
    program.write_text(NETWORK)
    address = own_address(["no-such-host.invalid:1"])
    interface = interface_of(address) or "chooses"
    nodes = ["--standalone", "--nproc-per-node=2"]
    async with AgentProcess(*nodes, f"--local-addr={address}", program, env={"NCCL_SOCKET_IFNAME": "ib7"}) as agent:
        assert await agent.code() == 0
    assert f"gloo {interface} nccl ib7" in agent.output
    async with AgentProcess(*nodes, program, env={"TORCHELASTIC_NODE_ADDRESS": address}) as agent:
        assert await agent.code() == 0
    assert "gloo chooses nccl chooses" in agent.output
