"""The reconcile loop: after each possible change of a job, it observes the job, makes a plan, and applies the plan.

Different jobs are reconciled concurrently, and each job by one task at a time. A reconcile that fails is repeated with
exponential back-off. A job that is woken continuously is reconciled at a limited rate.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

from elastic_operator.controller.plan import plan
from elastic_operator.errors import ElasticJobError
from torchelastic.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from elastic_operator.controller.model import Job, Observed, Plan


class Backend(Protocol):
    """Where jobs run: a cluster or this machine. An implementation wakes the reconciler when a job may have changed."""

    async def observe(self, key: str) -> tuple[Job, Observed] | None:
        """Return the job and its observed state; None if the job does not exist.

        The state may be outdated, but is never older than an earlier observation of this job or a write of ``apply``.

        Raises:
            ClusterError: the job could not be read; the reconciler retries.
        """

    async def apply(self, job: Job, plan: Plan) -> float | None:
        """Apply the plan in its order; return the seconds after which to reconcile again, or None.

        The replicas and the status are written only to the observed version of the job; if that fails, the rest of
        the plan is skipped. If the size cannot be written, pods are still changed, and the error is raised afterwards.
        Deleting a pod that is gone or was replaced, and creating a pod that exists, count as done.

        Raises:
            ClusterError: a part of the plan failed; the reconciler retries.
        """


logger: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileSettings:
    """The settings of a reconciler.

    Attributes:
        base_delay: seconds before the first retry; each further retry waits twice as long.
        max_delay: maximum number of seconds before a retry.
        resync_period: seconds between two resyncs of all jobs, because watches can stop delivering changes.
        min_interval: seconds between two reconciles of one job: changes of its pods often come together.
        max_share: maximum fraction of the time for observing one job and planning it; both are slow for 1000 pods.
        max_interval: maximum number of seconds by which ``max_share`` may separate two reconciles of one job.
    """

    base_delay: float = 0.1
    max_delay: float = 60.0
    resync_period: float = 300.0
    min_interval: float = 0.02
    max_share: float = 0.25
    max_interval: float = 0.5


@dataclass(slots=True)
class _Queued:
    """A queued job.

    Attributes:
        due: when to reconcile it next, a monotonic time; infinite for never.
        timer: the timer that starts its reconcile; None if none is set.
        after: the earliest time of the next reconcile.
        busy: whether it is being reconciled.
        failures: the number of consecutive failed reconciles.
    """

    due: float = math.inf
    timer: asyncio.TimerHandle | None = None
    after: float = 0.0
    busy: bool = False
    failures: int = 0


class Reconciler:
    """Observes jobs, plans their changes and applies the plans, until it is canceled.

    Args:
        backend: where the jobs run.
        clock: returns the seconds since the Unix epoch.
        list_keys: returns the keys of all jobs for a resync.
        settings: the settings of the reconciler.
        waited: called before each reconcile with the seconds since it was due.
        reconciled: called after each reconcile with its seconds, and the result: success, error or panic (a defect).
    """

    def __init__(
        self,
        backend: Backend,
        clock: Callable[[], float] = time.time,
        *,
        list_keys: Callable[[], Iterable[str]] = tuple,
        settings: ReconcileSettings | None = None,
        waited: Callable[[float], None] = lambda _seconds: None,
        reconciled: Callable[[float, str], None] = lambda _seconds, _result: None,
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._list_keys = list_keys
        self._settings = settings if settings is not None else ReconcileSettings()
        self._waited = waited
        self._reconciled = reconciled
        self._jobs: dict[str, _Queued] = {}
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def depth(self) -> int:
        """The number of jobs that are due, but whose reconcile has not begun."""
        now = time.monotonic()
        return sum(max(job.due, job.after) <= now for job in self._jobs.values())

    def wake(self, key: str, delay: float = 0.0) -> None:
        """Schedule a reconcile of a job after ``delay`` seconds, unless one is due earlier."""
        job = self._jobs.setdefault(key, _Queued())
        due = time.monotonic() + max(delay, 0.0)
        if due < job.due:
            job.due = due
            self._schedule(key, job)

    async def run(self) -> NoReturn:
        """Reconcile jobs until canceled; no task outlives this call."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                for key, job in self._jobs.items():
                    self._schedule(key, job)
                while True:
                    for key in self._list_keys():
                        self.wake(key)
                    await asyncio.sleep(self._settings.resync_period)
            finally:
                self._tasks = None
                for key, job in self._jobs.items():
                    self._schedule(key, job)

    def _schedule(self, key: str, job: _Queued) -> None:
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None
        if self._tasks is not None and not job.busy and job.due < math.inf:
            job.timer = asyncio.get_running_loop().call_at(max(job.due, job.after), self._start, key, job, self._tasks)

    def _start(self, key: str, job: _Queued, tasks: asyncio.TaskGroup) -> None:
        job.timer, job.busy = None, True
        self._waited(max(time.monotonic() - max(job.due, job.after), 0.0))
        job.due = math.inf
        tasks.create_task(self._process(key, job))

    async def _process(self, key: str, job: _Queued) -> None:
        exists, begun = True, time.monotonic()
        try:
            exists, result = await self._reconcile(key, job)
            self._reconciled(time.monotonic() - begun, result)
        finally:
            job.busy = False
            if exists or job.due < math.inf:
                self._schedule(key, job)
            else:
                del self._jobs[key]

    async def _reconcile(self, key: str, job: _Queued) -> tuple[bool, str]:
        """Reconcile a job; return whether the job exists, and the result."""
        settings, begun = self._settings, time.monotonic()
        interval = settings.min_interval
        try:
            found = await self._backend.observe(key)
            if found is None:
                return False, "success"
            todo = plan(*found, self._clock())
            interval = max(
                interval, min((time.monotonic() - begun) * (1 / settings.max_share - 1), settings.max_interval)
            )
            if todo.wake_at is not None:
                self.wake(key, todo.wake_at - self._clock())
            again = await self._backend.apply(found[0], todo)
            if again is not None:
                self.wake(key, again)
        except (ElasticJobError, StoreError) as error:
            logger.warning("%s: %s; trying again in %.1f s", key, error, self._retry(key, job))
            return True, "error"
        except Exception:
            logger.exception("%s: an unexpected error; trying again in %.1f s", key, self._retry(key, job))
            return True, "panic"
        finally:
            job.after = time.monotonic() + interval
        job.failures = 0
        return True, "success"

    def _retry(self, key: str, job: _Queued) -> float:
        """Schedule another reconcile of a job after a failure; return the maximum number of seconds until then."""
        delay = min(self._settings.base_delay * 2.0 ** min(job.failures, 32), self._settings.max_delay)
        job.failures += 1
        self.wake(key, delay)
        return delay
