"""The state of a pod and of its containers, as its status says it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from elastic_operator.api.json_access import at, integer, listing, mapping, mappings, text

if TYPE_CHECKING:
    from elastic_operator.api.spec import Json

DISRUPTION: Final = "DisruptionTarget"
"""The condition of pods that are about to be removed for reasons that lie outside of them."""
OUT_OF_MEMORY: Final = "OOMKilled"

_UNKNOWN_STATUS: Final = "ContainerStatusUnknown"
"""The kubelet's reason for a container that it has lost; the exit code beside it is invented."""
_OWN_LIMITS: Final = ("exceeds the limit", "exceeds the total limit", "exceeded its local ephemeral storage limit")
"""How a kubelet says that it evicts a pod for exceeding its own limits."""


@dataclass(frozen=True, slots=True)
class ContainerState:
    """The state of a container; one of ``waiting``, ``running`` and ``terminated`` is set.

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
        """Its exit code, if that is known."""
        if self.terminated is None or text(self.terminated, "reason") == _UNKNOWN_STATUS:
            return None
        return integer(self.terminated, "exitCode")

    @property
    def started(self) -> float | None:
        """When it started, if that is known."""
        # A container that could not start has the start of the Unix epoch here.
        return seconds(at(self.running or self.terminated, "startedAt")) or None

    @property
    def ended(self) -> float | None:
        """When it ended, if that is known."""
        return seconds(at(self.terminated, "finishedAt")) or None


def container_states(pod: Json, kind: str = "containerStatuses") -> tuple[ContainerState, ...]:
    """The states of a pod's containers, or of its ``initContainerStatuses``."""
    return tuple(_state(entry, over=is_over(pod)) for entry in mappings(pod, "status", kind))


def is_over(pod: Json) -> bool:
    """Whether no container of the pod runs, or will run."""
    return text(pod, "status", "phase") in ("Failed", "Succeeded")


def is_leaving(pod: Json) -> bool:
    """Whether the pod is being deleted."""
    return bool(text(pod, "metadata", "deletionTimestamp"))


def seconds(time: object) -> float | None:
    """A Kubernetes time as seconds since the Unix epoch; None if it is not one."""
    if not isinstance(time, str):
        return None
    try:
        parsed = datetime.fromisoformat(time)
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def conditions_of(pod: Json) -> dict[str, str]:
    """The pod's conditions by type: True, False or Unknown."""
    return {text(entry, "type"): text(entry, "status") for entry in mappings(pod, "status", "conditions")}


def disruption_of(pod: Json) -> Json | None:
    """The condition DisruptionTarget, if it holds."""
    for condition in mappings(pod, "status", "conditions"):
        if condition.get("type") == DISRUPTION and condition.get("status") == "True":
            return condition
    return None


def is_over_its_limit(pod: Json) -> bool:
    """Whether a pod was evicted because it wrote more than it may."""
    return any(words in text(pod, "status", "message") for words in _OWN_LIMITS)


def node_is_silent(pod: Json, worker: ContainerState) -> bool:
    """Whether the pod's node does not respond: the pod is not ready although its containers are.

    Kubernetes marks all pods of such a node like this; the rest of their status stays as the kubelet wrote it last.
    """
    if worker.running is None or listing(pod, "spec", "readinessGates"):
        return False
    conditions = conditions_of(pod)
    return conditions.get("Ready") == "False" and conditions.get("ContainersReady") == "True"


def _state(entry: Json, *, over: bool) -> ContainerState:
    name = text(entry, "name")
    state = mapping(entry, "state")
    terminated, running = state.get("terminated"), state.get("running")
    if not isinstance(terminated, dict) and over:
        # The kubelet has lost the container: the last known state is all there is.
        last = at(entry, "lastState", "terminated")
        terminated = last if isinstance(last, dict) else None
        return ContainerState(name, waiting=None if terminated is not None else {}, terminated=terminated)
    if isinstance(terminated, dict):
        return ContainerState(name, terminated=terminated)
    if isinstance(running, dict):
        return ContainerState(name, running=running, ready=entry.get("ready") is True)
    return ContainerState(name, waiting=mapping(state, "waiting"))
