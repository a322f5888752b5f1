"""PromQL expressions that stay correct when pods and the leader of a job change."""

from __future__ import annotations

from typing import Final

JOB: Final = "job_namespace, elasticjob"
"""The labels that identify a job in every series."""
WALL: Final = "torchelastic_job_seconds_total"
"""The time of a job by state. Only the leader's agent reports it, and the next leader continues it."""
LOST: Final = "torchelastic_job_lost_seconds_total"
"""The training time that was lost because no checkpoint contained it."""
TRAINING: Final = 'state="training"'
RATE: Final = "$__rate_interval"
"""Grafana's variable for an interval with enough scrapes for a rate."""
MOMENT: Final = "$__interval"
"""Grafana's variable for the interval between two points of a line."""
SHOWN: Final = "$__range"
"""Grafana's variable for the time range of the dashboard."""


def selector(*matchers: str) -> str:
    """Return the matchers that are not empty, in braces; empty if there are none."""
    given = ", ".join(filter(None, matchers))
    return f"{{{given}}}" if given else ""


def total(series: str, *matchers: str, by: str = JOB, over: str = "") -> str:
    """Return the query for a total that the leaders of a job report.

    A new leader continues at the last value, or slightly below it if the previous leader was killed. ``rate`` and
    ``increase`` would treat a lower value as a reset of the counter, so the query uses the maximum.

    Args:
        series: the name of the series.
        matchers: matchers that select jobs and series.
        by: the labels of the result.
        over: the time range; empty for the current value.
    """
    found = f"{series}{selector(*matchers)}"
    return f"max by ({by}) (max_over_time({found}[{over}]))" if over else f"max by ({by}) ({found})"


def goodput(jobs: str, *, over: str = "") -> str:
    """Return the query for the share of the time since a job's creation in which it trained without losing the result.

    There is no result for a job whose program reports no checkpoints, because its lost work is unknown.

    Args:
        jobs: matchers that select jobs.
        over: the time range in which the job existed; empty for jobs that exist now.
    """
    trained, lost = total(WALL, jobs, TRAINING, over=over), total(LOST, jobs, over=over)
    wall = total(WALL, jobs, by=f"{JOB}, state", over=over)
    return f"({trained} - {lost}) / sum by ({JOB}) ({wall})"


def mean(histogram: str, *, jobs: str, by: str, only: str = "") -> str:
    """Return the query for the mean of the latest values of a histogram, if there are any."""
    found = selector(jobs, only)
    total, count = (f"sum by ({by}) (rate({histogram}_{part}{found}[{RATE}]))" for part in ("sum", "count"))
    return f"{total} / ({count} > 0)"


def quantile(share: float, histogram: str, *, jobs: str = "", by: str = "") -> str:
    """Return the query for a quantile of the latest values of a histogram, if there are any."""
    return _quantile(share, f"rate({histogram}_bucket{selector(jobs)}[{RATE}])", by)


def quantile_of_all(share: float, histogram: str, *, jobs: str = "", by: str = "") -> str:
    """Return the query for a quantile of all values of the histograms that existed in the time range of the dashboard.

    Use it for rare events: Prometheus sees no increase if the first scrape of a histogram contains its first value.
    """
    return _quantile(share, f"max_over_time({histogram}_bucket{selector(jobs)}[{SHOWN}])", by)


def _quantile(share: float, buckets: str, by: str) -> str:
    labels = ", ".join(filter(None, ("le", by)))
    # Without values the quantile is NaN, which the comparison drops.
    return f"histogram_quantile({share:g}, sum by ({labels}) ({buckets})) >= 0"


def grown(series: str, *, jobs: str = "", by: str, window: str = SHOWN, step: str = MOMENT) -> str:
    """Return the query for the increase of a total that each copy of the operator reports."""
    return f"increase(max by ({by}) ({series}{selector(jobs)})[{window}:{step}])"
