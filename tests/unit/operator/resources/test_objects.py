"""The conversion of pods, jobs and etcd objects into the model of the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from elastic_operator.api.constants import Reason
from elastic_operator.api.status import JobStatus, status_to_json
from elastic_operator.controller import messages
from elastic_operator.controller.model import EtcdState, NewPod, Pod, PodPhase, TerminationCause
from elastic_operator.errors import BadInput
from elastic_operator.kubernetes.backend import job_of
from elastic_operator.kubernetes.object_cache import etcd_blocked, etcd_state
from elastic_operator.kubernetes.pod_status import pod_of
from elastic_operator.manifest.crd import apply_defaults
from elastic_operator.resources.owned_objects import AGENT_METRICS_PORT, PodSettings
from elastic_operator.resources.worker_pod import worker_pod
from tests.support.builders import UID, a_job, size, termination_message
from torchelastic.protocol.pod import TerminationMessage, encode_termination_message
from torchelastic.protocol.records import PROTOCOL_VERSION, FailureRecord

NAME = "digits-1-bcdfg"
SIZE = size(2, generation=3)
CREATED, STARTED, ENDED = "2026-03-01T12:00:00Z", "2026-03-01T12:00:05Z", "2026-03-01T12:01:00Z"
AT_CREATED, AT_STARTED, AT_ENDED = 1772366400.0, 1772366405.0, 1772366460.0

SCHEDULED = {"type": "PodScheduled", "status": "True", "lastTransitionTime": CREATED}
RUNNING = {"running": {"startedAt": STARTED}}
CREATING = {"waiting": {"reason": "ContainerCreating"}}


def an_object(phase: str = "Running", *statuses: dict[str, Any], template: Any = None, **status: Any) -> dict[str, Any]:
    """Return a pod as created by the operator, with a status from the kubelet."""
    job = a_job(image="team/train:1", args=("x.py",), template={"spec": template or {}})
    made = worker_pod(
        job, NewPod(NAME, 1, SIZE, failures=2, failed=AT_CREATED - 9), PodSettings(), store="10.96.0.7:2379"
    )
    made["metadata"] |= {"uid": "uid-1", "creationTimestamp": CREATED, "resourceVersion": "77", "managedFields": [{}]}
    made["spec"]["nodeName"] = "node-1"
    made["status"] = {"phase": phase, "conditions": [SCHEDULED], "containerStatuses": list(statuses), **status}
    return made


def without_node(obj: dict[str, Any]) -> dict[str, Any]:
    """Return the pod without a node."""
    del obj["spec"]["nodeName"]
    return obj


def worker(state: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": "worker", "state": state, "ready": "running" in state, "image": "docker.io/team/train:1", **more}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def starting(reason: str = "ContainerCreating", message: str = "", **more: Any) -> dict[str, Any]:
    """Return a pod whose worker container is waiting with this reason."""
    return an_object("Pending", worker(waiting(reason, message)), **more)


def unscheduled(reason: str, message: str = "", **more: Any) -> dict[str, Any]:
    """Return a pod that the scheduler could not place."""
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return an_object("Pending", conditions=[condition], **more)


def ended(code: int, message: str = "", reason: str = "Error", **more: Any) -> dict[str, Any]:
    times = {"startedAt": STARTED, "finishedAt": ENDED}
    return {"terminated": {"exitCode": code, "reason": reason, "message": message, **times, **more}}


BASE = Pod(
    name=NAME,
    uid="uid-1",
    index=1,
    phase=PodPhase.PENDING,
    created=AT_CREATED,
    failures=2,
    failed=AT_CREATED - 9,
    size=SIZE,
    node="node-1",
    conditions={"PodScheduled": "True"},
    metrics_port=AGENT_METRICS_PORT,
    etcd_address="10.96.0.7",
)


# The phase of a pod


def test_a_new_pod_is_pending() -> None:
    assert pod_of(an_object("Pending", conditions=None, containerStatuses=None)) == replace(BASE, conditions={})


def test_a_pod_runs_when_its_worker_does() -> None:
    running = replace(BASE, phase=PodPhase.RUNNING, ready=True, started=AT_STARTED)
    assert pod_of(an_object("Running", worker(RUNNING))) == running
    assert pod_of(an_object("Pending", worker(RUNNING))) == running
    assert pod_of(an_object("Running", worker(RUNNING, ready=False))) == replace(running, ready=False)


def test_a_pod_that_is_deleted_before_it_has_a_node_never_runs() -> None:
    held = without_node(an_object("Pending"))
    held["metadata"] |= {"deletionTimestamp": ENDED, "finalizers": ["queue.example.org/managed"]}
    gone = pod_of(held)
    assert (gone.phase, gone.terminating, gone.ended) == (PodPhase.FAILED, True, AT_ENDED)
    assert (gone.started, gone.exit_code) == (None, None)


def test_a_pod_ends_when_its_worker_exits_despite_running_sidecars() -> None:
    sidecar = {"name": "log", "state": RUNNING, "ready": True}
    lingering = pod_of(an_object("Running", sidecar, worker(ended(1, "x"))))
    assert (lingering.phase, lingering.sidecars_running, lingering.ready) == (PodPhase.FAILED, True, False)
    alone = pod_of(an_object("Running", {"name": "log", "state": ended(0)}, worker(ended(0, reason="Completed"))))
    assert (alone.phase, alone.sidecars_running) == (PodPhase.SUCCEEDED, False)
    native = pod_of(an_object("Running", worker(ended(0)), initContainerStatuses=[sidecar]))
    assert (native.phase, native.sidecars_running) == (PodPhase.SUCCEEDED, False)
    assert not pod_of(an_object("Running", sidecar, worker(RUNNING))).sidecars_running


def test_the_termination_message_is_decoded() -> None:
    failure = FailureRecord(round=3, rank=1, local_rank=0, node="n.1", exit_code=-9, message="killed")
    message = TerminationMessage(reason="WorkerFailed", message="rank 1 was killed", round=3, failure=failure)
    pod = pod_of(an_object("Failed", worker(ended(1, encode_termination_message(message).decode() + "\n"))))
    assert pod == replace(
        BASE,
        phase=PodPhase.FAILED,
        started=AT_STARTED,
        ended=AT_ENDED,
        exit_code=1,
        message=message,
        reasons=frozenset({"Error"}),
    )


@pytest.mark.parametrize("text", ["Traceback\nValueError: x", '{"a": 1}', '{"reason": 7}', "[1]", "7", "\ud800"])
def test_a_termination_message_of_another_program_is_plain_text(text: str) -> None:
    assert pod_of(an_object("Failed", worker(ended(1, text + "\n")))).message == text


DISK = "Pod ephemeral local storage\nexceeded"
NO_DEVICE = "Allocate failed due to no healthy devices"
NO_NODE = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "DeletionByPodGC",
    "message": "PodGC: node no longer exists",
    "lastTransitionTime": ENDED,
}
FETCHING = [{"name": "fetch", "state": ended(3, "trying\nno such bucket")}]
LOST = ended(137, "The container could not be located", "ContainerStatusUnknown")


@pytest.mark.parametrize(
    ("statuses", "more", "code", "last_line"),
    [
        ([worker(ended(137, "step 7", "OOMKilled"))], {}, 137, "OOMKilled: it ran out of memory"),
        ([worker(ended(137, "", "ContainerStatusUnknown"))], {}, None, "ContainerStatusUnknown"),
        ([], {"reason": "Evicted", "message": "low on memory. "}, None, "Evicted: low on memory."),
        (
            [worker(ended(137))],
            {"reason": "Evicted", "message": DISK},
            137,
            "Evicted: Pod ephemeral local storage exceeded",
        ),
        (
            [],
            {"reason": "UnexpectedAdmissionError", "message": NO_DEVICE},
            None,
            f"UnexpectedAdmissionError: {NO_DEVICE}",
        ),
        ([worker(RUNNING)], {"conditions": [NO_NODE]}, None, "DeletionByPodGC: PodGC: node no longer exists"),
        (
            [worker(waiting("PodInitializing"))],
            {"initContainerStatuses": FETCHING},
            None,
            "its init container fetch exited with code 3: no such bucket",
        ),
        ([worker({}, lastState=LOST)], {}, None, "ContainerStatusUnknown"),
    ],
)
def test_without_a_termination_message_the_reason_comes_from_the_pod_status(
    statuses: list[dict[str, Any]], more: dict[str, Any], code: int | None, last_line: str
) -> None:
    pod = pod_of(an_object("Failed", *statuses, **more))
    assert (pod.phase, pod.exit_code) == (PodPhase.FAILED, code)
    assert str(pod.message).splitlines()[-1] == last_line
    assert pod.waiting == ""
    assert not pod.sidecars_running


def test_the_exit_code_of_an_init_container_is_distinguished_from_that_of_the_agent() -> None:
    failed = [{"name": "fetch", "state": ended(3)}]
    assert pod_of(an_object("Failed", worker(CREATING), initContainerStatuses=failed)).init_exit_code == 3
    succeeded = [{"name": "fetch", "state": ended(0)}]
    pod = pod_of(an_object("Failed", worker(ended(1)), initContainerStatuses=succeeded))
    assert (pod.init_exit_code, pod.exit_code) == (None, 1)


def test_the_termination_message_takes_precedence_unless_the_agent_was_asked_to_leave() -> None:
    failed = encode_termination_message(termination_message("rank 0 failed", "WorkerFailed")).decode()
    pod = pod_of(an_object("Failed", worker(ended(1, failed)), reason="Evicted", message="memory"))
    assert pod.message == termination_message("rank 0 failed", "WorkerFailed")
    left = encode_termination_message(termination_message("left on SIGTERM", "Left")).decode()
    assert pod_of(an_object("Failed", worker(ended(143, left)))).message == termination_message(
        "left on SIGTERM", "Left"
    )
    evicted = pod_of(an_object("Failed", worker(ended(143, left)), reason="Evicted", message="memory"))
    assert evicted.message == "Evicted: memory"
    assert messages.pod_disruption(evicted) == "was evicted: memory"


def test_a_pod_succeeds_only_if_its_worker_does() -> None:
    assert pod_of(an_object("Succeeded")).phase is PodPhase.FAILED
    assert pod_of(an_object("Succeeded", worker(RUNNING))).phase is PodPhase.FAILED


# Why a pod ended


def disrupted(reason: str, status: str = "True") -> dict[str, str]:
    return {"type": "DisruptionTarget", "status": status, "reason": reason, "message": "for the sake of others"}


def ready(status: str, kind: str = "Ready") -> dict[str, str]:
    return {"type": kind, "status": status}


SILENT = [ready("False"), ready("True", "ContainersReady")]
"""The conditions of a pod whose node does not respond."""
LEFT = encode_termination_message(termination_message("left on SIGTERM", "Left")).decode()
LOW = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 80Mi."
FULL = 'Usage of EmptyDir volume "tmp" exceeds the limit "1Gi".'
FULL_POD = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi."
FULL_CONTAINER = 'Container worker exceeded its local ephemeral storage limit "1Gi".'
RUNS = worker(RUNNING)
DISRUPTED, NODE_LOST, NOT_ADMITTED, OVER_LIMIT, OUT_OF_MEMORY = (
    TerminationCause.DISRUPTED,
    TerminationCause.NODE_LOST,
    TerminationCause.NOT_ADMITTED,
    TerminationCause.OVER_LIMIT,
    TerminationCause.OUT_OF_MEMORY,
)


def leaving(*statuses: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a pod that is being deleted."""
    obj = an_object("Running", *statuses, **more)
    obj["metadata"]["deletionTimestamp"] = ENDED
    return obj


