"""A user of a cluster, who runs kubectl and elasticjob, waits for conditions, and reads the output."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.support.operator_namespace import manifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from testbed.node import Node

ROOT = Path(__file__).resolve().parents[2]
ELASTICJOB = Path(sys.executable).with_name("elasticjob")
TIMEOUT = "180s"
"""The limit of each ``kubectl wait``; waits take much less time unless the machine is busy."""

SIGHT = 180.0
"""The limit of each other wait in seconds."""

AGENT = "torchelastic-run"

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
"""A program that does not train: its workers take each step together until a file exists."""


def job(name: str, **spec: Any) -> dict[str, Any]:
    """Return a job of one or more pods in which every worker takes steps until one pod has the file ``/tmp/finish``."""
    whole = manifest(
        name,
        **{
            "command": ["python3", "-c", ROUNDS],
            "template": {"spec": {"securityContext": {"runAsNonRoot": True}}},
            **spec,
        },
    )
    del whole["spec"]["args"]
    return whole


class User:
    """Works in one namespace of a node's cluster."""

    def __init__(self, node: Node, namespace: str) -> None:
        self.node = node
        self.namespace = namespace

    async def kubectl(self, *words: str, check: bool = True, stdin: str | None = None, limit: float = 240) -> Any:
        """Run kubectl in this namespace, and return its result."""
        return await self.node.run("kubectl", "-n", self.namespace, *words, check=check, stdin=stdin, timeout=limit)

    async def elasticjob(self, *words: str, check: bool = True) -> Any:
        """Run elasticjob in this namespace."""
        return await self.node.run(str(ELASTICJOB), *words, "-n", self.namespace, check=check, timeout=240)

    async def first_log_line(self, name: str, *words: str) -> str:
        """Wait for the first line of ``elasticjob logs -f``, and return it."""
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
        """Apply a file or an object with ``kubectl apply``."""
        if isinstance(manifest, Path):
            await self.kubectl("apply", "-f", str(manifest))
        else:
            await self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest))

    async def wait(self, what: str, condition: str, *, limit: str = TIMEOUT) -> None:
        """Run ``kubectl wait`` for a condition, such as ``condition=Running`` or ``jsonpath={.status.worldSize}=3``."""
        await self.kubectl("wait", what, f"--for={condition}", f"--timeout={limit}", limit=float(limit[:-1]) + 30)

    async def wait_for_status(self, name: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait, with ``kubectl get -w``, until the status of a job meets a condition, and return the job.

        Args:
            name: the name of the job.
            condition: the condition on the status.
        """
        argv = ("kubectl", "-n", self.namespace, "get", "elasticjob", name, "-w", "-o", "json", "--output-watch-events")
        watching = await self.node.popen(*argv)
        assert watching.stdout is not None
        job: dict[str, Any] = {}
        try:
            async with asyncio.timeout(SIGHT):
                async for line in watching.stdout:
                    job = json.loads(line)["object"]
                    if condition(job.get("status") or {}):
                        return job
        except TimeoutError:
            pass
        finally:
            watching.terminate()
            await watching.communicate()
        raise AssertionError(f"the condition was never met; last status: {json.dumps(job.get('status'), indent=1)}")

    async def wait_for_event(self, name: str, words: str) -> None:
        """Wait for an event of a job that contains this text."""
        about = f"--field-selector=involvedObject.name={name}"
        watching = await self.node.popen("kubectl", "-n", self.namespace, "get", "events", about, "-w", "-o", "wide")
        assert watching.stdout is not None
        try:
            async with asyncio.timeout(SIGHT):
                async for line in watching.stdout:
                    if words in line.decode():
                        return
        finally:
            watching.terminate()
            await watching.communicate()
        raise AssertionError(f"there is no event {words!r} of {name}")

    async def get(self, what: str, *more: str) -> dict[str, Any]:
        """Return an object or a list of objects."""
        found: dict[str, Any] = json.loads((await self.kubectl("get", what, *more, "-o", "json")).stdout)
        return found

    async def pods(self, name: str) -> dict[str, dict[str, Any]]:
        """Return the live worker pods of a job, by name: they have not ended and are not being deleted."""
        listing = await self.get("pods", "-l", f"elastic.pytorch.org/job={name},elastic.pytorch.org/role=worker")
        return {
            pod["metadata"]["name"]: pod
            for pod in listing["items"]
            if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] in ("Pending", "Running")
        }

    async def kill(self, pod: dict[str, Any], what: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Wait for a process of a pod whose command line contains a text, and send a signal to the youngest one.

        Args:
            pod: the pod.
            what: a part of the command line; the agent, whose command line has the worker's, needs :data:`AGENT`.
            number: the signal.
        """
        async with asyncio.timeout(SIGHT):
            while not (found := self._processes(pod, what)):  # noqa: ASYNC110 - there is no event for a new process
                await asyncio.sleep(0.1)
        os.kill(max(found), number)

    def _processes(self, pod: dict[str, Any], what: str) -> list[int]:
        processes = self.node.processes(pod["metadata"]["uid"])
        agents = what == AGENT
        return [pid for pid, command in processes.items() if what in command and (AGENT in command) == agents]

    async def wait_for_output(self, pod: str, words: str) -> asyncio.Task[str]:
        """Wait until a pod's worker has printed a line that ends with this text.

        The returned task continues to read, and returns the complete output of the worker.
        """
        argv = ("kubectl", "-n", self.namespace, "logs", pod, "-c", "worker", "-f")
        reading = await self.node.popen(*argv)
        stdout = reading.stdout
        assert stdout is not None
        lines: list[str] = []
        async with asyncio.timeout(SIGHT):
            while not (lines and lines[-1].rstrip().endswith(words)):
                line = await stdout.readline()
                assert line, f"the worker exited before it printed {words}: {lines}"
                lines.append(line.decode())

        async def rest() -> str:
            async with asyncio.timeout(SIGHT):
                last, _ = await reading.communicate()
            return "".join(lines) + last.decode()

        return asyncio.create_task(rest())

    async def events(self, name: str) -> str:
        """Return the output of ``kubectl describe`` for a job."""
        return str((await self.kubectl("describe", f"elasticjob/{name}")).stdout)

    async def finish(self, name: str) -> None:
        """Stop the program of a job from :func:`job`.

        After a scale-down, a surplus pod may still be listed, so every pod gets the file.
        """
        touch = ("-c", "worker", "--", "touch", "/tmp/finish")
        asked = [await self.kubectl("exec", pod, *touch, check=False) for pod in await self.pods(name)]
        assert 0 in [each.returncode for each in asked], asked

    async def delete(self, name: str) -> list[str]:
        """Delete a job with ``kubectl delete``, wait for the deletion of its objects, and return those that remain."""
        await self.kubectl("delete", f"elasticjob/{name}")
        return await self.left_for_good()

    async def left_for_good(self, *staying: str) -> list[str]:
        """Return the objects that remain in the namespace after garbage collection.

        Args:
            staying: objects that may remain, such as job.example.org/digits.
        """
        for each in await self._objects():
            if each not in staying:
                await self.kubectl("wait", each, "--for=delete", f"--timeout={TIMEOUT}", check=False)
        return await self._objects()

    async def _objects(self) -> list[str]:
        """Return all objects in the namespace, except events and those that Kubernetes creates in each namespace."""
        kinds = (await self.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name")).stdout.split()
        wanted = [kind for kind in kinds if not kind.startswith(("events", "pods.metrics"))]
        names = (await self.kubectl("get", ",".join(wanted), "-o", "name", "--ignore-not-found")).stdout.split()
        return [name for name in names if name not in ("configmap/kube-root-ca.crt", "serviceaccount/default")]
