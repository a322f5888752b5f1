"""Pods that have a node and take their time to start: what is said of them, and how often it is looked up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from elastic_operator.kube.api import Api
from elastic_operator.kube.pod_starts import PodStarts, last_word
from tests.support.answering import answering
from tests.support.builders import a_job, going, pending, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from elastic_operator.model import Pod

JOB = a_job()
NO_SECRET = 'MountVolume.SetUp failed for volume "key" : secret "tea" not found'
CREATE_IT = "create it, or name another one in spec.template"


def event(second: int, message: str, *, bad: bool = True, by: str = "kubelet", **more: Any) -> dict[str, Any]:
    """Something that was told of a pod in this second."""
    return {
        "type": "Warning" if bad else "Normal",
        "reason": "FailedMount" if bad else "Pulling",
        "message": message,
        "source": {"component": by},
        "lastTimestamp": f"2026-01-01T00:00:{second:02}Z",
        **more,
    }


@pytest.mark.parametrize(
    ("events", "said"),
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
def test_what_was_told_last_of_a_pod_is_what_keeps_it(events: list[dict[str, Any]], said: str) -> None:
    assert last_word(events) == said
    assert last_word(reversed(events)) == said


class Place:
    """Pods, their events by UID, and a clock."""

    def __init__(self) -> None:
        self.events: dict[str, list[dict[str, Any]]] = {}
        self.asked: list[str] = []
        self.status = 200
        self.now = 100.0

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        assert request.path == "/api/v1/namespaces/default/events"
        uid = request.query["fieldSelector"].removeprefix("involvedObject.uid=")
        self.asked.append(uid)
        items = self.events.get(uid, [])
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": items}, status=self.status)


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
async def starts(place: Place) -> AsyncIterator[PodStarts]:
    async with answering(place.answer) as configuration, Api(configuration) as api:
        yield PodStarts(api, lambda: place.now)


def bound(index: int, **more: Any) -> Pod:
    """A pod that has its node, and does not run yet."""
    return pending(index, node="n", **more)


async def test_pods_that_start_soon_cost_no_request(place: Place, starts: PodStarts) -> None:
    assert await starts.look(JOB, [bound(0)]) == 5.0
    place.now += 4.9
    assert await starts.look(JOB, [bound(0)]) == pytest.approx(0.1)
    place.now += 9
    assert await starts.look(JOB, [running(0), pending(1), bound(2, waiting="no image"), going(3, node="n")]) is None
    assert await starts.look(JOB, [bound(0)]) == 5.0, "another start, another five seconds"
    assert place.asked == []


async def test_one_pod_is_looked_at_in_its_turn_and_each_time_later(place: Place, starts: PodStarts) -> None:
    pods = [bound(0), bound(1)]
    place.events = {pods[0].uid: [event(1, "no network")], pods[1].uid: [event(1, "no volume")]}
    waits = []
    for _ in range(7):
        waits.append(await starts.look(JOB, pods))
        place.now += waits[-1] or 0.0
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0]
    assert place.asked == [pod.uid for pod in pods] * 3
    assert [starts.explained(JOB, pod).waiting for pod in pods] == ["no network", "no volume"]

    assert starts.explained(JOB, running(0)).waiting == ""
    assert await starts.look(JOB, [running(0)]) is None
    assert starts.explained(JOB, pods[1]) == pods[1]


async def test_where_events_cannot_be_seen_nothing_is_said_and_what_was_known_stays(
    place: Place, starts: PodStarts
) -> None:
    pod = bound(0)
    await starts.look(JOB, [pod])
    place.now, place.status = place.now + 5, 403
    assert await starts.look(JOB, [pod]) == 10.0
    assert starts.explained(JOB, pod).waiting == ""
    place.now, place.status, place.events = place.now + 10, 200, {pod.uid: [event(1, "no volume")]}
    await starts.look(JOB, [pod])
    place.now, place.status = place.now + 20, 500
    await starts.look(JOB, [pod])
    assert starts.explained(JOB, pod).waiting == "no volume"
    assert len(place.asked) >= 3
