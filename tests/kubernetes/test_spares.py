"""Spares of jobs on a real API server; the tests report what kubelets and agents would."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import pytest

from elastic_operator.kubernetes.client import PODS
from tests.support.operator_namespace import holds, index_of, live, uids
from torchelastic.store.client import connect

if TYPE_CHECKING:
    from tests.support.etcd import EtcdServer
    from tests.support.operator_namespace import OperatorNamespace

pytestmark = [
    pytest.mark.control_plane,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.usefixtures("operator"),
]


async def test_the_operator_keeps_the_spares_of_a_job_and_counts_them_apart(
    ns: OperatorNamespace, etcd: EtcdServer
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        store = await connect(etcd.settings)
        stack.push_async_callback(store.close)
        job = await ns.apply(replicas=2, spares=1, etcd={"endpoint": etcd.endpoint})
        pods = await ns.wait_for_pods(3)
        for pod in pods.values():
            environment = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
            assert environment["PET_WARM_SPARE"] == "1"
        first, second, spare = sorted(pods, key=lambda name: index_of(pods[name]))
        await ns.report_round(store, job, first, second)
        await ns.wait_for_job(lambda status: status.get("state") == "Running" and status["readyDesired"] == "2/2")
        await ns.report_joined(store, job, spare)
        await ns.wait_for_job(lambda status: status.get("readySpares") == 1)
        columns = (await ns.kubectl("get", "elasticjobs", "-o", "wide")).stdout.splitlines()
        assert columns[0].split() == [
            *("NAME", "STATE", "READY", "MIN", "MAX", "RESTARTS", "AGE", "ROUND", "WORLD", "SPARES")
        ]
        assert (columns[1].split()[2], columns[1].split()[-1]) == ("2/2", "1")

        # A member fails, and the spare takes its place.
        await ns.report_ended(first, 1)
        await ns.report_round(store, job, second, spare, round=2)
        changed = await ns.wait_for(PODS, lambda found: len(live(found)) == 3 and first not in live(found))
        status = (await ns.wait_for_job(lambda status: status.get("podFailures") == 1 and status.get("round") == 2))[
            "status"
        ]
        assert (status["readyDesired"], status["readySpares"], status["state"]) == ("2/2", 0, "Running")
        assert not holds(status, "Degraded")
        (successor,) = live(changed).keys() - {second, spare}
        assert index_of(changed[successor]) == 0

        # The scale of the job does not include its spares, and an unused pod leaves before one that trains.
        await ns.report_joined(store, job, successor)
        await ns.wait_for_job(lambda status: status.get("readySpares") == 1)
        await ns.kubectl("scale", "elasticjob/digits", "--replicas=1")
        small = await ns.wait_for(PODS, lambda found: len(live(found)) == 2)
        assert live(small).keys() == {second, spare}
        path = f"/apis/elastic.pytorch.org/v1alpha1/namespaces/{ns.name}/elasticjobs/digits/scale"
        scale = json.loads((await ns.kubectl("get", "--raw", path)).stdout)
        assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (1, 1)
        await ns.change(spares=0)
        assert uids(live(await ns.wait_for_pods(1))) == {changed[second]["metadata"]["uid"]}
