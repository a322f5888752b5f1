"""Converts a pod's object into the planner's :class:`Pod`.

The state of the container ``worker`` decides, not the pod's phase, because a sidecar may still run. But a pod that was
evicted, rejected by its node, lost with its node, or deleted before it had a node has ended in any case.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import msgspec

from elastic_operator.api import constants
from elastic_operator.api.json_values import Json, get_dict, get_dicts, get_int, get_list, get_str, get_time, get_value
from elastic_operator.api.spec import WORKER
from elastic_operator.controller.model import IncompatibleImage, Pod, PodPhase, TerminationCause
from elastic_operator.kubernetes.client import with_hint
from elastic_operator.resources.worker_pod import LAUNCHER
from torchelastic.errors import MalformedRecord
from torchelastic.protocol.codec import decode, shorten
from torchelastic.protocol.pod import LEFT_CODES, TerminationMessage
from torchelastic.protocol.records import PROTOCOL_VERSION, SizeRecord

DISRUPTION: Final = "DisruptionTarget"
"""The condition of pods that are about to be removed for external reasons."""
OUT_OF_MEMORY: Final = "OOMKilled"

_UNKNOWN_STATUS: Final = "ContainerStatusUnknown"
"""The kubelet's reason for a container that it has lost; the exit code is not that of the container."""
_OWN_LIMITS: Final = ("exceeds the limit", "exceeds the total limit", "exceeded its local ephemeral storage limit")
"""Messages of a kubelet that evicts a pod because it exceeds its own limits."""


@dataclass(frozen=True, slots=True)
class ContainerState:
    """The state of a container; exactly one of ``waiting``, ``running`` and ``terminated`` is set.

    Attributes:
        ready: whether it runs and its readiness probe, if any, succeeds.
    """

    name: str
    waiting: Json | None = None
    running: Json | None = None
    terminated: Json | None = None
    ready: bool = False

    @property
    def exit_code(self) -> int | None:
        """The exit code; None if unknown."""
        if self.terminated is None or get_str(self.terminated, "reason") == _UNKNOWN_STATUS:
            return None
        return get_int(self.terminated, "exitCode")

    @property
    def started(self) -> float | None:
        """When the container started; None if unknown."""
        # A container that could not start has the start of the Unix epoch as its time.
        return get_time(self.running or self.terminated, "startedAt") or None

    @property
    def ended(self) -> float | None:
        """When the container ended; None if unknown."""
        return get_time(self.terminated, "finishedAt") or None


def container_states(pod: Json, kind: str = "containerStatuses") -> tuple[ContainerState, ...]:
    """Return the states of a pod's containers, or of its ``initContainerStatuses``."""
    return tuple(_state(entry, over=is_over(pod)) for entry in get_dicts(pod, "status", kind))


def is_over(pod: Json) -> bool:
    """Return whether all containers of the pod have stopped permanently."""
    return get_str(pod, "status", "phase") in ("Failed", "Succeeded")


def is_leaving(pod: Json) -> bool:
    """Return whether the pod is being deleted."""
    return bool(get_str(pod, "metadata", "deletionTimestamp"))


def event_time(event: Json) -> float:
    """Return when an event happened last, in seconds since the Unix epoch; 0 if unknown."""
    fields = (("series", "lastObservedTime"), ("lastTimestamp",), ("eventTime",), ("metadata", "creationTimestamp"))
    return next((time for field in fields if (time := get_time(event, *field)) is not None), 0.0)


def conditions_of(pod: Json) -> dict[str, str]:
    """Return the pod's conditions by type: True, False or Unknown."""
    return {get_str(entry, "type"): get_str(entry, "status") for entry in get_dicts(pod, "status", "conditions")}


def true_condition(body: Json | None, kind: str) -> Json | None:
    """Return an object's condition of this type, if it is true."""
    conditions = get_dicts(body, "status", "conditions")
    return next((each for each in conditions if each.get("type") == kind and each.get("status") == "True"), None)


def is_over_its_limit(pod: Json) -> bool:
    """Return whether a pod was evicted because it exceeded its storage limits."""
    return any(words in get_str(pod, "status", "message") for words in _OWN_LIMITS)


