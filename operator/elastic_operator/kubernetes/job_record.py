"""What the operator remembers of a job between two reconciles, only in memory."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elastic_operator.kubernetes import client
from elastic_operator.kubernetes.object_cache import unpack_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_operator.api.json_values import Json
    from elastic_operator.controller.model import Pod

_BASE_DELAY: Final = 0.5
_MAX_DELAY: Final = 30.0


@dataclass(slots=True)
class CreateBackoff:
    """The rejections of the API server for a generation of the spec, and the time of the next attempt.

    Attributes:
        rejected: why the objects will never be accepted; None if they may be.
        blocked: why the objects were not accepted, although a later attempt may succeed; None if they were.
    """

    rejected: str | None = None
    blocked: str | None = None
    _generation: int = 0
    _delays: Iterator[float] = field(default_factory=lambda: client.backoff(_BASE_DELAY, _MAX_DELAY))
    _next_try: float = 0.0

    def reset_for(self, generation: int) -> None:
        """Start over for a new generation; a block of the former generation remains until the first attempt."""
        if generation != self._generation:
            blocked = self.blocked
            self.succeed()
            self._generation, self.blocked = generation, blocked

    @property
    def wait(self) -> float:
        """The seconds until the next attempt."""
        return max(self._next_try - time.monotonic(), 0.0)

    def reject(self, why: str) -> None:
        """Record that the objects will never be accepted."""
        self.rejected, self.blocked = why, None

    def block(self, why: str) -> None:
        """Record that the objects are not accepted now."""
        self.rejected, self.blocked = None, why
        self._next_try = time.monotonic() + next(self._delays)

    def succeed(self) -> None:
        """Record that all objects were created."""
        self.rejected = self.blocked = None
        self._next_try, self._delays = 0.0, client.backoff(_BASE_DELAY, _MAX_DELAY)


@dataclass(slots=True)
class JobRecord:
    """The data of a job that the operator keeps only in memory; their loss does no harm.

    Attributes:
        packed: the job as last observed, packed by :func:`~elastic_operator.kubernetes.object_cache.pack_job`.
        creates: the back-off for pods, etcd and PodGroup.
        pdb: the back-off for the PodDisruptionBudget.
        deleted: by index, the last state of the pods that are gone and not replaced yet, and a monotonic time at which
            they are forgotten.
        startup: why slow pods do not start, by UID (by container name for the etcd pod), in the order of the reads.
        read_at: when to read the next pod's events, a monotonic time; None if no pod is starting.
        report: the digest of the last report that was written or rejected.
        requeue: seconds after which to observe the job again; None if that is not needed.
    """

    key: str
    packed: Json
    creates: CreateBackoff = field(default_factory=CreateBackoff)
    pdb: CreateBackoff = field(default_factory=CreateBackoff)
    deleted: dict[int, tuple[Pod, float]] = field(default_factory=dict)
    startup: dict[str, str] = field(default_factory=dict)
    read_at: float | None = None
    report: bytes = b""
    requeue: float | None = None

    @property
    def uid(self) -> str:
        """The job's UID."""
        return str(self.packed["metadata"]["uid"])

    @property
    def body(self) -> Json:
        """The job as last observed."""
        return unpack_job(self.packed)

    @property
    def problems(self) -> tuple[str | None, ...]:
        """The reasons why objects were not accepted; None if they were."""
        return self.creates.rejected, self.creates.blocked, self.pdb.blocked

    def requeue_after(self, delay: float) -> None:
        """Request another observation of the job after at most these seconds."""
        self.requeue = delay if self.requeue is None else min(self.requeue, delay)
