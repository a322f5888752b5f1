"""Access to jobs for the ``elasticjob`` command: the same methods for jobs on this machine and on a cluster.

Each method may raise an :class:`~elastic_operator.errors.ElasticJobError` whose message says what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from elastic_operator.errors import NotFound
from elastic_operator.views.formatting import rank_list

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elastic_operator.views.job_view import JobView
    from elastic_operator.views.top import MetricsPage

    Notify = Callable[[str], object]
    """A function that receives sentences for the user; the sentences are not part of the output."""


class ScrapedJob(NamedTuple):
    """A job, the metrics of its agents, and sentences about missing metrics."""

    job: JobView
    pages: Sequence[MetricsPage]
    notes: Sequence[str] = ()


def still_running(name: str, state: str) -> str:
    """Return the message for a job in this state, which has no report yet."""
    return (
        f"the job {name} is still {state}: its report is written when it has ended or is suspended; "
        f"`elasticjob top {name}` shows how it trains"
    )


@dataclass(frozen=True, slots=True)
class LogSelector:
    """A selection of lines from a job's logs.

    Attributes:
        rank: the rank whose lines to print; None for all ranks.
        pod: the name of the pod whose lines to print; None for all pods.
        agents: whether to print the agents' own logs instead of the workers' output.
        round: the round to print; None for the current round and, with ``follow``, later rounds.
        tail: the maximum number of existing lines to print of each rank or agent; None for all.
        follow: whether to print new lines until the job has ended.
    """

    rank: int | None = None
    pod: str | None = None
    agents: bool = False
    round: int | None = None
    tail: int | None = None
    follow: bool = False

    @property
    def single_source(self) -> bool:
        """Whether all lines come from one rank or agent, so that they need no label."""
        return self.rank is not None or (self.agents and self.pod is not None)

    def check(self, ranks: Mapping[int, set[int]], round: int) -> None:
        """Check that a round has logs, also of the selected rank; ``ranks`` are the ranks with logs, by round.

        Raises:
            NotFound: there is no such log; the message says which logs there are.
        """
        if round not in ranks:
            raise NotFound(f"there is no log of round {round}; there are logs of rounds {rank_list(sorted(ranks))}")
        if self.rank is not None and self.rank not in ranks[round]:
            existing = rank_list(sorted(ranks[round]))
            raise NotFound(f"there is no rank {self.rank} in round {round}; it has ranks {existing}")
