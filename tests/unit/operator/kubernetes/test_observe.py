"""Observations besides the objects of a job: slow pods, a slow etcd, deleted pods, and back-off."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from elastic_operator.controller.failures import pod_end
from elastic_operator.controller.model import Job, Observed, Plan, PodEnd, PodPhase
from elastic_operator.kubernetes.backend import KubernetesBackend, job_of, startup_problem
from elastic_operator.kubernetes.client import DEPLOYMENTS, ELASTIC_JOBS, PODS, SERVICES, Api, ApiError
from elastic_operator.kubernetes.executor import Executor
from elastic_operator.kubernetes.job_store import JobStores
from elastic_operator.kubernetes.object_cache import ObjectCache
from elastic_operator.kubernetes.pod_status import pod_of
from elastic_operator.kubernetes.writer import Writer
from elastic_operator.resources.owned_objects import PodSettings, etcd_deployment, etcd_service
from tests.support import cluster_objects
from tests.support.certificates import CERTIFICATES
from tests.support.object_server import answering

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NO_SECRET = 'MountVolume.SetUp failed for volume "key" : secret "tea" not found'
CREATE_IT = "create it, or name another one in spec.template"
STARTING = {"waiting": {"reason": "ContainerCreating"}}


def event(second: int, message: str, *, bad: bool = True, by: str = "kubelet", **more: Any) -> dict[str, Any]:
    """Return an event of a pod at this second."""
    return {
        "type": "Warning" if bad else "Normal",
        "reason": "FailedMount" if bad else "Pulling",
        "message": message,
        "source": {"component": by},
        "lastTimestamp": f"2026-01-01T00:00:{second:02}Z",
        **more,
    }


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([], ""),
        ([event(1, NO_SECRET)], f"{NO_SECRET}; {CREATE_IT}"),
        ([event(1, "rpc error: code = Unknown desc = no network\nfor the pod")], "no network for the pod"),
        ([event(1, "", reason="FailedCreatePodSandBox")], "FailedCreatePodSandBox"),
        (
            [event(9, "the disk is\nelsewhere", by="attachdetach-controller"), event(1, NO_SECRET)],
            "the disk is elsewhere",
        ),
        ([event(1, NO_SECRET), event(2, 'Pulling image "i:1"', bad=False)], 'its node is pulling image "i:1"'),
        ([event(2, 'Pulling image "i:1"', bad=False), event(2, "no network")], "no network"),
        ([event(1, NO_SECRET), event(2, "Pulled", bad=False, reason="Pulled")], ""),
        ([event(1, NO_SECRET), event(9, "0/3 nodes", by="default-scheduler")], f"{NO_SECRET}; {CREATE_IT}"),
        (
            [{"type": "Warning", "message": "m", "reportingComponent": "kubelet", "eventTime": "2026-01-01T00:00:00Z"}],
            "m",
        ),
        ([{"type": 1, "message": ["m"], "source": "kubelet"}, {"source": {"component": "kubelet"}}], ""),
    ],
)
def test_the_last_event_of_a_pod_explains_why_it_does_not_start(events: list[dict[str, Any]], problem: str) -> None:
    assert startup_problem(events) == problem
    assert startup_problem(reversed(events)) == problem


class Cluster:
    """A job's objects, the events of its pods by UID, and a clock."""

    def __init__(self) -> None:
        self.events: dict[str, list[dict[str, Any]]] = {}
        self.etcd_state: dict[str, Any] = STARTING
        self.requests: list[str] = []
        self.status = 200
        self.delay = 0.0
        self.now = 100.0
        self.cache = ObjectCache(changed=lambda _key: None)
        self.job: Job = job_of(cluster_objects.job())
        self.requeue: float | None = None
        self.versions = iter(range(1, 1000))
        self.cache.put(ELASTIC_JOBS, cluster_objects.job())

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.now += self.delay
        if request.path.endswith("/events"):
            uid = request.query["fieldSelector"].removeprefix("involvedObject.uid=")
            self.requests.append(uid)
            items = self.events.get(uid, [])
        else:
            assert request.query["labelSelector"] == f"elastic.pytorch.org/job-uid={self.job.uid}"
            self.requests.append("etcd")
            spec = {"nodeName": "n", "containers": [{"name": "etcd", "image": "team/etcd:9"}]}
            status = {"phase": "Pending", "containerStatuses": [{"name": "etcd", "state": self.etcd_state}]}
            items = [{"metadata": {"name": "digits-etcd-x", "uid": "of-etcd"}, "spec": spec, "status": status}]
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": items}, status=self.status)

    def pod(self, index: int, state: dict[str, Any] = STARTING) -> str:
        """Add a pod that has a node and a container in this state; return the pod's UID."""
        pod = cluster_objects.pod(index, f"p{index}", state=state)
        pod["metadata"]["resourceVersion"] = str(next(self.versions))
        pod["metadata"]["ownerReferences"][0]["apiVersion"] = ELASTIC_JOBS.api_version
        self.cache.put(PODS, pod)
        return str(pod["metadata"]["uid"])

    def start_etcd(self) -> None:
        """Add an etcd that is not ready."""
        for kind, body in (
            (SERVICES, etcd_service(self.job, cluster_ip="10.0.0.9")),
            (DEPLOYMENTS, etcd_deployment(self.job, PodSettings())),
        ):
            body["metadata"] |= {"uid": kind.plural, "resourceVersion": "1"}
            self.cache.put(kind, body)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    clock = SimpleNamespace(monotonic=lambda: cluster.now, time=lambda: cluster.now)
    for module in ("backend", "executor", "job_record"):
        monkeypatch.setattr(f"elastic_operator.kubernetes.{module}.time", clock)
    return cluster


