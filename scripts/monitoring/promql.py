"""Forms of PromQL that bear what happens to elastic jobs: pods come and go, and one leader follows the other."""

from __future__ import annotations

from typing import Final

JOB: Final = "job_namespace, elasticjob"
"""The labels that name a job in every series."""
WALL: Final = "torchelastic_job_seconds_total"
"""The time of a job by state: told by the leading agent alone, and kept across leaders."""
LOST: Final = "torchelastic_job_lost_seconds_total"
"""Training that no checkpoint held when it ended."""
TRAINING: Final = 'state="training"'
RATE: Final = "$__rate_interval"
"""What Grafana fills in for a time in which there are enough scrapes for a rate."""
MOMENT: Final = "$__interval"
"""What it fills in for the time from one point of a line to the next."""
SHOWN: Final = "$__range"
"""What it fills in for the time that a page shows."""


def selector(*matchers: str) -> str:
    """Matchers in braces; empty ones do not count."""
    given = ", ".join(filter(None, matchers))
    return f"{{{given}}}" if given else ""


def total(series: str, *matchers: str, by: str = JOB, over: str = "") -> str:
    """A total that the leader of a job tells, whoever leads.

    Who leads later goes on from where the one before ended, or from a little earlier where that one died: to ``rate``
    and ``increase`` that would be a counter that began anew. What bears it is the highest value.

    Args:
        series: its name.
        matchers: which jobs, and which of their series.
        by: the labels of the answer.
        over: the time looked at; empty: now.
    """
    found = f"{series}{selector(*matchers)}"
    return f"max by ({by}) (max_over_time({found}[{over}]))" if over else f"max by ({by}) ({found})"


def goodput(jobs: str, *, over: str = "") -> str:
    """The share of the time since each job was made in which it trained and kept it.

    Args:
        jobs: matchers.
        over: the time in which it must have been there; empty: now.
    """
    trained, lost = total(WALL, jobs, TRAINING, over=over), total(LOST, jobs, over=over)
    wall = total(WALL, jobs, by=f"{JOB}, state", over=over)
    return f"({trained} - {lost} or {trained}) / sum by ({JOB}) ({wall})"


def mean(histogram: str, *, jobs: str, by: str, only: str = "") -> str:
    """The mean of what a histogram counted in the last moments, where it counted anything."""
    found = selector(jobs, only)
    total, count = (f"sum by ({by}) (rate({histogram}_{part}{found}[{RATE}]))" for part in ("sum", "count"))
    return f"{total} / ({count} > 0)"


def quantile(share: float, histogram: str, *, jobs: str = "", by: str = "") -> str:
    """A quantile of what a histogram counted in the last moments, where it counted anything."""
    return _quantile(share, f"rate({histogram}_bucket{selector(jobs)}[{RATE}])", by)


def quantile_of_all(share: float, histogram: str, *, jobs: str = "", by: str = "") -> str:
    """A quantile of all that histograms hold which were there in the time that a page shows.

    For what is rare: a histogram that appears with its first value already in it has not grown, as Prometheus sees it.
    """
    return _quantile(share, f"max_over_time({histogram}_bucket{selector(jobs)}[{SHOWN}])", by)


def _quantile(share: float, buckets: str, by: str) -> str:
    labels = ", ".join(filter(None, ("le", by)))
    # What nothing was counted of is no number, and so not 0 or more either.
    return f"histogram_quantile({share:g}, sum by ({labels}) ({buckets})) >= 0"


def grown(series: str, *, jobs: str = "", by: str, window: str = SHOWN, step: str = MOMENT) -> str:
    """How much a total has grown that each copy of the operator tells, whichever of them was there."""
    return f"increase(max by ({by}) ({series}{selector(jobs)})[{window}:{step}])"
