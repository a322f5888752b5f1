"""From wake-ups to plans that are carried out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from elastic_operator.controller.reconciler import Reconciler, ReconcileSettings
from elastic_operator.errors import BadInput, ClusterError
from tests.support.builders import NOW, a_job, a_world, died, running, that_trained
from torchelastic.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from elastic_operator.controller.model import Job, Observed, Plan

QUICK = ReconcileSettings(base_delay=0.001, max_delay=0.01)
PATIENCE = 20.0


class RecordingCluster:
    """A cluster that shows what it is told to show, and notes what it is asked to do."""

    def __init__(self) -> None:
        self.worlds: dict[str, tuple[Job, Observed] | None] = {}
        self.applied: list[tuple[str, Plan]] = []
        self.observed: list[str] = []
        self.busy: set[str] = set()
        self.troubles: dict[str, list[Exception]] = {}
        self.refusals: list[Exception] = []
        self.gate: Callable[[str], asyncio.Event | None] = lambda _key: None
        self.changed = asyncio.Condition()

    async def observe(self, key: str) -> tuple[Job, Observed] | None:
        assert key not in self.busy, "one job is worked on twice at once"
        self.busy.add(key)
        self.observed.append(key)
        try:
            await self._tell()
            if (gate := self.gate(key)) is not None:
                await gate.wait()
            if self.troubles.get(key):
                raise self.troubles[key].pop(0)
            return self.worlds.get(key)
        finally:
            self.busy.discard(key)
            await self._tell()

    async def apply(self, job: Job, plan: Plan) -> None:
        self.applied.append((job.namespace, plan))
        await self._tell()
        if self.refusals:
            raise self.refusals.pop(0)

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE), self.changed:
            await self.changed.wait_for(true)


@contextlib.asynccontextmanager
async def at_work(reconciler: Reconciler) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(reconciler.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def cluster() -> RecordingCluster:
    return RecordingCluster()


def a_reconciler(cluster: RecordingCluster, settings: ReconcileSettings = QUICK) -> Reconciler:
    return Reconciler(cluster, lambda: NOW, settings=settings)


async def test_a_job_that_is_woken_is_observed_planned_and_changed(cluster: RecordingCluster) -> None:
    cluster.worlds["a"] = a_job(), a_world()
    reconciler = a_reconciler(cluster)
    async with at_work(reconciler):
        reconciler.wake("a")
        await cluster.until(lambda: bool(cluster.applied))

    [(_, done)] = cluster.applied
    assert [pod.index for pod in done.create] == [0, 1]


async def test_a_job_that_is_gone_is_left_alone(cluster: RecordingCluster) -> None:
    reconciler = a_reconciler(cluster)
    async with at_work(reconciler):
        reconciler.wake("a")
        await cluster.until(lambda: cluster.observed == ["a"])

    assert cluster.applied == []


async def test_wake_ups_that_come_while_a_job_is_worked_on_make_one_more_turn(cluster: RecordingCluster) -> None:
    gate = asyncio.Event()
    cluster.worlds["a"] = a_job(), a_world()
    cluster.gate = lambda _key: gate
    reconciler = a_reconciler(cluster)
    async with at_work(reconciler):
        for _ in range(10):
            reconciler.wake("a")
        await cluster.until(lambda: len(cluster.observed) == 1)
        for _ in range(10):
            reconciler.wake("a")
        gate.set()
        await cluster.until(lambda: len(cluster.applied) == 2)
        cluster.worlds["last"] = a_job(), a_world()
        reconciler.wake("last")
        await cluster.until(lambda: len(cluster.applied) == 3)

    assert cluster.observed == ["a", "a", "last"]


async def test_jobs_that_take_their_time_hold_up_no_other(cluster: RecordingCluster) -> None:
    gate = asyncio.Event()
    cluster.gate = lambda key: gate if key.startswith("slow/") else None
    reconciler = a_reconciler(cluster)
    async with at_work(reconciler):
        for number in range(99):
            reconciler.wake(f"slow/{number}")
        await cluster.until(lambda: len(cluster.busy) == 99)
        reconciler.wake("other/job")
        await cluster.until(lambda: "other/job" in cluster.observed)
        gate.set()
        await cluster.until(lambda: not cluster.busy)


@pytest.mark.parametrize("trouble", [ClusterError("the server is busy"), StoreUnavailable("the store is away")])
async def test_what_fails_is_tried_again_and_told_in_a_sentence(
    cluster: RecordingCluster, caplog: pytest.LogCaptureFixture, trouble: Exception
) -> None:
    cluster.worlds["a"] = a_job(), a_world()
    cluster.troubles["a"] = [trouble, trouble]
    reconciler = a_reconciler(cluster)
    async with at_work(reconciler):
        reconciler.wake("a")
        await cluster.until(lambda: bool(cluster.applied))

    assert cluster.observed == ["a", "a", "a"]
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in told] == [
        f"a: {trouble}; trying again in 0.0 s",
        f"a: {trouble}; trying again in 0.0 s",
    ]
    assert all(record.exc_info is None for record in told)


async def test_a_defect_is_told_with_its_traceback_and_stops_no_other_job(
    cluster: RecordingCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.worlds = {"bad": (a_job(), a_world()), "good": (a_job(), a_world())}
    cluster.troubles["bad"] = [KeyError("surprise")]
    reconciler = a_reconciler(cluster)
    async with at_work(reconciler):
        reconciler.wake("bad")
        reconciler.wake("good")
        await cluster.until(lambda: len(cluster.applied) == 2)

    [told] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert told.getMessage().startswith("bad: an unexpected error")
    assert told.exc_info is not None


async def test_each_try_waits_longer_than_the_last_and_success_starts_over(
    cluster: RecordingCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.worlds["a"] = a_job(), a_world()
    cluster.troubles["a"] = [ClusterError("no") for _ in range(4)]
    reconciler = a_reconciler(cluster, ReconcileSettings(base_delay=0.001, max_delay=0.004))
    async with at_work(reconciler):
        reconciler.wake("a")
        await cluster.until(lambda: len(cluster.applied) == 1)
        cluster.troubles["a"] = [ClusterError("no")]
        reconciler.wake("a")
        await cluster.until(lambda: len(cluster.applied) == 2)

    waits = [record.args[-1] for record in caplog.records if isinstance(record.args, tuple)]
    assert waits == [0.001, 0.002, 0.004, 0.004, 0.001]


async def test_a_plan_that_asks_for_it_is_made_anew_when_its_time_has_come(cluster: RecordingCluster) -> None:
    waits = that_trained(a_job(replicas=2)), a_world(running(0), died(1, failures=1, ended=NOW - 0.99))
    cluster.worlds["a"] = waits
    reconciler = a_reconciler(cluster)
    async with at_work(reconciler):
        reconciler.wake("a")
        await cluster.until(lambda: len(cluster.applied) == 2)

    assert cluster.applied[0][1].wake_at == pytest.approx(NOW + 0.01)


async def test_its_time_comes_also_when_what_was_planned_has_failed(cluster: RecordingCluster) -> None:
    cluster.worlds["a"] = that_trained(a_job(replicas=2)), a_world(running(0), died(1, failures=1, ended=NOW - 0.99))
    cluster.refusals = [ClusterError("not today")]
    async with at_work(reconciler := a_reconciler(cluster, ReconcileSettings(base_delay=3600, max_delay=3600))):
        reconciler.wake("a")
        await cluster.until(lambda: len(cluster.applied) == 2)

    assert cluster.refusals == []


async def test_a_job_at_which_a_look_takes_long_is_looked_at_less_often(cluster: RecordingCluster) -> None:
    cluster.worlds = {"large": (a_job(), a_world()), "other": (a_job(), a_world())}
    settings = ReconcileSettings(min_interval=0.0, max_share=1e-12, max_interval=3600)
    async with at_work(reconciler := a_reconciler(cluster, settings)):
        reconciler.wake("large")
        await cluster.until(lambda: len(cluster.applied) == 1)
        reconciler.wake("large")
        reconciler.wake("other")
        await cluster.until(lambda: len(cluster.applied) == 2)

    assert cluster.observed == ["large", "other"]


async def test_it_ends_when_it_is_cancelled_and_leaves_nothing_running(cluster: RecordingCluster) -> None:
    cluster.gate = lambda _key: asyncio.Event()
    before = asyncio.all_tasks()
    reconciler = a_reconciler(cluster)
    async with at_work(reconciler) as task:
        reconciler.wake("a")
        await cluster.until(lambda: len(cluster.busy) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert asyncio.all_tasks() == before
    assert cluster.busy == set()


async def test_it_tells_how_each_reconcile_went(cluster: RecordingCluster) -> None:
    cluster.worlds = dict.fromkeys(("good", "bad", "odd"), (a_job(), a_world()))
    cluster.troubles = {"bad": [ClusterError("no")], "odd": [KeyError("surprise")]}
    told: list[str] = []
    settings = ReconcileSettings(base_delay=3600.0)
    reconciler = Reconciler(
        cluster, lambda: NOW, settings=settings, reconciled=lambda _seconds, outcome: told.append(outcome)
    )
    async with at_work(reconciler):
        for key in cluster.worlds:
            reconciler.wake(key)
        await cluster.until(lambda: len(cluster.observed) == 3 and len(cluster.applied) == 1)

    assert sorted(told) == ["error", "panic", "success"]


async def test_all_jobs_are_reconciled_now_and_then(cluster: RecordingCluster) -> None:
    lists = [["a", "b"], ["c"]]
    settings = replace(QUICK, resync_period=0.001)
    async with at_work(Reconciler(cluster, list_keys=lambda: lists.pop(0) if lists else [], settings=settings)):
        await cluster.until(lambda: cluster.observed == ["a", "b", "c"])


async def test_a_job_that_is_woken_continuously_holds_up_no_other_and_is_limited(cluster: RecordingCluster) -> None:
    cluster.worlds = {"calm": (a_job(), a_world())}
    cluster.troubles["restless"] = [BadInput("spec.minReplicas is no number")]
    reconciler = a_reconciler(cluster, ReconcileSettings(min_interval=3600.0))

    def wake_again(key: str) -> None:
        if key == "restless":
            reconciler.wake(key)

    cluster.gate = wake_again
    async with at_work(reconciler):
        reconciler.wake("restless")
        await cluster.until(lambda: cluster.observed == ["restless"])
        reconciler.wake("calm")
        await cluster.until(lambda: "calm" in cluster.observed)
        assert reconciler.depth == 0

    assert cluster.observed == ["restless", "calm"]


async def test_a_job_can_be_brought_forward_but_not_put_off(cluster: RecordingCluster) -> None:
    reconciler = a_reconciler(cluster)
    reconciler.wake("later", 3600.0)
    reconciler.wake("now")
    reconciler.wake("now", 3600.0)
    assert reconciler.depth == 1
    async with at_work(reconciler):
        await cluster.until(lambda: cluster.observed == ["now"])
        reconciler.wake("later")
        await cluster.until(lambda: cluster.observed == ["now", "later"])
