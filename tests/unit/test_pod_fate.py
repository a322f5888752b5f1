"""What became of a pod, by all that Kubernetes says of it."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_operator.controller.failures import pod_end
from elastic_operator.controller.model import PodEnd, TerminationCause
from elastic_operator.kubernetes.pod_status import pod_of
from tests.support.builders import says
from torchelastic.protocol import encode_termination_message

STARTED, ENDED = "2026-03-01T12:00:05Z", "2026-03-01T12:01:00Z"
RUNNING = {"running": {"startedAt": STARTED}}
GONE = "node node-1 is unresponsive"


def a_pod(
    phase: str = "Running",
    state: dict[str, Any] | None = None,
    *conditions: dict[str, str],
    going: bool = False,
    **status: Any,
) -> dict[str, Any]:
    """A pod on node-1; ``state`` is its worker's, None for one of which nothing is known yet."""
    worker = [] if state is None else [{"name": "worker", "state": state, "ready": "running" in state}]
    about = {"name": "digits-0-bcdfg", "uid": "u", **({"deletionTimestamp": ENDED} if going else {})}
    return {
        "metadata": about,
        "spec": {"nodeName": "node-1", "containers": [{"name": "worker", "image": "i"}]},
        "status": {"phase": phase, "conditions": list(conditions), "containerStatuses": worker, **status},
    }


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {
        "terminated": {
            "exitCode": code, "reason": reason, "message": message, "startedAt": STARTED, "finishedAt": ENDED,
        }
    }  # fmt: skip


def disrupted(reason: str, status: str = "True") -> dict[str, str]:
    return {"type": "DisruptionTarget", "status": status, "reason": reason, "message": "for the sake of others"}


def ready(status: str, kind: str = "Ready") -> dict[str, str]:
    return {"type": kind, "status": status}


SILENT = (ready("False"), ready("True", "ContainersReady"))
"""What is left to see of a pod whose node is not heard of any more."""


@pytest.mark.parametrize("reason", ["PreemptionByScheduler", "EvictionByEvictionAPI", "DeletionByTaintManager"])
@pytest.mark.parametrize(
    "end", [("Failed", ended(137)), ("Failed", ended(143)), ("Failed", None), ("Running", RUNNING)]
)
def test_a_pod_that_others_need_the_place_of_was_disrupted(reason: str, end: tuple[str, Any]) -> None:
    phase, state = end
    pod = pod_of(a_pod(phase, state, disrupted(reason), going=phase == "Running"))
    assert pod.termination_cause is TerminationCause.DISRUPTED
    assert reason in pod.reasons
    assert pod.conditions["DisruptionTarget"] == "True"


def test_one_that_is_only_about_to_be_has_no_fate_yet() -> None:
    pod = pod_of(a_pod("Running", RUNNING, disrupted("PreemptionByScheduler")))
    assert (pod.termination_cause, pod.conditions) == (None, {"DisruptionTarget": "True"})


def test_a_disruption_that_did_not_happen_is_none() -> None:
    assert pod_of(a_pod("Failed", ended(1), disrupted("EvictionByEvictionAPI", "False"))).termination_cause is None


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("Evicted", "The node was low on resource: memory. Threshold quantity: 100Mi, available: 80Mi."),
        ("Evicted", "Pod was rejected: The node had condition: [DiskPressure]. "),
        ("Preempting", "Preempted in order to admit critical pod"),
        ("Terminated", "Pod was terminated in response to imminent node shutdown."),
    ],
)
@pytest.mark.parametrize("conditions", [(), (disrupted("TerminationByKubelet"),)])
def test_a_pod_that_its_node_ended_for_the_sake_of_others_was_disrupted(
    reason: str, message: str, conditions: tuple[dict[str, str], ...]
) -> None:
    pod = pod_of(a_pod("Failed", ended(137), *conditions, reason=reason, message=message))
    assert pod.termination_cause is TerminationCause.DISRUPTED
    assert pod.reasons >= {reason, "Error"}


