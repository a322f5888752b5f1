"""The operator under faults: its API server is slow, refuses or does not answer; it is killed between any two writes;
and two replicas act at once. The jobs must reach the same end as without faults.

Each run tries a sample of the faults; TORCHELASTIC_EXHAUSTIVE=1 in the environment tries all of them.
"""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.support.api_proxy import ApiProxy, BadDays
from tests.support.operator_place import Json, Place
from tests.support.operator_story import Story
from tests.support.testbed.availability import EXHAUSTIVE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.etcd import EtcdServer
    from tests.support.operator_process import OperatorProcess
    from tests.support.testbed.cluster import Cluster
    from tests.support.watching_api import WatchingApi

pytestmark = [
    pytest.mark.control_plane,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(3600 if EXHAUSTIVE else 300),
]

SEEDS = range(40 if EXHAUSTIVE else 2)
PARTS = 8 if EXHAUSTIVE else 3
"""The number of tests over which the numbers of writes are distributed."""

SPARED = 8
"""The permitted difference in writes: changes in quick succession may be written at once."""


@contextlib.asynccontextmanager
async def a_place(api: WatchingApi, cluster: Cluster) -> AsyncIterator[Place]:
    async with cluster.namespace() as namespace:
        yield Place(api, cluster, namespace)


def an_operator(place: Place, folder: Path, proxy: ApiProxy, *flags: str, name: str = "operator") -> OperatorProcess:
    """An operator replica that reaches the API server through a proxy; its name stays the same, as in a pod."""
    kubeconfig = proxy.write_kubeconfig(folder / f"{name}.kubeconfig")
    return place.operator(folder, *flags, kubeconfig=kubeconfig, name=name, environ={"POD_NAME": name})


class GoodDay:
    """The end of the scenario without faults, and the number of its writes."""

    def __init__(self, end: Json, writes: int) -> None:
        self.end = end
        self.writes = writes


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def good_day(
    api: WatchingApi, cluster_with_crd: Cluster, etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory
) -> GoodDay:
    folder = tmp_path_factory.mktemp("good-day")
    async with (
        a_place(api, cluster_with_crd) as place,
        ApiProxy(await api.access()) as proxy,
        an_operator(place, folder, proxy) as operator,
        Story(place, etcd) as story,
    ):
        await story.tell()
        end = await story.end()
        writes = proxy.writes
        assert await operator.stop() == 0
    assert story.wrongs == []
    assert "Traceback" not in operator.log
    return GoodDay(end, writes)


async def test_the_operator_reaches_the_expected_end_without_faults(good_day: GoodDay) -> None:
    jobs = good_day.end["jobs"]
    assert {name: (job["status"]["state"], job["pods"]) for name, job in jobs.items()} == {
        "dies": ("Pending", {"0 Failed": 2, "0 Pending": 1, "1 Pending": 1}),
        "fails": ("Failed", {}),
        "grows": ("Succeeded", {"0 Succeeded": 1}),
        "later0": ("Running", {"0 Running": 1}),
        "rests": ("Running", {"0 Running resumed": 1, "1 Running resumed": 1}),
        "stores": ("Succeeded", {"0 Succeeded": 1}),
    }
    charged = {name: (job["status"]["restarts"], job["status"]["podFailures"]) for name, job in jobs.items()}
    assert {name: charges for name, charges in charged.items() if charges != (0, 0)} == {
        "dies": (0, 2),
        "fails": (0, 1),
        "rests": (1, 0),
    }
    assert good_day.end["Deployment"] == good_day.end["Service"] == good_day.end["PodDisruptionBudget"] == []


@pytest.mark.parametrize("seed", SEEDS)
async def test_faulty_requests_and_watches_lead_to_the_same_end(
    good_day: GoodDay, api: WatchingApi, place: Place, etcd: EtcdServer, tmp_path: Path, seed: int
) -> None:
    days = BadDays(seed, share=0.15)
    async with (
        ApiProxy(await api.access(), fault=days) as proxy,
        an_operator(place, tmp_path, proxy) as operator,
        Story(place, etcd) as story,
    ):
        await story.tell()
        days.share = 0.0
        await story.ends_as(good_day.end)
        assert await operator.stop() == 0
    assert days.happened.total() > 0
    assert "Traceback" not in operator.log


@pytest.mark.parametrize("part", range(PARTS))
async def test_an_operator_killed_after_any_write_reaches_the_same_end(
    good_day: GoodDay, api: WatchingApi, cluster_with_crd: Cluster, etcd: EtcdServer, tmp_path: Path, part: int
) -> None:
    first, behind = (1 + good_day.writes * each // PARTS for each in (part, part + 1))
    sure = min(behind, good_day.writes + 1 - SPARED)
    for number in range(first, behind) if EXHAUSTIVE else [random.Random(part).randrange(first, sure)]:
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            await killed_after(number, good_day, api, cluster_with_crd, etcd, folder)
        except BaseException as error:
            error.add_note(f"the operator was killed after its write {number} of {good_day.writes}")
            raise


async def killed_after(
    number: int, good_day: GoodDay, api: WatchingApi, cluster: Cluster, etcd: EtcdServer, folder: Path
) -> None:
    """Kill the operator once, between a write and its answer, and check the end of the scenario."""
    killed: list[int] = []

    def wrote(count: int) -> None:
        if count == number:
            killed.append(count)
            operator.kill()
            operator.start()

    async with (
        a_place(api, cluster) as place,
        ApiProxy(await api.access(), wrote=wrote) as proxy,
        an_operator(place, folder, proxy) as operator,
        Story(place, etcd) as story,
    ):
        await story.tell()
        await story.ends_as(good_day.end)
        await operator.ready()  # it may have been killed a moment ago
        assert await operator.stop() == 0
    assert killed == [number] or number > good_day.writes - SPARED
    assert "Traceback" not in operator.log


async def test_two_operators_that_both_believe_they_lead_do_no_harm(
    good_day: GoodDay, api: WatchingApi, place: Place, etcd: EtcdServer, tmp_path: Path
) -> None:
    async with (
        ApiProxy(await api.access()) as proxy,
        an_operator(place, tmp_path, proxy, "--no-leader-elect", name="one") as one,
        an_operator(place, tmp_path, proxy, "--no-leader-elect", name="two") as two,
        Story(place, etcd) as story,
    ):
        await story.tell()
        await story.ends_as(good_day.end)
        for operator in (one, two):
            assert await operator.metric("elastic_operator_reconciles_total", result="success") > 0
            assert await operator.stop() == 0
            assert "Traceback" not in operator.log
