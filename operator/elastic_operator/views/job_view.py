"""The state of a job, as commands and the live view read it: typed, with a default for every field.

The data is a JSON snapshot: of a run on this machine (:mod:`elastic_operator.local.snapshot`) or of a job on a cluster
(:mod:`elastic_operator.client.cluster`). Another version may have written it: unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from elastic_operator.errors import ElasticJobError


class _View(msgspec.Struct, frozen=True, rename="camel"):
    pass


class PodView(_View, frozen=True):
    """A pod; on this machine a process. Times are in seconds since the Unix epoch.

    Attributes:
        pid: process ID of its agent, on this machine.
        exit_code: of the agent, 128 + n for signal n.
        message: the agent's termination message.
        ranks: of its workers in the current round; None if unknown.
        log_dir: directory of its workers' output, on this machine.
        note: additional information, such as why it has not started.
    """

    name: str
    index: int = 0
    uid: str = ""
    pid: int | None = None
    phase: str = "Pending"
    ready: bool = False
    terminating: bool = False
    created: float = 0.0
    ended: float | None = None
    exit_code: int | None = None
    message: str | dict[str, Any] | None = None
    group_rank: int | None = None
    ranks: tuple[int, ...] | None = ()
    log_dir: str | None = None
    metrics_url: str | None = None
    node: str = ""
    address: str = ""
    note: str = ""

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.ended is not None or self.phase in ("Succeeded", "Failed")

    @property
    def words(self) -> str:
        """The agent's termination message as text; empty if there is none."""
        if isinstance(self.message, Mapping):
            return str(self.message.get("message") or self.message.get("reason") or "")
        return self.message or ""


class EventView(_View, frozen=True):
    """An event; ``time`` is in seconds since the Unix epoch."""

    time: float
    reason: str = ""
    message: str = ""
    warning: bool = False
    count: int = 1


class ConditionView(_View, frozen=True):
    """A condition of the status, as in Kubernetes' ``metav1.Condition``."""

    type: str
    status: str = "Unknown"
    reason: str = ""
    message: str = ""
    last_transition_time: str | float | None = None


class FailureView(_View, frozen=True):
    """The last failure."""

    message: str = ""
    time: str | float | None = None


class TimeBreakdownView(_View, frozen=True):
    """Seconds by run state until ``as_of``; ``lost_seconds`` of training that no checkpoint holds, None if unknown."""

    as_of: str | float | None = None
    seconds: dict[str, float] = {}
    lost_seconds: float | None = None


class StatusView(_View, frozen=True):
    """The job's status; the names are those of the CRD."""

    state: str = "Pending"
    observed_generation: int = 0
    replicas: int = 0
    ready_replicas: int = 0
    desired: int = 0
    round: int = 0
    world_size: int = 0
    restarts: int = 0
    uncharged_restarts: int = 0
    pod_failures: int = 0
    start_time: str | float | None = None
    active_since: str | float | None = None
    completion_time: str | float | None = None
    last_failure: FailureView | None = None
    time_breakdown: TimeBreakdownView | None = None
    excluded_nodes: tuple[str, ...] = ()
    conditions: tuple[ConditionView, ...] = ()

    @property
    def what_failed(self) -> str:
        """The message of the last failure; empty if there is none."""
        return self.last_failure.message if self.last_failure else ""

    @property
    def finished(self) -> bool:
        """Whether the job has succeeded or failed."""
        return self.state in ("Succeeded", "Failed")

    @property
    def ready(self) -> str:
        """The number of ready pods of those desired: 2/3."""
        return f"{self.ready_replicas}/{self.desired}"

    @property
    def suspended(self) -> bool:
        """Whether the job is suspended and all its pods are gone."""
        return self.state == "Suspended" and any(
            condition.type == "Suspended" and condition.status == "True" for condition in self.conditions
        )


class EndView(_View, frozen=True):
    """How a run on this machine ended."""

    how: str = ""
    exit_code: int = 0
    message: str = ""
    time: float = 0.0


