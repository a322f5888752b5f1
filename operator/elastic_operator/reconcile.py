"""From "something may have changed" to a cluster that is as the plan wants it.

Wake-ups are gathered in a queue by job: however many come while a job waits or is worked on, it is looked at once more.
One job is worked on by one task at a time, several jobs side by side. What fails is tried again, later and later, and
keeps no other job from its turn. Nor does a job that is woken without end: it has to rest. And jobs of one namespace
leave room for those of others.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NoReturn

from elastic_operator.errors import ElasticJobError
from elastic_operator.plan import plan
from torchelastic.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from elastic_operator.cluster import Cluster

_log: Final = logging.getLogger(__name__)

_SPARE: Final = 64
"""So many entries of the queue may be out of date, beside as many as there are keys."""
_RESTLESS: Final = 600
"""So often in a row must a job have been made to rest before that is told."""

Outcome = Literal["done", "failed", "defect"]
"""How a reconcile went: ``failed`` is tried again; so is what met a defect of ours."""


class WorkQueue:
    """Keys that want attention, each at most once and not before its time; the one that is due longest comes first.

    A key that is handed out is not handed out again before :meth:`done`, but may be put back in the meantime.

    Args:
        waited: called for each key that is handed out with the seconds since it was due.
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
        """Have the key looked at.

        Args:
            key: of the job.
            delay: seconds until then; where it is to be looked at earlier already, that holds.
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
                self._changed.set()  # several may wait here; the next one looks at what is left
                return key
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, key: str, rest: float = 0.0) -> None:
        """The key that was taken may be handed out again.

        Args:
            key: of the job.
            rest: seconds in which it may not.
        """
        self._busy.discard(key)
        if rest > 0:
            self._resting[key] = time.monotonic() + rest
        else:
            self._resting.pop(key, None)
        if (due := self._due.get(key)) is not None:
            self._schedule(key, self._rested(key, due))

    def clear(self) -> None:
        """Nobody takes keys any more, and whoever does next begins anew."""
        self._due.clear()
        self._heap.clear()
        self._resting.clear()

    @property
    def depth(self) -> int:
        """How many keys want attention now."""
        now = time.monotonic()
        return sum(due <= now for due in self._due.values())

    def _rested(self, key: str, due: float) -> float:
        """When a key can be handed out that wants to be at this time."""
        rested = self._resting.get(key, 0.0)
        if rested <= time.monotonic():
            self._resting.pop(key, None)
        return max(due, rested)

    def _schedule(self, key: str, due: float) -> None:
        self._due[key] = due
        heapq.heappush(self._heap, (due, next(self._order), key))
        if len(self._heap) > 2 * len(self._due) + _SPARE:  # what was brought forward stands there twice
            self._heap = [(due, next(self._order), key) for key, due in self._due.items()]
            heapq.heapify(self._heap)
        self._changed.set()

    def _next_wait(self) -> float | None:
        """Seconds until a key can be handed out, that one on top of the heap; None where there is none."""
        while self._heap:
            due, _, key = self._heap[0]
            if self._due.get(key) == due and key not in self._busy:
                return due - time.monotonic()
            heapq.heappop(self._heap)  # it was brought forward, or comes back when it is done
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileSettings:
    """How a reconciler works.

    Attributes:
        side_by_side: so many jobs are worked on at once.
        of_one_namespace: of these, so many in one namespace: one where all is slow holds up no other.
        first_retry: seconds after which what failed is tried again; then twice as long, and so on.
        longest_retry: seconds that lie at most between two tries.
        relist_every: seconds after which all jobs are looked at though nothing seems to have happened: watches can fall
            silent.
        burst: so often in a row may a job be looked at without a rest.
        per_second: so often it may be looked at in the long run.
        gathering: seconds that lie at least between two looks at one job: what happens to its pods often happens to
            several at once.
        looking_share: of the time at most that looks at one job take: a look at a thousand pods takes its time, and a
            thousand pods that start wake the operator a thousand times.
        longest_rest: seconds for which a job rests at most because a look at it took long.
    """

    side_by_side: int = 64
    of_one_namespace: int = 48
    first_retry: float = 0.1
    longest_retry: float = 60.0
    relist_every: float = 300.0
    burst: int = 30
    per_second: float = 20.0
    gathering: float = 0.02
    looking_share: float = 0.25
    longest_rest: float = 0.5


class _Pace:
    """How often one job is looked at.

    Attributes:
        looked: seconds that the last look took, without what was done then.
    """

    def __init__(self, burst: int, per_second: float) -> None:
        self.looked = 0.0
        self._burst = self._left = float(burst)
        self._per_second = per_second
        self._last = time.monotonic()
        self._tired = 0

    def rest(self) -> float:
        """It was looked at once more; gives back the seconds that it has to rest now."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._last) * self._per_second) - 1
        self._last = now
        if self._left >= 0:
            self._tired = 0
            return 0.0
        self._tired += 1
        return -self._left / self._per_second

    @property
    def restless(self) -> bool:
        """Whether that has gone on for so long now that somebody should know; true once each time."""
        return self._tired == _RESTLESS


