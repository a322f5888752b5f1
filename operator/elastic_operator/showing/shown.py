"""What is known of a job, as the view and the commands read it: typed, every field with a default.

It comes as JSON of one shape from either place: over the control socket or out of a run's folder
(:mod:`elastic_operator.local.snapshot`), or made of what an API server says (:mod:`elastic_operator.kube.snapshot`).
Another version may have written it, so that unknown fields are passed over and absent ones are filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from elastic_operator.errors import ElasticJobError


class ShownPod(msgspec.Struct, frozen=True, rename="camel"):
    """One pod: on this machine a process.

    Attributes:
        name: ``<job>-<index>-<suffix>``.
        index: which of the job's places it fills.
        uid: unique for all time.
        pid: of its agent.
        phase: Pending, Running, Succeeded or Failed.
        ready: whether its agent serves.
        terminating: whether it is on its way out.
        created: seconds since the Unix epoch.
        ended: likewise; None while it has not.
        exit_code: of the agent, 128 + n for a signal.
        message: the agent's last words.
        group_rank: its place among the nodes of the current epoch.
        ranks: of its workers in the current epoch; None where nobody knows them.
        log_dir: where its workers' output stands.
        metrics_url: where its agent shows metrics.
        node: the machine on which it runs; empty on this machine.
        address: its own.
        note: what else is to be said of it, such as why it has not started; empty where there is nothing.
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
        """Whether it has come to its end."""
        return self.ended is not None or self.phase in ("Succeeded", "Failed")

    @property
    def words(self) -> str:
        """The agent's last words as text, empty where there are none."""
        if isinstance(self.message, Mapping):
            return str(self.message.get("message") or self.message.get("reason") or "")
        return self.message or ""


class ShownEvent(msgspec.Struct, frozen=True):
    """Something that happened.

    Attributes:
        time: seconds since the Unix epoch.
        reason: one word in CamelCase.
        message: a sentence.
        warning: whether it is bad news.
        count: how often it happened.
    """

    time: float
    reason: str = ""
    message: str = ""
    warning: bool = False
    count: int = 1


class ShownCondition(msgspec.Struct, frozen=True, rename="camel"):
    """A condition of the status, as in Kubernetes' metav1.

    Attributes:
        type: its name.
        status: "True", "False" or "Unknown".
        reason: one word in CamelCase.
        message: a sentence.
        last_transition_time: when ``status`` last changed.
    """

    type: str
    status: str = "Unknown"
    reason: str = ""
    message: str = ""
    last_transition_time: str | float | None = None


class ShownFailure(msgspec.Struct, frozen=True):
    """What failed last.

    Attributes:
        message: all of it, in words.
        time: when it was seen.
    """

    message: str = ""
    time: str | float | None = None


class ShownSplit(msgspec.Struct, frozen=True, rename="camel"):
    """Where a job's time went up to a moment.

    Attributes:
        as_of: that moment.
        seconds: by what the job did.
        lost_seconds: of training that no checkpoint held; None where nobody knows.
    """

    as_of: str | float | None = None
    seconds: dict[str, float] = {}
    lost_seconds: float | None = None


class ShownStatus(msgspec.Struct, frozen=True, rename="camel"):
    """What the reconciler says of the job; the names are those of the CRD's status."""

    state: str = "Pending"
    observed_generation: int = 0
    replicas: int = 0
    ready: int = 0
    desired: int = 0
    epoch: int = 0
    world_size: int = 0
    restarts: int = 0
    free_restarts: int = 0
    pod_failures: int = 0
    start_time: str | float | None = None
    active_since: str | float | None = None
    completion_time: str | float | None = None
    last_failure: ShownFailure | str | None = None
    time_split: ShownSplit | None = None
    excluded_nodes: tuple[str, ...] = ()
    conditions: tuple[ShownCondition, ...] = ()

    @property
    def what_failed(self) -> str:
        """What failed last, in words; empty where nothing has."""
        failure = self.last_failure
        return failure.message if isinstance(failure, ShownFailure) else failure or ""

    @property
    def finished(self) -> bool:
        """Whether nothing more will happen to the job."""
        return self.state in ("Succeeded", "Failed")

    @property
    def rests(self) -> bool:
        """Whether the job is suspended and nothing of it runs any more."""
        return self.state == "Suspended" and any(
            condition.type == "Suspended" and condition.status == "True" for condition in self.conditions
        )


class ShownEnd(msgspec.Struct, frozen=True, rename="camel"):
    """How a run ended.

    Attributes:
        how: one of :class:`elastic_operator.local.ending.How`.
        exit_code: of ``elasticjob run``.
        message: in words, why; empty where there is nothing to explain.
        time: seconds since the Unix epoch.
    """

    how: str = ""
    exit_code: int = 0
    message: str = ""
    time: float = 0.0


