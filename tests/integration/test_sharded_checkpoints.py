"""Checkpoints of a model that real ranks share, as with FSDP2."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest
import torch

import torchelastic
from tests.support.agents import AgentProcess
from tests.support.isolation import mounts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.integration

PROGRAM = """
import os
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
import torchelastic

def trained(steps):
    "Return a model and its optimizer after some steps, which need no data, so that the result is known."
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        advance(model, optimizer, step)
    return model, optimizer

def advance(model, optimizer, step):
    for number, parameter in enumerate(model.parameters()):
        gradient = torch.full(parameter.shape, float(step + number))
        if isinstance(parameter, DTensor):
            gradient = DTensor.from_local(
                torch.full_like(parameter.to_local(), float(step + number)), parameter.device_mesh,
                parameter.placements, shape=parameter.shape, stride=parameter.stride(),
            )
        parameter.grad = gradient
    optimizer.step()

def full(value):
    if isinstance(value, dict):
        return {key: full(each) for key, each in value.items()}
    return value.full_tensor() if isinstance(value, DTensor) else value

def report(step):
    wanted_model, wanted_optimizer = trained(step)
    torch.testing.assert_close(full(dict(model.state_dict())), dict(wanted_model.state_dict()), rtol=0, atol=0)
    found, wanted = optimizer.state_dict()["state"], wanted_optimizer.state_dict()["state"]
    torch.testing.assert_close(full(found), wanted, rtol=0, atol=0)
    assert all(isinstance(each["exp_avg"], DTensor) for each in found.values())

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks, until = dist.get_rank(), dist.get_world_size(), int(sys.argv[2])
model, _ = trained(0)
fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
folder = f"{sys.argv[1]}/{rank}" if "apart" in sys.argv else sys.argv[1]
if "unwritable" in sys.argv:  # the folder of rank 0; each rank stands for a node
    os.environ["LOCAL_RANK"] = "0"
    os.makedirs(sys.argv[1], exist_ok=True)
    if rank == 0:
        open(folder, "x").close()
state = torchelastic.TorchState(
    model=model,
    optimizer=optimizer,
    checkpointer=torchelastic.Checkpointer(folder, memory_every=1 if "memory" in sys.argv else None),
)

@torchelastic.elastic
def train(state):
    print(f"rank {rank} begins at step {state.commits}", flush=True)
    report(state.commits)
    while state.commits < until:
        advance(model, optimizer, state.commits)
        state.commit()
    report(until)

train(state)
if "again" in sys.argv:
    try:
        train(state)
    except TypeError as error:
        print(error, flush=True)
