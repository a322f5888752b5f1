"""The examples, run as documented."""

from __future__ import annotations

import contextlib
import importlib.util
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


@pytest.fixture(scope="module")
def digits() -> Any:
    """The example digits.py as a module."""
    spec = importlib.util.spec_from_file_location("digits_example", EXAMPLES / "digits.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    program = (EXAMPLES / "digits.py", "--epochs=1", "--checkpoint-every=0")
    undisturbed, first, second = tmp_path / "undisturbed", tmp_path / "first", tmp_path / "second"
    with started(sys.executable, *program, TORCHELASTIC_CHECKPOINT_DIR=undisturbed, OMP_NUM_THREADS=1) as process:
        output = output_of(process)
    assert "started with 1 workers" in output
    assert re.search(r"epoch 1/1  step \d+/23  loss \d\.\d{3}  \d+\.\dk samples/s", output)
    assert re.search(r"test accuracy 0\.\d{3}", output)

    with agent("--nproc-per-node=2", *program, TORCHELASTIC_CHECKPOINT_DIR=first) as process:
        assert process.stdout
        assert any("samples/s" in line and (first / "checkpoint.pt").exists() for line in process.stdout)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=LIMIT)  # wait until the workers have exited, too
    reached = torch.load(first / "checkpoint.pt", weights_only=True)["step"]
    assert 0 < reached < 23

    # Two nodes with 3 workers; one node has no checkpoint.
    meet = ("--nnodes=2", "--rdzv-endpoint", etcd.endpoint, "--rdzv-id", tmp_path, "--local-addr=127.0.0.1")
    with (
        agent(*meet, "--nproc-per-node=1", *program, TORCHELASTIC_CHECKPOINT_DIR=second) as one,
        agent(*meet, "--nproc-per-node=2", *program, TORCHELASTIC_CHECKPOINT_DIR=first) as two,
    ):
        said = output_of(one) + output_of(two)
    assert f"resumed at step {reached} with 3 workers" in said

    wanted, *found = (
        torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (undisturbed, first, second)
    )
    for checkpoint in found:
        assert checkpoint["step"] == wanted["step"] == 23
        torch.testing.assert_close(checkpoint["model"], wanted["model"], rtol=0.02, atol=0.02)


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
    losses = re.findall(r"training ends at step 192 with the loss (\S+)", output)
    assert len(losses) == 3
    assert max(map(float, losses)) < 0.2


def test_the_newest_checkpoint_on_a_shared_volume_is_found_in_another_pods_folder(digits: Any, tmp_path: Path) -> None:
    for folder, step in (("digits/0", 7), ("digits/2", 9), ("another/0", 20), ("digits/notes", 30)):
        (tmp_path / folder).mkdir(parents=True)
        torch.save({"step": step}, tmp_path / folder / "checkpoint.pt")

    assert digits.newest(tmp_path / "digits" / "0")["step"] == 9
    assert digits.newest(tmp_path / "digits" / "1")["step"] == 9
    # This is not the folder of a pod, so no other folder is searched.
    assert digits.newest(tmp_path / "digits" / "notes")["step"] == 30
    assert digits.newest(tmp_path / "nothing") is None


@pytest.mark.parametrize("batch", [4, 10, 23])
def test_the_sampler_loses_and_repeats_nothing_when_the_world_size_changes(digits: Any, batch: int) -> None:
    samples, rounds = 10, 6
    dealt: list[int] = []
    changes = [(0, 1), (1, 3), (4, 2), (5, 5), (9, 1)]  # (first step, number of ranks)
    last = rounds * samples // batch
    for (step, world_size), (until, _) in zip(changes, [*changes[1:], (last, 0)], strict=True):
        steps = range(min(step, last), min(until, last))
        ranks = [list(digits.ElasticSampler(samples, batch, steps, rank, world_size)) for rank in range(world_size)]
        for shares in zip(*ranks, strict=True):
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            together = [shares[at % world_size][at // world_size] for at in range(sum(map(len, shares)))]
            assert len(together) == batch
            dealt += together

    whole = len(dealt) // samples
    assert whole >= 2
    passes = [dealt[at * samples : (at + 1) * samples] for at in range(whole)]
    assert all(sorted(each) == list(range(samples)) for each in passes)
    assert passes[0] != passes[1]
