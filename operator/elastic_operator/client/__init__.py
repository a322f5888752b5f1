"""Access to jobs for the ``elasticjob`` command, with the same methods for this machine and for a cluster.

Every method raises an :class:`~elastic_operator.errors.ElasticJobError` whose message says what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elastic_operator.views.job_metrics import MetricsPage
    from elastic_operator.views.job_view import JobView
    from elastic_operator.views.log_selector import LogSelector

    Tell = Callable[[str], object]
    """Receives sentences for the user that are not part of the output."""


class ScrapedJob(NamedTuple):
    """A job, the metrics of its agents, and sentences about what is missing."""

    job: JobView
    pages: Sequence[MetricsPage]
    notes: Sequence[str] = ()


class JobClient(Protocol):
    """Access to jobs."""

    @property
    def place(self) -> str:
        """The location of the jobs, such as "here" or "in the namespace team"."""

    @property
    def start_command(self) -> str:
        """The command that starts a job there."""

    def close(self) -> None:
        """Close all connections."""

    def jobs(self, name: str | None, *, every_run: bool, pods: bool) -> Sequence[JobView]:
        """Return all jobs, or one; with earlier runs (on this machine), and with pods."""

    def describe(self, name: str) -> JobView:
        """Return a job with its pods and events."""

    def scrape(self, name: str | None) -> list[ScrapedJob]:
        """Read the metrics of all agents of a job; for None, of the leader of each job."""

    def logs(self, name: str, selector: LogSelector, write: Callable[[bytes], object]) -> bool:
        """Write a job's logs; return whether all could be read."""

    def report(self, name: str) -> tuple[bytes, str]:
        """Return a job's report, and how its run ended if its job is unfinished (on this machine)."""

    def scale(self, name: str, replicas: int) -> None:
        """Change the number of a job's pods."""

    def suspend(self, name: str, *, suspended: bool) -> None:
        """Suspend or resume a job."""

    def delete(self, name: str, *, wait: bool) -> None:
        """Delete a job; if ``wait``, return when all its pods are gone."""