def node_is_unreachable(pod: Json, worker: ContainerState) -> bool:
    """Return whether the pod's node does not respond: the pod is not ready although its containers are.

    Kubernetes sets these conditions on all pods of such a node, and leaves the rest of their status unchanged.
    """
    if worker.running is None or get_list(pod, "spec", "readinessGates"):
        return False
    conditions = conditions_of(pod)
    return conditions.get("Ready") == "False" and conditions.get("ContainersReady") == "True"


def _state(entry: Json, *, over: bool) -> ContainerState:
    name = get_str(entry, "name")
    state = get_dict(entry, "state")
    terminated, running = state.get("terminated"), state.get("running")
    if not isinstance(terminated, dict) and over:
        # The kubelet has lost the container: only the last known state is available.
        last = get_value(entry, "lastState", "terminated")
        terminated = last if isinstance(last, dict) else None
        return ContainerState(name, waiting=None if terminated is not None else {}, terminated=terminated)
    if isinstance(terminated, dict):
        return ContainerState(name, terminated=terminated)
    if isinstance(running, dict):
        return ContainerState(name, running=running, ready=entry.get("ready") is True)
    return ContainerState(name, waiting=get_dict(state, "waiting"))


OWN_IMAGE_GUIDE: Final = "docs/own-image.md"

_LIMIT: Final = 400
_DEFAULT_SCHEDULER: Final = "default-scheduler"
_STARTING_REASONS: Final = frozenset({"", "ContainerCreating", "PodInitializing"})
_PULL: Final = frozenset({"ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable"})
_BACK_OFF: Final = re.compile(r'Back-off pulling image "[^"]*"(: ErrImagePull)?(: |$)')
_PREEMPTION: Final = re.compile(r"\s*(no new claims to deallocate, )?preemption: .*", re.DOTALL)
"""The part of the scheduler's message that repeats the message for the pods that it might preempt."""
_REMOTE: Final = re.compile(r"rpc error: code = \w+ desc = ")
_START_FAILURES: Final = frozenset({"StartError", "ContainerCannotRun", "CreateContainerError", "RunContainerError"})
"""Reasons for a container whose command cannot be executed."""
_LAUNCHER: Final = re.compile(rf"""["'`/]{re.escape(LAUNCHER)}["'`:]""")
"""How container runtimes quote the command; a pod's name may contain the same word."""
_NO_SUCH_FILE: Final = re.compile(r"not found|no such file|ENOENT|error finding", re.IGNORECASE)
_UNSPECIFIC_REASONS: Final = frozenset({"", "Completed", "Error"})


def why_waiting(pod: Json, name: str = WORKER) -> str:
    """Return why a container does not start, as a clause; empty if unknown."""
    if is_over(pod):
        return ""
    if why := _why_not_scheduled(pod):
        return why
    init_containers = container_states(pod, "initContainerStatuses")
    sidecars = {
        get_str(entry, "name")
        for entry in get_dicts(pod, "spec", "initContainers")
        if entry.get("restartPolicy") == "Always"
    }
    for container in init_containers:
        if (obstacle := _obstacle(pod, container, "initContainers")) is not None:
            return f"its init container {container.name}: {obstacle}"
        if container.running is not None and container.name not in sidecars:
            return f"its init container {container.name} still runs"
    for container in container_states(pod):
        if container.name == name:
            return _obstacle(pod, container, "containers") or ""
    return ""


def last_message(pod: Json, worker: ContainerState) -> TerminationMessage | str | None:
    """Return the termination message of an ended worker, or other information about its end; None if there is none."""
    # An agent does not know why it received a signal.
    if (is_over_its_limit(pod) and worker.exit_code != 0) or (worker.exit_code in LEFT_CODES and _end_of_pod(pod)):
        return _end_of_pod(pod)
    said = get_str(worker.terminated, "message").strip()
    try:
        return decode(said.encode(errors="replace"), TerminationMessage)
    except MalformedRecord:
        pass
    # The cluster's message comes last, because the last line of a plain string is shown.
    parts = [said, _exit_description(worker), _end_of_pod(pod)]
    if worker.terminated is None and (failed := _failed_init_container(pod)) is not None:
        lines = get_str(failed.terminated, "message").strip().splitlines()
        code = "ended for an unknown reason" if failed.exit_code is None else f"exited with code {failed.exit_code}"
        parts.append(f"its init container {failed.name} {code}{f': {in_a_line(lines[-1])}' if lines else ''}")
    return "\n".join(part for part in parts if part) or None


