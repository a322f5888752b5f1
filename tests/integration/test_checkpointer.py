"""Checkpoints of real ranks, and of a writer that is killed while it writes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import TIMEOUT, AgentProcess
from tests.support.isolation import mounts
from tests.support.workers import poll_until
from torchelastic.protocol.pod import Env
from torchelastic.protocol.worker import MEMORY, WORKER_SOCKET

if TYPE_CHECKING:
    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.integration

KILLED = """
import os, signal, sys, threading
import torch
import torchelastic
from torchelastic.training import checkpoint_files

def train(line, pipe):
    "Save two checkpoints; this process dies before it runs this line of the module for the second one."
    with torchelastic.Checkpointer(sys.argv[1]) as checkpointer:
        state = checkpointer.load() or {"step": 0, "weight": torch.zeros(100_000)}
        assert (state["weight"] == state["step"]).all()
        os.write(pipe, b"loaded %d\\n" % state["step"])
        save(checkpointer, state["step"] + 1)
        os.write(pipe, b"written %d\\n" % (state["step"] + 1))
        lines = iter(range(line))

        def trace(frame, event, _):
            if frame.f_code.co_filename != checkpoint_files.__file__:
                return None
            if event == "line" and next(lines, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        threading.settrace(trace)
        save(checkpointer, state["step"] + 2)

def save(checkpointer, step):
    assert checkpointer.save(step, {"step": step, "weight": torch.full((100_000,), float(step))})
    checkpointer.wait()

torch.set_num_threads(1)
written, deaths, line, code = 0, 0, 0, -signal.SIGKILL
while code == -signal.SIGKILL:
    reading, writing = os.pipe()
    child = os.fork()  # torch is already imported
    if child == 0:
        try:
            train(line, writing)
        except BaseException as error:
            print(repr(error))
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with open(reading) as said:
        for (what, step) in map(str.split, said):
            assert what == "written" or written <= int(step) <= written + 1, (step, written, line)
            written = int(step)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    deaths += 1
    line += 1 + line // 40
files = [name for name in os.listdir(sys.argv[1]) if not name.startswith("token-")]
print(f"{deaths} writers, the last one ended with {code}, and left {len(files)} files")
"""


def test_a_writer_that_is_killed_anywhere_loses_no_checkpoint(tmp_path: Path) -> None:
    program, env = tmp_path / "train.py", {**os.environ, "OMP_NUM_THREADS": "1"}
    program.write_text(KILLED)
    command = [sys.executable, program, tmp_path / "checkpoints"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    found = re.fullmatch(r"(\d+) writers, the last one ended with 0, and left 4 files\n", ended.stdout)
    assert found, ended
    assert int(found[1]) > 50


DISK = """
import logging, os, subprocess, sys
from pathlib import Path
import torch
import torchelastic
from torchelastic.protocol.worker import MEMORY

disk, how = Path(sys.argv[1]), sys.argv[2]
logging.basicConfig(format="%(message)s", stream=sys.stdout)

def load():
    checkpointer = torchelastic.Checkpointer(memory_every=1)  # in memory if there is an agent
    print("loaded", (checkpointer.load() or {"step": 0})["step"])
    return checkpointer

def save(checkpointer, step):
    before = {path.name for path in disk.rglob("*checkpoint-*")}  # with remains of a write
    assert checkpointer.save(step, {"step": step, "weight": torch.full((10_000,), float(step))})
    checkpointer.wait()
    written = {path.name for path in disk.rglob("*checkpoint-*")} - before
    assert len(written) in (0, 2)
    print("wrote" if written else "lost", step)

def mount(option):
    subprocess.run(["mount", "-o", f"remount,{option}", disk], check=True)

def begin_fault():
    if how == "read-only":
        mount("ro")
    else:
        state, page = next(disk.rglob("*.pt")).stat().st_size, os.sysconf("SC_PAGE_SIZE")
        left = {"no space": 0, "for a part": 1, "for all but the manifest": -(-state // page)}[how]
        (disk / "other").write_bytes(bytes((os.statvfs(disk).f_bavail - left) * page))

def end_fault():
    mount("rw") if how == "read-only" else (disk / "other").unlink()

(disk / MEMORY).mkdir()
checkpointer = load()
save(checkpointer, 1)
begin_fault()
save(checkpointer, 2)
save(checkpointer, 3)
checkpointer = load()
save(checkpointer, 4)
end_fault()
save(checkpointer, 5)
load()
"""


@pytest.mark.parametrize(
    ("place", "how"),
    [
        *(("folder", how) for how in ("no space", "for a part", "for all but the manifest", "read-only")),
        *(("memory", how) for how in ("no space", "for a part", "for all but the manifest")),
    ],
)
def test_training_goes_on_while_a_disk_is_full_or_read_only_and_saves_afterwards(
    tmp_path: Path, place: str, how: str
) -> None:
    variables = {"folder": (Env.CHECKPOINT_DIR, tmp_path), "memory": (WORKER_SOCKET, tmp_path / "socket")}
    name, value = variables[place]
    on_disk = (*mounts(), "sh", "-c", 'mount -t tmpfs -o size=400k none "$0" && exec "$@"', tmp_path)
    command = [*on_disk, sys.executable, "-c", DISK, tmp_path, how]
    env = {**os.environ, "OMP_NUM_THREADS": "1", name: str(value)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert ended.returncode == 0, ended
    folder = tmp_path / MEMORY / "checkpoints" if place == "memory" else tmp_path
    reason = "[Errno 30] Read-only file system" if how == "read-only" else "[Errno 28] No space left on device"
    unwritten = (
        f"The checkpoint of step {{}} was not written to {folder}, and training continues "
        f"(the same warning is not repeated at each checkpoint): {reason}"
    )
    # The token's file is empty in memory, and fits into any disk.
    reserves = how != "read-only" and (place == "memory" or how != "no space")
    unreserved = [] if reserves else [f"No checkpoint can be written to {folder}, and training continues: {reason}"]
    assert re.sub(r": '.*'", "", ended.stdout).splitlines() == [  # without the name of the file
        *("loaded 0", "wrote 1", unwritten.format(2), "lost 2", "lost 3"),
        *(*unreserved, "loaded 1", unwritten.format(4), "lost 4", "wrote 5", "loaded 5"),
    ], ended


RANKS = """
import os, sys
import torch
import torch.distributed as dist
import torchelastic

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
if "per-node" in sys.argv:  # each rank stands for a node with one rank and its own folder
    folder, os.environ["LOCAL_RANK"] = f"{folder}/{rank}", "0"
with torchelastic.Checkpointer(folder) as checkpointer:
    state = checkpointer.load()
    step = int(state["weight"][0]) if state else 0
    print(f"loaded {step} on rank {rank}", flush=True)
    if "sharded" in sys.argv:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        try:
            checkpointer.save(step + 1, {"weight": distribute_tensor(torch.ones(6), mesh, [Shard(0)])})
        except TypeError as error:
            print(error, flush=True)
    wrote = checkpointer.save(step + 1, {"weight": torch.full((1000,), step + 1.0)})
    print(f"wrote {wrote} on rank {rank}", flush=True)
dist.destroy_process_group()
"""


async def run(folder: Path, ranks: int, *arguments: str) -> set[str]:
    """Run a training until it ends, and return what its ranks said."""
    (program := folder / "train.py").write_text(RANKS)
    flags = ("--standalone", f"--nproc-per-node={ranks}", "--local-addr=127.0.0.1")
    async with AgentProcess(*flags, program, folder / "checkpoints", *arguments) as agent:
        assert await agent.code() == 0, agent.output
    return {
        match[1] for line in agent.lines if (match := re.search(r"\] (loaded .*|wrote .*|state.*|The check.*)", line))
    }


async def test_one_rank_writes_into_a_shared_folder_and_ranks_of_another_number_load(tmp_path: Path) -> None:
    said = await run(tmp_path, 2)
    assert said == {"loaded 0 on rank 0", "loaded 0 on rank 1", "wrote True on rank 0", "wrote False on rank 1"}
    said = await run(tmp_path, 3, "sharded")
    assert {line for line in said if line.startswith("loaded")} == {f"loaded 1 on rank {rank}" for rank in range(3)}
    assert "state['weight'] is sharded: pass the state to load(), too, on all ranks." in said


async def test_ranks_with_their_own_folders_continue_at_the_same_step(tmp_path: Path) -> None:
    import torch

    import torchelastic

    for rank, step in ((0, 20), (2, 110), (2, 120)):
        checkpointer = torchelastic.Checkpointer(tmp_path / "checkpoints" / str(rank))
        checkpointer.load()
        checkpointer.save(step, {"weight": torch.full((1000,), float(step))}, force=True)
        checkpointer.close()
    said = await run(tmp_path, 3, "per-node")
    assert said == {f"loaded 120 on rank {rank}" for rank in range(3)} | {
        f"wrote True on rank {rank}" for rank in range(3)
    }

    # Two of the three copies of step 121 are damaged.
    for rank in (0, 2):
        (path,) = (tmp_path / "checkpoints" / str(rank)).glob("*-000000121-*.pt")
        path.write_bytes(b"")
    said = await run(tmp_path, 3, "per-node")
    assert {line for line in said if line.startswith("loaded")} == {f"loaded 121 on rank {rank}" for rank in range(3)}

    # All copies of step 122 are damaged, so all ranks continue from the newest one before.
    for path in (tmp_path / "checkpoints").glob("*/*-000000122-*.pt"):
        path.write_bytes(b"")
    said = await run(tmp_path, 3, "per-node")
    assert {line for line in said if line.startswith("loaded")} == {f"loaded 121 on rank {rank}" for rank in range(3)}


IN_MEMORY = """
import os, sys
import torch
import torch.distributed as dist
import torchelastic

torch.set_num_threads(1)
dist.init_process_group("gloo")
print("copies in", os.path.realpath(os.path.dirname(os.environ["TORCHELASTIC_WORKER_SOCKET"]) + "/memory"))
with torchelastic.Checkpointer(memory_every=1) as checkpointer:
    state = checkpointer.load()
    step = int(state["weight"][0]) if state else 0
    os.write(1, b"loaded %d with %d ranks\\n" % (step, dist.get_world_size()))
    while not os.path.exists(sys.argv[1]):
        weight = torch.ones(1000)
        dist.all_reduce(weight)
        step += 1
        checkpointer.save(step, {"weight": weight / dist.get_world_size() * step})
        checkpointer.wait()
        os.write(1, b"saved %d\\n" % step)
"""


async def test_a_lost_node_costs_only_the_steps_since_the_last_copy_in_the_memory_of_another_one(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    (program := tmp_path / "train.py").write_text(IN_MEMORY)
    run = ("--nnodes=1:2", f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={uuid.uuid4()}", "--local-addr=127.0.0.1")
    arguments = (*run, "--nproc-per-node=2", "--rdzv-conf=last_call_timeout=0,lease=1", program, tmp_path / "end")
    async with AgentProcess(*arguments) as left:
        async with AgentProcess(*arguments) as lost:
            await lost.wait_for_line("loaded .* with 4 ranks")
            reached = int((await lost.wait_for_line(r"saved (\d+)", since=len(lost.lines) + 20))[1])
            mark = len(left.lines)
        alone = await left.wait_for_line(r"loaded (\d+) with 2 ranks", since=mark)
        assert int(alone[1]) >= reached - 1 > 0, "the other node may not have saved the last step yet"
        async with AgentProcess(*arguments) as new:
            joined = await new.wait_for_line(r"loaded (\d+) with 4 ranks")
            assert int(joined[1]) >= int(alone[1])
            folders = {Path((await agent.wait_for_line(r"copies in (/.+)"))[1]) for agent in (left, lost, new)}
            assert len(folders) == 3
            assert any((folder / "checkpoints").is_dir() for folder in folders)
            (tmp_path / "end").touch()
            assert [await agent.code() for agent in (left, new)] == [0, 0]
    await poll_until(lambda: not any(folder.exists() for folder in folders))
