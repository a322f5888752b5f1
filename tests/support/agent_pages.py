"""Metrics pages as agents serve them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LEADS = {"waiting": 4.0, "rendezvous": 1.0, "starting": 5.0, "training": 90.0}
"""The time breakdown on the leader's page."""


def agent_page(
    *ranks: int,
    round: int = 3,
    seconds: Mapping[str, float] | None = None,
    lost: float | None = None,
    steps: tuple[float, int] | None = None,
    memory: float | None = 6e8,
    own: Sequence[str] = (),
    recoveries: tuple[float, int] | None = None,
) -> str:
    """The page of an agent whose workers have these ranks.

    Args:
        ranks: the ranks of its workers.
        round: the latest round that it knows.
        seconds: the job's time breakdown; None for an agent that is not the leader.
        lost: seconds of training since the last checkpoint.
        steps: sum and count of the step durations of each worker.
        memory: the memory of each worker.
        own: lines of the program's own metrics.
        recoveries: sum and count of the recoveries from failed workers.
    """
    job = 'elasticjob="digits",job_namespace="team"'
    lines = [
        "# TYPE torchelastic_round gauge",
        f"torchelastic_round{{{job}}} {round}",
        "# TYPE torchelastic_world_size gauge",
        f"torchelastic_world_size{{{job}}} 2",
        "# TYPE torchelastic_remaining_restarts gauge",
        f'torchelastic_remaining_restarts{{{job},role="default"}} 98',
    ]
    if recoveries is not None:
        series = f'{{{job},cause="worker_failed"}}'
        lines += _histogram("torchelastic_recovery_duration_seconds", series, recoveries)
    if seconds is not None:
        lines.append("# TYPE torchelastic_job_seconds_total counter")
        lines += [
            f'torchelastic_job_seconds_total{{{job},state="{state}"}} {spent}' for state, spent in seconds.items()
        ]
        lines += ["# TYPE torchelastic_job_restarts_total counter"]
        lines += [
            f'torchelastic_job_restarts_total{{{job},charged="{charged}"}} {count}'
            for charged, count in (("yes", 2), ("no", 3))
        ]
        for name, value in (("nodes", 2), ("wanted_nodes", 3)):
            lines += [f"# TYPE torchelastic_job_{name} gauge", f"torchelastic_job_{name}{{{job}}} {value}"]
        if lost is not None:
            lines += ["# TYPE torchelastic_job_lost_seconds_total counter"]
            lines += [f"torchelastic_job_lost_seconds_total{{{job}}} {lost}"]
    if memory is not None:
        lines.append("# TYPE torchelastic_worker_memory_bytes gauge")
        lines += [f'torchelastic_worker_memory_bytes{{{job},rank="{rank}"}} {memory}' for rank in ranks]
    if steps is not None:
        name = "torchelastic_operation_duration_seconds"
        lines.append(f"# TYPE {name} histogram")
        for rank in ranks:
            lines += _samples(name, f'{{{job},operation="train_step",rank="{rank}"}}', steps)
        lines += _samples(name, f'{{{job},operation="rendezvous"}}', (0.5, 1))
    lines += own
    return "\n".join(lines) + "\n"


def own_gauge(name: str, values: Mapping[int, float], *, of: str = "my_app", series: str = "my_app_loss") -> list[str]:
    """The lines of a gauge that the program defines."""
    lines = [
        f"# HELP {series} {name} of the group {of}, as the program measures it.",
        f"# TYPE {series} gauge",
    ]
    return lines + [f'{series}{{elasticjob="digits",rank="{rank}"}} {value}' for rank, value in values.items()]


def own_counter(name: str, values: Mapping[int, float], *, of: str = "my_app") -> list[str]:
    """The lines of a counter that the program defines."""
    series = f"{of}_{name}_total"
    lines = [
        f"# HELP {series} {name} of the group {of}, as the program measures it.",
        f"# TYPE {series} counter",
    ]
    return lines + [f'{series}{{elasticjob="digits",rank="{rank}"}} {value}' for rank, value in values.items()]


def _histogram(name: str, series: str, values: tuple[float, int]) -> list[str]:
    return [f"# TYPE {name} histogram", *_samples(name, series, values)]


def _samples(name: str, series: str, values: tuple[float, int]) -> list[str]:
    total, count = values
    buckets = f'{name}_bucket{series.removesuffix("}")},le="+Inf"}} {count}'
    return [buckets, f"{name}_sum{series} {total}", f"{name}_count{series} {count}"]
