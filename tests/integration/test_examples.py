"""The examples, run as documented."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml

from tests.support.agents import AgentProcess
from tests.support.workers import poll_until
from torchelastic.agent.workers.process_tree import read_table, with_descendants

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT = 300.0
"""Seconds after which a run counts as hanging, even on a busy machine."""


@contextlib.contextmanager
def started(*command: object, **environment: object) -> Iterator[subprocess.Popen[str]]:
    """Start a program whose output can be read; kill it at the end of the block if it still runs."""
    with subprocess.Popen(
        [str(part) for part in command],
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def output_of(process: subprocess.Popen[str]) -> str:
    """Return the complete output of a program that succeeds."""
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    return output


def agent(*arguments: object, **environment: object) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Start an agent as users do."""
    return started(Path(sys.executable).with_name("torchelastic-run"), *arguments, **environment)


def printed_environment(output: str, pid: str) -> Mapping[str, str]:
    """Return the environment of the worker with this pid, as hello.py prints it."""
    return dict(re.findall(rf"On PID {pid}, (\w+)=(.*)", output))


def newest_checkpoint(folder: Path) -> dict[str, Any]:
    """Return the state of the newest checkpoint in a folder."""
    state: dict[str, Any] = torch.load(max(folder.glob("checkpoint-*.pt")), weights_only=True)
    return state


def workers_of(agent: int, program: str) -> list[int]:
    """Return the process ids of an agent's workers that run this example."""
    found = []
    for pid in {*with_descendants(read_table(), [agent])} - {agent}:
        with contextlib.suppress(OSError):  # it has just exited
            if bytes(EXAMPLES / program) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:3]:
                found.append(pid)
    return sorted(found)


def test_composed_agents_meet_through_etcd_and_their_workers_connect(etcd: EtcdServer) -> None:
    services = yaml.safe_load((EXAMPLES / "multi_container" / "docker-compose.yml").read_text())["services"]
    command = services["agent"]["command"]
    assert command == "--nnode=1 --nproc_per_node=2 --rdzv_endpoint=etcd-server /workspace/your_app.py"
    assert "etcd-server" in services
    (mount,) = services["agent"]["volumes"]
    program, mounted_as, _ = mount.split(":")
    assert mounted_as == "/workspace/your_app.py"

    # The commands are unchanged, except for two host names that exist only in the containers' network.
    here = {"etcd-server": etcd.endpoint, mounted_as: str((EXAMPLES / "multi_container" / program).resolve())}
    line = command
    for there, real in here.items():
        line = line.replace(there, real)
    with agent(*shlex.split(line)) as process:
        output = output_of(process)

    places = re.findall(r"On PID (\d+), after init process group, rank=(\d+), world_size = (\d+)", output)
    assert sorted((rank, world_size) for _, rank, world_size in places) == [("0", "2"), ("1", "2")]
    for pid, rank, _ in places:
        given = printed_environment(output, pid)
        assert given["RANK"] == given["LOCAL_RANK"] == rank
        assert given["TORCHELASTIC_MAX_RESTARTS"] == "0"


