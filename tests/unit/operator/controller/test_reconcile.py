"""The reconciler: work queue, retries, back-off and limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from elastic_operator.controller.reconciler import Reconciler, ReconcileSettings
from elastic_operator.errors import BadInput, ClusterError
from tests.support.builders import NOW, a_job, a_world, died, running, that_trained
from torchelastic.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from elastic_operator.controller.model import Job, Observed, Plan

QUICK = ReconcileSettings(base_delay=0.001, max_delay=0.01)
TIMEOUT = 20.0


class RecordingCluster:
    """A cluster with settable observations and errors, which records the plans that are applied."""

    def __init__(self) -> None:
        self.observations: dict[str, tuple[Job, Observed] | None] = {}
        self.applied: list[tuple[str, Plan]] = []
        self.observed: list[str] = []
        self.busy: set[str] = set()
        self.observe_errors: dict[str, list[Exception]] = {}
        self.apply_errors: list[Exception] = []
        self.gate: Callable[[str], asyncio.Event | None] = lambda _key: None
        self.changed = asyncio.Condition()

    async def observe(self, key: str) -> tuple[Job, Observed] | None:
        assert key not in self.busy, "one job is reconciled twice at the same time"
        self.busy.add(key)
        self.observed.append(key)
        try:
            await self._notify()
            if (gate := self.gate(key)) is not None:
                await gate.wait()
            if self.observe_errors.get(key):
                raise self.observe_errors[key].pop(0)
            return self.observations.get(key)
        finally:
            self.busy.discard(key)
            await self._notify()

    async def apply(self, job: Job, plan: Plan) -> None:
        self.applied.append((job.namespace, plan))
        await self._notify()
        if self.apply_errors:
            raise self.apply_errors.pop(0)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT), self.changed:
            await self.changed.wait_for(condition)


@contextlib.asynccontextmanager
async def running_reconciler(
    cluster: RecordingCluster, settings: ReconcileSettings = QUICK, **more: Any
) -> AsyncIterator[Reconciler]:
    reconciler = Reconciler(cluster, lambda: NOW, settings=settings, **more)
    task = asyncio.create_task(reconciler.run())
    try:
        yield reconciler
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def cluster() -> RecordingCluster:
    return RecordingCluster()


async def test_wake_ups_during_a_reconcile_cause_one_more_reconcile(cluster: RecordingCluster) -> None:
    gate = asyncio.Event()
    cluster.observations["a"] = a_job(), a_world()
    cluster.gate = lambda _key: gate
    async with running_reconciler(cluster) as reconciler:
        for _ in range(10):
            reconciler.wake("a")
        await cluster.until(lambda: len(cluster.observed) == 1)
        for _ in range(10):
            reconciler.wake("a")
        gate.set()
        await cluster.until(lambda: len(cluster.applied) == 2)
        cluster.observations["last"] = a_job(), a_world()
        reconciler.wake("last")
        await cluster.until(lambda: len(cluster.applied) == 3)

    assert cluster.observed == ["a", "a", "last"]


async def test_slow_jobs_do_not_delay_others(cluster: RecordingCluster) -> None:
    gate = asyncio.Event()
    cluster.gate = lambda key: gate if key.startswith("slow/") else None
    async with running_reconciler(cluster) as reconciler:
        for number in range(99):
            reconciler.wake(f"slow/{number}")
        await cluster.until(lambda: len(cluster.busy) == 99)
        reconciler.wake("other/job")
        await cluster.until(lambda: "other/job" in cluster.observed)
        gate.set()
        await cluster.until(lambda: not cluster.busy)


@pytest.mark.parametrize("error", [ClusterError("the server is busy"), StoreUnavailable("the store is away")])
async def test_an_error_is_logged_in_one_sentence_and_the_reconcile_is_retried(
    cluster: RecordingCluster, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    cluster.observations["a"] = a_job(), a_world()
    cluster.observe_errors["a"] = [error, error]
    async with running_reconciler(cluster) as reconciler:
        reconciler.wake("a")
        await cluster.until(lambda: bool(cluster.applied))

    assert cluster.observed == ["a", "a", "a"]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in warnings] == [
        f"a: {error}; trying again in 0.0 s",
        f"a: {error}; trying again in 0.0 s",
    ]
    assert all(record.exc_info is None for record in warnings)


async def test_an_unexpected_error_is_logged_with_its_traceback_and_does_not_stop_other_jobs(
    cluster: RecordingCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.observations = {"bad": (a_job(), a_world()), "good": (a_job(), a_world())}
    cluster.observe_errors["bad"] = [KeyError("surprise")]
    async with running_reconciler(cluster) as reconciler:
        reconciler.wake("bad")
        reconciler.wake("good")
        await cluster.until(lambda: len(cluster.applied) == 2)

    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage().startswith("bad: an unexpected error")
    assert record.exc_info is not None


async def test_the_delay_grows_with_each_failure_and_success_resets_it(
    cluster: RecordingCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.observations["a"] = a_job(), a_world()
    cluster.observe_errors["a"] = [ClusterError("no") for _ in range(4)]
    async with running_reconciler(cluster, ReconcileSettings(base_delay=0.001, max_delay=0.004)) as reconciler:
        reconciler.wake("a")
        await cluster.until(lambda: len(cluster.applied) == 1)
        cluster.observe_errors["a"] = [ClusterError("no")]
        reconciler.wake("a")
        await cluster.until(lambda: len(cluster.applied) == 2)

    waits = [record.args[-1] for record in caplog.records if isinstance(record.args, tuple)]
    assert waits == [0.001, 0.002, 0.004, 0.004, 0.001]


async def test_a_job_is_reconciled_again_at_the_time_that_its_plan_requests(cluster: RecordingCluster) -> None:
    waits = that_trained(a_job(replicas=2)), a_world(running(0), died(1, failures=1, ended=NOW - 0.99))
    cluster.observations["a"] = waits
    async with running_reconciler(cluster) as reconciler:
        reconciler.wake("a")
        await cluster.until(lambda: len(cluster.applied) == 2)

    assert cluster.applied[0][1].wake_at == pytest.approx(NOW + 0.01)


async def test_a_job_is_reconciled_at_the_requested_time_even_if_the_plan_could_not_be_applied(
    cluster: RecordingCluster,
) -> None:
    cluster.observations["a"] = (
        that_trained(a_job(replicas=2)),
        a_world(running(0), died(1, failures=1, ended=NOW - 0.99)),
    )
    cluster.apply_errors = [ClusterError("not today")]
    async with running_reconciler(cluster, ReconcileSettings(base_delay=3600, max_delay=3600)) as reconciler:
        reconciler.wake("a")
        await cluster.until(lambda: len(cluster.applied) == 2)

    assert cluster.apply_errors == []


async def test_a_job_whose_reconciles_take_long_is_reconciled_less_often(cluster: RecordingCluster) -> None:
    cluster.observations = {"large": (a_job(), a_world()), "other": (a_job(), a_world())}
    settings = ReconcileSettings(min_interval=0.0, max_share=1e-12, max_interval=3600)
    async with running_reconciler(cluster, settings) as reconciler:
        reconciler.wake("large")
        await cluster.until(lambda: len(cluster.applied) == 1)
        reconciler.wake("large")
        reconciler.wake("other")
        await cluster.until(lambda: len(cluster.applied) == 2)

    assert cluster.observed == ["large", "other"]


async def test_a_cancelled_reconciler_leaves_no_task_behind(cluster: RecordingCluster) -> None:
    cluster.gate = lambda _key: asyncio.Event()
    before = asyncio.all_tasks()
    async with running_reconciler(cluster) as reconciler:
        reconciler.wake("a")
        await cluster.until(lambda: len(cluster.busy) == 1)

    assert asyncio.all_tasks() == before
    assert cluster.busy == set()


async def test_the_outcome_of_each_reconcile_is_reported(cluster: RecordingCluster) -> None:
    cluster.observations = dict.fromkeys(("good", "bad", "odd"), (a_job(), a_world()))
    cluster.observe_errors = {"bad": [ClusterError("no")], "odd": [KeyError("surprise")]}
    outcomes: list[str] = []
    settings = ReconcileSettings(base_delay=3600.0)
    report = {"reconciled": lambda _seconds, outcome: outcomes.append(outcome)}
    async with running_reconciler(cluster, settings, **report) as reconciler:
        for key in cluster.observations:
            reconciler.wake(key)
        await cluster.until(lambda: len(cluster.observed) == 3 and len(cluster.applied) == 1)

    assert sorted(outcomes) == ["error", "panic", "success"]


async def test_all_jobs_are_reconciled_once_per_resync_period(cluster: RecordingCluster) -> None:
    lists = [["a", "b"], ["c"]]
    settings = replace(QUICK, resync_period=0.001)
    async with running_reconciler(cluster, settings, list_keys=lambda: lists.pop(0) if lists else []):
        await cluster.until(lambda: cluster.observed == ["a", "b", "c"])


async def test_a_continuously_requeued_job_is_limited_and_does_not_delay_others(cluster: RecordingCluster) -> None:
    cluster.observations = {"calm": (a_job(), a_world())}
    cluster.observe_errors["restless"] = [BadInput("spec.minReplicas is not a number")]
    async with running_reconciler(cluster, ReconcileSettings(min_interval=3600.0)) as reconciler:
        cluster.gate = lambda key: reconciler.wake(key) if key == "restless" else None
        reconciler.wake("restless")
        await cluster.until(lambda: cluster.observed == ["restless"])
        reconciler.wake("calm")
        await cluster.until(lambda: "calm" in cluster.observed)
        assert reconciler.depth == 0

    assert cluster.observed == ["restless", "calm"]


async def test_a_scheduled_reconcile_can_be_moved_earlier_but_not_later(cluster: RecordingCluster) -> None:
    async with running_reconciler(cluster) as reconciler:
        reconciler.wake("later", 3600.0)
        reconciler.wake("now")
        reconciler.wake("now", 3600.0)
        assert reconciler.depth == 1
        await cluster.until(lambda: cluster.observed == ["now"])
        reconciler.wake("later")
        await cluster.until(lambda: cluster.observed == ["now", "later"])
