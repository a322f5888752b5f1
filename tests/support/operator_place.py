"""A namespace with an operator, in which a test plays the users, the kubelet and the agents.

A control plane alone has no kubelet: pods stay Pending, and a test that needs one to run, fail or end plays the
kubelet. On a cluster with nodes, pods stay Pending as well, because no scheduler handles them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elastic_operator.api.constants import LABEL_INDEX, worker_selector
from elastic_operator.kubernetes.client import ELASTIC_JOBS, EVENTS, PODS
from tests.support.operator_process import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_operator.kubernetes.client import Resource
    from tests.support.testbed.cluster import Cluster
    from tests.support.watching_api import WatchingApi

Json = dict[str, Any]
Objects = dict[str, Json]
"""Objects by name."""


class Place:
    """A namespace with all permissions."""

    def __init__(self, api: WatchingApi, cluster: Cluster, namespace: str) -> None:
        self.api = api
        self.cluster = cluster
        self.namespace = namespace

    async def apply(self, name: str = "digits", **spec: Any) -> Json:
        """Create a job whose pods are not scheduled."""
        return dict(await self.api.create(ELASTIC_JOBS, self.namespace, a_manifest(name, **spec)))

    async def change(self, name: str = "digits", **spec: Any) -> None:
        """Change fields of a job's spec."""
        await self.api.patch(ELASTIC_JOBS, self.namespace, name, {"spec": spec})

    async def kubectl(self, *words: str, check: bool = True) -> Any:
        """Run kubectl in this namespace."""
        return await self.cluster.kubectl("--namespace", self.namespace, *words, check=check)

    async def until(self, resource: Resource, true: Callable[[Objects], bool], **select: str) -> Objects:
        """The objects of a kind, by name, as soon as they meet a condition."""
        last: Objects = {}
        try:
            async with (
                asyncio.timeout(PATIENCE),
                contextlib.aclosing(self.api.states(resource, self.namespace, **select)) as states,
            ):
                async for state in states:
                    last = {each["metadata"]["name"]: dict(each) for each in state.values()}
                    if true(last):
                        return last
        except TimeoutError:
            pass
        for each in last.values():
            each["metadata"].pop("managedFields", None)
        raise AssertionError(f"never so, at last it was {sorted(last)}: {json.dumps(last, indent=1)[-4000:]}")

    async def job(self, true: Callable[[Json], bool], name: str = "digits") -> Json:
        """A job, as soon as its status meets a condition."""
        jobs = await self.until(
            ELASTIC_JOBS, lambda found: name in found and true(found[name].get("status") or {}), name=name
        )
        return jobs[name]

    async def pods(self, count: int, name: str = "digits") -> Objects:
        """The worker pods of a job, as soon as exactly this many live."""
        found = await self.until(PODS, lambda pods: len(live(pods)) == count, labels=worker_selector(name))
        return live(found)

    async def told(self, *words: str) -> str:
        """The events, one per line, as soon as one contains all of these words."""
        found = await self.until(
            EVENTS, lambda events: any(all(word in line for word in words) for line in lines_of(events))
        )
        return "\n".join(lines_of(found))

    async def runs(self, pod: str) -> None:
        """Report as the kubelet that a pod's worker runs."""
        await self._says(pod, "Running", {"running": {"startedAt": "2026-01-01T00:00:00Z"}})

    async def ends(self, pod: str, code: int, message: str = "") -> None:
        """Report as the kubelet that a pod's worker has ended."""
        terminated = {
            "exitCode": code,
            "message": message,
            "reason": "Error" if code else "Completed",
            "startedAt": "2026-01-01T00:00:00Z",
            "finishedAt": "2099-01-01T00:00:00Z" if code == 137 else "2026-01-01T01:00:00Z",
        }
        await self._says(pod, "Failed" if code else "Succeeded", {"terminated": terminated})

    async def bind(self, pod: str) -> None:
        """Bind a pod to a node that does not exist."""
        target = {"apiVersion": "v1", "kind": "Node", "name": "nowhere"}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
        await self.api.create(replace(PODS, plural=f"pods/{pod}/binding"), self.namespace, binding)

    async def _says(self, pod: str, phase: str, state: Json) -> None:
        worker = {
            "name": "worker", "image": "i", "imageID": "", "ready": phase == "Running", "restartCount": 0,
            "state": state,
        }  # fmt: skip
        status = {"status": {"phase": phase, "containerStatuses": [worker]}}
        await self.api.patch(PODS, self.namespace, pod, status, "status")


def a_manifest(name: str, **spec: Any) -> Json:
    """A job of one to three pods, which stay Pending also on a cluster with nodes."""
    template = spec.pop("template", {"spec": {"schedulerName": "nobody"}})
    fields = {"maxReplicas": 3, "image": "elastic-agent:dev", "args": ["train.py"], "template": template, **spec}
    return {
        "apiVersion": ELASTIC_JOBS.api_version,
        "kind": ELASTIC_JOBS.kind,
        "metadata": {"name": name},
        "spec": fields,
    }


def live(pods: Objects) -> Objects:
    """The pods that neither have ended nor are being deleted."""
    return {
        name: pod
        for name, pod in pods.items()
        if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") in ("Pending", "Running")
    }


def lines_of(events: Mapping[str, Json]) -> list[str]:
    return [f"{event['type']} {event['reason']} {event['message']}" for event in events.values()]


def conditions(status: Json) -> Objects:
    return {condition["type"]: condition for condition in status.get("conditions", ())}


def holds(status: Json, kind: str) -> bool:
    return bool(conditions(status).get(kind, {}).get("status") == "True")


def uids(objects: Objects) -> set[str]:
    return {each["metadata"]["uid"] for each in objects.values()}


def index_of(pod: Json) -> int:
    """The index of a pod in its job."""
    return int(pod["metadata"]["labels"][LABEL_INDEX])
