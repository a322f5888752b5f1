"""Changes between two readings of a job's metrics: how long steps take now, and how fast counters grow."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

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


class _Last(NamedTuple):
    """A histogram at the latest reading, and the mean of the values since it last grew."""

    tally: Tally
    mean: float | None


class RateTracker:
    """Computes rates from one reading to the next."""

    def __init__(self) -> None:
        self._time: float | None = None
        self._steps: dict[tuple[str, int], _Last] = {}
        self._recoveries: dict[str, _Last] = {}
        self._counters: dict[tuple[str, str], float] = {}

    def update(self, metrics: JobMetrics, now: float) -> Rates:
        """Take a reading of a job's metrics at a time in seconds."""
        for cause, tally in metrics.recoveries.items():
            # Of several recoveries before the first reading, the duration of the latest is unknown.
            unknown = self._time is None and tally.count > 1
            self._recoveries[cause] = _Last(tally, None) if unknown else _updated(self._recoveries.get(cause), tally)
        steps = {}
        for each in metrics.ranks:
            if each.steps is not None:
                key = each.pod, each.rank
                last = self._steps[key] = _updated(self._steps.get(key), each.steps)
                if last.mean is not None:
                    steps[each.rank] = last.mean
        rates = Rates(
            steps=steps,
            recoveries={cause: last.mean for cause, last in self._recoveries.items() if last.mean is not None},
            counters=self._update_counters(metrics, now),
            straggler=_straggler(steps),
        )
        self._time = now
        return rates

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


def _updated(before: _Last | None, now: Tally) -> _Last:
    if before is None or now.count < before.tally.count:
        return _Last(now, now.mean)
    if now.count == before.tally.count:
        return before
    return _Last(now, (now.total - before.tally.total) / (now.count - before.tally.count))


def _straggler(steps: Mapping[int, float]) -> int | None:
    if len(steps) < 2:
        return None
    slowest = max(steps, key=lambda rank: steps[rank])
    others = median(seconds for rank, seconds in steps.items() if rank != slowest)
    return slowest if steps[slowest] > STRAGGLER_RATIO * others else None
