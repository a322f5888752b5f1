"""The operator under faults: a slow or failing API server, kills between any two writes, and two leaders at once.

The jobs must reach the same final state as without faults.

Each run tries a sample of the faults; TORCHELASTIC_EXHAUSTIVE=1 in the environment tries all of them.
"""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from testbed.availability import EXHAUSTIVE
from tests.support.api_proxy import ApiProxy, RandomFaults
from tests.support.operator_namespace import Json, OperatorNamespace
from tests.support.operator_scenario import Scenario

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from testbed.cluster import Cluster
    from tests.support.etcd import EtcdServer
    from tests.support.operator_process import OperatorProcess
    from tests.support.watching_api import WatchingApi

pytestmark = [
    pytest.mark.control_plane,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(3600 if EXHAUSTIVE else 300),
]

SEEDS = range(40 if EXHAUSTIVE else 2)
PARTS = 8 if EXHAUSTIVE else 3
"""The number of parts of the sequence of writes; each test kills the operator in a different part."""

WRITE_TOLERANCE = 8
"""The permitted difference in the number of writes: changes in quick succession may be written together."""


@contextlib.asynccontextmanager
async def new_namespace(api: WatchingApi, cluster: Cluster) -> AsyncIterator[OperatorNamespace]:
    async with cluster.namespace() as namespace:
        yield OperatorNamespace(api, cluster, namespace)


def an_operator(
    ns: OperatorNamespace, folder: Path, proxy: ApiProxy, *flags: str, name: str = "operator"
) -> OperatorProcess:
    """Return an operator replica that reaches the API server through a proxy and keeps its name, as in a pod."""
    kubeconfig = proxy.write_kubeconfig(folder / f"{name}.kubeconfig")
    return ns.operator(folder, *flags, kubeconfig=kubeconfig, name=name, environ={"POD_NAME": name})


class Baseline:
    """The final state of the scenario without faults, and the number of writes in it."""

    def __init__(self, end: Json, writes: int) -> None:
        self.end = end
        self.writes = writes


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def baseline(
    api: WatchingApi, cluster_with_crd: Cluster, etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory
) -> Baseline:
    folder = tmp_path_factory.mktemp("baseline")
    async with (
        new_namespace(api, cluster_with_crd) as ns,
        ApiProxy(await api.access()) as proxy,
        an_operator(ns, folder, proxy) as operator,
        Scenario(ns, etcd) as scenario,
    ):
        await scenario.play()
        end = await scenario.end()
        writes = proxy.writes
        assert await operator.stop() == 0
    assert scenario.violations == []
    assert "Traceback" not in operator.log
    return Baseline(end, writes)


async def test_the_jobs_reach_the_expected_state_without_faults(baseline: Baseline) -> None:
    jobs = baseline.end["jobs"]
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
    assert baseline.end["Deployment"] == baseline.end["Service"] == baseline.end["PodDisruptionBudget"] == []


@pytest.mark.parametrize("seed", SEEDS)
async def test_the_jobs_reach_the_same_state_despite_faulty_requests_and_watches(
    baseline: Baseline, api: WatchingApi, ns: OperatorNamespace, etcd: EtcdServer, tmp_path: Path, seed: int
) -> None:
    faults = RandomFaults(seed, share=0.15)
    async with (
        ApiProxy(await api.access(), fault=faults) as proxy,
        an_operator(ns, tmp_path, proxy) as operator,
        Scenario(ns, etcd) as scenario,
    ):
        await scenario.play()
        faults.share = 0.0
        await scenario.ends_as(baseline.end)
        assert await operator.stop() == 0
    assert faults.chosen.total() > 0
    assert "Traceback" not in operator.log


@pytest.mark.parametrize("part", range(PARTS))
async def test_the_jobs_reach_the_same_state_if_the_operator_is_killed_after_any_write(
    baseline: Baseline, api: WatchingApi, cluster_with_crd: Cluster, etcd: EtcdServer, tmp_path: Path, part: int
) -> None:
    first, end = (1 + baseline.writes * each // PARTS for each in (part, part + 1))
    last_certain = min(end, baseline.writes + 1 - WRITE_TOLERANCE)
    for number in range(first, end) if EXHAUSTIVE else [random.Random(part).randrange(first, last_certain)]:
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            await killed_after(number, baseline, api, cluster_with_crd, etcd, folder)
        except BaseException as error:
            error.add_note(f"the operator was killed after its write {number} of {baseline.writes}")
            raise


async def killed_after(
    number: int, baseline: Baseline, api: WatchingApi, cluster: Cluster, etcd: EtcdServer, folder: Path
) -> None:
    """Kill and restart the operator once, between a write and its answer, and check the final state."""
    killed: list[int] = []

    def on_write(count: int) -> None:
        if count == number:
            killed.append(count)
            operator.kill()
            operator.start()

    async with (
        new_namespace(api, cluster) as ns,
        ApiProxy(await api.access(), on_write=on_write) as proxy,
        an_operator(ns, folder, proxy) as operator,
        Scenario(ns, etcd) as scenario,
    ):
        await scenario.play()
        await scenario.ends_as(baseline.end)
        await operator.wait_until_ready()  # the operator may have just restarted
        assert await operator.stop() == 0
    assert killed == [number] or number > baseline.writes - WRITE_TOLERANCE
    assert "Traceback" not in operator.log


async def test_the_jobs_reach_the_same_state_with_two_concurrent_leaders(
    baseline: Baseline, api: WatchingApi, ns: OperatorNamespace, etcd: EtcdServer, tmp_path: Path
) -> None:
    async with (
        ApiProxy(await api.access()) as proxy,
        an_operator(ns, tmp_path, proxy, "--no-leader-elect", name="one") as one,
        an_operator(ns, tmp_path, proxy, "--no-leader-elect", name="two") as two,
        Scenario(ns, etcd) as scenario,
    ):
        await scenario.play()
        await scenario.ends_as(baseline.end)
        for operator in (one, two):
            assert await operator.metric("elastic_operator_reconciles_total", result="success") > 0
            assert await operator.stop() == 0
            assert "Traceback" not in operator.log
