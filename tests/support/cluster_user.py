"""A person at a cluster: types kubectl, helm and elasticjob, waits for what they promise, and reads what they print."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.testbed.node import Node

ROOT = Path(__file__).resolve().parents[2]
ELASTICJOB = Path(sys.executable).with_name("elasticjob")
PATIENCE = "180s"
"""How long a person waits for anything; nothing here should take a tenth of it, but machines may be busy."""

SIGHT = 180.0
"""The same in seconds."""

ROUNDS = """\
import os, pathlib, signal, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
finish = pathlib.Path("/tmp/finish")
number = 0
while True:
    votes = torch.tensor([float(finish.exists()), 1.0])
    dist.all_reduce(votes)
    number += 1
    if number == 1 or number % 50 == 0:
        print(f"round {number} of {int(votes[1])} workers", flush=True)
    if votes[0]:
        print("finished by request", flush=True)
        break
    time.sleep(0.02)
"""
"""Trains nothing, but as all training does: all workers go through each round together. It ends when it is asked to."""


def job(name: str, **spec: Any) -> dict[str, Any]:
    """A job of one or more pods in which every worker goes through rounds until ``/tmp/finish`` is there in one pod."""
    return {
        "apiVersion": "elastic.pytorch.org/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": {
            "maxReplicas": 3,
            "image": "elastic-agent:dev",
            "command": ["python3", "-c", ROUNDS],
            "template": {"spec": {"securityContext": {"runAsNonRoot": True}}},
            **spec,
        },
    }


class User:
    """Works in one namespace of a node's cluster."""

    def __init__(self, node: Node, namespace: str) -> None:
        self.node = node
        self.namespace = namespace

    async def kubectl(self, *words: str, check: bool = True, stdin: str | None = None, limit: float = 240) -> Any:
        """Type kubectl in this namespace; gives back its result."""
        return await self.node.run("kubectl", "-n", self.namespace, *words, check=check, stdin=stdin, timeout=limit)

    async def elasticjob(self, *words: str, check: bool = True) -> Any:
        """Type elasticjob for this namespace."""
        return await self.node.run(str(ELASTICJOB), *words, "-n", self.namespace, check=check, timeout=240)

    async def first_words(self, name: str, *words: str) -> str:
        """The first line that ``elasticjob logs -f`` shows, as soon as there is one."""
        argv = (str(ELASTICJOB), "logs", name, "-f", *words, "-n", self.namespace)
        following = await self.node.popen(*argv)
        assert following.stdout is not None
        try:
            async with asyncio.timeout(180):
                return (await following.stdout.readline()).decode()
        finally:
            following.terminate()
            await following.communicate()

    async def apply(self, manifest: dict[str, Any] | Path) -> None:
        """``kubectl apply`` a file, or an object."""
        if isinstance(manifest, Path):
            await self.kubectl("apply", "-f", str(manifest))
        else:
            await self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest))

    async def wait(self, what: str, condition: str, *, limit: str = PATIENCE) -> None:
        """``kubectl wait`` for a condition, such as ``condition=Running`` or ``jsonpath={.status.worldSize}=3``."""
        await self.kubectl("wait", what, f"--for={condition}", f"--timeout={limit}", limit=float(limit[:-1]) + 30)

    async def sees(self, name: str, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """A job, as soon as its status is as wanted; watched as ``kubectl get -w`` shows it.

        Args:
            name: of the job.
            true: whether a status is as wanted.
        """
        argv = ("kubectl", "-n", self.namespace, "get", "elasticjob", name, "-w", "-o", "json", "--output-watch-events")
        watching = await self.node.popen(*argv)
        assert watching.stdout is not None
        job: dict[str, Any] = {}
        try:
            async with asyncio.timeout(SIGHT):
                async for line in watching.stdout:
                    job = json.loads(line)["object"]
                    if true(job.get("status") or {}):
                        return job
        except TimeoutError:
            pass
        finally:
            watching.terminate()
            await watching.communicate()
        raise AssertionError(f"never so, at last it was {json.dumps(job.get('status'), indent=1)}")

    async def get(self, what: str, *more: str) -> dict[str, Any]:
        """An object, or a list of them."""
        found: dict[str, Any] = json.loads((await self.kubectl("get", what, *more, "-o", "json")).stdout)
        return found

    async def pods(self, name: str) -> dict[str, dict[str, Any]]:
        """The worker pods of a job that neither have ended nor are going, by name."""
        listing = await self.get("pods", "-l", f"elastic.pytorch.org/job={name},elastic.pytorch.org/role=worker")
        return {
            pod["metadata"]["name"]: pod
            for pod in listing["items"]
            if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] in ("Pending", "Running")
        }

    def kill(self, pod: dict[str, Any], what: str) -> None:
        """kill -9 the youngest process of a pod whose command line has these words in it.

        Args:
            pod: the pod.
            what: such as torchelastic-run.
        """
        processes = self.node.processes(pod["metadata"]["uid"])
        os.kill(max(pid for pid, command in processes.items() if what in command), signal.SIGKILL)

    async def prints(self, pod: str, words: str) -> asyncio.Task[str]:
        """Return when a pod's worker has printed a line that ends with these words; gives back a task that reads on.

        Its result is all that the worker prints until it ends.
        """
        argv = ("kubectl", "-n", self.namespace, "logs", pod, "-c", "worker", "-f")
        reading = await self.node.popen(*argv)
        stdout = reading.stdout
        assert stdout is not None
        lines: list[str] = []
        async with asyncio.timeout(SIGHT):
            while not (lines and lines[-1].rstrip().endswith(words)):
                line = await stdout.readline()
                assert line, f"it ended before it printed {words}: {lines}"
                lines.append(line.decode())

        async def rest() -> str:
            async with asyncio.timeout(SIGHT):
                last, _ = await reading.communicate()
            return "".join(lines) + last.decode()

        return asyncio.create_task(rest())

    async def events(self, name: str) -> str:
        """What ``kubectl describe`` tells of a job."""
        return str((await self.kubectl("describe", f"elasticjob/{name}")).stdout)

    async def finish(self, name: str) -> None:
        """Ask the program of a job that :func:`job` made to end."""
        pod = next(iter(await self.pods(name)))
        await self.kubectl("exec", pod, "-c", "worker", "--", "touch", "/tmp/finish")

    async def delete(self, name: str) -> list[str]:
        """``kubectl delete`` a job, and wait until what belongs to it is gone; gives back what is left all the same."""
        await self.kubectl("delete", f"elasticjob/{name}")
        return await self.left_for_good()

    async def left_for_good(self, *staying: str) -> list[str]:
        """What is left in the namespace when Kubernetes has collected its garbage.

        Args:
            staying: what need not be waited for, such as job.example.org/digits.
        """
        for each in await self._objects():
            if each not in staying:
                await self.kubectl("wait", each, "--for=delete", f"--timeout={PATIENCE}", check=False)
        return await self._objects()

    async def _objects(self) -> list[str]:
        """All objects in the namespace but what Kubernetes itself puts into each, and events."""
        kinds = (await self.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name")).stdout.split()
        wanted = [kind for kind in kinds if not kind.startswith(("events", "pods.metrics"))]
        names = (await self.kubectl("get", ",".join(wanted), "-o", "name", "--ignore-not-found")).stdout.split()
        return [name for name in names if name not in ("configmap/kube-root-ca.crt", "serviceaccount/default")]
