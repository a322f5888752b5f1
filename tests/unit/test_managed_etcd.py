"""The etcd of a job that takes its time to start: what is said of it, and when it is looked at."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from elastic_operator.kube.api import Api
from elastic_operator.kube.cache import Cache
from elastic_operator.kube.managed_etcd import ManagedEtcd
from elastic_operator.kube.resources import DEPLOYMENTS, PODS, SERVICES
from elastic_operator.kube.settings import PodSettings
from elastic_operator.kube.worker_pod import worker_pod
from elastic_operator.kube.writer import Hindered, Refused, Writer
from elastic_operator.model import EtcdState, NewPod
from tests.support.answering import answering
from tests.support.builders import UID, a_job, size
from tests.support.object_server import NAMESPACE, ObjectServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.object_server import Fault

NO_IMAGE = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}


class Server:
    """Has the pod of an etcd, whose container stands so."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = NO_IMAGE
        self.status = 200
        self.asked: list[str] = []
        self.told: list[dict[str, Any]] = []

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path.endswith("/events"):
            told = self.told if request.query["fieldSelector"] == "involvedObject.uid=u" else []
            return web.json_response({"metadata": {"resourceVersion": "9"}, "items": told})
        self.asked.append(f"{request.path}?{request.query.get('labelSelector')}")
        pod = {
            "metadata": {"name": "digits-etcd-x", "uid": "u"},
            "spec": {"nodeName": "n", "containers": [{"name": "etcd", "image": "team/etcd:9"}]},
            "status": {"phase": "Pending", "containerStatuses": [{"name": "etcd", "state": self.state}]},
        }
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": [pod]}, status=self.status)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    async with answering(server.answer) as configuration, Api(configuration) as api:
        yield api


def an_etcd(api: Api, *, patience: float) -> ManagedEtcd:
    cache = Cache(changed=lambda _key: None)
    return ManagedEtcd(api, cache, Writer(api, cache), PodSettings(), patience=patience)


async def test_why_an_etcd_does_not_serve_is_told_as_long_as_it_does_not(server: Server, api: Api) -> None:
    etcd, job = an_etcd(api, patience=0.0), a_job()
    said = await etcd.complaint(job, EtcdState.STARTING)
    assert said == "its etcd does not serve yet: the image team/etcd:9 cannot be pulled: not found"
    assert server.asked == [f"/api/v1/namespaces/default/pods?elastic.pytorch.org/job-uid={UID}"]

    server.status = 500
    assert await etcd.complaint(job, EtcdState.STARTING) == said, "what was known is known still"
    assert await etcd.complaint(job, EtcdState.READY) is None
    server.status, server.state = 200, {"running": {}}
    assert await etcd.complaint(job, EtcdState.STARTING) is None


async def test_why_the_volume_of_an_etcd_is_not_there_stands_in_the_events_of_its_pod(server: Server, api: Api) -> None:
    etcd, job = an_etcd(api, patience=0.0), a_job()
    server.state = {"waiting": {"reason": "ContainerCreating"}}
    assert await etcd.complaint(job, EtcdState.STARTING) is None
    attach = "AttachVolume.Attach failed for volume pvc-1: the disk is in another zone"
    server.told = [{"type": "Warning", "message": attach, "source": {"component": "attachdetach-controller"}}]
    assert await etcd.complaint(job, EtcdState.STARTING) == f"its etcd does not serve yet: {attach}"


async def test_an_etcd_whose_pod_could_not_be_made_for_a_while_is_made_anew() -> None:
    job = replace(a_job(image="i", args=("x",)), namespace=NAMESPACE)
    async with ObjectServer() as server, Api(server.configuration) as api:
        cache = Cache(changed=lambda _key: None)
        writer = Writer(api, cache)
        etcd = ManagedEtcd(api, cache, writer, PodSettings(), anew_after=0.0)
        patient = ManagedEtcd(api, cache, writer, PodSettings())
        await etcd.ensure(job)
        (first,) = server.of_kind(DEPLOYMENTS)
        full = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: few"}
        name = first["metadata"]["name"]
        cache.put(DEPLOYMENTS, server.put(DEPLOYMENTS, name, status={"conditions": [full]}))
        first_words = etcd.seen(job).hindrance
        assert first_words is not None
        await patient.ensure(job)
        assert server.times("DELETE", DEPLOYMENTS) == 0
        await etcd.ensure(job)
        await etcd.ensure(job)
        (second,) = server.of_kind(DEPLOYMENTS)
        assert second["metadata"]["uid"] != first["metadata"]["uid"]
        assert server.times("DELETE", DEPLOYMENTS) == 1
        assert etcd.seen(job).hindrance == first_words, "as long as nothing else is known"
        cache.put(DEPLOYMENTS, server.put(DEPLOYMENTS, name, status={"readyReplicas": 1, "observedGeneration": 9}))
        assert etcd.seen(job).hindrance is None


async def test_where_somebody_else_has_the_address_that_pods_know_it_is_said_what_to_do() -> None:
    job = replace(a_job(image="i", args=("x",)), namespace=NAMESPACE)
    async with ObjectServer() as server, Api(server.configuration) as api:
        cache = Cache(changed=lambda _key: None)
        etcd = ManagedEtcd(api, cache, Writer(api, cache), PodSettings())
        pod = worker_pod(job, NewPod("digits-0-b", 0, size(1)), PodSettings(), store="10.3.0.7:2379")
        cache.put(PODS, server.put(PODS, "digits-0-b", **pod))
        why = "10.3.0.7"

        def fault(method: str, path: str) -> Fault | None:
            taken = (
                f'spec.clusterIPs: Invalid value: ["{why}"]: failed to allocate IP: provided IP is already allocated'
            )
            return (422, "Invalid", taken) if (method, path) == ("POST", SERVICES.path(NAMESPACE)) else None

        server.fault = fault
        with pytest.raises(Hindered, match=r"address 10\.3\.0\.7, .* belongs to another service .* delete these pods"):
            await etcd.ensure(job)
        why = "10.3.0.99"
        with pytest.raises(Refused, match=r"10\.3\.0\.99"):
            await etcd.ensure(job)


async def test_an_etcd_that_starts_is_not_looked_at(server: Server, api: Api) -> None:
    etcd, job = an_etcd(api, patience=60.0), a_job()
    for state in (EtcdState.ABSENT, EtcdState.STARTING, EtcdState.STARTING, EtcdState.READY):
        assert await etcd.complaint(job, state) is None
    assert server.asked == []
    etcd.forget(job.uid)
