"""Where an agent has found a port for its metrics, its pod says so."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from elastic_operator.kube.api import Api
from elastic_operator.kube.cache import Cache
from elastic_operator.kube.resources import PODS
from elastic_operator.kube.scraping import FoundPorts
from elastic_operator.kube.writer import Writer
from elastic_operator.names import ANNOTATION_METRICS_PORT
from tests.support.builders import a_job
from tests.support.object_server import NAMESPACE, ObjectServer
from torchelastic.contract import NodeRecord, SizeRecord

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from elastic_operator.model import Job

UID = "uid-of-the-job"
RUNS = {"name": "worker", "ready": True, "state": {"running": {}}}
ENDED = {"name": "worker", "ready": False, "state": {"terminated": {"exitCode": 0}}}
OWNER = {"apiVersion": "elastic.pytorch.org/v1alpha1", "kind": "ElasticJob", "controller": True}


class Place:
    """A job whose pods run, and what notes the ports of their agents."""

    def __init__(self, server: ObjectServer, api: Api) -> None:
        self.server = server
        self.cache = Cache(changed=lambda _: None)
        self.woken: list[float] = []
        self._found = FoundPorts(Writer(api, self.cache), lambda _, wait: self.woken.append(wait))

    def pod(self, name: str, *, worker: dict[str, Any] = RUNS, **metadata: Any) -> None:
        """Have a pod there."""
        owner = {**OWNER, "name": "digits", "uid": UID}
        metadata = {"annotations": {"mine": "1"}, "ownerReferences": [owner], **metadata}
        status = {"phase": "Running", "containerStatuses": [worker]}
        self.cache.put(PODS, self.server.put(PODS, name, metadata=metadata, status=status))

    async def note(self, job: Job | None = None, **ports: int) -> None:
        """Have the agents say on which port they serve, and that noted."""
        nodes = [
            NodeRecord(name=name, address="10.0.0.1", workers=1, size=SizeRecord(min=1, max=2), metrics=port)
            for name, port in ports.items()
        ]
        await self._found.note(job or the_job(), self.cache.pods(NAMESPACE, UID), nodes)

    def noted(self, name: str) -> dict[str, str]:
        """What stands on a pod."""
        noted: dict[str, str] = self.server.get(PODS, name)["metadata"]["annotations"]
        return noted

    @property
    def writes(self) -> int:
        """How often a pod was written."""
        return self.server.times("PATCH", PODS)


def the_job(**annotations: str) -> Job:
    """The job of the pods; these annotations stand in its template."""
    job = a_job(image="i", args=("x",), template={"metadata": {"annotations": annotations}})
    return replace(job, uid=UID, namespace=NAMESPACE)


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with ObjectServer() as server, Api(server.configuration) as api:
        yield Place(server, api)


async def test_each_pod_says_where_its_agent_serves_and_says_it_once(place: Place) -> None:
    place.pod("a")
    place.pod("b")
    for _ in range(2):
        await place.note(a=40123, b=40124, gone=40125)
        assert place.writes == 2
    assert place.noted("a") == {
        "mine": "1",
        ANNOTATION_METRICS_PORT: "40123",
        "prometheus.io/scrape": "true",
        "prometheus.io/port": "40123",
        "prometheus.io/path": "/metrics",
    }
    assert place.noted("b")[ANNOTATION_METRICS_PORT] == "40124"
    assert place.woken == []


async def test_what_the_template_tells_a_prometheus_holds(place: Place) -> None:
    place.pod("a")
    await place.note(the_job(**{"prometheus.io/scrape": "false", "prometheus.io/port": "80"}), a=40123)
    noted = place.noted("a")
    assert noted[ANNOTATION_METRICS_PORT] == "40123"
    assert "prometheus.io/scrape" not in noted
    assert "prometheus.io/port" not in noted


async def test_no_pod_is_written_whose_agent_serves_nothing_or_no_more(place: Place) -> None:
    place.pod("silent")
    place.pod("nonsense")
    place.pod("said", annotations={ANNOTATION_METRICS_PORT: "9464"})
    place.pod("ended", worker=ENDED)
    place.pod("goes", deletionTimestamp="2026-01-01T00:00:00Z")
    await place.note(silent=0, nonsense=65536, said=9464, ended=40123, goes=40124)
    assert place.writes == 0


async def test_where_it_may_not_be_noted_that_is_told_once_and_tried_again_later(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    words = 'pods "a" is forbidden: User "x" cannot patch resource "pods"'
    place.server.fault = lambda method, _: (403, "Forbidden", words) if method == "PATCH" else None
    place.pod("a")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await place.note(a=40123)
    assert place.writes == 1
    assert 0 < place.woken[0] <= 0.5
    [told] = caplog.messages
    assert 'cannot patch resource "pods"' in told

    place.server.fault = lambda _method, _path: None
    place.woken.clear()
    while ANNOTATION_METRICS_PORT not in place.noted("a"):
        await place.note(a=40123)
    await place.note(a=40123)
    assert place.writes == 2


async def test_a_pod_that_is_gone_is_no_trouble(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.pod("a")
    place.server.pop(PODS, "a")
    await place.note(a=40123)
    assert (place.woken, caplog.messages, place.cache.pods(NAMESPACE, UID)) == ([], [], ())


async def test_another_pod_of_that_name_is_left_alone(place: Place) -> None:
    place.pod("a")
    place.server.pop(PODS, "a")
    another = {**OWNER, "name": "digits", "uid": "another"}
    place.server.put(PODS, "a", metadata={"annotations": {}, "ownerReferences": [another]})
    await place.note(a=40123)
    assert place.noted("a") == {}
    assert place.cache.pods(NAMESPACE, UID) == ()
