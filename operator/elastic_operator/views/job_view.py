"""The state of a job, as commands and the live view read it: typed, with defaults for most fields.

A run writes its state to its directory and serves it on its control socket, as JSON with camelCase names. The state may
come from another version of ``elasticjob``, so unknown fields are ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from elastic_operator.api.json_values import get_time
from elastic_operator.api.status import JobStatus, status_from_json
from elastic_operator.errors import BadInput, ElasticJobError

if TYPE_CHECKING:
    from elastic_operator.controller.model import Pod


class _View(msgspec.Struct, frozen=True, rename="camel"):
    pass


class PodView(_View, frozen=True):
    """A pod; on this machine a process. Times are in seconds since the Unix epoch.

    Attributes:
        pid: process ID of the pod's agent, on this machine.
        exit_code: the exit code of the agent, 128 + n for signal n.
        message: the agent's termination message, or another explanation of the pod's end.
        ranks: the ranks of its workers in the current round; None if unknown.
        spare: whether enough other pods train, so that it stands by; False on a cluster.
        log_dir: directory of its logs, on this machine.
        note: additional information, such as why the pod has not started.
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
    message: str = ""
    ranks: tuple[int, ...] | None = ()
    spare: bool = False
    log_dir: str | None = None
    metrics_url: str | None = None
    node: str = ""
    address: str = ""
    note: str = ""

    @classmethod
    def of(cls, pod: Pod, **others: Any) -> PodView:  # noqa: ANN401 - the other fields
        """Return the view of a pod; ``others`` are the fields that a :class:`Pod` does not have."""
        message = pod.message if isinstance(pod.message, str | None) else pod.message.message or pod.message.reason
        return cls(
            name=pod.name,
            index=pod.index,
            uid=pod.uid,
            phase=pod.phase.value,
            ready=pod.ready,
            terminating=pod.terminating,
            created=pod.created,
            ended=pod.ended,
            exit_code=pod.exit_code,
            message=message or "",
            **others,
        )

    @property
    def over(self) -> bool:
        """Whether the pod has ended."""
        return self.ended is not None or self.phase in ("Succeeded", "Failed")


class EventView(_View, frozen=True):
    """An event; ``time`` is in seconds since the Unix epoch, and ``count`` is the number of occurrences."""

    time: float
    reason: str = ""
    message: str = ""
    warning: bool = False
    count: int = 1


class EndView(_View, frozen=True):
    """How a run on this machine ended.

    Attributes:
        how: succeeded, failed, badInput, deleted or interrupted.
        message: an explanation; empty if there is none.
        time: when the run ended, in seconds since the Unix epoch.
    """

    how: str = ""
    message: str = ""
    time: float = 0.0


class RunView(_View, frozen=True):
    """The ``elasticjob run`` that owns the job. For a job on a cluster, only ``alive`` is set.

    ``directory``, ``logs`` and ``checkpoints`` are paths; ``ended`` is None if the run is alive or was killed.
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
    """The etcd of a job on this machine; ``pid`` is None if the run has no etcd process."""

    pid: int | None = None
    endpoint: str | None = None
    restarts: int = 0


class ProgressView(_View, frozen=True):
    """The last line that rank 0 printed, and when, in seconds since the Unix epoch."""

    line: str = ""
    time: float = 0.0


class RoundView(_View, frozen=True):
    """A round; ``started`` (its workers) and ``first_step`` are in seconds since the Unix epoch, 0 if unknown."""

    number: int = 0
    started: float = 0.0
    first_step: float = 0.0


class JobView(_View, frozen=True, dict=True):
    """The state of one job.

    Attributes:
        manifest: the object without its status.
        status_json: the object's status.
        events: the events, the oldest first.
        rounds: the latest rounds, the oldest first; only on this machine.
    """

    manifest: dict[str, Any] = {}
    status_json: dict[str, Any] = msgspec.field(default_factory=dict, name="status")
    pods: tuple[PodView, ...] = ()
    events: tuple[EventView, ...] = ()
    run: RunView = RunView()
    etcd: EtcdView | None = None
    progress: ProgressView | None = None
    rounds: tuple[RoundView, ...] = ()

    @functools.cached_property
    def status(self) -> JobStatus:
        """The job's status.

        Raises:
            ElasticJobError: the status is invalid.
        """
        try:
            return status_from_json(self.status_json)
        except BadInput as error:
            raise ElasticJobError(
                f"the state of the job {self.name} cannot be read ({error}); was it written by another version?"
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
        """Whether the job runs on a cluster, not on this machine."""
        return self.run.alive and not self.run.id

    @property
    def spec(self) -> Mapping[str, Any]:
        """The job's spec."""
        spec = self.manifest.get("spec")
        return spec if isinstance(spec, Mapping) else {}

    @property
    def created(self) -> float | None:
        """When the job was created, in seconds since the Unix epoch."""
        return get_time(self.manifest, "metadata", "creationTimestamp") or self.status.started

    @property
    def completed(self) -> float | None:
        """When the job ended, in seconds since the Unix epoch; None while it runs, or if unknown."""
        return self.run.ended.time if self.run.ended else self.status.completed

    @property
    def state(self) -> str:
        """The job's state; for a run that ended before its job finished, how it ended."""
        if self.status.finished or (self.run.alive and self.run.ended is None):
            return self.status.state
        how = self.run.ended.how if self.run.ended else "killed"
        return how[:1].upper() + how[1:]

    @property
    def deadline(self) -> float | None:
        """When ``activeDeadlineSeconds`` expires, in seconds since the Unix epoch; None if no deadline applies."""
        allowed, since = self.spec.get("activeDeadlineSeconds"), self.status.active
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
