"""Pods with scheduling gates and finalizers of another controller.

Queueing systems that admit a job by its pods add such gates and finalizers. The tests act as such a system.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_operator.api.constants import worker_selector
from elastic_operator.api.json_values import get_time
from elastic_operator.kubernetes.client import PODS
from tests.support.operator_namespace import OperatorNamespace, conditions, holds, index_of, live

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.operator_namespace import Json, Objects

pytestmark = [
    pytest.mark.control_plane,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.usefixtures("operator"),
]

GATE = "queue.example.org/admission"
HELD = "queue.example.org/managed"
GATED = {"spec": {"schedulerName": "nobody", "schedulingGates": [{"name": GATE}]}}


async def hold(ns: OperatorNamespace, pod: str, *finalizers: str) -> None:
    await ns.api.patch(PODS, ns.name, pod, {"metadata": {"finalizers": list(finalizers)}})


async def workers(ns: OperatorNamespace, true: Callable[[Objects], bool]) -> Objects:
    """Wait until the worker pods meet a condition, and return the pods."""
    return await ns.wait_for(PODS, true, labels=worker_selector("digits"))


def names_the_gate(status: Json) -> bool:
    return holds(status, "Waiting") and GATE in conditions(status)["Waiting"]["message"]


async def test_gated_pods_wait_and_a_rejected_one_is_replaced_without_a_charge(
    ns: OperatorNamespace,
) -> None:
    await ns.apply(template=GATED, replicas=2, backoffLimit=0)
    before = await ns.wait_for_pods(2)
    await ns.wait_for_job(names_the_gate)
    gone = min(before)
    await hold(ns, gone, HELD)
    await ns.api.delete(PODS, ns.name, gone)
    found = await workers(ns, lambda pods: len(live(pods)) == 2 and live(pods).keys() != before.keys())
    assert gone in found, "the gated pod still waits"
    assert max(before) in live(found), "the other pod is replaced"
    assert (await ns.wait_for_job(names_the_gate))["status"]["podFailures"] == 0
    await hold(ns, gone)

    for pod in live(found):
        await ns.api.patch(PODS, ns.name, pod, {"spec": {"schedulingGates": []}})
    await ns.wait_for_job(lambda status: not names_the_gate(status))


async def test_pods_deleted_before_they_ran_are_replaced_with_growing_delays(ns: OperatorNamespace) -> None:
    await ns.apply(template=GATED, replicas=2)
    await ns.wait_for_pods(2)
    made: list[Json] = []
    for _ in range(5):
        names = {pod["metadata"]["name"] for pod in made}

        def new_pods(pods: Objects, names: set[str] = names) -> list[Json]:
            return [pod for name, pod in live(pods).items() if index_of(pod) == 1 and name not in names]

        found = await workers(ns, lambda pods: bool(new_pods(pods)))
        made += new_pods(found)
        await ns.api.delete(PODS, ns.name, made[-1]["metadata"]["name"])
    times = [get_time(pod, "metadata", "creationTimestamp") or 0.0 for pod in made]
    assert times[-1] - times[0] >= 5, "the delays are 0, 1, 2 and 4 s, and the times are in whole seconds"
    await ns.wait_for_job(lambda status: "was deleted 5 times in a row" in str(status))


async def test_a_job_is_suspended_even_if_pods_without_a_node_have_finalizers(
    ns: OperatorNamespace,
) -> None:
    await ns.apply(template=GATED, replicas=2)
    first, second = await ns.wait_for_pods(2)
    await hold(ns, first, HELD)
    await ns.change(suspend=True)
    await ns.wait_for_job(lambda status: holds(status, "Suspended"))
    found = await workers(ns, lambda pods: second not in pods)
    assert "deletionTimestamp" in found[first]["metadata"]
    await hold(ns, first)