@pytest.mark.parametrize(
    ("obj", "cause"),
    [
        *(
            (obj, DISRUPTED)
            for reason in ("PreemptionByScheduler", "DeletionByTaintManager")
            for obj in (
                an_object("Failed", worker(ended(137)), conditions=[disrupted(reason)]),
                an_object("Failed", conditions=[disrupted(reason)]),
                leaving(RUNS, conditions=[disrupted(reason)]),
            )
        ),
        (an_object("Running", RUNS, conditions=[disrupted("PreemptionByScheduler")]), None),
        (an_object("Failed", worker(ended(1)), conditions=[disrupted("EvictionByEvictionAPI", "False")]), None),
        (an_object("Failed", worker(ended(137)), reason="Evicted", message=LOW), DISRUPTED),
        (an_object("Failed", worker(ended(137)), reason="Preempting", message="to admit critical pod"), DISRUPTED),
        (an_object("Failed", worker(ended(137)), reason="Terminated", message="imminent node shutdown"), DISRUPTED),
        (an_object("Failed", worker(ended(143, LEFT)), reason="Evicted", message=FULL), OVER_LIMIT),
        (an_object("Failed", worker(ended(143, LEFT)), reason="Evicted", message=FULL_POD), OVER_LIMIT),
        (an_object("Failed", worker(ended(143, LEFT)), reason="Evicted", message=FULL_CONTAINER), OVER_LIMIT),
        (leaving(RUNS, conditions=SILENT), NODE_LOST),
        (leaving(RUNS, conditions=[*SILENT, disrupted("DeletionByTaintManager")]), NODE_LOST),
        (leaving(RUNS, reason="NodeLost", message="node node-1 is unresponsive"), NODE_LOST),
        (an_object("Failed", RUNS, conditions=[disrupted("DeletionByPodGC")]), NODE_LOST),
        (an_object("Failed", conditions=[disrupted("DeletionByPodGC")]), NODE_LOST),
        (leaving(RUNS, conditions=[ready("False"), ready("False", "ContainersReady")]), None),
        (leaving(RUNS), None),
        (leaving(worker(ended(137)), conditions=SILENT), None),
        (leaving(RUNS, conditions=SILENT, template={"readinessGates": [{"conditionType": "x/y"}]}), None),
        *(
            (an_object("Failed", *statuses, reason=reason), NOT_ADMITTED)
            for reason in ("OutOfcpu", "OutOfnvidia.com/gpu", "UnexpectedAdmissionError", "NodePorts")
            for statuses in ((), (worker(CREATING),))
        ),
        *((an_object("Failed", reason=reason), None) for reason in ("SysctlForbidden", "DeadlineExceeded", "")),
        (an_object("Failed", worker(ended(137, "step 7", "OOMKilled"))), OUT_OF_MEMORY),
        (an_object("Failed", worker(ended(143, LEFT, "OOMKilled"))), None),
        (an_object("Succeeded", worker(ended(0, reason="OOMKilled")), reason="Evicted"), None),
        (an_object("Running", RUNS), None),
        (an_object("Failed", worker(ended(1))), None),
    ],
)
def test_the_termination_cause_is_read_from_reasons_and_conditions(
    obj: dict[str, Any], cause: TerminationCause | None
) -> None:
    pod = pod_of(obj)
    assert pod.termination_cause is cause
    assert pod.reasons >= {text for text in (obj["status"].get("reason"),) if text}