def incompatible_image(pod: Json, worker: ContainerState) -> IncompatibleImage | None:
    """Return why the pod's image is not compatible with this operator; None if it seems to be."""
    image = _image(pod, WORKER, "containers")
    state = worker.terminated or worker.waiting or {}
    if get_str(state, "reason") in _START_FAILURES:
        message = get_str(state, "message")
        if _LAUNCHER.search(message) and _NO_SUCH_FILE.search(message):
            return IncompatibleImage(
                constants.Reason.NO_AGENT,
                f"the image {image} has no {LAUNCHER}, which every worker pod runs: install the agent in it, "
                f"as {OWN_IMAGE_GUIDE} shows, or name an image that has it",
            )
    spoken = _protocol_of(get_str(worker.terminated, "message"))
    if spoken is not None and spoken != PROTOCOL_VERSION:
        return IncompatibleImage(
            constants.Reason.PROTOCOL_MISMATCH,
            f"the agent in the image {image} speaks version {spoken} of the protocol between operator and agents, and "
            f"this operator version {PROTOCOL_VERSION}: use an agent and an operator of the same release",
        )
    return None


def in_a_line(message: str) -> str:
    """Return a message of the cluster in one line, without prefixes of RPC errors, and of limited length."""
    return shorten(" ".join(_REMOTE.sub("", message).split()), _LIMIT)


def _why_not_scheduled(pod: Json) -> str:
    """Return why a pod has no node yet; empty if it has a node, or if the reason is unknown."""
    gates = tuple(get_str(gate, "name") for gate in get_dicts(pod, "spec", "schedulingGates"))
    if gates:
        return f"it is not scheduled before its scheduling gates are removed: {', '.join(gates)}"
    for condition in get_dicts(pod, "status", "conditions"):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            said = in_a_line(_PREEMPTION.sub("", get_str(condition, "message"))) or get_str(condition, "reason")
            return f"it cannot be scheduled{f': {said}' if said else ''}"
    scheduler = get_str(pod, "spec", "schedulerName")
    if scheduler not in ("", _DEFAULT_SCHEDULER) and not get_str(pod, "spec", "nodeName"):
        # The default scheduler always runs; another one may not be installed.
        return f"the scheduler {scheduler} has not processed it yet; check that this scheduler runs"
    return ""


class _MessageHeader(msgspec.Struct):
    """The fields that termination messages of all protocol versions have."""

    reason: str
    protocol: int


def _protocol_of(message: str) -> int | None:
    """Return the protocol version of the agent that left a message; None if no agent left it."""
    try:
        return msgspec.json.decode(message.encode(errors="replace"), type=_MessageHeader).protocol
    except (msgspec.DecodeError, RecursionError):
        return None


def _obstacle(pod: Json, container: ContainerState, kind: str) -> str | None:
    """Return why a container waits; None if it does not wait, or is being created."""
    if container.waiting is None or (reason := get_str(container.waiting, "reason")) in _STARTING_REASONS:
        return None
    image = _image(pod, container.name, kind)
    said = in_a_line(get_str(container.waiting, "message"))
    if reason in _PULL:
        # ErrImagePull and ImagePullBackOff alternate; both get the same message.
        cause = _BACK_OFF.sub("", said)
        # An image without a registry in its name was probably meant to be on the node already.
        hint = "" if "/" in image else " (is it on the nodes?)"
        return f"the image {image} cannot be pulled{hint}{f': {cause}' if cause else ''}"
    if reason == "InvalidImageName":
        return f'"{image}" is not a valid image name; correct it in the job'
    if reason == "ErrImageNeverPull":
        return f"the image {image} is not on its node, and imagePullPolicy is Never"
    if reason.startswith(("CreateContainer", "RunContainer", "PreCreateHook", "PreStartHook", "PostStartHook")):
        return f"its container cannot be started: {with_hint(said or reason)}"
    return f"{reason}: {said}" if said else reason


