"""What a pod's status says, in words: why it does not start, how it ended, and whether it can have an agent at all."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec

from elastic_operator.kube.advice import with_advice
from elastic_operator.kube.container_state import ContainerState, container_states, is_over
from elastic_operator.kube.pod_fate import DISRUPTION, OUT_OF_MEMORY, is_over_its_limit, node_is_silent
from elastic_operator.model import Misfit, Unfit
from elastic_operator.pods import LAUNCHER
from elastic_operator.template import WORKER
from elastic_operator.unchecked import mapping, mappings, text
from torchelastic.contract import CONTRACT_VERSION, ExitCode, TerminationMessage, decode, shorten
from torchelastic.errors import MalformedRecord

if TYPE_CHECKING:
    from elastic_operator.spec import Json

OWN_IMAGE_GUIDE: Final = "docs/own-image.md"

_LIMIT: Final = 400
_DEFAULT_SCHEDULER: Final = "default-scheduler"
_UNDERWAY: Final = frozenset({"", "ContainerCreating", "PodInitializing"})
_PULL: Final = frozenset({"ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable"})
_BACK_OFF: Final = re.compile(r'Back-off pulling image "[^"]*"(: ErrImagePull)?(: |$)')
_PREEMPTION: Final = re.compile(r"\s*(no new claims to deallocate, )?preemption: .*", re.DOTALL)
"""Behind what is missing on the nodes, the scheduler says it once more of the pods that it could remove from them."""
_REMOTE: Final = re.compile(r"rpc error: code = \w+ desc = ")
_COULD_NOT_START: Final = frozenset({"StartError", "ContainerCannotRun", "CreateContainerError", "RunContainerError"})
"""What container runtimes, through the kubelet, call it when the command of a container can't be executed."""
_LAUNCHER: Final = re.compile(rf"""["'`/]{re.escape(LAUNCHER[0])}["'`:]""")
"""As runtimes name what they execute; a pod's name may have the same word in it."""
_NO_SUCH_FILE: Final = re.compile(r"not found|no such file|ENOENT|error finding", re.IGNORECASE)
_SELF_EVIDENT: Final = frozenset({"", "Completed", "Error"})


def why_waiting(pod: Json, name: str = WORKER) -> str:
    """What keeps a container from starting, as a clause; empty where nothing is known to."""
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
    """What keeps a worker container that runs from being ready, as a clause; empty where nothing is known to."""
    return f"its node {text(pod, 'spec', 'nodeName')} is silent" if node_is_silent(pod, worker) else ""


def last_message(pod: Json, worker: ContainerState) -> TerminationMessage | str | None:
    """The agent's last words; what is known instead where it left none of its own; None where nothing is.

    Args:
        pod: a pod whose worker container has ended.
        worker: this container.
    """
    # An agent that was asked to leave does not know why.
    if (is_over_its_limit(pod) and worker.exit_code != 0) or (worker.exit_code == ExitCode.LEFT and _end_of_pod(pod)):
        return _end_of_pod(pod)
    said = text(worker.terminated, "message").strip()
    try:
        return decode(said.encode(errors="replace"), TerminationMessage)
    except MalformedRecord:
        pass
    # What the cluster says comes last: of a plain text, the last line is what is shown.
    parts = [said, _end_in_words(worker), _end_of_pod(pod)]
    if worker.terminated is None:
        parts.append(_failed_init_container(pod))
    return "\n".join(part for part in parts if part) or None


def init_exit_code(pod: Json) -> int | None:
    """The exit code of the first init container that failed; None where none did, or it has none that is known."""
    failed = _first_that_failed(pod)
    return None if failed is None else failed.exit_code


def why_unfit(pod: Json, worker: ContainerState) -> Unfit | None:
    """Why no agent that this operator understands can run in the pod; None where nothing says so."""
    image = _image(pod, WORKER, "containers")
    state = worker.terminated or worker.waiting or {}
    if text(state, "reason") in _COULD_NOT_START:
        message = text(state, "message")
        if _LAUNCHER.search(message) and _NO_SUCH_FILE.search(message):
            return Unfit(
                Misfit.NO_AGENT,
                f"the image {image} has no {LAUNCHER[0]}, with which every worker pod starts: install the agent in it, "
                f"as {OWN_IMAGE_GUIDE} shows, or name an image that has it",
            )
    spoken = _contract_of(text(worker.terminated, "message"))
    if spoken is not None and spoken != CONTRACT_VERSION:
        return Unfit(
            Misfit.CONTRACT_MISMATCH,
            f"the agent in the image {image} speaks version {spoken} of the contract between operator and agents, and "
            f"this operator version {CONTRACT_VERSION}: use an image with the agent of the operator's release, or the "
            "operator of the agent's",
        )
    return None