def test_a_node_without_heartbeats_is_reported() -> None:
    pod = pod_of(an_object("Running", RUNS, conditions=SILENT))
    assert (pod.termination_cause, pod.waiting) == (None, "its node node-1 sends no heartbeats")
    assert pod.conditions == {"Ready": "False", "ContainersReady": "True"}


# Why a pod does not start


CAUSE = 'failed to resolve "team/train:1": not found'
PULL = f"rpc error: code = NotFound desc = {CAUSE}"
NO_PULL = "the image team/train:1 cannot be pulled"
BACK_OFF = 'Back-off pulling image "team/train:1"'


UNAVAILABLE = "0/3 nodes are available: 3 "
NO_GPU = (
    f"{UNAVAILABLE}Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: {UNAVAILABLE}Preemption is "
    "not helpful for scheduling."
)
GATED = {"schedulingGates": [{"name": "team/quota"}, {"name": "team/data"}]}


def initialized(state: dict[str, Any], name: str = "fetch", **more: Any) -> dict[str, Any]:
    """Return a pod that waits for its init container, which is in this state."""
    template = {"initContainers": [{"name": name, "image": "busybox:9", **more}]}
    statuses = [{"name": name, "state": state}]
    return starting("PodInitializing", template=template, initContainerStatuses=statuses)


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        (starting(), ""),
        (starting("PodInitializing"), ""),
        (an_object("Pending", worker({})), ""),
        (unscheduled("Unschedulable", NO_GPU), f"it cannot be scheduled: {UNAVAILABLE}Insufficient nvidia.com/gpu."),
        (unscheduled("SchedulingGated"), "it cannot be scheduled: SchedulingGated"),
        (
            unscheduled("SchedulingGated", template=GATED),
            "it is not scheduled before its scheduling gates are removed: team/quota, team/data",
        ),
        (
            without_node(an_object("Pending", conditions=[], template={"schedulerName": "volcano"})),
            "the scheduler volcano has not processed it yet; check that this scheduler runs",
        ),
        (without_node(an_object("Pending", conditions=[], template={"schedulerName": "default-scheduler"})), ""),
        (starting(template={"schedulerName": "volcano"}), ""),
        (starting("ErrImagePull", PULL), f"{NO_PULL}: {CAUSE}"),
        (starting("ImagePullBackOff", f"{BACK_OFF}: ErrImagePull: {PULL}"), f"{NO_PULL}: {CAUSE}"),
        (starting("ImagePullBackOff", BACK_OFF), NO_PULL),
        (
            starting("InvalidImageName", 'couldn\'t parse image name "TEAM"'),
            '"team/train:1" is not a valid image name; correct it in the job',
        ),
        (
            starting("ErrImageNeverPull", 'Container image "x" is not present'),
            "the image team/train:1 is not on its node, and imagePullPolicy is Never",
        ),
        (
            starting("CreateContainerConfigError", 'secret "hub" not found'),
            'its container cannot be started: secret "hub" not found; create it, or name another one in spec.template',
        ),
        (starting("NewerThanUs", "who knows"), "NewerThanUs: who knows"),
        (starting("NewerThanUs"), "NewerThanUs"),
        (initialized(RUNNING), "its init container fetch still runs"),
        (initialized(RUNNING, "proxy", restartPolicy="Always"), ""),
        (
            initialized(waiting("ErrImagePull", "denied")),
            "its init container fetch: the image busybox:9 cannot be pulled (is it on the nodes?): denied",
        ),
        (an_object("Running", worker(RUNNING)), ""),
    ],
)
def test_the_reason_why_a_pod_does_not_start_is_reported(obj: dict[str, Any], words: str) -> None:
    assert pod_of(obj).waiting == words