def _exit_description(worker: ContainerState) -> str:
    """Return the kubelet's message about the container's end, without its exit code."""
    reason = get_str(worker.terminated, "reason")
    if worker.exit_code == 0 or reason in _UNSPECIFIC_REASONS or reason in _START_FAILURES:
        return ""
    return f"{OUT_OF_MEMORY}: it ran out of memory" if reason == OUT_OF_MEMORY else reason


def _end_of_pod(pod: Json) -> str:
    """Return why the whole pod ended, for example because of an eviction."""
    for said in (get_dict(pod, "status"), true_condition(pod, DISRUPTION)):
        parts = (get_str(said, "reason"), in_a_line(get_str(said, "message")))
        if any(parts):
            return ": ".join(filter(None, parts))
    return ""


def _failed_init_container(pod: Json) -> ContainerState | None:
    init_containers = container_states(pod, "initContainerStatuses")
    return next((each for each in init_containers if each.terminated is not None and each.exit_code != 0), None)


def _image(pod: Json, name: str, kind: str) -> str:
    return next((get_str(entry, "image") for entry in get_dicts(pod, "spec", kind) if entry.get("name") == name), "")


_MAX_DIGITS: Final = 7
_NODE_LOST: Final = "NodeLost"
_NODE_DELETED: Final = "DeletionByPodGC"
_ENDED_BY_NODE: Final = frozenset({"Evicted", "Preempting", "Terminated", "Shutdown"})
"""The kubelet's reasons for ending a pod: lack of a resource, a critical pod, a shutdown."""
_NOT_ADMITTED: Final = frozenset(
    {
        "InvalidNodeInfo",
        "NodeAffinity",
        "NodePorts",
        "NodeShutdown",
        "TaintToleration",
        "TopologyAffinityError",
        "UnexpectedAdmissionError",
    }
)
"""The kubelet's reasons for rejecting a pod, in addition to ``OutOf<resource>``. For other reasons,
such as SysctlForbidden, the next node would reject the pod, too."""

MAX_PORT: Final = 65535


def pod_of(body: Json) -> Pod:
    """Convert a pod; its object may have any content."""
    states = container_states(body)
    worker = next((state for state in states if state.name == WORKER), ContainerState(WORKER, waiting={}))
    phase = _phase(body, worker)
    annotations = get_dict(body, "metadata", "annotations")
    port = _number(get_str(annotations, constants.ANNOTATION_METRICS_PORT)) or 0
    message = last_message(body, worker) if phase.ended else None
    failed_init = _failed_init_container(body) if phase.ended and worker.terminated is None else None
    label = get_str(body, "metadata", "labels", constants.LABEL_INDEX)
    from_name = get_str(body, "metadata", "name").rpartition("-")[0].rpartition("-")[2]
    waiting = ""
    if phase is PodPhase.PENDING:
        waiting = why_waiting(body)
    elif not phase.ended:
        node = get_str(body, "spec", "nodeName")
        waiting = f"its node {node} sends no heartbeats" if node_is_unreachable(body, worker) else ""
    return Pod(
        name=get_str(body, "metadata", "name"),
        uid=get_str(body, "metadata", "uid"),
        index=next((number for number in map(_number, (label, from_name)) if number is not None), 0),
        phase=phase,
        ready=worker.ready,
        terminating=is_leaving(body),
        deletion_deadline=get_time(body, "metadata", "deletionTimestamp"),
        created=get_time(body, "metadata", "creationTimestamp") or 0.0,
        started=worker.started,
        ended=_ended(body, worker) if phase.ended else None,
        exit_code=worker.exit_code,
        init_exit_code=None if failed_init is None else failed_init.exit_code,
        message=message,
        failures=_number(get_str(annotations, constants.ANNOTATION_FAILURES)) or 0,
        failed=get_time(annotations, constants.ANNOTATION_FAILED),
        size=_size(get_str(annotations, constants.ANNOTATION_SIZE)),
        waiting=waiting,
        incompatible_image=incompatible_image(body, worker),
        # The kubelet itself ends sidecars among the init containers.
        sidecars_running=phase.ended and any(s.running is not None and s.name != WORKER for s in states),
        node=get_str(body, "spec", "nodeName"),
        termination_cause=termination_cause_of(body, worker, message),
        reasons=reasons_of(body, worker),
        conditions=conditions_of(body),
        metrics_port=port if port <= MAX_PORT else 0,
        etcd_address=_etcd_address(body),
    )


