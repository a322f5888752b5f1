"""The agent's own metrics: values of the group ``torchelastic`` under their documented names, and the run's totals."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal, cast, get_args

from torchelastic.metrics import series
from torchelastic.metrics.api import REGISTRY
from torchelastic.metrics.series import BUILT_IN_FAMILIES, DEFAULT_GROUP, Kind, printable
from torchelastic.protocol.records import DepartureReason, OutcomeState, RunState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from prometheus_client import CollectorRegistry, Metric
    from prometheus_client.registry import Collector

    from torchelastic.metrics.series import MetricFamily
    from torchelastic.protocol.records import OutcomeRecord, RoundReason, RoundRecord, TimeBreakdown
    from torchelastic.rendezvous.node import RendezvousNode

logger: Final = logging.getLogger(__name__)

WorkerStateName = Literal["unknown", "init", "healthy", "unhealthy", "stopped", "succeeded", "failed"]
"""The states of a node's workers, by the names of torch's metrics."""


class AgentMetrics:
    """Records the metrics of an agent for the handlers of the group ``torchelastic``, and for /metrics if it is served.

    Args:
        role: the role of this node's workers.
        job: namespace and name of the job, added as labels to all series of :meth:`page`; None for no labels.
    """

    def __init__(self, role: str, *, job: tuple[str, str] | None = None) -> None:
        self._role = role
        names = ("job_namespace", "elasticjob")
        self._labels = {} if job is None else dict(zip(names, map(printable, job), strict=True))
        self._node: RendezvousNode | None = None
        self._collectors: tuple[Collector, ...] | None = None  # None while /metrics is not served
        self._failed: set[Collector] = set()
        self._lock = threading.Lock()
        self._values: dict[MetricFamily, list[float]] = {}
        self._trained = 0.0
        self._waits_since: float | None = None
        self._without_workers_since = 0.0

    def page(self, *others: Collector) -> CollectorRegistry:
        """Start recording the agent's series; return a registry of the series, the run's totals and other collectors.

        Args:
            others: the other collectors; families of the same name are merged. A collector that raises is left out
                and logged once.
        """
        from prometheus_client import CollectorRegistry

        self._collectors = others
        registry = CollectorRegistry()
        registry.register(cast("Collector", self))
        return registry

    def collect(self) -> Iterable[Metric]:
        """Return the families with their current values; a registry calls this at each scrape, from any thread."""
        families = {family.name: family for family in self._own()}
        for collector in self._collectors or ():
            try:
                collected = list(collector.collect())
            except Exception:
                if collector not in self._failed:
                    self._failed.add(collector)
                    logger.exception(
                        "/metrics does not show the metrics of %s. Its further errors are not logged.",
                        type(collector).__name__,
                    )
                continue
            for family in collected:
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples = [*known.samples, *family.samples]
        for family in families.values():
            for sample in family.samples:
                sample.labels.update(self._labels)
        return [family for family in families.values() if family.samples]

    def follow(self, node: RendezvousNode) -> None:
        """Show the totals of the run while the node of this agent is the leader."""
        self._node = node

    def round_began(self, round: RoundRecord, max_restarts: int) -> None:
        """Record a new round; a world size of 0 means that too few nodes are present to train."""
        self._put("round", round.number, series.ROUND)
        self._put("world_size", round.world_size, series.WORLD_SIZE)
        name, remaining = f"workers.{self._role}.remaining_restarts", max(max_restarts - round.restarts, 0)
        self._put(name, remaining, series.REMAINING_RESTARTS, role=self._role)

    def workers_changed(self, state: WorkerStateName) -> None:
        """Record the new state of this node's workers."""
        REGISTRY.add(DEFAULT_GROUP, f"workers.{self._role}.{state}", 1)
        for each in get_args(WorkerStateName):
            self._show(series.WORKER_STATE, int(each == state), role=self._role, state=each)

    def workers_started(self, broken_at: float | None, reason: RoundReason, *, succeeded: bool = True) -> None:
        """Record that the workers of the round were started, or could not be started.

        The end of the previous round was noticed at `broken_at`, on the monotonic clock; None for the first round.
        """
        now = time.monotonic()
        if succeeded:
            self.workers_changed("healthy")
        self.took("SimpleElasticAgent._initialize_workers", now - self._without_workers_since, succeeded=succeeded)
        if broken_at is not None:
            self.took("SimpleElasticAgent._restart_workers", now - broken_at, succeeded=succeeded)
            if succeeded:
                duration = (now - broken_at) * 1000
                self._put(f"worker_restart.{reason}.duration.ms", duration, series.WORKER_RESTART, cause=str(reason))

    def recovered(self, broken_at: float, reason: RoundReason) -> None:
        """Record the first step of this node's new workers; see :meth:`workers_started`."""
        duration = (time.monotonic() - broken_at) * 1000
        self._put(f"recovery.{reason}.duration.ms", duration, series.RECOVERY, cause=str(reason))

    def run_ended(self, outcome: OutcomeRecord, max_restarts: int) -> None:
        """Record the end of the run, and how many failures counted against the restart budget."""
        role, restarts, succeeded = self._role, outcome.restarts, outcome.state is OutcomeState.SUCCEEDED
        if not succeeded and outcome.failure is None:
            self.rendezvous_ended(succeeded=False)
        self._put(f"workers.{role}.run_total", 1, series.RUNS, role=role)
        for name, ending, happened in (("success", "success", succeeded), ("failed", "failure", not succeeded)):
            for suffix, retries, value in (
                ("with_retries", "yes", happened and restarts > 0),
                ("no_retries", "no", happened and restarts == 0),
            ):
                labels = {"role": role, "outcome": ending, "retries": retries}
                self._put(f"workers.{role}.run_{name}_{suffix}", int(value), series.RUN_OUTCOMES, **labels)
        spent = min(restarts / (max_restarts + 1), 1.0) if succeeded else 1.0
        self._put(f"workers.{role}.flakiness", 100 * spent, series.FLAKINESS, role=role)

    @contextmanager
    def measured(self, operation: str) -> Iterator[None]:
        """Record the outcome and the duration of a block as an operation; see :meth:`took`."""
        began = time.perf_counter()
        succeeded: bool | None = None  # a canceled operation neither succeeds nor fails
        try:
            yield
            succeeded = True
        except Exception:
            succeeded = False
            raise
        finally:
            self.took(operation, time.perf_counter() - began, succeeded=succeeded)

    def took(self, operation: str, seconds: float, *, succeeded: bool | None) -> None:
        """Record one of :data:`~torchelastic.metrics.series.OPERATIONS`; `succeeded` is None if it was interrupted."""
        outcome = "" if succeeded is None else "success" if succeeded else "failure"
        for what, value in ((outcome, 1), ("duration.ms", seconds * 1000)):
            if what:
                self._put(f"{operation}.{what}", value, BUILT_IN_FAMILIES[f"{operation}.{what}"])

    def rendezvous_began(self) -> None:
        """Record that this node has no workers to run; torch calls the time until the next round *rendezvous*."""
        self._waits_since = self._waits_since or time.monotonic()

    def rendezvous_ended(self, *, succeeded: bool) -> None:
        """Record that a round begins with this node as a member, or that no round will begin."""
        now = time.monotonic()
        if succeeded:
            self._without_workers_since = self._waits_since = self._waits_since or now
        if self._waits_since is not None:
            self.took("SimpleElasticAgent._rendezvous", now - self._waits_since, succeeded=succeeded)
            self._waits_since = None

    def store_answered(self, request: str, seconds: float, *, succeeded: bool) -> None:
        """Record a request to the store; handlers do not receive these values, because there are too many."""
        self._show(series.STORE_REQUEST, seconds, request=request, outcome="success" if succeeded else "failure")

    def _put(self, name: str, value: float, family: MetricFamily, **labels: str) -> None:
        """Record a value under torchelastic's name, and show it in a series."""
        REGISTRY.add(DEFAULT_GROUP, name, value)
        self._show(family, value, **labels)

    def _show(self, family: MetricFamily, value: float, **labels: str) -> None:
        if self._collectors is None:
            return
        one, value = family.labeled(**labels) if labels else family, value / family.divisor
        with self._lock:
            values = self._values.setdefault(one, [0.0] * one.type.size)
            if one.type.kind is Kind.HISTOGRAM:
                values[bisect_left(one.type.buckets, value)] += 1
                values[-1] += value
            else:
                values[0] = value + (values[0] if one.type.kind is Kind.COUNTER else 0.0)

    def _own(self) -> Iterable[Metric]:
        from torchelastic.metrics.prometheus import families_of

        with self._lock:
            own: list[tuple[MetricFamily, Sequence[float]]] = [(one, tuple(each)) for one, each in self._values.items()]
        totals = [(one, (value,)) for one, value in self._totals()]
        return families_of((one, dict(one.labels), values) for one, values in own + totals)

    def _totals(self) -> Iterator[tuple[MetricFamily, float]]:
        """Yield the totals of the run, only in the leader's agent, because a sum over several agents would be wrong."""
        node = self._node
        if node is None or not node.is_leader:
            self._trained = 0.0
            return
        times, round, settings = node.history.breakdown(), node.round, node.run.settings
        size, restarted = node.run.size or settings.size, round or settings.resume
        for state, seconds in self._rising(times).items():
            yield series.JOB_SECONDS.labeled(state=state), seconds
        if times.lost is not None:
            yield series.JOB_LOST, times.lost
        yield series.JOB_JOINED, times.nodes_joined
        for end in DepartureReason:
            yield series.JOB_DEPARTURES.labeled(cause=end), times.departures.get(end, 0)
        yield series.JOB_RESTARTS.labeled(charged="yes"), restarted.restarts
        yield series.JOB_RESTARTS.labeled(charged="no"), restarted.uncharged_restarts
        yield series.JOB_NODES, 0 if round is None else len(round.members)
        yield series.JOB_DESIRED_NODES, size.target
        yield series.JOB_MIN_NODES, size.min

    def _rising(self, times: TimeBreakdown) -> dict[RunState, float]:
        """Return the seconds by state, which add up to the elapsed time and never decrease.

        A late report of the first step reclassifies seconds of training as restoring. Until training catches up, its
        counter stays constant, and the counter of restoring shows too little.
        """
        states = [state for state in RunState if state in times.seconds or state is not RunState.RESTORING]
        shown = {state: times.seconds.get(state, 0.0) for state in states}
        if ahead := min(max(self._trained - shown[RunState.TRAINING], 0.0), shown.get(RunState.RESTORING, 0.0)):
            shown[RunState.TRAINING] += ahead
            shown[RunState.RESTORING] -= ahead
        self._trained = shown[RunState.TRAINING]
        return shown