def test_the_readme_commands_of_the_hello_example_work() -> None:
    readme = (EXAMPLES / "hello" / "README.md").read_text()
    lines = re.findall(r"^    torchelastic-run (.*)$", readme, flags=re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        with agent("--check", *shlex.split(line)) as process:
            output_of(process)


def test_digits_resumed_on_other_nodes_gives_the_same_network(etcd: EtcdServer, tmp_path: Path) -> None:
    program = (EXAMPLES / "digits.py", "--epochs=1", "--checkpoint-every=0.001")
    undisturbed, first, second = tmp_path / "undisturbed", tmp_path / "first", tmp_path / "second"
    with started(sys.executable, *program, TORCHELASTIC_CHECKPOINT_DIR=undisturbed, OMP_NUM_THREADS=1) as process:
        output = output_of(process)
    assert "started with 1 workers" in output
    assert re.search(r"epoch 1/1  step \d+/23  loss \d\.\d{3}  \d+\.\dk samples/s", output)
    assert re.search(r"test accuracy 0\.\d{3}", output)

    with agent("--nproc-per-node=2", *program, TORCHELASTIC_CHECKPOINT_DIR=first) as process:
        assert process.stdout
        assert any("samples/s" in line and [*first.glob("checkpoint-*.json")] for line in process.stdout)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=LIMIT)  # wait until the workers have exited, too
    reached = newest_checkpoint(first)["commits"]
    assert 0 < reached < 23

    # Two nodes with 3 workers; one node has no checkpoint.
    meet = ("--nnodes=2", "--rdzv-endpoint", etcd.endpoint, "--rdzv-id", tmp_path, "--local-addr=127.0.0.1")
    with (
        agent(*meet, "--nproc-per-node=1", *program, TORCHELASTIC_CHECKPOINT_DIR=second) as one,
        agent(*meet, "--nproc-per-node=2", *program, TORCHELASTIC_CHECKPOINT_DIR=first) as two,
    ):
        said = output_of(one) + output_of(two)
    assert f"resumed at step {reached} with 3 workers" in said

    wanted, *found = map(newest_checkpoint, (undisturbed, first, second))
    for checkpoint in found:
        assert checkpoint["commits"] == wanted["commits"] == 23
        torch.testing.assert_close(checkpoint["values"]["model"], wanted["values"]["model"], rtol=0.02, atol=0.02)


def test_a_sharded_model_continues_with_another_number_of_ranks(tmp_path: Path) -> None:
    program = (EXAMPLES / "fsdp2.py", tmp_path / "checkpoints")
    flags = ("--standalone", "--local-addr=127.0.0.1")
    with agent(*flags, "--nproc-per-node=2", *program, "--epochs=2", OMP_NUM_THREADS=1) as process:
        output = output_of(process)
    assert "training begins at step 0 with 2 ranks" in output
    assert "training ends at step 32 with" in output
    with agent(*flags, "--nproc-per-node=3", *program, "--epochs=12", OMP_NUM_THREADS=1) as process:
        output = output_of(process)
    assert "training begins at step 32 with 3 ranks" in output
    losses = re.findall(r"training ends at step 192 with the loss (\d\.\d+)", output)
    assert len(losses) == 3
    assert max(map(float, losses)) < 0.2


def test_the_other_worker_of_digits_trains_on_when_one_is_killed(tmp_path: Path) -> None:
    command = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", EXAMPLES / "digits.py", "--epochs=2")
    with agent(*command, "--checkpoint-dir", tmp_path) as process:
        assert process.stdout
        assert any("samples/s" in line for line in process.stdout)
        os.kill(workers_of(process.pid, "digits.py")[1], signal.SIGKILL)
        said = output_of(process)
    assert re.search(r"resumed at step \d+ with [12] workers", said)
    assert "started with" not in said
    assert re.search(r"step 46/46 .*\n.*test accuracy 0\.\d{3}", said)


@pytest.mark.parametrize("name", ["digits_restart.py", "accelerate_elastic.py", "fabric_elastic.py"])
async def test_the_workers_of_an_example_in_restart_style_continue_from_a_checkpoint(tmp_path: Path, name: str) -> None:
    command = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", EXAMPLES / name)
    environment = {"TORCHELASTIC_CHECKPOINT_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    async with AgentProcess(*command, env=environment) as process:
        await process.wait_for_line("training begins at step 0 with 2 workers")
        worker = workers_of(process.pid, name)[0]
        await poll_until(lambda: [*tmp_path.glob("checkpoint-*.json")])
        os.kill(worker, signal.SIGKILL)
        assert await process.code() == 0, process.output
    assert re.search(r"training begins at step [1-9]\d* with 2 workers", process.output), process.output
    assert re.search(r"accuracy 0\.9\d\d", process.output), process.output