def termination_cause_of(
    pod: Json, worker: ContainerState, message: TerminationMessage | str | None
) -> TerminationCause | None:
    """Return why a pod has ended or is leaving, if its agent did not cause that.

    Kubernetes reports this in four places: the reason of the pod's status, the condition DisruptionTarget, the reason
    of the container's end, and, for a pod on a lost node, a condition Ready that contradicts the other conditions.
    """
    if worker.exit_code == 0:
        return None
    if worker.terminated is None and not is_over(pod) and not is_leaving(pod):
        return None
    disruption = true_condition(pod, DISRUPTION)
    reason = get_str(pod, "status", "reason")
    if reason == _NODE_LOST or get_str(disruption, "reason") == _NODE_DELETED or node_is_unreachable(pod, worker):
        return TerminationCause.NODE_LOST
    if disruption is not None:
        return TerminationCause.DISRUPTED
    if is_over(pod) and worker.started is None and (reason in _NOT_ADMITTED or reason.startswith("OutOf")):
        return TerminationCause.NOT_ADMITTED
    if reason in _ENDED_BY_NODE:
        return TerminationCause.OVER_LIMIT if is_over_its_limit(pod) else TerminationCause.DISRUPTED
    # An old kernel kills only one process. If the agent survives, it restarts its workers or reports what happened.
    if get_str(worker.terminated, "reason") == OUT_OF_MEMORY and not isinstance(message, TerminationMessage):
        return TerminationCause.OUT_OF_MEMORY
    return None


def reasons_of(pod: Json, worker: ContainerState) -> frozenset[str]:
    """Return the reasons for which a pod ended, or is to be removed."""
    ended = get_str(worker.terminated, "reason")
    reasons = {get_str(pod, "status", "reason"), get_str(true_condition(pod, DISRUPTION), "reason")}
    if not (worker.exit_code == 0 and ended == OUT_OF_MEMORY):
        reasons.add(ended)
    return frozenset(reasons - {""})


def _etcd_address(pod: Json) -> str | None:
    for container in get_dicts(pod, "spec", "containers"):
        for entry in get_dicts(container, "env") if container.get("name") == WORKER else ():
            endpoint = get_str(entry, "value") if entry.get("name") == "PET_RDZV_ENDPOINT" else ""
            if ":" in endpoint:
                return endpoint.rpartition(":")[0].removeprefix("[").removesuffix("]") or None
    return None


def _phase(pod: Json, worker: ContainerState) -> PodPhase:
    if worker.terminated is not None:
        return PodPhase.SUCCEEDED if worker.exit_code == 0 else PodPhase.FAILED
    if is_over(pod) or _never_runs(pod):
        # Even if the pod's phase is Succeeded: only the agent says that the run has succeeded.
        return PodPhase.FAILED
    return PodPhase.PENDING if worker.running is None else PodPhase.RUNNING


def _never_runs(pod: Json) -> bool:
    """Return whether the pod is being deleted and will never get a node; a finalizer may keep it for a long time."""
    return is_leaving(pod) and not get_str(pod, "spec", "nodeName")


def _ended(pod: Json, worker: ContainerState) -> float | None:
    """Return when the worker container ended; if that is unknown, when the pod's conditions last changed."""
    if worker.ended is not None:
        return worker.ended
    if _never_runs(pod):
        return get_time(pod, "metadata", "deletionTimestamp")
    changes = (get_time(entry, "lastTransitionTime") for entry in get_dicts(pod, "status", "conditions"))
    return max((time for time in changes if time is not None), default=None)


def _number(digits: str) -> int | None:
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS
    return min(int(digits), 10 ** (_MAX_DIGITS - 1)) if is_number else None


def _size(record: str) -> SizeRecord | None:
    try:
        return decode(record.encode(errors="replace"), SizeRecord)
    except MalformedRecord:
        return None