@pytest.fixture
async def backend(cluster: Cluster) -> AsyncIterator[KubernetesBackend]:
    async with (
        answering(cluster.answer) as configuration,
        Api(configuration) as api,
        JobStores(api, lambda _key: None, CERTIFICATES) as stores,
    ):
        writer = Writer(api, cluster.cache)
        executor = Executor(
            cache=cluster.cache, writer=writer, stores=stores, certificates=CERTIFICATES, settings=PodSettings()
        )
        yield KubernetesBackend(api=api, cache=cluster.cache, stores=stores, executor=executor)


async def observe(cluster: Cluster, backend: KubernetesBackend) -> Observed:
    """Observe the job, and record when the job should be observed again."""
    found = await backend.observe("team/digits")
    assert found is not None
    cluster.requeue = await backend.apply(found[0], Plan(unmanaged=True))
    return found[1]


async def test_the_events_of_slow_pods_are_read_one_pod_at_a_time(cluster: Cluster, backend: KubernetesBackend) -> None:
    uids = [cluster.pod(0), cluster.pod(1)]
    cluster.events = {uids[0]: [event(1, "no network")], uids[1]: [event(1, "no volume")]}
    waits = []
    for _ in range(5):
        observed = await observe(cluster, backend)
        waits.append(cluster.requeue)
        cluster.now += waits[-1] or 0.0
    assert waits == [5.0, 15.0, 15.0, 15.0, 15.0]
    assert cluster.requests == uids * 2
    assert [pod.waiting for pod in observed.pods] == ["no network", "no volume"]

    cluster.status = 500
    assert [pod.waiting for pod in (await observe(cluster, backend)).pods] == ["no network", "no volume"]
    for index in (0, 1):
        cluster.pod(index, {"running": {}})
    assert [pod.waiting for pod in (await observe(cluster, backend)).pods] == ["", ""]
    assert cluster.requeue is None
    cluster.pod(0)
    await observe(cluster, backend)
    assert cluster.requeue == 5.0, "the first observation comes sooner than later ones"


async def test_reads_of_events_take_at_most_a_tenth_of_the_time(cluster: Cluster, backend: KubernetesBackend) -> None:
    uid = cluster.pod(0)
    cluster.delay = 3.0
    read_at = []
    while len(read_at) < 3:
        await observe(cluster, backend)
        if len(cluster.requests) > len(read_at):
            read_at.append(cluster.now)
        cluster.now += cluster.requeue or 0.0
    assert cluster.requests == [uid] * 3
    assert [later - earlier for earlier, later in itertools.pairwise(read_at)] == [pytest.approx(33, abs=5)] * 2


async def test_an_etcd_that_is_not_ready_is_diagnosed(cluster: Cluster, backend: KubernetesBackend) -> None:
    cluster.start_etcd()
    assert (await observe(cluster, backend)).etcd_error is None
    assert (cluster.requests, cluster.requeue) == ([], 5.0)

    async def later() -> str | None:
        cluster.now += 60
        return (await observe(cluster, backend)).etcd_error

    cluster.etcd_state = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}
    error = "its etcd does not serve yet: the image team/etcd:9 cannot be pulled: not found"
    assert await later() == error
    cluster.status = 500
    assert await later() == error
    cluster.status, cluster.etcd_state = 200, {"running": {}}
    assert await later() is None
    cluster.etcd_state = STARTING
    attach = "AttachVolume.Attach failed for volume pvc-1: the disk is in another zone"
    cluster.events = {"of-etcd": [event(1, attach, by="attachdetach-controller")]}
    assert await later() == f"its etcd does not serve yet: {attach}"


def delete(backend: KubernetesBackend, index: int, suffix: str) -> None:
    pod = cluster_objects.pod(index, suffix)
    pod["metadata"]["ownerReferences"][0]["apiVersion"] = ELASTIC_JOBS.api_version
    backend.pod_deleted(pod, pod_of(pod))


async def test_a_removed_pod_is_observed_as_deleted_until_it_is_replaced(
    cluster: Cluster, backend: KubernetesBackend
) -> None:
    delete(backend, 1, "older")
    delete(backend, 1, "old")
    cluster.pod(0)
    [gone] = [pod for pod in (await observe(cluster, backend)).pods if pod.index == 1]
    assert (gone.name, gone.ready, gone.phase, pod_end(gone)) == ("digits-1-old", False, PodPhase.FAILED, PodEnd.LEFT)

    cluster.pod(1, {"terminated": {"exitCode": 1}})
    assert len((await observe(cluster, backend)).pods) == 3, "a terminating pod does not replace a deleted pod"
    cluster.pod(1)
    assert len((await observe(cluster, backend)).pods) == 2

    delete(backend, 2, "old")
    cluster.now += 901
    assert len((await observe(cluster, backend)).pods) == 2


@pytest.mark.parametrize(
    ("status", "message", "by_policy"),
    [
        (400, 'admission webhook "policy.example.org" denied the request: no image of this registry', True),
        (422, "pods \"digits-0\" is forbidden: ValidatingAdmissionPolicy 'few' with binding 'few' denied it", True),
        (422, 'Pod "digits-0" is invalid: spec.x', False),
    ],
)
def test_a_rejection_by_a_policy_is_retried(status: int, message: str, *, by_policy: bool) -> None:
    error = ApiError(status, "Invalid", message)
    assert (error.blocked, error.invalid) == (by_policy, not by_policy)
