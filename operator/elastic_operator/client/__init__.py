"""Access to jobs for the ``elasticjob`` command, with the same methods for this machine and for a cluster.

Every method raises an :class:`~elastic_operator.errors.ElasticJobError` whose message says what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elastic_operator.views.job_metrics import MetricsPage
    from elastic_operator.views.job_view import JobView

    Tell = Callable[[str], object]
    """Receives sentences for the user that are not part of the output."""


class ScrapedJob(NamedTuple):
    """A job, the metrics of its agents, and sentences about what is missing."""

    job: JobView
    pages: Sequence[MetricsPage]
    notes: Sequence[str] = ()


def still_running(name: str, state: str) -> str:
    """Return the sentence that a job in this state has no report yet."""
    return (
        f"the job {name} is still {state}: its report is written when it has ended or is suspended; "
        f"`elasticjob top {name}` shows how it trains"
    )
