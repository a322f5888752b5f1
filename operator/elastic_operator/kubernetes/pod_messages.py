"""What a pod's status says, in words: why it does not start, how it ended, and whether its image has no agent."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec

from elastic_operator.api.constants import Reason
from elastic_operator.api.json_access import mapping, mappings, text
from elastic_operator.api.template import WORKER
from elastic_operator.controller.model import IncompatibleImage
from elastic_operator.kubernetes.container_state import (
    OUT_OF_MEMORY,
    ContainerState,
    container_states,
    disruption_of,
    is_over,
    is_over_its_limit,
    node_is_silent,
)
from elastic_operator.kubernetes.error_hints import with_hint
from elastic_operator.resources.agent_command import LAUNCHER
from torchelastic.errors import MalformedRecord
from torchelastic.protocol import PROTOCOL_VERSION, ExitCode, TerminationMessage, decode, shorten

if TYPE_CHECKING:
    from elastic_operator.api.spec import Json

OWN_IMAGE_GUIDE: Final = "docs/own-image.md"

_LIMIT: Final = 400
_DEFAULT_SCHEDULER: Final = "default-scheduler"
_UNDERWAY: Final = frozenset({"", "ContainerCreating", "PodInitializing"})
_PULL: Final = frozenset({"ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable"})
_BACK_OFF: Final = re.compile(r'Back-off pulling image "[^"]*"(: ErrImagePull)?(: |$)')
_PREEMPTION: Final = re.compile(r"\s*(no new claims to deallocate, )?preemption: .*", re.DOTALL)
"""The scheduler repeats its message for the pods that it might preempt."""
_REMOTE: Final = re.compile(r"rpc error: code = \w+ desc = ")
_COULD_NOT_START: Final = frozenset({"StartError", "ContainerCannotRun", "CreateContainerError", "RunContainerError"})
"""Reasons for a container whose command cannot be executed."""
_LAUNCHER: Final = re.compile(rf"""["'`/]{re.escape(LAUNCHER[0])}["'`:]""")
"""How container runtimes quote the command; a pod's name may contain the same word."""
_NO_SUCH_FILE: Final = re.compile(r"not found|no such file|ENOENT|error finding", re.IGNORECASE)
_SELF_EVIDENT: Final = frozenset({"", "Completed", "Error"})


def why_waiting(pod: Json, name: str = WORKER) -> str:
    """Why a container does not start, as a clause; empty if unknown."""
    if is_over(pod):
        return ""
    if why := _why_not_scheduled(pod):
        return why
    init_containers = container_states(pod, "initContainerStatuses")
    sidecars = {
        text(entry, "name") for entry in _specs(pod, "initContainers") if entry.get("restartPolicy") == "Always"
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


def why_not_ready(pod: Json, worker: ContainerState) -> str:
    """Why a running worker container is not ready, as a clause; empty if unknown."""
    return f"its node {text(pod, 'spec', 'nodeName')} is silent" if node_is_silent(pod, worker) else ""


def last_message(pod: Json, worker: ContainerState) -> TerminationMessage | str | None:
    """The termination message of a worker that has ended, or what else is known of its end."""
    # An agent that got SIGTERM does not know why.
    if (is_over_its_limit(pod) and worker.exit_code != 0) or (worker.exit_code == ExitCode.LEFT and _end_of_pod(pod)):
        return _end_of_pod(pod)
    said = text(worker.terminated, "message").strip()
    try:
        return decode(said.encode(errors="replace"), TerminationMessage)
    except MalformedRecord:
        pass
    # The cluster's message comes last: of a plain text, the last line is shown.
    parts = [said, _end_in_words(worker), _end_of_pod(pod)]
    if worker.terminated is None:
        parts.append(_failed_init_container(pod))
    return "\n".join(part for part in parts if part) or None


def init_exit_code(pod: Json) -> int | None:
    """The exit code of the first init container that failed, if it is known."""
    failed = _first_that_failed(pod)
    return None if failed is None else failed.exit_code


def incompatible_image(pod: Json, worker: ContainerState) -> IncompatibleImage | None:
    """Why the pod's image is not compatible with this operator; None if it seems to be."""
    image = _image(pod, WORKER, "containers")
    state = worker.terminated or worker.waiting or {}
    if text(state, "reason") in _COULD_NOT_START:
        message = text(state, "message")
        if _LAUNCHER.search(message) and _NO_SUCH_FILE.search(message):
            return IncompatibleImage(
                Reason.NO_AGENT,
                f"the image {image} has no {LAUNCHER[0]}, with which every worker pod starts: install the agent in it, "
                f"as {OWN_IMAGE_GUIDE} shows, or name an image that has it",
            )
    spoken = _protocol_of(text(worker.terminated, "message"))
    if spoken is not None and spoken != PROTOCOL_VERSION:
        return IncompatibleImage(
            Reason.PROTOCOL_MISMATCH,
            f"the agent in the image {image} speaks version {spoken} of the protocol between operator and agents, and "
            f"this operator version {PROTOCOL_VERSION}: use an image with the agent of the operator's release, or the "
            "operator of the agent's",
        )
    return None


def in_a_line(message: str) -> str:
    """A message of the cluster in one line, without the noise of RPC errors, and of limited length."""
    return shorten(" ".join(_REMOTE.sub("", message).split()), _LIMIT)


def _why_not_scheduled(pod: Json) -> str:
    """Why a pod has no node yet; empty if it was just created."""
    gates = tuple(text(gate, "name") for gate in mappings(pod, "spec", "schedulingGates"))
    if gates:
        return f"it may not be given to a node before its scheduling gates are lifted: {', '.join(gates)}"
    for condition in mappings(pod, "status", "conditions"):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            said = in_a_line(_PREEMPTION.sub("", text(condition, "message"))) or text(condition, "reason")
            return f"no node takes it{f': {said}' if said else ''}"
    scheduler = text(pod, "spec", "schedulerName")
    if scheduler not in ("", _DEFAULT_SCHEDULER) and not text(pod, "spec", "nodeName"):
        # The default scheduler always runs; another one may not be installed.
        return f"the scheduler {scheduler} has not looked at it yet; does it run?"
    return ""


class _Speaker(msgspec.Struct):
    """The fields that termination messages of all protocol versions have."""

    reason: str
    protocol: int


def _protocol_of(message: str) -> int | None:
    """The protocol version of the agent that left a message; None if it is not an agent's."""
    try:
        return msgspec.json.decode(message.encode(errors="replace"), type=_Speaker).protocol
    except (msgspec.DecodeError, RecursionError):
        return None


def _obstacle(pod: Json, container: ContainerState, kind: str) -> str | None:
    """What a container waits for; None if it does not wait, or is just being created."""
    if container.waiting is None or (reason := text(container.waiting, "reason")) in _UNDERWAY:
        return None
    image = _image(pod, container.name, kind)
    said = in_a_line(text(container.waiting, "message"))
    if reason in _PULL:
        # ErrImagePull and ImagePullBackOff alternate; both get the same message.
        cause = _BACK_OFF.sub("", said)
        # An image without a registry in its name was probably meant to be on the node already.
        hint = "" if "/" in image else " (is it on the nodes?)"
        return f"the image {image} cannot be pulled{hint}{f': {cause}' if cause else ''}"
    if reason == "InvalidImageName":
        return f'"{image}" is no name of an image; correct it in the job'
    if reason == "ErrImageNeverPull":
        return f"the image {image} is not on its node, and imagePullPolicy is Never"
    if reason.startswith(("CreateContainer", "RunContainer", "PreCreateHook", "PreStartHook", "PostStartHook")):
        return f"its container cannot be started: {with_hint(said or reason)}"
    return f"{reason}: {said}" if said else reason


def _end_in_words(worker: ContainerState) -> str:
    """What the kubelet says of the container's end, beside its exit code."""
    reason = text(worker.terminated, "reason")
    if worker.exit_code == 0 or reason in _SELF_EVIDENT or reason in _COULD_NOT_START:
        return ""
    return f"{OUT_OF_MEMORY}: it needed more memory than it may have" if reason == OUT_OF_MEMORY else reason


def _end_of_pod(pod: Json) -> str:
    """Why the whole pod ended: evicted, preempted, its node lost."""
    status = mapping(pod, "status")
    told = _joined(text(status, "reason"), text(status, "message"))
    disruption = disruption_of(pod)
    return told or _joined(text(disruption, "reason"), text(disruption, "message"))


def _failed_init_container(pod: Json) -> str:
    container = _first_that_failed(pod)
    if container is None:
        return ""
    lines = text(container.terminated, "message").strip().splitlines()
    code = "came to an unknown end" if container.exit_code is None else f"exited with code {container.exit_code}"
    return f"its init container {container.name} {code}{f': {in_a_line(lines[-1])}' if lines else ''}"


def _first_that_failed(pod: Json) -> ContainerState | None:
    init_containers = container_states(pod, "initContainerStatuses")
    return next((each for each in init_containers if each.terminated is not None and each.exit_code != 0), None)


def _joined(reason: str, message: str) -> str:
    return ": ".join(part for part in (reason, in_a_line(message)) if part)


def _image(pod: Json, name: str, kind: str) -> str:
    """The image of a container, as in the spec."""
    return next((text(entry, "image") for entry in _specs(pod, kind) if entry.get("name") == name), "")


def _specs(pod: Json, kind: str) -> tuple[Json, ...]:
    return mappings(pod, "spec", kind)
