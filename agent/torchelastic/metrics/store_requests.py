"""How long the store takes to answer, as an agent's page shows it.

It is no value of the group ``torchelastic``: a program's handler for that would be told of every request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Histogram
from prometheus_client.registry import Collector

from torchelastic.metrics.series import STORE_REQUESTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric


class StoreRequests(Collector):
    """The requests of one agent."""

    def __init__(self) -> None:
        self._durations = Histogram(
            STORE_REQUESTS.name,
            STORE_REQUESTS.help,
            ("request", "outcome"),
            registry=None,
            buckets=STORE_REQUESTS.buckets,
        )

    def answered(self, request: str, seconds: float, *, succeeded: bool) -> None:
        """A request has ended.

        Args:
            request: what was asked, in a word.
            seconds: how long it took.
            succeeded: whether the store answered.
        """
        self._durations.labels(request, "success" if succeeded else "failure").observe(seconds)

    def collect(self) -> Iterable[Metric]:
        """The family with its present values; called by a registry at each scrape, from any thread."""
        for family in self._durations.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            if family.samples:
                yield family
