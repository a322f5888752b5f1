"""NetworkPolicies that are enforced on a real kubelet: which pods can connect to a job's pods and to the operator."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from testbed import network_policies
from tests.support.cluster_user import ROOT, SIGHT, User, job

if TYPE_CHECKING:
    from testbed.node import Node

pytestmark = [pytest.mark.node, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

SYSTEM = "elastic-system"
LISTENS = """
for name in ("/proc/net/tcp", "/proc/net/tcp6"):
    for line in list(open(name))[1:]:
        address, state = line.split()[1], line.split()[3]
        if state == "0A" and not address.startswith("0100007F"):
            print(int(address.rpartition(":")[2], 16))
"""
"""A program that prints the ports on which the processes of its pod listen to others."""

CONNECTS = """
import socket, sys
for place in sys.argv[1:]:
    host, port = place.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
        print(place)
    except OSError:
        pass
"""
"""A program that prints to which places it can connect."""


async def python(namespace: User, pod: str, program: str, *words: str) -> list[str]:
    """Run a program in the first container of a pod, and return the words that it prints."""
    return str((await namespace.kubectl("exec", pod, "--", "python3", "-c", program, *words)).stdout).split()


def address(pod: dict[str, Any]) -> str:
    return str(pod["status"]["podIP"])


async def test_only_the_jobs_pods_the_operator_and_prometheus_can_connect(user: User, installed: Node) -> None:
    system = User(installed, SYSTEM)
    async with installed.namespace() as elsewhere:
        await installed.run(
            "helm", "upgrade", "elastic-operator", str(ROOT / "charts"), "--namespace", SYSTEM, "--wait",
            "--set", f"networkPolicies.metricsNamespaces={{{elsewhere}}}", timeout=180,
        )  # fmt: skip
        await user.apply(job("closed", replicas=2))
        await user.apply(job("other", replicas=1))
        await user.wait("elasticjob/closed", "jsonpath={.status.readyDesired}=2/2")
        await user.wait("elasticjob/closed", "jsonpath={.status.worldSize}=2")
        await user.wait("elasticjob/other", "condition=Running")
        first, second = (workers := await user.pods("closed"))
        (stranger,) = await user.pods("other")
        # A pod in the namespace of Prometheus has the labels of a worker, which must not help it.
        labels = ",".join(f"{name}={value}" for name, value in workers[first]["metadata"]["labels"].items())
        monitoring = User(installed, elsewhere)
        sleeps = ("--command", "--", "python3", "-c", "import time; time.sleep(100_000)")
        await monitoring.kubectl("run", "prometheus", "--image=elastic-operator:dev", f"--labels={labels}", *sleeps)
        await monitoring.wait("pod/prometheus", "condition=Ready")

        (etcd,) = (await user.get("pods", "-l=elastic.pytorch.org/job=closed,elastic.pytorch.org/role=etcd"))["items"]
        (operator,) = (
            each for each in (await system.get("pods"))["items"] if "deletionTimestamp" not in each["metadata"]
        )
        of_worker = {f"{address(workers[second])}:{port}" for port in await python(user, second, LISTENS)}
        metrics_of_worker = f"{address(workers[second])}:9464"
        store, metrics_of_store = f"{address(etcd)}:2379", f"{address(etcd)}:2381"
        metrics_of_operator = f"{address(operator)}:8080"
        all_places = of_worker | {store, metrics_of_store, metrics_of_operator}
        assert metrics_of_worker in of_worker
        assert len(of_worker) > 1, "the agents listen to each other"

        async def reached(namespace: User, pod: str) -> set[str]:
            return set(await python(namespace, pod, CONNECTS, *all_places))

        assert await reached(user, stranger) == all_places, "nothing enforces the policies yet"
        async with network_policies.enforced(installed):
            async with asyncio.timeout(SIGHT):
                while await reached(user, stranger) == all_places:
                    pass
            assert await reached(user, stranger) == set()
            metrics = {metrics_of_worker, metrics_of_store, metrics_of_operator}
            assert await reached(monitoring, "prometheus") == metrics
            assert await reached(system, operator["metadata"]["name"]) >= {store}
            assert await reached(user, first) == of_worker | {store, metrics_of_store}

            # A pod that is created now joins the others, and its probes succeed.
            await user.kubectl("scale", "elasticjob/closed", "--replicas=3")
            await user.wait("elasticjob/closed", "jsonpath={.status.readyDesired}=3/3")
            await user.wait("elasticjob/closed", "jsonpath={.status.worldSize}=3")
            await user.finish("closed")
            await user.wait("elasticjob/closed", "condition=Succeeded")
        assert metrics_of_operator in await reached(user, stranger), "nothing enforces the policies any more"