# Incompatible images

CONTAINERD = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: "
    'unable to start container process: exec: "torchelastic-run": executable file not found in $PATH: unknown'
)
CRUN = "container create failed: executable file `torchelastic-run` not found in $PATH: No such file or directory"


@pytest.mark.parametrize(
    "obj",
    [
        an_object("Failed", worker(ended(128, CONTAINERD, "StartError"))),
        an_object("Failed", worker(ended(127, CONTAINERD, "ContainerCannotRun"))),
        an_object("Pending", worker(waiting("CreateContainerError", CRUN))),
        an_object(
            "Pending", worker(waiting("RunContainerError", 'error finding executable "torchelastic-run" in PATH'))
        ),
        an_object(
            "Failed", worker(ended(128, "exec /usr/bin/torchelastic-run: no such file or directory", "StartError"))
        ),
    ],
)
def test_an_image_without_the_agent_is_incompatible(obj: dict[str, Any]) -> None:
    incompatible_image = pod_of(obj).incompatible_image
    assert incompatible_image is not None
    assert incompatible_image.reason is Reason.NO_AGENT
    assert incompatible_image.message == (
        "the image team/train:1 has no torchelastic-run, which every worker pod runs: install the agent in it, "
        "as docs/own-image.md shows, or name an image that has it"
    )