class ShownRun(msgspec.Struct, frozen=True, rename="camel"):
    """The run that the job lives in: one ``elasticjob run``. On a cluster there is none: all but ``alive`` is empty.

    Attributes:
        id: names its folder.
        directory: that folder.
        logs: where the workers' output stands.
        checkpoints: where the program keeps its checkpoints.
        pid: of ``elasticjob run``.
        manifest_path: the file that it was started with.
        alive: whether it still goes on.
        ended: how it ended; None while it goes on, and where it was killed.
    """

    id: str = ""
    directory: str = ""
    logs: str = ""
    checkpoints: str = ""
    pid: int | None = None
    manifest_path: str = ""
    alive: bool = False
    ended: ShownEnd | None = None


class ShownEtcd(msgspec.Struct, frozen=True, rename="camel"):
    """The job's etcd.

    Attributes:
        pid: of its process; None where it is not ours.
        endpoint: host:port; None while it has none.
        restarts: how often it had to be started again.
        state: where it stands; empty where that is not known, or not ours to know.
    """

    pid: int | None = None
    endpoint: str | None = None
    restarts: int = 0
    state: str = ""


class ShownProgress(msgspec.Struct, frozen=True):
    """The last line that rank 0 printed.

    Attributes:
        line: as it was printed.
        time: seconds since the Unix epoch.
    """

    line: str = ""
    time: float = 0.0


class Shown(msgspec.Struct, frozen=True):
    """All that is to be shown of one job.

    Attributes:
        manifest: as it stands now, as ``kubectl get -o json`` would give it without the status.
        status: what the reconciler says of it.
        pods: those that exist, in any state.
        events: what happened, the oldest first.
        run: the run that it lives in.
        etcd: its store.
        progress: the training's own last line.
    """

    manifest: dict[str, Any] = {}
    status: ShownStatus = ShownStatus()
    pods: tuple[ShownPod, ...] = ()
    events: tuple[ShownEvent, ...] = ()
    run: ShownRun = ShownRun()
    etcd: ShownEtcd | None = None
    progress: ShownProgress | None = None

    @classmethod
    def of(cls, snapshot: Mapping[str, Any]) -> Shown:
        """The typed form of a snapshot.

        Raises:
            ElasticJobError: it is not one.
        """
        try:
            return msgspec.convert(snapshot, cls)
        except msgspec.ValidationError as error:
            raise ElasticJobError(
                f"what is known of this job cannot be read ({error}); was it made by another version?"
            ) from None

    @property
    def name(self) -> str:
        """The job's name."""
        return str((self.manifest.get("metadata") or {}).get("name") or "?")

    @property
    def namespace(self) -> str:
        """The job's namespace."""
        return str((self.manifest.get("metadata") or {}).get("namespace") or "")

    @property
    def on_cluster(self) -> bool:
        """Whether it lives on a cluster, and not in a run on this machine."""
        return self.run.alive and not self.run.id

    @property
    def spec(self) -> Mapping[str, Any]:
        """The job's spec, as the manifest has it."""
        spec = self.manifest.get("spec")
        return spec if isinstance(spec, Mapping) else {}

    @property
    def created(self) -> float | None:
        """When the job was made, in seconds since the Unix epoch."""
        metadata = self.manifest.get("metadata") or {}
        return seconds(metadata.get("creationTimestamp")) or seconds(self.status.start_time)

    @property
    def completed(self) -> float | None:
        """When it was over, in seconds since the Unix epoch; None while it goes on, or where nobody saw it end."""
        return self.run.ended.time if self.run.ended else seconds(self.status.completion_time)

    @property
    def state(self) -> str:
        """The job's state in a word; a run that is over without having finished is called what it is."""
        if self.status.finished or (self.run.alive and self.run.ended is None):
            return self.status.state
        how = self.run.ended.how if self.run.ended else "killed"
        return how[:1].upper() + how[1:]

    @property
    def deadline(self) -> float | None:
        """When the job has taken as long as it may, in seconds since the Unix epoch; None for never, or not now."""
        allowed, since = self.spec.get("activeDeadlineSeconds"), seconds(self.status.active_since)
        if self.status.finished or since is None or not isinstance(allowed, int):
            return None
        return since + allowed

    def age(self, now: float) -> float:
        """How long the job has gone on, or went on until it finished, in seconds."""
        start = self.created
        return 0.0 if start is None else max(0.0, (self.completed or now) - start)

    @property
    def living_pods(self) -> tuple[ShownPod, ...]:
        """The pods that have not ended, by index; of one index, the one that leaves first."""
        living = (pod for pod in self.pods if not pod.over)
        return tuple(sorted(living, key=lambda pod: (pod.index, not pod.terminating)))

    @property
    def ended_pods(self) -> tuple[ShownPod, ...]:
        """The pods that have ended, the latest first."""
        return tuple(sorted((pod for pod in self.pods if pod.over), key=lambda pod: pod.ended or 0.0, reverse=True))


def seconds(time: str | float | None) -> float | None:
    """A time of a snapshot (RFC 3339, or seconds) as seconds since the Unix epoch; None where it is no time."""
    if isinstance(time, str):
        try:
            return datetime.fromisoformat(time).timestamp()
        except ValueError:
            return None
    return time or None
