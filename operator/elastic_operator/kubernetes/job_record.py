"""What the operator remembers of a job beside the job's status; it may be lost at any time without harm."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from elastic_operator.api.spec import Json
    from elastic_operator.controller.model import Pod

_BASE_DELAY: Final = 0.5
_MAX_DELAY: Final = 30.0
_TRANSIENT_TRIES: Final = 3


@dataclass(slots=True)
class CreateBackoff:
    """What the API server did not accept for a generation of the spec, and when to try again.

    Attributes:
        rejected: why it will never be accepted.
        blocked: why it was not accepted at the last try, though it may be later.
    """

    rejected: str | None = None
    blocked: str | None = None
    _generation: int = 0
    _tries: int = 0
    _next_try: float = 0.0
    _failing_since: float | None = None
    _failures: int = 0

    def see(self, generation: int) -> None:
        """Start over for a new generation; what blocked the former one counts until this one was tried."""
        if generation != self._generation:
            self._generation, self._tries, self._next_try, self.rejected = generation, 0, 0.0, None

    @property
    def wait(self) -> float:
        """Seconds until the next try."""
        return max(self._next_try - time.monotonic(), 0.0)

    def reject(self, why: str) -> None:
        """It will never be accepted."""
        self.rejected, self.blocked = why, None

    def block(self, why: str) -> None:
        """It is not accepted now."""
        self.rejected, self.blocked = None, why
        self._next_try = time.monotonic() + min(_BASE_DELAY * 2.0 ** min(self._tries, 16), _MAX_DELAY)
        self._tries += 1

    def fail(self, patience: float) -> bool:
        """The API server failed; return whether it has for so many seconds, and several times."""
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        self._failures += 1
        return self._failures >= _TRANSIENT_TRIES and now - self._failing_since >= patience

    def progress(self) -> None:
        """Something was created, though perhaps not everything."""
        self._failing_since, self._failures = None, 0

    def succeed(self) -> bool:
        """Everything was created; return whether something had been rejected or blocked before."""
        self.progress()
        changed = self.rejected is not None or self.blocked is not None
        self.rejected = self.blocked = None
        self._tries, self._next_try = 0, 0.0
        return changed


@dataclass(frozen=True, slots=True)
class DeletedPod:
    """A pod that is gone and not replaced yet.

    Attributes:
        pod: its last state, as a pod that has ended and is leaving.
        expires: a monotonic time.
    """

    pod: Pod
    expires: float


@dataclass(slots=True)
class StartupDiagnosis:
    """What keeps slow pods from starting.

    Attributes:
        wait: seconds between this look at their events and the next.
        due: when to look next, a monotonic time; None if no pod is starting.
        messages: by UID, the pod that was looked at last at the end.
    """

    wait: float = 0.0
    due: float | None = None
    messages: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class ReportWrite:
    """How far the ConfigMap with a job's report is.

    Attributes:
        written: digest of the report that was written, or given up, last.
        pending: digest of the one that could not be written yet.
        failing_since: a monotonic time.
        error: why it could not be written; None if nothing is pending.
    """

    written: bytes = b""
    pending: bytes = b""
    failing_since: float = 0.0
    error: str | None = None


@dataclass(slots=True)
class JobRecord:
    """What is remembered of one job.

    Attributes:
        key: of the job.
        body: the job as last observed.
        observed: whether it was observed by this copy of the operator.
        creates: pods, etcd and PodGroup.
        pdb: the PodDisruptionBudget.
        pdb_error: why it could not be created.
        annotations: the metrics ports that are written on pods.
        deleted: by index, the pods that are gone and not replaced yet.
        startup: why pods do not start.
        etcd_startup: why the pod of the job's own etcd does not start.
        report: the report of the run.
        requeue: seconds after which to look at the job again; None for no need.
    """

    key: str
    body: Json
    observed: bool = False
    creates: CreateBackoff = field(default_factory=CreateBackoff)
    pdb: CreateBackoff = field(default_factory=CreateBackoff)
    pdb_error: str | None = None
    annotations: CreateBackoff = field(default_factory=CreateBackoff)
    deleted: dict[int, DeletedPod] = field(default_factory=dict)
    startup: StartupDiagnosis = field(default_factory=StartupDiagnosis)
    etcd_startup: StartupDiagnosis = field(default_factory=StartupDiagnosis)
    report: ReportWrite = field(default_factory=ReportWrite)
    requeue: float | None = None

    @property
    def uid(self) -> str:
        """The job's UID."""
        return str(self.body["metadata"]["uid"])

    def requeue_after(self, seconds: float) -> None:
        """Look at the job again after this time at the latest."""
        self.requeue = seconds if self.requeue is None else min(self.requeue, seconds)