@pytest.mark.parametrize(
    "state",
    [
        ended(128, 'exec: "other": executable file not found in $PATH', "StartError"),
        ended(128, "mount of torchelastic-run-0-bcdfg: no such file or directory", "StartError"),
        waiting("ImagePullBackOff", 'image "torchelastic-run" not found'),
        RUNNING,
    ],
)
def test_other_problems_do_not_make_an_image_incompatible(state: dict[str, Any]) -> None:
    assert pod_of(an_object("Pending", worker(state))).incompatible_image is None


def message_of_version(version: int, **more: Any) -> str:
    """Return the termination message of an agent with this protocol version."""
    return json.dumps({"reason": "BadInput", "message": "the versions differ", "protocol": version, **more})


@pytest.mark.parametrize("message", [message_of_version(7), message_of_version(7, round="one", news=[1])])
def test_an_agent_of_another_protocol_version_is_incompatible(message: str) -> None:
    incompatible_image = pod_of(an_object("Failed", worker(ended(2, message)))).incompatible_image
    assert incompatible_image is not None
    assert incompatible_image.reason is Reason.PROTOCOL_MISMATCH
    assert incompatible_image.message == (
        "the agent in the image team/train:1 speaks version 7 of the protocol between operator and agents, and this "
        f"operator version {PROTOCOL_VERSION}: use an agent and an operator of the same release"
    )


@pytest.mark.parametrize(
    "message", [message_of_version(PROTOCOL_VERSION), '{"protocol": 7}', '{"reason": "x", "protocol": "7"}', ""]
)
def test_an_agent_of_this_protocol_version_is_compatible(message: str) -> None:
    assert pod_of(an_object("Failed", worker(ended(2, message)))).incompatible_image is None


# Labels and annotations


@pytest.mark.parametrize(
    ("label", "index"), [("0", 0), ("12", 12), (None, 1), ("x", 1), ("-3", 1), ("٣", 1), ("9" * 30, 1)]
)
def test_the_index_comes_from_the_label_or_else_from_the_name(label: str | None, index: int) -> None:
    obj = an_object()
    obj["metadata"]["labels"]["elastic.pytorch.org/index"] = label
    assert pod_of(obj).index == index


