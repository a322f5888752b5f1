"""Turns "something may have changed" into a cluster that is as the plan wants it.

Jobs wait in a queue, each at most once. One task works on a job at a time, several jobs run side by side, and a
namespace cannot use up all of them. A reconcile that fails is repeated with exponential back-off. A job that is woken
continuously is throttled.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NoReturn, Protocol

from elastic_operator.controller.plan import plan
from elastic_operator.errors import ElasticJobError
from torchelastic.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from elastic_operator.controller.model import Job, Observed, Plan


class Cluster(Protocol):
    """A place where jobs run. It calls ``wake(key)`` of the reconciler when something may have changed."""

    async def observe(self, key: str) -> tuple[Job, Observed] | None:
        """The job and what is known of it; None if it does not exist.

        It may be outdated, but never older than an earlier observation of this job, nor than what ``apply`` wrote.

        Raises:
            ClusterError: it could not be read; the reconciler retries.
        """

    async def apply(self, job: Job, plan: Plan) -> float | None:
        """Carry out the plan in its order; returns seconds after which to reconcile again, or None.

        The replicas and the status are written only onto the observed version of the job; if that fails, nothing else
        is done. If the size cannot be written, pods are still changed, and the error is raised afterwards. A pod to
        delete that is gone or was replaced, and a pod to create that exists, count as done.

        Raises:
            ClusterError: a part could not be done; the reconciler retries.
        """


_log: Final = logging.getLogger(__name__)

_SPARE: Final = 64
"""Outdated entries of the queue, beside one for each key, before it is rebuilt."""

_THROTTLES_BEFORE_WARNING: Final = 600
"""Consecutive throttles of a job before a warning is logged."""

Result = Literal["success", "error", "panic"]
"""How a reconcile ended; errors, and panics (defects of the operator), are repeated."""


class WorkQueue:
    """A queue of keys, each at most once and not before its time; the one that is due longest comes first.

    A key that was taken is not handed out again before :meth:`done`, but may be added again in the meantime.

    Args:
        waited: called for each key that is taken, with the seconds since it was due.
    """

    def __init__(self, waited: Callable[[float], None] = lambda _seconds: None) -> None:
        self._waited = waited
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._busy: set[str] = set()
        self._resting: dict[str, float] = {}
        self._order = itertools.count()
        self._changed = asyncio.Event()

    def put(self, key: str, delay: float = 0.0) -> None:
        """Add a key.

        Args:
            key: of the job.
            delay: seconds until it is due, unless it is due earlier already.
        """
        due = self._rested(key, time.monotonic() + max(delay, 0.0))
        if due < self._due.get(key, float("inf")):
            self._schedule(key, due)

    async def take(self) -> str:
        """The next key, as soon as one is due."""
        while True:
            self._changed.clear()
            wait = self._next_wait()
            if wait is not None and wait <= 0:
                _, _, key = heapq.heappop(self._heap)
                del self._due[key]
                self._waited(-wait)
                self._busy.add(key)
                self._changed.set()  # wakes the next waiter
                return key
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, key: str, rest: float = 0.0) -> None:
        """Allow a taken key to be handed out again.

        Args:
            key: of the job.
            rest: after this many seconds.
        """
        self._busy.discard(key)
        if rest > 0:
            self._resting[key] = time.monotonic() + rest
        else:
            self._resting.pop(key, None)
        if (due := self._due.get(key)) is not None:
            self._schedule(key, self._rested(key, due))

    def clear(self) -> None:
        """Remove all keys."""
        self._due.clear()
        self._heap.clear()
        self._resting.clear()

    @property
    def depth(self) -> int:
        """How many keys are due."""
        now = time.monotonic()
        return sum(due <= now for due in self._due.values())

    def _rested(self, key: str, due: float) -> float:
        """When a key that is due at this time can be handed out."""
        rested = self._resting.get(key, 0.0)
        if rested <= time.monotonic():
            self._resting.pop(key, None)
        return max(due, rested)

    def _schedule(self, key: str, due: float) -> None:
        self._due[key] = due
        heapq.heappush(self._heap, (due, next(self._order), key))
        if len(self._heap) > 2 * len(self._due) + _SPARE:  # keys that became due earlier have two entries
            self._heap = [(due, next(self._order), key) for key, due in self._due.items()]
            heapq.heapify(self._heap)
        self._changed.set()

    def _next_wait(self) -> float | None:
        """Seconds until the key on top of the heap can be handed out; None if there is none."""
        while self._heap:
            due, _, key = self._heap[0]
            if self._due.get(key) == due and key not in self._busy:
                return due - time.monotonic()
            heapq.heappop(self._heap)  # outdated, or scheduled again when it is done
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileSettings:
    """How a reconciler works.

    Attributes:
        max_concurrent_reconciles: jobs that are reconciled at once.
        max_per_namespace: of these, in one namespace.
        base_delay: seconds before the first retry; each further retry waits twice as long.
        max_delay: seconds before a retry at most.
        resync_period: seconds between two resyncs of all jobs, as watches can fall silent.
        burst: reconciles of one job in a row without throttling.
        qps: reconciles of one job per second in the long run.
        min_interval: seconds between two reconciles of one job: changes of its pods often come together.
        max_share: of the time that observing and planning one job takes at most; 1000 pods take their time.
        max_interval: seconds between two reconciles of one job at most, because of ``max_share``.
    """

    max_concurrent_reconciles: int = 64
    max_per_namespace: int = 48
    base_delay: float = 0.1
    max_delay: float = 60.0
    resync_period: float = 300.0
    burst: int = 30
    qps: float = 20.0
    min_interval: float = 0.02
    max_share: float = 0.25
    max_interval: float = 0.5


@dataclass(slots=True)
class _JobRecord:
    """What the reconciler remembers of a job.

    Attributes:
        tokens: reconciles that are left without throttling.
        refilled: when ``tokens`` was computed.
        throttles: in a row.
        failures: of reconciles, in a row.
        observing: seconds that observing and planning it took last.
    """

    tokens: float
    refilled: float
    throttles: int = 0
    failures: int = 0
    observing: float = 0.0


class Reconciler:
    """Observes, plans and applies, job by job, until it is cancelled.

    Args:
        cluster: where the jobs run.
        clock: seconds since the Unix epoch.
        queue: the keys to reconcile; a cluster that needs it before there is a reconciler shares its own.
        list_keys: gives the keys of all jobs for a resync; None for no resyncs.
        settings: see there.
        reconciled: called after each reconcile with the seconds that it took and its result.
    """

    def __init__(
        self,
        cluster: Cluster,
        clock: Callable[[], float] = time.time,
        *,
        queue: WorkQueue | None = None,
        list_keys: Callable[[], Awaitable[Iterable[str]]] | None = None,
        settings: ReconcileSettings | None = None,
        reconciled: Callable[[float, Result], None] = lambda _seconds, _result: None,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._queue = queue if queue is not None else WorkQueue()
        self._list_keys = list_keys
        self._settings = settings if settings is not None else ReconcileSettings()
        self._reconciled = reconciled
        self._jobs: dict[str, _JobRecord] = {}
        self._begun: dict[str, float] = {}
        self._at_work: Counter[str] = Counter()
        self._held: dict[str, deque[str]] = {}

    @property
    def longest(self) -> float:
        """For how many seconds the longest current reconcile has been running; 0 if there is none."""
        return time.monotonic() - min(self._begun.values()) if self._begun else 0.0

    def wake(self, key: str) -> None:
        """Say that something about this job may have changed."""
        self._queue.put(key)

    async def run(self) -> None:
        """Work until cancelled; no task outlives this."""
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._list_keys is not None:
                    tasks.create_task(self._resync(self._list_keys))
                for _ in range(self._settings.max_concurrent_reconciles):
                    tasks.create_task(self._work())
        finally:
            for key in itertools.chain(*self._held.values()):
                self._queue.done(key)

    async def _work(self) -> NoReturn:
        while True:
            key = await self._queue.take()
            namespace = key.partition("/")[0]
            if self._at_work[namespace] >= self._settings.max_per_namespace:
                self._held.setdefault(namespace, deque()).append(key)
                continue
            self._at_work[namespace] += 1
            try:
                await self._process(key)
                while (held := self._held.get(namespace)) is not None:
                    key = held.popleft()
                    if not held:
                        del self._held[namespace]
                    await self._process(key)
            finally:
                self._at_work[namespace] -= 1
                if not self._at_work[namespace]:
                    del self._at_work[namespace]

    async def _process(self, key: str) -> None:
        begun = self._begun[key] = time.monotonic()
        try:
            result, again = await self._reconcile(key)
            if again is not None:
                self._queue.put(key, again)
            self._reconciled(time.monotonic() - begun, result)
        finally:
            del self._begun[key]
            self._queue.done(key, self._interval(key))

    async def _reconcile(self, key: str) -> tuple[Result, float | None]:
        """Reconcile a job; returns the result, and the seconds until it is due again whatever happens."""
        record = self._jobs.setdefault(key, _JobRecord(self._settings.burst, time.monotonic()))
        due: list[float | None] = []
        try:
            begun = time.monotonic()
            seen = await self._cluster.observe(key)
            if seen is None:
                self._jobs.pop(key, None)
                return "success", None
            job, observed = seen
            todo = plan(job, observed, self._clock())
            record.observing = time.monotonic() - begun
            due.append(None if todo.wake_at is None else todo.wake_at - self._clock())
            due.append(await self._cluster.apply(job, todo))
        except (ElasticJobError, StoreError) as error:
            delay = self._retry_delay(record)
            _log.warning("%s: %s; trying again in %.1f s", key, error, delay)
            return "error", _first(delay, *due)
        except Exception:  # noqa: BLE001 - a defect met by one job must not stop the others
            delay = self._retry_delay(record)
            _log.exception("%s: an unexpected error; trying again in %.1f s", key, delay)
            return "panic", _first(delay, *due)
        record.failures = 0
        return "success", _first(*due)

    def _retry_delay(self, record: _JobRecord) -> float:
        record.failures += 1
        return min(self._settings.base_delay * 2.0 ** min(record.failures - 1, 32), self._settings.max_delay)

    def _interval(self, key: str) -> float:
        """Seconds until the job may be reconciled again."""
        if (record := self._jobs.get(key)) is None:
            return 0.0
        settings, now = self._settings, time.monotonic()
        refill = (now - record.refilled) * settings.qps
        record.tokens = min(float(settings.burst), record.tokens + refill) - 1
        record.refilled = now
        throttle = max(-record.tokens / settings.qps, 0.0)
        record.throttles = record.throttles + 1 if throttle else 0
        if record.throttles == _THROTTLES_BEFORE_WARNING:
            _log.warning("%s: job is requeued continuously", key)
        after_observing = min(record.observing * (1 / settings.max_share - 1), settings.max_interval)
        return max(throttle, settings.min_interval, after_observing)

    async def _resync(self, list_keys: Callable[[], Awaitable[Iterable[str]]]) -> NoReturn:
        while True:
            try:
                for key in await list_keys():
                    self._queue.put(key)
            except (ElasticJobError, StoreError) as error:
                _log.warning("the jobs cannot be listed: %s", error)
            except Exception:  # noqa: BLE001 - the next listing may succeed
                _log.exception("the jobs cannot be listed")
            await asyncio.sleep(self._settings.resync_period)


def _first(*delays: float | None) -> float | None:
    return min((delay for delay in delays if delay is not None), default=None)
