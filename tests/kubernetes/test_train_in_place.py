"""Training in place on a real kubelet: processes that stay while workers and pods are lost and the job is scaled."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.cluster_user import AGENT, SIGHT, job

if TYPE_CHECKING:
    from tests.support.cluster_user import User

pytestmark = [pytest.mark.node, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

PROGRAM = """\
import os, pathlib, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import torchelastic

torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
state = torchelastic.TorchState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
finish = pathlib.Path("/tmp/finish")
reached = 0
print(f"process {os.getpid()} is ready", flush=True)

@torchelastic.elastic
def train(state):
    global reached
    where = f"process {os.getpid()} in a world of {dist.get_world_size()}"
    print(f"{where}: from step {state.commits}, after step {reached}", flush=True)
    parallel = DistributedDataParallel(state.model)
    while True:
        ends = torch.tensor([float(finish.exists())])
        dist.all_reduce(ends)
        if ends:
            break
        state.optimizer.zero_grad()
        parallel(torch.ones(4, 8)).square().mean().backward()
        state.optimizer.step()
        state.commit()
        reached = state.commits
        time.sleep(0.05)

train(state)
print(f"ended at step {state.commits}", flush=True)
"""
"""A program that trains until one pod has the file ``/tmp/finish``."""


def worlds(log: str) -> list[tuple[int, int, int, int]]:
    """Return process, size, first step and last step before, of each world in the output of a pod's worker."""
    lines = re.findall(r"process (\d+) in a world of (\d+): from step (\d+), after step (\d+)", log)
    return [(int(process), int(size), int(first), int(before)) for process, size, first, before in lines]


async def test_the_processes_of_the_pods_that_are_left_train_on_through_kills_spares_and_scaling(user: User) -> None:
    async def log(pod: str) -> str:
        return str((await user.kubectl("logs", pod, "-c", "worker", check=False)).stdout)

    async def in_worlds_of(size: int, count: int, *pods: str) -> set[str]:
        """Wait until the processes of this number of these pods have been in a world of this size."""
        async with asyncio.timeout(SIGHT):
            while True:
                found = {pod for pod in pods if size in [world[1] for world in worlds(await log(pod))]}
                if len(found) >= count:
                    return found

    async def trains(size: int) -> dict[str, dict[str, Any]]:
        """Wait until a job of this size trains with a spare, and return its pods."""
        wanted = (size, f"{size}/{size}", 1)
        await user.wait_for_status(
            "stays", lambda now: (now.get("worldSize"), now.get("readyDesired"), now.get("readySpares")) == wanted
        )
        return await user.pods("stays")

    await user.apply(job("stays", command=["python3", "-c", PROGRAM], replicas=2, spares=1))
    first = await trains(2)
    staying, victim = sorted(await in_worlds_of(2, 2, *first))
    (spare,) = first.keys() - {staying, victim}

    # A worker is killed: the other one trains on, and the successor joins it in the same pod.
    await user.kill(first[victim], "finish.exists")
    await user.wait("elasticjob/stays", "jsonpath={.status.restarts}=1")
    assert (await trains(2)).keys() == first.keys()

    # The pod is killed: the spare takes its place, and a new pod becomes the spare.
    await user.kill(first[victim], AGENT)
    await user.wait(f"pod/{victim}", "jsonpath={.status.phase}=Failed")
    await user.wait("elasticjob/stays", "jsonpath={.status.podFailures}=1")
    await trains(2)

    await user.kubectl("scale", "elasticjob/stays", "--replicas=3")
    await in_worlds_of(3, 3, *await trains(3))
    await user.kubectl("scale", "elasticjob/stays", "--replicas=2")
    left = await trains(2)
    assert {staying, spare} <= left.keys()

    await user.finish("stays")
    await user.wait("elasticjob/stays", "condition=Succeeded")
    for pod in left:
        found = worlds(await log(pod))
        assert [first for _, _, first, before in found if before > first + 1] == [], "more than one step is repeated"
        assert len({process for process, *_ in found}) <= 1, f"the process of {pod} was replaced:\n{await log(pod)}"
        statuses = (await user.get(f"pod/{pod}"))["status"]["containerStatuses"]
        assert [each["restartCount"] for each in statuses] == [0]
    sizes = [size for _, size, *_ in worlds(await log(staying))]
    assert (sizes[0], 1 in sizes, 3 in sizes) == (2, True, True), sizes
    taken = worlds(await log(spare))[0]
    assert f"process {taken[0]} is ready" in await log(spare)
    assert taken[2] > 0, "the spare begins with the state of the others"
    assert re.search(r"ended at step \d+", await log(staying))
    status = (await user.get("elasticjob/stays"))["status"]
    assert (status["restarts"], status["podFailures"]) == (1, 1)
    assert "StepsDiffer" not in await user.events("stays")
    assert (await user.kubectl("get", "elasticjobs")).stdout.splitlines()[1].split()[:2] == ["stays", "Succeeded"]