@pytest.mark.parametrize("note", ["", "x", "-1", "65536", "9" * 30])
def test_an_invalid_annotation_is_ignored(note: str) -> None:
    obj = an_object()
    for key in ("failed", "size", "metrics-port"):
        obj["metadata"]["annotations"][f"elastic.pytorch.org/{key}"] = note
    pod = pod_of(obj)
    assert (pod.failed, pod.size, pod.metrics_port) == (None, None, 0)


@pytest.mark.parametrize(
    ("store", "address"),
    [("10.96.0.7:2379", "10.96.0.7"), ("[fd00::7]:2379", "fd00::7"), ("", None), ("nonsense", None)],
)
def test_the_address_of_etcd_is_read_from_a_pod(store: str, address: str | None) -> None:
    obj = worker_pod(a_job(), NewPod(NAME, 1, SIZE), PodSettings(), store=store)
    assert pod_of(obj).etcd_address == address


# Jobs


def a_stored_job(**spec: Any) -> dict[str, Any]:
    fields = {"maxReplicas": 3, "image": "i", "args": ["x.py"], **spec}
    return apply_defaults(
        {
            "metadata": {
                "name": "digits",
                "namespace": "team",
                "uid": UID,
                "generation": 4,
                "creationTimestamp": CREATED,
            },
            "spec": fields,
        }
    )


def test_a_job_is_read_with_its_status() -> None:
    status = JobStatus(replicas=2, restarts=7, counted_pod_uids=frozenset({"a"}))
    job = job_of({**a_stored_job(etcd={"endpoint": "e:1"}), "status": {**status_to_json(status), "selector": "x=y"}})
    assert (job.name, job.namespace, job.uid, job.generation) == ("digits", "team", UID, 4)
    assert (job.created, job.deleting, job.status) == (AT_CREATED, False, status)
    leaving = a_stored_job()
    leaving["metadata"]["deletionTimestamp"] = ENDED
    assert job_of(leaving).deleting
    assert (job.spec.min_replicas, job.spec.max_replicas, job.spec.etcd.endpoint) == (1, 3, "e:1")


@pytest.mark.parametrize(
    "spec",
    [
        None,
        7,
        {},
        {"minReplicas": 1, "maxReplicas": "many"},
        {"minReplicas": 1, "maxReplicas": 2, "etcd": 7},
        {"minReplicas": 1, "maxReplicas": 2, "failurePolicy": {"rules": [{"action": "Shrug"}]}},
    ],
)
def test_a_job_of_another_definition_is_refused(spec: Any) -> None:
    with pytest.raises(BadInput, match="the spec of the job digits does not match this operator's definition"):
        job_of({**a_stored_job(), "spec": spec})


# etcd

SERVICE: dict[str, Any] = {"metadata": {"name": "digits-etcd"}}
GOING: dict[str, Any] = {"metadata": {"deletionTimestamp": ENDED}}


def a_deployment(*, generation: int = 1, observed: int = 1, ready: int | None = 1) -> dict[str, Any]:
    return {"metadata": {"generation": generation}, "status": {"observedGeneration": observed, "readyReplicas": ready}}


@pytest.mark.parametrize(
    ("service", "deployment", "state"),
    [
        (None, None, EtcdState.ABSENT),
        (SERVICE, None, EtcdState.ABSENT),
        (None, a_deployment(), EtcdState.ABSENT),
        (GOING, a_deployment(), EtcdState.ABSENT),
        (SERVICE, GOING, EtcdState.ABSENT),
        (SERVICE, {"metadata": {}}, EtcdState.STARTING),
        (SERVICE, a_deployment(ready=None), EtcdState.STARTING),
        (SERVICE, a_deployment(generation=2), EtcdState.STARTING),
        (SERVICE, a_deployment(), EtcdState.READY),
    ],
)
def test_the_state_of_etcd_is_read_from_its_deployment(service: Any, deployment: Any, state: EtcdState) -> None:
    assert etcd_state(service, deployment) is state


def test_a_deployment_says_why_the_pod_of_etcd_cannot_be_created() -> None:
    failed = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "no such thing today"}
    assert etcd_blocked({"status": {"conditions": [failed]}}) == "no such thing today"
    assert etcd_blocked({"status": {"conditions": [{**failed, "status": "False"}]}}) is None
    assert etcd_blocked(a_deployment()) is None
    assert etcd_blocked(None) is None