def in_a_line(message: str) -> str:
    """A message of the cluster in one line, without what only programmers need, and not longer than anybody reads."""
    return shorten(" ".join(_REMOTE.sub("", message).split()), _LIMIT)


def _why_not_scheduled(pod: Json) -> str:
    """Why a pod has no node yet; empty where that is a matter of a moment."""
    gates = tuple(text(gate, "name") for gate in mappings(pod, "spec", "schedulingGates"))
    if gates:
        return f"it may not be given to a node before its scheduling gates are lifted: {', '.join(gates)}"
    for condition in mappings(pod, "status", "conditions"):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            said = in_a_line(_PREEMPTION.sub("", text(condition, "message"))) or text(condition, "reason")
            return f"no node takes it{f': {said}' if said else ''}"
    scheduler = text(pod, "spec", "schedulerName")
    if scheduler not in ("", _DEFAULT_SCHEDULER) and not text(pod, "spec", "nodeName"):
        # The cluster's own is always there; of another one only its name may be.
        return f"the scheduler {scheduler} has not looked at it yet; does it run?"
    return ""


class _Speaker(msgspec.Struct):
    """What termination messages of all versions have."""

    reason: str
    contract: int


def _contract_of(message: str) -> int | None:
    """The version of the contract that an agent speaks, by its last words; None where they aren't an agent's."""
    try:
        return msgspec.json.decode(message.encode(errors="replace"), type=_Speaker).contract
    except (msgspec.DecodeError, RecursionError):
        return None


def _obstacle(pod: Json, container: ContainerState, kind: str) -> str | None:
    """What a container waits for, in words; None where it does not, or is being started."""
    if container.waiting is None or (reason := text(container.waiting, "reason")) in _UNDERWAY:
        return None
    image = _image(pod, container.name, kind)
    said = in_a_line(text(container.waiting, "message"))
    if reason in _PULL:
        # Pulling and backing off take turns; what is said of both is the same.
        cause = _BACK_OFF.sub("", said)
        # An image without a registry in its name was most often meant to be on the node already.
        hint = "" if "/" in image else " (is it on the nodes?)"
        return f"the image {image} cannot be pulled{hint}{f': {cause}' if cause else ''}"
    if reason == "InvalidImageName":
        return f'"{image}" is no name of an image; correct it in the job'
    if reason == "ErrImageNeverPull":
        return f"the image {image} is not on its node, and imagePullPolicy is Never"
    if reason.startswith(("CreateContainer", "RunContainer", "PreCreateHook", "PreStartHook", "PostStartHook")):
        return f"its container cannot be started: {with_advice(said or reason)}"
    return f"{reason}: {said}" if said else reason


def _end_in_words(worker: ContainerState) -> str:
    """What the kubelet says of the end of a container, beside its exit code."""
    reason = text(worker.terminated, "reason")
    if worker.exit_code == 0 or reason in _SELF_EVIDENT or reason in _COULD_NOT_START:
        return ""
    return f"{OUT_OF_MEMORY}: it needed more memory than it may have" if reason == OUT_OF_MEMORY else reason


def _end_of_pod(pod: Json) -> str:
    """What is said of the end of the whole pod: evicted, preempted, its node lost."""
    status = mapping(pod, "status")
    told = _joined(text(status, "reason"), text(status, "message"))
    if told:
        return told
    for condition in mappings(status, "conditions"):
        if condition.get("type") == DISRUPTION and condition.get("status") == "True":
            return _joined(text(condition, "reason"), text(condition, "message"))
    return ""


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
    """The image of a container, as it was asked for."""
    return next((text(entry, "image") for entry in _specs(pod, kind) if entry.get("name") == name), "")


def _specs(pod: Json, kind: str) -> tuple[Json, ...]:
    return mappings(pod, "spec", kind)