@pytest.mark.parametrize(
    "message",
    [
        'Usage of EmptyDir volume "tmp" exceeds the limit "1Gi". ',
        "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ",
        'Container worker exceeded its local ephemeral storage limit "1Gi". ',
    ],
)
def test_a_pod_that_wrote_more_than_it_may_has_itself_to_blame(message: str) -> None:
    words = encode_termination_message(says("left on SIGTERM", "Left")).decode()
    pod = pod_of(a_pod("Failed", ended(143, message=words), reason="Evicted", message=message))
    assert (pod.termination_cause, pod.reasons) == (TerminationCause.OVER_LIMIT, {"Evicted", "Error"})
    assert pod.message == f"Evicted: {message.strip()}"
    assert pod_end(pod) is PodEnd.FAILED


@pytest.mark.parametrize(
    "obj",
    [
        a_pod("Running", RUNNING, *SILENT, going=True),
        a_pod("Running", RUNNING, *SILENT, disrupted("DeletionByTaintManager"), going=True),
        a_pod("Running", RUNNING, reason="NodeLost", message=GONE, going=True),
        a_pod("Failed", RUNNING, disrupted("DeletionByPodGC")),
        a_pod("Failed", None, disrupted("DeletionByPodGC")),
    ],
)
def test_a_pod_on_a_node_that_is_gone_or_silent_is_lost_with_it(obj: dict[str, Any]) -> None:
    assert pod_of(obj).termination_cause is TerminationCause.NODE_LOST


def test_that_a_node_is_silent_is_told_and_ends_nothing_by_itself() -> None:
    pod = pod_of(a_pod("Running", RUNNING, *SILENT))
    assert (pod.termination_cause, pod.waiting) == (None, "its node node-1 is silent")


@pytest.mark.parametrize(
    "obj",
    [
        a_pod("Running", RUNNING, ready("False"), ready("False", "ContainersReady"), going=True),
        a_pod("Running", RUNNING, ready("True"), ready("True", "ContainersReady"), going=True),
        a_pod("Running", RUNNING, going=True),
        a_pod("Running", ended(137), *SILENT, going=True),
        {**a_pod("Running", RUNNING, *SILENT, going=True), "spec": {"readinessGates": [{"conditionType": "x/y"}]}},
    ],
)
def test_a_pod_that_is_merely_not_ready_is_not_taken_for_lost(obj: dict[str, Any]) -> None:
    pod = pod_of(obj)
    assert (pod.termination_cause, pod.waiting) == (None, "")


@pytest.mark.parametrize(
    "reason",
    [
        "OutOfcpu",
        "OutOfmemory",
        "OutOfnvidia.com/gpu",
        "UnexpectedAdmissionError",
        "TopologyAffinityError",
        "NodePorts",
    ],
)
@pytest.mark.parametrize("state", [None, {"waiting": {"reason": "ContainerCreating"}}])
def test_a_pod_for_which_its_node_had_no_room_was_not_admitted(reason: str, state: Any) -> None:
    pod = pod_of(a_pod("Failed", state, reason=reason, message="Pod was rejected: no"))
    assert (pod.termination_cause, pod.reasons) == (TerminationCause.NOT_ADMITTED, {reason})


@pytest.mark.parametrize("reason", ["SysctlForbidden", "DeadlineExceeded", "PodOSNotSupported", ""])
def test_what_the_next_node_would_say_as_well_is_a_failure(reason: str) -> None:
    assert pod_of(a_pod("Failed", None, reason=reason)).termination_cause is None


def test_a_container_that_was_killed_for_memory_ran_out_of_it() -> None:
    pod = pod_of(a_pod("Failed", ended(137, "OOMKilled", "step 7")))
    assert (pod.termination_cause, pod.reasons) == (TerminationCause.OUT_OF_MEMORY, {"OOMKilled"})


def test_exit_code_0_counts_more_than_any_reason() -> None:
    pod = pod_of(a_pod("Succeeded", ended(0, "OOMKilled"), disrupted("PreemptionByScheduler"), reason="Evicted"))
    assert pod.termination_cause is None
    assert "OOMKilled" not in pod.reasons


def test_an_agent_that_outlived_a_process_that_was_killed_for_memory_has_the_word() -> None:
    words = encode_termination_message(says("left on SIGTERM", "Left")).decode()
    assert pod_of(a_pod("Failed", ended(143, "OOMKilled", words))).termination_cause is None


def test_a_pod_that_lives_or_died_by_itself_has_no_fate() -> None:
    assert pod_of(a_pod("Running", RUNNING, ready("True"))).termination_cause is None
    assert pod_of(a_pod("Failed", ended(1))).termination_cause is None
    assert pod_of(a_pod("Pending", None)).termination_cause is None