class RunView(_View, frozen=True):
    """The ``elasticjob run`` that owns the job. For a job on a cluster, only ``alive`` is set.

    ``directory``, ``logs`` and ``checkpoints`` are paths; ``ended`` is None while it runs, or if it was killed.
    """

    id: str = ""
    directory: str = ""
    logs: str = ""
    checkpoints: str = ""
    pid: int | None = None
    manifest_path: str = ""
    alive: bool = False
    ended: EndView | None = None


class EtcdView(_View, frozen=True):
    """The job's etcd; ``pid`` is that of its process on this machine, ``state`` that of its Service on a cluster."""

    pid: int | None = None
    endpoint: str | None = None
    restarts: int = 0
    state: str = ""


class ProgressView(_View, frozen=True):
    """The last line that rank 0 printed."""

    line: str = ""
    time: float = 0.0


class JobView(_View, frozen=True):
    """The state of one job; ``manifest`` is the object without its status, ``events`` has the oldest first."""

    manifest: dict[str, Any] = {}
    status: StatusView = StatusView()
    pods: tuple[PodView, ...] = ()
    events: tuple[EventView, ...] = ()
    run: RunView = RunView()
    etcd: EtcdView | None = None
    progress: ProgressView | None = None

    @classmethod
    def of(cls, snapshot: Mapping[str, Any]) -> JobView:
        """Decode a snapshot.

        Raises:
            ElasticJobError: it is invalid.
        """
        try:
            return msgspec.convert(snapshot, cls)
        except msgspec.ValidationError as error:
            raise ElasticJobError(
                f"the state of this job cannot be read ({error}); was it written by another version?"
            ) from None

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The job's metadata."""
        return self.manifest.get("metadata") or {}

    @property
    def name(self) -> str:
        """The job's name."""
        return str(self.metadata.get("name") or "?")

    @property
    def namespace(self) -> str:
        """The job's namespace."""
        return str(self.metadata.get("namespace") or "")

    @property
    def on_cluster(self) -> bool:
        """Whether it lives on a cluster, not on this machine."""
        return self.run.alive and not self.run.id

    @property
    def spec(self) -> Mapping[str, Any]:
        """The job's spec."""
        spec = self.manifest.get("spec")
        return spec if isinstance(spec, Mapping) else {}

    @property
    def created(self) -> float | None:
        """When the job was created, in seconds since the Unix epoch."""
        return seconds(self.metadata.get("creationTimestamp")) or seconds(self.status.start_time)

    @property
    def completed(self) -> float | None:
        """When the job ended, in seconds since the Unix epoch; None while it runs, or if unknown."""
        return self.run.ended.time if self.run.ended else seconds(self.status.completion_time)

    @property
    def state(self) -> str:
        """The job's state; for a run that ended before its job finished, how it ended."""
        if self.status.finished or (self.run.alive and self.run.ended is None):
            return self.status.state
        how = self.run.ended.how if self.run.ended else "killed"
        return how[:1].upper() + how[1:]

    @property
    def deadline(self) -> float | None:
        """When ``activeDeadlineSeconds`` runs out, in seconds since the Unix epoch; None if it does not."""
        allowed, since = self.spec.get("activeDeadlineSeconds"), seconds(self.status.active_since)
        if self.status.finished or since is None or not isinstance(allowed, int):
            return None
        return since + allowed

    def age(self, now: float) -> float:
        """Return the seconds from the job's creation to its end, or to ``now``."""
        start = self.created
        return 0.0 if start is None else max(0.0, (self.completed or now) - start)

    @property
    def living_pods(self) -> tuple[PodView, ...]:
        """The pods that have not ended, by index; terminating ones first."""
        living = (pod for pod in self.pods if not pod.over)
        return tuple(sorted(living, key=lambda pod: (pod.index, not pod.terminating)))

    @property
    def ended_pods(self) -> tuple[PodView, ...]:
        """The pods that have ended, the latest first."""
        return tuple(sorted((pod for pod in self.pods if pod.over), key=lambda pod: pod.ended or 0.0, reverse=True))


def seconds(time: str | float | None) -> float | None:
    """Convert a time (RFC 3339, or seconds) to seconds since the Unix epoch; None if it is neither."""
    if isinstance(time, str):
        try:
            return datetime.fromisoformat(time).timestamp()
        except ValueError:
            return None
    return time or None
