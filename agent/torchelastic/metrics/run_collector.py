"""What the leading agent shows of the run as a whole: totals that would be wrong as a sum over several agents.

They are kept across leaders, so they go on where another agent leads; and an agent that leads no more shows none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from torchelastic.metrics import series as names
from torchelastic.protocol import NodeEnd, RunState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from torchelastic.protocol import RoundRecord, SizeRecord, TimeBreakdown


_FIRST_HELD_BACK: Final = (RunState.RESTORING, RunState.TRAINING)
"""Between these two, a late word moves seconds."""


class Run(Protocol):
    """A run, as one of its agents knows it."""

    @property
    def is_leader(self) -> bool:
        """Whether this agent leads it."""

    @property
    def round(self) -> RoundRecord | None:
        """The present round; None as long as there was none."""

    @property
    def restarts(self) -> int:
        """Restarts that were charged to it, those before it was suspended included."""

    @property
    def uncharged_restarts(self) -> int:
        """Likewise those that were not."""

    @property
    def size(self) -> SizeRecord:
        """How many nodes there should be."""

    @property
    def time_breakdown(self) -> TimeBreakdown:
        """Where its time went, up to now."""


class RunCollector:
    """The series of a run, as a collector of prometheus_client's; without any until :meth:`follow` was called."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._shown: dict[RunState, float] = {}

    def follow(self, run: Run) -> None:
        """Show this run from now on."""
        self._run = run

    def collect(self) -> Iterator[Metric]:
        """The families with their present values; called by a registry at each scrape, from any thread."""
        run = self._run
        if run is None or not run.is_leader:
            self._shown = {}
            return
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        split, size, round = run.time_breakdown, run.size, run.round
        seconds = CounterMetricFamily(names.JOB_SECONDS.name, names.JOB_SECONDS.help, labels=["state"])
        for state, spent in self._rising(split).items():
            seconds.add_metric([state.value], spent)
        yield seconds
        if split.lost is not None:
            yield CounterMetricFamily(names.JOB_LOST.name, names.JOB_LOST.help, value=split.lost)
        yield CounterMetricFamily(names.JOB_JOINED.name, names.JOB_JOINED.help, value=split.joined)
        gone = CounterMetricFamily(names.JOB_GONE.name, names.JOB_GONE.help, labels=["cause"])
        for end in NodeEnd:
            gone.add_metric([end.value], split.gone.get(end, 0))
        yield gone
        restarts = CounterMetricFamily(names.JOB_RESTARTS.name, names.JOB_RESTARTS.help, labels=["charged"])
        restarts.add_metric(["yes"], run.restarts)
        restarts.add_metric(["no"], run.uncharged_restarts)
        yield restarts
        nodes = 0 if round is None else len(round.members)
        for series, number in (
            (names.JOB_NODES, nodes),
            (names.JOB_WANTED_NODES, size.target),
            (names.JOB_MIN_NODES, size.min),
        ):
            yield GaugeMetricFamily(series.name, series.help, value=number)

    def _rising(self, split: TimeBreakdown) -> dict[RunState, float]:
        """The seconds by state, which add up to the time that has passed; a counter never falls.

        What a state has turned out not to have spent is held back from those that rise, until it has. So where a
        program says for the first time that it has begun to train, and what was taken for training before is known to
        have been restoring: training stands still then, and restoring rises in its place.
        """
        before = self._shown
        told = [state for state in RunState if state in split.seconds or state is not RunState.RESTORING]
        shown = {state: max(split.seconds.get(state, 0.0), before.get(state, 0.0)) for state in told}
        ahead = sum(shown.values()) - sum(split.seconds.values())
        for state in sorted(told, key=_FIRST_HELD_BACK.__contains__, reverse=True):
            held = min(shown[state] - before.get(state, 0.0), ahead)
            shown[state] -= held
            ahead -= held
        self._shown = shown
        return shown
