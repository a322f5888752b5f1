"""Where a container of a pod stands, as its status says."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from elastic_operator.unchecked import at, integer, mapping, mappings, text

if TYPE_CHECKING:
    from elastic_operator.spec import Json

_OVER: Final = ("Failed", "Succeeded")
_UNKNOWN_END: Final = "ContainerStatusUnknown"
"""The kubelet's reason for a container of which it has lost sight; the exit code that stands beside it is invented."""


@dataclass(frozen=True, slots=True)
class ContainerState:
    """Where a container stands.

    Attributes:
        name: of the container.
        waiting: what keeps it from starting; None where it has started.
        running: what is known of its run; None where it doesn't run.
        terminated: how it came to its end; None where it has not.
        ready: whether it runs and its readiness probe, if it has one, succeeds.
    """

    name: str
    waiting: Json | None = None
    running: Json | None = None
    terminated: Json | None = None
    ready: bool = False

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None where it has none that is known."""
        if self.terminated is None or text(self.terminated, "reason") == _UNKNOWN_END:
            return None
        return integer(self.terminated, "exitCode")

    @property
    def started(self) -> float | None:
        """When it started; None where it has not, or nobody knows."""
        # What could not be started "started" when the epoch began.
        return seconds(at(self.running or self.terminated, "startedAt")) or None

    @property
    def ended(self) -> float | None:
        """When it ended; None where it has not, or nobody knows."""
        return seconds(at(self.terminated, "finishedAt")) or None


def container_states(pod: Json, kind: str = "containerStatuses") -> tuple[ContainerState, ...]:
    """The containers of a pod, as far as their status is known.

    Args:
        pod: the pod.
        kind: of its containers: ``containerStatuses`` or ``initContainerStatuses``.
    """
    return tuple(_state(entry, over=is_over(pod)) for entry in mappings(pod, "status", kind))


def is_over(pod: Json) -> bool:
    """Whether the kubelet, or whoever spoke for it, has given the pod up: no container of it runs, or will."""
    return text(pod, "status", "phase") in _OVER


def seconds(time: object) -> float | None:
    """A time as Kubernetes writes it, in seconds since the Unix epoch; None where it is none."""
    if not isinstance(time, str):
        return None
    try:
        parsed = datetime.fromisoformat(time)
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def _state(entry: Json, *, over: bool) -> ContainerState:
    name = text(entry, "name")
    terminated = _given(entry, "state", "terminated")
    if terminated is None and over:
        # The node is gone, or the kubelet has lost sight of the container: what was known last is all there is.
        terminated = _given(entry, "lastState", "terminated")
        return ContainerState(name, waiting=None if terminated is not None else {}, terminated=terminated)
    running = _given(entry, "state", "running")
    if terminated is not None:
        return ContainerState(name, terminated=terminated)
    if running is not None:
        return ContainerState(name, running=running, ready=entry.get("ready") is True)
    return ContainerState(name, waiting=mapping(entry, "state", "waiting"))


def _given(entry: Json, *path: str) -> Json | None:
    found = at(entry, *path)
    return found if isinstance(found, dict) else None
