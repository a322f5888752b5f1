"""A namespace with an operator, in which a test acts as the users, the kubelet and the agents.

A control plane without nodes has no kubelet: pods stay Pending, and a test that needs them to run, fail or end reports
this in place of the kubelet. On a cluster with nodes, pods stay Pending as well, because no scheduler handles them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elastic_operator.api.constants import LABEL_INDEX, worker_selector
from elastic_operator.kubernetes.client import ELASTIC_JOBS, EVENTS, PODS
from tests.support.operator_process import TIMEOUT, OperatorProcess
from torchelastic.protocol.codec import encode
from torchelastic.protocol.keys import RunKeys
from torchelastic.protocol.records import Member, NodeRecord, RoundRecord, SizeRecord, StateRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from elastic_operator.kubernetes.client import Resource
    from testbed.cluster import Cluster
    from tests.support.watching_api import WatchingApi
    from torchelastic.store.api import Store

Json = dict[str, Any]
Objects = dict[str, Json]
"""Objects by name."""


class OperatorNamespace:
    """A namespace in which the test has all permissions.

    Args:
        api: the API server, with the permissions of an administrator.
        cluster: the cluster.
        namespace: the name of the namespace.
        restricted: whether the namespace admits only restricted pods, so that pods must not run as root.
    """

    def __init__(self, api: WatchingApi, cluster: Cluster, namespace: str, *, restricted: bool = False) -> None:
        self.api = api
        self.cluster = cluster
        self.name = namespace
        self._pods: Json = {"securityContext": {"runAsNonRoot": True}} if restricted else {}

    def operator(self, folder: Path, *flags: str, kubeconfig: Path | None = None, **more: Any) -> OperatorProcess:
        """Return an operator replica for this namespace, with its lease in the same namespace.

        Args:
            folder: the folder of its log.
            flags: more flags.
            kubeconfig: the operator's kubeconfig; None for that of an administrator.
            more: further arguments of OperatorProcess.
        """
        only_here = (f"--namespace={self.name}", f"--lease-namespace={self.name}")
        return OperatorProcess(folder, kubeconfig or self.cluster.kubeconfig, *only_here, *flags, **more)

    async def apply(self, name: str = "digits", **spec: Any) -> Json:
        """Create a job of one to three pods, which stay Pending even on a cluster with nodes."""
        template = spec.pop("template", {"spec": {"schedulerName": "nobody"}})
        template = {**template, "spec": {**self._pods, **template.get("spec", {})}}
        return dict(await self.api.create(ELASTIC_JOBS, self.name, manifest(name, template=template, **spec)))

    async def change(self, name: str = "digits", **spec: Any) -> None:
        """Change fields of a job's spec."""
        await self.api.patch(ELASTIC_JOBS, self.name, name, {"spec": spec})

    async def kubectl(self, *words: str, check: bool = True, stdin: str | None = None) -> Any:
        """Run kubectl in this namespace."""
        return await self.cluster.kubectl("--namespace", self.name, *words, check=check, stdin=stdin)

    async def wait_for(self, resource: Resource, condition: Callable[[Objects], bool], **select: str) -> Objects:
        """Wait until the objects of a kind meet a condition, and return them by name."""
        last: Objects = {}
        try:
            async with (
                asyncio.timeout(TIMEOUT),
                contextlib.aclosing(self.api.states(resource, self.name, **select)) as states,
            ):
                async for state in states:
                    last = {each["metadata"]["name"]: dict(each) for each in state.values()}
                    if condition(last):
                        return last
        except TimeoutError:
            pass
        for each in last.values():
            each["metadata"].pop("managedFields", None)
        raise AssertionError(
            f"the condition was never met; last state: {sorted(last)}: {json.dumps(last, indent=1)[-4000:]}"
        )

    async def wait_for_job(self, condition: Callable[[Json], bool], name: str = "digits") -> Json:
        """Wait until the status of a job meets a condition, and return the job."""
        jobs = await self.wait_for(
            ELASTIC_JOBS, lambda found: name in found and condition(found[name].get("status") or {}), name=name
        )
        return jobs[name]

    async def wait_for_pods(self, count: int, name: str = "digits") -> Objects:
        """Wait until a job has exactly this number of live worker pods, and return them by name."""
        found = await self.wait_for(PODS, lambda pods: len(live(pods)) == count, labels=worker_selector(name))
        return live(found)

    async def wait_for_event(self, *words: str) -> str:
        """Wait for an event that contains all of these words, and return all events, one per line."""
        found = await self.wait_for(
            EVENTS, lambda events: any(all(word in line for word in words) for line in lines_of(events))
        )
        return "\n".join(lines_of(found))

    async def report_running(self, pod: str) -> None:
        """Report, as the kubelet, that a pod's worker runs."""
        await self._report(pod, "Running", {"running": {"startedAt": "2026-01-01T00:00:00Z"}})

    async def report_ended(self, pod: str, code: int, message: str = "") -> None:
        """Report, as the kubelet, that a pod's worker has terminated."""
        terminated = {
            "exitCode": code,
            "message": message,
            "reason": "Error" if code else "Completed",
            "startedAt": "2026-01-01T00:00:00Z",
            "finishedAt": "2099-01-01T00:00:00Z" if code == 137 else "2026-01-01T01:00:00Z",
        }
        await self._report(pod, "Failed" if code else "Succeeded", {"terminated": terminated})

    async def report_joined(self, store: Store, job: Json, pod: str, **about: Any) -> None:
        """Report, as the kubelet and as the agent, that a pod's worker runs and its agent has joined the run.

        Args:
            store: the job's etcd.
            job: the job.
            pod: the name of the pod.
            about: fields of the agent's record.
        """
        await self.report_running(pod)
        size = SizeRecord(min=1, max=4, desired=1)
        record = NodeRecord(name=pod, address="10.0.0.1", workers=1, size=size, **about)
        await store.put(run_keys(job).node(f"{pod}.1"), encode(record))

    async def report_round(
        self, store: Store, job: Json, *pods: str, round: int = 1, restarts: int = 0, **about: Any
    ) -> None:
        """Report, as the agents of these pods, that they have formed a round."""
        for pod in pods:
            await self.report_joined(store, job, pod, **about)
        members = tuple(Member(node=f"{pod}.1", address="10.0.0.1", workers=1) for pod in sorted(pods))
        record = RoundRecord(number=round, members=members, restarts=restarts)
        await store.put(run_keys(job).state, encode(StateRecord(record)))

    async def bind(self, pod: str) -> None:
        """Bind a pod to a node that does not exist."""
        target = {"apiVersion": "v1", "kind": "Node", "name": "nowhere"}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
        await self.api.create(replace(PODS, plural=f"pods/{pod}/binding"), self.name, binding)

    async def _report(self, pod: str, phase: str, state: Json) -> None:
        worker = {
            "name": "worker", "image": "i", "imageID": "", "ready": phase == "Running", "restartCount": 0,
            "state": state,
        }  # fmt: skip
        status = {"status": {"phase": phase, "containerStatuses": [worker]}}
        await self.api.patch(PODS, self.name, pod, status, "status")


def manifest(name: str, **spec: Any) -> Json:
    """Return a valid job of one to three pods with these additional fields of the spec."""
    return {
        "apiVersion": ELASTIC_JOBS.api_version,
        "kind": ELASTIC_JOBS.kind,
        "metadata": {"name": name},
        "spec": {"maxReplicas": 3, "image": "elastic-agent:dev", "args": ["digits.py"], **spec},
    }


def run_keys(job: Json) -> RunKeys:
    """Return the keys of a job's run in its etcd."""
    return RunKeys(job["metadata"]["uid"])


def live(pods: Objects) -> Objects:
    """Return the pods that have not ended and are not being deleted."""
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
    """Return the index of a pod in its job."""
    return int(pod["metadata"]["labels"][LABEL_INDEX])
