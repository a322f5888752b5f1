"""Scaling on a real kubelet."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.cluster_user import job
from tests.support.operator_namespace import index_of, uids

if TYPE_CHECKING:
    from tests.support.cluster_user import User

pytestmark = [pytest.mark.node, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

SAVES = """
import signal, sys, time

def save(*_):
    print("saving", flush=True)
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(100_000)
"""
"""A program that saves slowly when it is stopped."""


async def test_the_highest_pods_leave_and_save_together_while_the_others_stay(user: User) -> None:
    await user.apply(job("saves", command=["python3", "-c", SAVES], replicas=3))
    await user.wait("elasticjob/saves", "jsonpath={.status.readyDesired}=3/3")
    before = await user.pods("saves")
    staying, *going = sorted(before, key=lambda name: index_of(before[name]))
    logs = [await user.wait_for_output(pod, "ready") for pod in going]
    await user.wait("elasticjob/saves", "jsonpath={.status.worldSize}=3")
    round = (await user.get("elasticjob/saves"))["status"]["round"]

    await user.kubectl("scale", "elasticjob/saves", "--replicas=1")
    for pod in going:
        await user.wait(f"pod/{pod}", "delete")
    for log in await asyncio.gather(*logs):
        assert any(line.endswith("saved") for line in log.splitlines())
    await user.wait("elasticjob/saves", "jsonpath={.status.worldSize}=1")
    after = await user.pods("saves")
    assert uids(after) == uids({staying: before[staying]})

    status = (await user.get("elasticjob/saves"))["status"]
    assert (status["restarts"], status["podFailures"]) == (0, 0)
    assert status["round"] == round + 1, "the pods leave in one round change"
    events = await user.events("saves")
    assert "scaled from 3 to 1 pod" in events
