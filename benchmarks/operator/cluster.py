"""The cluster of the operator benchmark: a control plane, simulated nodes, an etcd for the jobs, and the operator.

The API server, its etcd, the controller manager and the scheduler are real. kwok reports pods as running. The benchmark
writes the records of the pods' agents to the jobs' etcd (:meth:`OperatedCluster.train`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from benchmarks.operator.audit import Audit, writes
from benchmarks.operator.nodes import LINGERS, SimulatedNodes
from benchmarks.operator.pod_watch import PodWatch
from benchmarks.support.etcd import etcd_serving
from elastic_operator.api.constants import ANNOTATION_SIZE
from elastic_operator.kubernetes.client import ELASTIC_JOBS, PODS, Api
from testbed.binaries import binary
from testbed.control_plane import ControlPlane
from tests.support.operator_process import OperatorProcess
from torchelastic.protocol.codec import decode, encode
from torchelastic.protocol.keys import RunKeys
from torchelastic.protocol.records import Member, NodeRecord, RoundRecord, SizeRecord, StateRecord
from torchelastic.store.api import StoreSettings
from torchelastic.store.client import connect

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType

    from benchmarks.operator.pod_watch import SeenPod
    from elastic_operator.kubernetes.client import Resource
    from torchelastic.store.api import Store

OPERATORS_NAMESPACE: Final = "elastic-system"
_ACCOUNT: Final = "elastic-operator"
_USER: Final = f"system:serviceaccount:{OPERATORS_NAMESPACE}:{_ACCOUNT}"
_DEFINITION: Final = Path(__file__).parents[2] / "crds" / "elasticjob.yaml"
_LOW_PRIORITY: Final = ("kube-scheduler", "kube-controller-manager")
"""The control plane's components of low priority. Like kwok, which simulates the kubelets, they get only the processor
time that the API server, its etcd and the operator leave. In a real cluster, they and the kubelets have their own
machines, and their work follows the measured work."""
_NO_NODE_LOSS: Final = ("--node-monitor-grace-period=1h",)
"""kwok has a low priority, so the heartbeats of its nodes may be late."""
_NICE: Final = 19
_SIDE_BY_SIDE: Final = 16
_LEASE: Final = 3600.0
_LIMIT: Final = 120.0
_QUIET: Final = 3.0


class OperatedCluster:
    """A cluster in which the operator runs; an async context manager.

    Args:
        folder: the folder for all files.
        nodes: the number of simulated nodes.

    Attributes:
        api: a client with all rights.
        control_plane: the API server, its etcd, the controller manager and the scheduler.
        pods: the watch on all pods.
        audit: the operator's requests.
    """

    def __init__(self, folder: Path, *, nodes: int = 10) -> None:
        self._folder = folder
        self._nodes = nodes
        self._stack = contextlib.AsyncExitStack()
        self._names = (f"field-{number}" for number in itertools.count())
        self.api: Api
        self._store: Store
        self._etcd = ""
        self.audit = Audit(folder, _USER)
        self.control_plane = ControlPlane(
            folder, flags={"kube-apiserver": self.audit.flags(), "kube-controller-manager": _NO_NODE_LOSS}
        )
        self.pods = PodWatch(self.control_plane)
        self._operator: OperatorProcess

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.control_plane)
            nodes = SimulatedNodes(self.control_plane, self._folder, nodes=self._nodes)
            await stack.enter_async_context(nodes)
            elsewhere = [nodes.pid, *(self.control_plane.daemons[name].pid for name in _LOW_PRIORITY)]
            for pid in elsewhere:
                os.setpriority(os.PRIO_PGRP, pid, _NICE)
            self._etcd = (await stack.enter_async_context(etcd_serving(binary("etcd")))).endpoint
            self._store = await connect(StoreSettings(endpoints=(self._etcd,)))
            stack.push_async_callback(self._store.close)
            self.api = await stack.enter_async_context(await Api.from_kubeconfig(str(self.control_plane.kubeconfig)))
            await stack.enter_async_context(self.pods)
            await self.control_plane.kubectl("apply", "--filename", str(_DEFINITION))
            await self.control_plane.kubectl("wait", "--for=condition=Established", "--filename", str(_DEFINITION))
            await self.control_plane.kubectl("create", "namespace", OPERATORS_NAMESPACE)
            account = ("serviceaccount", _ACCOUNT, f"--namespace={OPERATORS_NAMESPACE}")
            await self.control_plane.kubectl("create", *account)
            rights = ("--clusterrole=cluster-admin", f"--serviceaccount={OPERATORS_NAMESPACE}:{_ACCOUNT}")
            await self.control_plane.kubectl("create", "clusterrolebinding", _ACCOUNT, *rights)
            kubeconfig = await self.control_plane.kubeconfig_for(OPERATORS_NAMESPACE, _ACCOUNT)
            self._operator = OperatorProcess(
                self._folder, kubeconfig, f"--lease-namespace={OPERATORS_NAMESPACE}", "--log-level=info"
            )
            await stack.enter_async_context(self._operator)
            await self._operator.wait_until_leading()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @contextlib.asynccontextmanager
    async def namespace(self, kind: Resource = ELASTIC_JOBS) -> AsyncIterator[str]:
        """Create a namespace for the block, and delete its jobs of this kind at the end."""
        name = next(self._names)
        await self.control_plane.kubectl("create", "namespace", name)
        await self.control_plane.kubectl("wait", "--for=create", "serviceaccount/default", "--namespace", name)
        yield name
        await self.clear(name, kind)

    async def clear(self, namespace: str, kind: Resource) -> None:
        """Delete all jobs of a kind in a namespace, and wait until the namespace has no pods."""
        path = ("--all", "--namespace", namespace, "--wait=false")
        await self.control_plane.kubectl("delete", f"{kind.plural}.{kind.group}", *path)
        settled = asyncio.create_task(self._delete_terminating_pods(namespace))
        try:
            await self.pods.until(lambda: not self.pods.there(namespace))
        finally:
            settled.cancel()
            await asyncio.wait([settled])

    async def _delete_terminating_pods(self, namespace: str) -> None:
        """Delete the pods that would otherwise stay Terminating."""
        while True:
            for pod in list(self.pods.there(namespace).values()):
                if LINGERS in pod.metadata.get("annotations", {}) and not pod.live:
                    with contextlib.suppress(Exception):
                        await self.api.delete(PODS, namespace, pod.name, grace=0)
            await asyncio.sleep(0.5)

    def manifest(self, name: str, replicas: int, *, maximum: int = 0, own_etcd: bool = False, **more: Any) -> Any:  # noqa: ANN401
        """Return the manifest of a job.

        Args:
            name: the job's name.
            replicas: the desired number of pods.
            maximum: the value of maxReplicas, if it is above ``replicas``.
            own_etcd: whether the operator creates an etcd for the job; otherwise the job uses the shared etcd.
            more: further fields of the job's spec.
        """
        etcd = {} if own_etcd else {"etcd": {"endpoint": self._etcd}}
        fields = {"minReplicas": 1, "maxReplicas": max(maximum, replicas), "replicas": replicas}
        return {
            "apiVersion": ELASTIC_JOBS.api_version,
            "kind": ELASTIC_JOBS.kind,
            "metadata": {"name": name},
            "spec": {**fields, "image": "elastic-agent:dev", "args": ["train.py"], **etcd, **more},
        }

    async def apply(self, namespace: str, manifest: Any, kind: Resource = ELASTIC_JOBS) -> float:  # noqa: ANN401
        """Create a job, and return the time before the request, by the monotonic clock."""
        begun = time.monotonic()
        await self.api.create(kind, namespace, manifest)
        return begun

    async def apply_all(self, namespace: str, manifests: list[Any]) -> dict[str, float]:
        """Create jobs concurrently, and return the time before each request, by name."""
        room = asyncio.Semaphore(_SIDE_BY_SIDE)

        async def one(manifest: Any) -> float:  # noqa: ANN401
            async with room:
                return await self.apply(namespace, manifest)

        begun = await asyncio.gather(*map(one, manifests))
        return {manifest["metadata"]["name"]: at for manifest, at in zip(manifests, begun, strict=True)}

    async def replace(self, namespace: str, pod: SeenPod) -> float:
        """Delete a pod, and return the seconds until the watch reports a new one."""
        before = set(self.pods.there(namespace))
        begun = time.monotonic()
        await self.api.delete(PODS, namespace, pod.name)
        return await self.pods.until(lambda: self.pods.has_others(namespace, before)) - begun

    async def train(self, namespace: str) -> None:
        """Write to the jobs' etcd the records of agents that train in all live pods."""
        lease = await self._store.grant(_LEASE)
        room = asyncio.Semaphore(_SIDE_BY_SIDE)
        runs: dict[str, list[SeenPod]] = {}
        for pod in self.pods.live(namespace).values():
            runs.setdefault(pod.metadata["ownerReferences"][0]["uid"], []).append(pod)

        async def put(key: str, value: bytes) -> None:
            async with room:
                await self._store.put(key, value, lease=lease)

        for uid, pods in runs.items():
            keys = RunKeys(uid)
            round = RoundRecord(number=1, members=tuple(Member(pod.name, "10.0.0.1", 1) for pod in pods))
            records = (NodeRecord(name=pod.name, address="10.0.0.1", workers=1, size=_size(pod)) for pod in pods)
            nodes = [put(keys.node(pod.name), encode(record)) for pod, record in zip(pods, records, strict=True)]
            await asyncio.gather(*nodes, put(keys.state, encode(StateRecord(round))))

    async def until_states(self, namespace: str, true: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Wait until a condition holds for the statuses of all jobs in a namespace."""
        async with asyncio.timeout(_LIMIT):
            while True:
                jobs, _ = await self.api.list(ELASTIC_JOBS, namespace)
                if true([dict(job.get("status") or {}) for job in jobs]):
                    return
                await asyncio.sleep(0.3)

    async def quiet(self, seconds: float = _QUIET) -> None:
        """Wait until the operator has written nothing for ``seconds``, except to its lease."""
        async with asyncio.timeout(_LIMIT):
            while True:
                mark = await self.audit.mark()
                await asyncio.sleep(seconds)
                if not writes(await self.audit.since(mark)):
                    return

    async def writes_within(self, seconds: float) -> Counter[str]:
        """Return the writes of the operator in this time, without those for its lease."""
        mark = await self.audit.mark()
        await asyncio.sleep(seconds)
        return writes(await self.audit.since(mark))

    def memory(self, what: str = "VmRSS") -> int:
        """Return the operator's resident memory in bytes: VmRSS (now) or VmHWM (maximum)."""
        text = Path(f"/proc/{self._operator.pid}/status").read_text(encoding="utf-8")
        found = re.search(rf"^{what}:\s*(\d+) kB$", text, re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024

    async def restart(self, jobs: int) -> float:
        """Restart the operator, and return the seconds until it has reconciled this number of jobs."""
        await self._operator.stop()
        begun = time.monotonic()
        self._operator.start()
        await self._operator.wait_for_metric("elastic_operator_reconciles_total", jobs, result="success")
        return time.monotonic() - begun


def _size(pod: SeenPod) -> SizeRecord:
    """Return the size with which a pod was started."""
    return decode(pod.metadata["annotations"][ANNOTATION_SIZE].encode(), SizeRecord)