class Reconciler:
    """Observes, plans and applies, job by job, until it is cancelled.

    Args:
        cluster: where the jobs run.
        clock: seconds since the Unix epoch.
        queue: the keys that want attention; a cluster that needs it before there is a reconciler shares its own.
        list_keys: gives the keys of all jobs, now and then; None where the cluster's word is enough.
        settings: see there.
        reconciled: called after each reconcile with the seconds that it took and how it went.
    """

    def __init__(
        self,
        cluster: Cluster,
        clock: Callable[[], float] = time.time,
        *,
        queue: WorkQueue | None = None,
        list_keys: Callable[[], Awaitable[Iterable[str]]] | None = None,
        settings: ReconcileSettings | None = None,
        reconciled: Callable[[float, Outcome], None] = lambda _seconds, _outcome: None,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._queue = queue if queue is not None else WorkQueue()
        self._list_keys = list_keys
        self._settings = settings if settings is not None else ReconcileSettings()
        self._reconciled = reconciled
        self._failures: dict[str, int] = {}
        self._paces: dict[str, _Pace] = {}
        self._begun: dict[str, float] = {}
        self._at_work: Counter[str] = Counter()
        self._held: dict[str, deque[str]] = {}

    @property
    def longest(self) -> float:
        """For how many seconds the job has been worked on that is worked on longest now; 0 where none is."""
        return time.monotonic() - min(self._begun.values()) if self._begun else 0.0

    def wake(self, key: str) -> None:
        """Say that something about this job may have changed."""
        self._queue.put(key)

    async def run(self) -> None:
        """Work until cancelled; nothing that was begun outlives this."""
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._list_keys is not None:
                    tasks.create_task(self._relist(self._list_keys))
                for _ in range(self._settings.side_by_side):
                    tasks.create_task(self._work())
        finally:
            for key in itertools.chain(*self._held.values()):
                self._queue.done(key)

    async def _work(self) -> NoReturn:
        while True:
            key = await self._queue.take()
            namespace = key.partition("/")[0]
            if self._at_work[namespace] >= self._settings.of_one_namespace:
                self._held.setdefault(namespace, deque()).append(key)
                continue
            self._at_work[namespace] += 1
            try:
                await self._turn(key)
                while (held := self._held.get(namespace)) is not None:
                    key = held.popleft()
                    if not held:
                        del self._held[namespace]
                    await self._turn(key)
            finally:
                self._at_work[namespace] -= 1
                if not self._at_work[namespace]:
                    del self._at_work[namespace]

    async def _turn(self, key: str) -> None:
        """Look at a job, and do what is to be done."""
        begun = self._begun[key] = time.monotonic()
        try:
            outcome = await self._reconcile(key)
            self._reconciled(time.monotonic() - begun, outcome)
        finally:
            del self._begun[key]
            self._queue.done(key, self._rest(key))

    async def _reconcile(self, key: str) -> Outcome:
        pace = self._paces.setdefault(key, _Pace(self._settings.burst, self._settings.per_second))
        try:
            begun = time.monotonic()
            seen = await self._cluster.observe(key)
            if seen is None:
                self._failures.pop(key, None)
                self._paces.pop(key, None)
                return "done"
            job, observed = seen
            todo = plan(job, observed, self._clock())
            pace.looked = time.monotonic() - begun
            if todo.wake_at is not None:
                self._queue.put(key, todo.wake_at - self._clock())
            await self._cluster.apply(job, todo)
        except (ElasticJobError, StoreError) as error:
            _log.warning("%s: %s; trying again in %.1f s", key, error, self._retry(key))
            return "failed"
        except Exception:  # noqa: BLE001 - a defect met by one job must not stop the others
            _log.exception("%s: an unexpected error; trying again in %.1f s", key, self._retry(key))
            return "defect"
        self._failures.pop(key, None)
        return "done"

    def _rest(self, key: str) -> float:
        """Seconds that a job has to rest after it was looked at; most often none."""
        if (pace := self._paces.get(key)) is None:
            return 0.0
        rest = pace.rest()
        if pace.restless:
            _log.warning("%s: something changes without end, and wakes the operator each time", key)
        settings = self._settings
        after_looking = min(pace.looked * (1 / settings.looking_share - 1), settings.longest_rest)
        return max(rest, settings.gathering, after_looking)

    def _retry(self, key: str) -> float:
        """Have the key looked at again, later than the last time; gives back the seconds until then."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay = min(self._settings.first_retry * 2.0 ** min(failures - 1, 32), self._settings.longest_retry)
        self._queue.put(key, delay)
        return delay

    async def _relist(self, list_keys: Callable[[], Awaitable[Iterable[str]]]) -> NoReturn:
        while True:
            try:
                for key in await list_keys():
                    self._queue.put(key)
            except (ElasticJobError, StoreError) as error:
                _log.warning("the jobs cannot be listed: %s", error)
            except Exception:  # noqa: BLE001 - the next listing may succeed
                _log.exception("the jobs cannot be listed")
            await asyncio.sleep(self._settings.relist_every)