dist.destroy_process_group()
"""


async def run(folder: Path, ranks: int, until: int, *arguments: str, code: int = 0, within: Sequence[str] = ()) -> str:
    """Train with a number of ranks until a step, and return the output."""
    (program := folder / "train.py").write_text(PROGRAM)
    flags = ("--standalone", f"--nproc-per-node={ranks}", "--local-addr=127.0.0.1", "--max-restarts=0")
    async with AgentProcess(*flags, program, folder / "checkpoints", f"{until}", *arguments, within=within) as agent:
        assert await agent.code() == code, agent.output
        return agent.output


def beginnings(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d begins at step \d+", output))


async def test_ranks_of_another_number_continue_with_the_same_state(tmp_path: Path) -> None:
    assert beginnings(await run(tmp_path, 2, 4)) == [f"rank {rank} begins at step 0" for rank in range(2)]
    names = {re.sub(r"\d{6}-00", "", path.name) for path in (tmp_path / "checkpoints").glob("*-000000004-*")}
    assert {name.partition(".")[2] for name in names} == {"pt", "json"}
    assert len(names) == 4
    output = await run(tmp_path, 3, 6, "again")
    assert beginnings(output) == [f"rank {rank} begins at step 4" for rank in range(3)]
    assert "The state is sharded, so it cannot move to another world" in output
    assert beginnings(await run(tmp_path, 1, 7)) == ["rank 0 begins at step 6"]


async def test_a_damaged_part_leads_to_the_checkpoint_before(tmp_path: Path) -> None:
    await run(tmp_path, 2, 3)
    for damage, ranks in (("torn", 3), ("missing", 1), ("without a manifest", 2)):
        (folder := tmp_path / damage).mkdir()
        shutil.copytree(tmp_path / "checkpoints", folder / "checkpoints")
        before, newest = sorted((folder / "checkpoints").glob("*-0001-of-0002.pt"))
        if damage == "torn":
            newest.write_bytes(newest.read_bytes()[:-1])
        else:
            (newest if damage == "missing" else newest.with_suffix(".json")).unlink()
        output = await run(folder, ranks, 4)
        step = int(before.name.split("-")[2])  # not always 2: training does not wait for the disk
        assert beginnings(output) == [f"rank {rank} begins at step {step}" for rank in range(ranks)]
        assert output.count("cannot be loaded") == (damage != "without a manifest")


async def test_ranks_continue_from_a_read_only_folder(tmp_path: Path) -> None:
    await run(tmp_path, 2, 3)
    newest = max(path.name.split("-")[2] for path in (tmp_path / "checkpoints").glob("checkpoint-*.json"))
    read_only = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    output = await run(tmp_path, 2, 6, within=(*mounts(), "sh", "-c", read_only, f"{tmp_path}/checkpoints"))
    assert beginnings(output) == [f"rank {rank} begins at step {int(newest)}" for rank in range(2)]
    assert output.count("No checkpoint can be written to") == 1
    assert output.count("was not written to") == 4, "each rank says once that it cannot, and again at its forced save"


LAYOUTS = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
import torchelastic

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (2, 2) if ranks == 4 else (ranks,))
layouts = {"rows": [Shard(0)], "columns": [Shard(1)], "whole": [Replicate()], "part": [Shard(0)]}
if ranks == 4:
    layouts = {
        "rows": [Replicate(), Shard(0)], "columns": [Shard(0), Shard(1)], "whole": [Replicate(), Replicate()],
        "part": [Shard(0), Shard(0)],
    }

def state_of(value):
    state = {name: distribute_tensor(value, mesh, layout) for name, layout in layouts.items()}
    small = distribute_tensor(torch.ones(1) * value[0, 1], mesh, layouts["rows"])  # most ranks have no part of it
    return {**state, "again": state["rows"], "small": small, "plain": value[0]}

value = torch.arange(77.0).view(7, 11)
with torchelastic.Checkpointer(sys.argv[1], every=100) as checkpointer:
    if checkpointer.load(state_of(torch.zeros(7, 11))) is None:
        assert not checkpointer.save(1, state_of(value))
        assert checkpointer.save(2, state_of(value), force=rank == 1)  # of one rank only, as after a notice
        assert not checkpointer.save(2, state_of(value), force=True)
dist.barrier()  # until all parts are written
state = torchelastic.Checkpointer(sys.argv[1]).load(zeros := state_of(torch.zeros(7, 11)))
for name in (*layouts, "again"):
    assert torch.equal(state[name].full_tensor(), value), name
    assert torch.equal(zeros[name].full_tensor(), value), name  # overwritten
assert state["small"].full_tensor().tolist() == [1]
assert torch.equal(state["plain"], value[0])
print(f"rank {rank} of {ranks} is done", flush=True)
dist.destroy_process_group()
"""


async def test_each_layout_can_be_loaded_into_another_one(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(LAYOUTS)
    for ranks in (4, 3):
        flags = ("--standalone", f"--nproc-per-node={ranks}", "--local-addr=127.0.0.1", "--max-restarts=0")
        async with AgentProcess(*flags, program, tmp_path / "checkpoints") as agent:
            assert await agent.code() == 0, agent.output
        assert agent.output.count(f"of {ranks} is done") == ranks
    whole = torchelastic.Checkpointer(tmp_path / "checkpoints").load()
    assert whole is not None
    assert torch.equal(whole["columns"], torch.arange(77.0).view(7, 11))


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (("apart",), "a sharded state needs a shared folder"),
        (("apart", "unwritable"), "a sharded state needs a shared folder"),
        (("memory",), "The state is sharded, and memory_every is for states that all ranks have alike."),
    ],
)
async def test_a_sharded_state_that_could_not_be_loaded_is_refused(
    arguments: tuple[str, ...], refusal: str, tmp_path: Path
) -> None:
    assert refusal in await run(tmp_path, 2, 3, *arguments, code=1)
