"""From one reading of a job's figures to the next: how long steps take now, and how fast counters grow."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from elastic_operator.showing.agent_page import Tally
    from elastic_operator.showing.figures import Figures

STRAGGLES: Final = 1.1
"""A rank whose steps take so many times what is usual among the others is one that they wait for."""


_ABSENT: Final = 1000
"""So many ranks that do not answer now are remembered."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How things go at the latest reading.

    Attributes:
        steps: seconds that a step takes, by rank: the mean since the reading before, or where no step ended since
            then, of the last time that some did; at the first reading the mean of all steps so far.
        recoveries: seconds that the latest recovery took, by cause; of those that ended while somebody read.
        rates: how much a counter of the program's own grows in a second, by group and name.
        straggler: the rank whose steps take longest, where that is much longer than is usual.
    """

    steps: Mapping[int, float]
    recoveries: Mapping[str, float]
    rates: Mapping[tuple[str, str], float]
    straggler: int | None


@dataclass(frozen=True, slots=True)
class _Last:
    """A histogram at the latest reading, and the mean of what had come to it when it last grew."""

    tally: Tally
    mean: float | None


class Trend:
    """Remembers what it has to of earlier readings."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._steps: dict[tuple[str, int], _Last] = {}
        self._recoveries: dict[str, _Last] = {}
        self._counters: dict[tuple[str, str], float] = {}

    def read(self, figures: Figures, now: float) -> Pace:
        """Take in a reading.

        Args:
            figures: of the job.
            now: when they were read, in seconds.
        """
        steps: dict[int, float] = {}
        for each in figures.ranks:
            if each.steps is not None:
                key = each.pod, each.rank
                last = self._steps[key] = _moved(self._steps.get(key), each.steps)
                if last.mean is not None:
                    steps[each.rank] = last.mean
        for cause, tally in figures.recoveries.items():
            known = self._recoveries.get(cause)
            if known is None and self._at is None and tally.count > 1:
                self._recoveries[cause] = _Last(tally, None)  # which of them was the latest nobody can say
            else:
                self._recoveries[cause] = _moved(known, tally)
        pace = Pace(
            steps=steps,
            recoveries={cause: last.mean for cause, last in self._recoveries.items() if last.mean is not None},
            rates=self._rates(figures, now),
            straggler=_straggler(steps),
        )
        self._at = now
        self._forget({(each.pod, each.rank) for each in figures.ranks}, figures.recoveries.keys())
        return pace

    def _forget(self, ranks: Collection[tuple[str, int]], causes: Collection[str]) -> None:
        """Keep what was in this reading and no more than so much besides: a pod may name others each time."""
        if len(self._steps) > len(ranks) + _ABSENT:
            self._steps = {key: last for key, last in self._steps.items() if key in ranks}
        if len(self._recoveries) > len(causes) + _ABSENT:
            self._recoveries = {cause: last for cause, last in self._recoveries.items() if cause in causes}

    def _rates(self, figures: Figures, now: float) -> dict[tuple[str, str], float]:
        sums = {
            (own.group, own.name): sum(value for value in own.values.values() if isinstance(value, float))
            for own in figures.own
            if own.kind == "counter"
        }
        before, self._counters = self._counters, sums
        if self._at is None or now <= self._at:
            return {}
        passed = now - self._at
        # What has become less begins anew, in another pod: for once nothing is known.
        return {key: (sums[key] - before[key]) / passed for key in sums if before.get(key, float("inf")) <= sums[key]}


def _moved(before: _Last | None, now: Tally) -> _Last:
    if before is None or now.count < before.tally.count:
        return _Last(now, now.mean)
    if now.count == before.tally.count:
        return before
    return _Last(now, (now.total - before.tally.total) / (now.count - before.tally.count))


def _straggler(steps: Mapping[int, float]) -> int | None:
    if len(steps) < 2:
        return None
    slowest = max(steps, key=lambda rank: steps[rank])
    usual = median(seconds for rank, seconds in steps.items() if rank != slowest)
    return slowest if steps[slowest] > STRAGGLES * usual else None
