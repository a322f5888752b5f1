"""Where the operator is measured: a real API server with simulated nodes, an etcd for the jobs, and the operator.

The API server, its etcd, the controller manager and the scheduler are the real ones. kwok says of the pods that they
run; what their agents would tell in the jobs' etcd is told here (:meth:`Field.train`).
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

from benchmarks.etcd import etcd_serving
from benchmarks.operator_audit import Audit, writes
from benchmarks.operator_watch import PodWatch
from elastic_operator.api.constants import ANNOTATION_SIZE
from elastic_operator.kubernetes.client import ELASTIC_JOBS, PODS, Api
from tests.support.operator_process import OperatorProcess
from tests.support.testbed.binaries import binary
from tests.support.testbed.control_plane import ControlPlane
from tests.support.testbed.kwok import LINGERS, SimulatedNodes
from torchelastic.protocol import Member, NodeRecord, RoundRecord, RunKeys, SizeRecord, StateRecord, decode, encode
from torchelastic.store import StoreSettings, connect

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType

    from benchmarks.operator_watch import SeenPod
    from elastic_operator.kubernetes.client import Resource
    from torchelastic.store import Store

OPERATORS_NAMESPACE: Final = "elastic-system"
_ACCOUNT: Final = "elastic-operator"
_USER: Final = f"system:serviceaccount:{OPERATORS_NAMESPACE}:{_ACCOUNT}"
_DEFINITION: Final = Path(__file__).parents[1] / "crds" / "elasticjob.yaml"
_ELSEWHERE: Final = ("kube-scheduler", "kube-controller-manager")
"""With kwok, which stands for the kubelets, they get the processor time that the API server, its etcd and the operator
leave: in a cluster they have machines of their own, and what they do comes after what is measured."""
_PATIENT: Final = ("--node-monitor-grace-period=1h",)
"""What is measured is not the loss of nodes; kwok, which comes last, is late with telling that they live."""
_LOW: Final = 19
_SIDE_BY_SIDE: Final = 16
_LEASE: Final = 3600.0
_LIMIT: Final = 120.0
_QUIET: Final = 3.0


class Field:
    """The cluster, and what is done there; within ``async with`` it is ready, and the operator runs.

    Args:
        folder: where all files go.
        nodes: how many simulated nodes there are.

    Attributes:
        pods: what is seen of them.
        audit: what the operator has asked the API server.
    """

    def __init__(self, folder: Path, *, nodes: int = 10) -> None:
        self._folder = folder
        self._nodes = nodes
        self._stack = contextlib.AsyncExitStack()
        self._names = (f"field-{number}" for number in itertools.count())
        self._api: Api | None = None
        self._store: Store | None = None
        self._etcd = ""
        self.audit = Audit(folder, _USER)
        self.cluster = ControlPlane(
            folder, flags={"kube-apiserver": self.audit.flags(), "kube-controller-manager": _PATIENT}
        )
        self.pods = PodWatch(self.cluster)
        self._operator: OperatorProcess | None = None

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.cluster)
            nodes = SimulatedNodes(self.cluster, self._folder, nodes=self._nodes)
            await stack.enter_async_context(nodes)
            elsewhere = [nodes.pid, *(self.cluster.daemons[name].pid for name in _ELSEWHERE)]
            for pid in elsewhere:
                os.setpriority(os.PRIO_PGRP, pid, _LOW)
            self._etcd = (await stack.enter_async_context(etcd_serving(binary("etcd")))).endpoint
            self._store = await connect(StoreSettings(endpoints=(self._etcd,)))
            stack.push_async_callback(self._store.close)
            self._api = await stack.enter_async_context(await Api.from_kubeconfig(str(self.cluster.kubeconfig)))
            await stack.enter_async_context(self.pods)
            await self.cluster.kubectl("apply", "--filename", str(_DEFINITION))
            await self.cluster.kubectl("wait", "--for=condition=Established", "--filename", str(_DEFINITION))
            await self.cluster.kubectl("create", "namespace", OPERATORS_NAMESPACE)
            account = ("serviceaccount", _ACCOUNT, f"--namespace={OPERATORS_NAMESPACE}")
            await self.cluster.kubectl("create", *account)
            rights = ("--clusterrole=cluster-admin", f"--serviceaccount={OPERATORS_NAMESPACE}:{_ACCOUNT}")
            await self.cluster.kubectl("create", "clusterrolebinding", _ACCOUNT, *rights)
            kubeconfig = await self.cluster.kubeconfig_for(OPERATORS_NAMESPACE, _ACCOUNT)
            self._operator = OperatorProcess(
                self._folder, kubeconfig, f"--lease-namespace={OPERATORS_NAMESPACE}", "--log-level=info"
            )
            await stack.enter_async_context(self._operator)
            await self._operator.leads()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def api(self) -> Api:
        """Of somebody who may do everything."""
        assert self._api is not None
        return self._api

    @property
    def operator(self) -> OperatorProcess:
        """The operator."""
        assert self._operator is not None
        return self._operator

    @property
    def store(self) -> Store:
        """The etcd of the jobs that have none of their own."""
        assert self._store is not None
        return self._store

    @contextlib.asynccontextmanager
    async def namespace(self, kind: Resource = ELASTIC_JOBS) -> AsyncIterator[str]:
        """A namespace of one's own; at the end its jobs of this kind and its pods are gone."""
        name = next(self._names)
        await self.cluster.kubectl("create", "namespace", name)
        await self.cluster.kubectl("wait", "--for=create", "serviceaccount/default", "--namespace", name)
        yield name
        await self.clear(name, kind)

    async def clear(self, namespace: str, kind: Resource) -> None:
        """Remove all jobs of a kind in a namespace, and wait until no pod is left."""
        path = ("--all", "--namespace", namespace, "--wait=false")
        await self.cluster.kubectl("delete", f"{kind.plural}.{kind.group}", *path)
        settled = asyncio.create_task(self._bury(namespace))
        try:
            await self.pods.until(lambda: not self.pods.there(namespace))
        finally:
            settled.cancel()
            await asyncio.wait([settled])

    async def _bury(self, namespace: str) -> None:
        """End pods that would stay Terminating."""
        while True:
            for pod in list(self.pods.there(namespace).values()):
                if LINGERS in pod.about.get("annotations", {}) and not pod.live:
                    with contextlib.suppress(Exception):
                        await self.api.delete(PODS, namespace, pod.name, grace=0)
            await asyncio.sleep(0.5)

    def manifest(self, name: str, replicas: int, *, maximum: int = 0, own_etcd: bool = False, **more: Any) -> Any:  # noqa: ANN401
        """A job.

        Args:
            name: its name.
            replicas: how many pods it wants.
            maximum: how many it may want.
            own_etcd: whether it gets an etcd of its own, as is the default; else it uses the field's, which is there.
            more: fields of its spec.
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
        """Create a job; gives back when that was begun, by the monotonic clock."""
        begun = time.monotonic()
        await self.api.create(kind, namespace, manifest)
        return begun

    async def apply_all(self, namespace: str, manifests: list[Any]) -> dict[str, float]:
        """Create jobs side by side; gives back when each was begun, by its name."""
        room = asyncio.Semaphore(_SIDE_BY_SIDE)

        async def one(manifest: Any) -> float:  # noqa: ANN401
            async with room:
                return await self.apply(namespace, manifest)

        begun = await asyncio.gather(*map(one, manifests))
        return {manifest["metadata"]["name"]: at for manifest, at in zip(manifests, begun, strict=True)}

    async def replace(self, namespace: str, pod: SeenPod) -> float:
        """Delete a pod; gives back the seconds until the API server has told of another that was not there before."""
        before = set(self.pods.there(namespace))
        begun = time.monotonic()
        await self.api.delete(PODS, namespace, pod.name)
        return await self.pods.until(lambda: self.pods.has_others(namespace, before)) - begun

    async def train(self, namespace: str) -> None:
        """Say in the jobs' etcd what the agents of all live pods there would: that they are there and train."""
        lease = await self.store.grant(_LEASE)
        room = asyncio.Semaphore(_SIDE_BY_SIDE)
        runs: dict[str, list[SeenPod]] = {}
        for pod in self.pods.live(namespace).values():
            runs.setdefault(pod.about["ownerReferences"][0]["uid"], []).append(pod)

        async def put(key: str, value: bytes) -> None:
            async with room:
                await self.store.put(key, value, lease=lease)

        for uid, pods in runs.items():
            keys = RunKeys.of(uid)
            round = RoundRecord(number=1, members=tuple(Member(pod.name, "10.0.0.1", 1) for pod in pods))
            records = (NodeRecord(name=pod.name, address="10.0.0.1", workers=1, size=_size(pod)) for pod in pods)
            nodes = [put(keys.node(pod.name), encode(record)) for pod, record in zip(pods, records, strict=True)]
            await asyncio.gather(*nodes, put(keys.state, encode(StateRecord(round))))

    async def until_states(self, namespace: str, true: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Return when the jobs' statuses are so."""
        async with asyncio.timeout(_LIMIT):
            while True:
                jobs, _ = await self.api.list(ELASTIC_JOBS, namespace)
                if true([dict(job.get("status") or {}) for job in jobs]):
                    return
                await asyncio.sleep(0.3)

    async def quiet(self, seconds: float = _QUIET) -> None:
        """Return when the operator has not written anything for so long."""
        async with asyncio.timeout(_LIMIT):
            while True:
                mark = await self.audit.mark()
                await asyncio.sleep(seconds)
                if not writes(await self.audit.since(mark)):
                    return

    async def writes_within(self, seconds: float) -> Counter[str]:
        """What the operator writes in this time, its lease apart."""
        mark = await self.audit.mark()
        await asyncio.sleep(seconds)
        return writes(await self.audit.since(mark))

    def memory(self, what: str = "VmRSS") -> int:
        """Bytes of the operator's process: VmRSS now, VmHWM at most."""
        text = Path(f"/proc/{self.operator.pid}/status").read_text(encoding="utf-8")
        found = re.search(rf"^{what}:\s*(\d+) kB$", text, re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024

    async def restart(self, jobs: int) -> float:
        """End the operator with SIGTERM and start it again; gives back how long until it has looked at so many jobs."""
        await self.operator.stop()
        begun = time.monotonic()
        self.operator.start()
        await self.operator.counts("elastic_operator_reconciles_total", jobs, result="success")
        return time.monotonic() - begun


def _size(pod: SeenPod) -> SizeRecord:
    """What a pod was started with."""
    return decode(pod.about["annotations"][ANNOTATION_SIZE].encode(), SizeRecord)
