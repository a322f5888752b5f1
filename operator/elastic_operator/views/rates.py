"""Changes between two readings of a job's metrics: how long steps take now, and how fast counters grow."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_operator.views.job_metrics import JobMetrics, Tally

STRAGGLER_RATIO: Final = 1.1
"""A rank straggles if its steps take this many times the median of the others."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates at the latest reading.

    Attributes:
        steps: mean seconds per step by rank, since the last reading in which one ended.
        recoveries: seconds of the latest recovery by cause, if it was observed.
        counters: growth per second of the program's own counters, by group and name.
        straggler: the rank whose steps take much longer than the others'.
    """

    steps: Mapping[int, float]
    recoveries: Mapping[str, float]
    counters: Mapping[tuple[str, str], float]
    straggler: int | None


class RateTracker:
    """Computes rates from one reading to the next."""

    def __init__(self) -> None:
        self._time: float | None = None
        self._last: dict[tuple[str, object], tuple[Tally, float | None]] = {}
        self._recoveries: dict[str, float] = {}
        self._counters: dict[tuple[str, str], float] = {}

    def update(self, metrics: JobMetrics, now: float) -> Rates:
        """Take a reading of a job's metrics at a time in seconds."""
        for cause, tally in metrics.recoveries.items():
            mean = self._mean(("recovery", cause), tally)
            if self._time is None and tally.count > 1:  # the duration of the latest of several is unknown
                self._last["recovery", cause] = tally, None
            elif mean is not None:
                self._recoveries[cause] = mean
        means = {each.rank: self._mean((each.pod, each.rank), each.steps) for each in metrics.ranks if each.steps}
        steps = {rank: mean for rank, mean in means.items() if mean is not None}
        rates = Rates(
            steps=steps,
            recoveries=dict(self._recoveries),
            counters=self._update_counters(metrics, now),
            straggler=_straggler(steps),
        )
        self._time = now
        return rates

    def _mean(self, key: tuple[str, object], now: Tally) -> float | None:
        """Return the mean of the values by which a histogram last grew."""
        before, mean = self._last.get(key, (None, None))
        if before is None or now.count < before.count:
            mean = now.mean
        elif now.count > before.count:
            mean = (now.total - before.total) / (now.count - before.count)
        self._last[key] = now, mean
        return mean

    def _update_counters(self, metrics: JobMetrics, now: float) -> dict[tuple[str, str], float]:
        before = self._counters
        self._counters = {
            (each.group, each.name): sum(value for value in each.values.values() if isinstance(value, float))
            for each in metrics.custom
            if each.kind == "counter"
        }
        passed = now - self._time if self._time is not None else 0.0
        # A counter that became smaller started again, in another pod.
        return {
            key: (value - before[key]) / passed
            for key, value in self._counters.items()
            if passed > 0 and key in before and before[key] <= value
        }


def _straggler(steps: Mapping[int, float]) -> int | None:
    if len(steps) < 2:
        return None
    slowest = max(steps, key=lambda rank: steps[rank])
    others = median(seconds for rank, seconds in steps.items() if rank != slowest)
    return slowest if steps[slowest] > STRAGGLER_RATIO * others else None
