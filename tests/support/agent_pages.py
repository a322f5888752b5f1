"""Metrics pages as agents serve them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Final, cast

from prometheus_client import generate_latest

from torchelastic.metrics import series
from torchelastic.metrics.prometheus import families_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prometheus_client import CollectorRegistry

    from torchelastic.metrics.series import MetricFamily

    Row = tuple[MetricFamily, dict[str, str], Sequence[float]]
    """A series, its labels and its values."""

LEADS: Final = {"waiting": 4.0, "rendezvous": 1.0, "starting": 5.0, "training": 90.0}
"""The time breakdown on the page of a leader."""


def agent_page(
    *ranks: int,
    round: int = 3,
    seconds: Mapping[str, float] | None = None,
    lost: float | None = None,
    steps: tuple[float, int] | None = None,
    memory: float | None = 6e8,
    own: Sequence[Row] = (),
    recoveries: tuple[float, int] | None = None,
    restarts: tuple[float, int] | None = None,
) -> str:
    """Return the page of an agent whose workers have these ranks.

    Args:
        ranks: the ranks of its workers.
        round: the latest round of the agent.
        seconds: the job's time breakdown; None for an agent that is not the leader.
        lost: seconds of training that no checkpoint holds.
        steps: sum and count of the step durations of each worker.
        memory: the memory of each worker in bytes.
        own: further series, such as metrics of the program.
        recoveries: sum and count of the recoveries from failed workers.
        restarts: sum and count of the agent's share of these recoveries.
    """
    rows: list[Row] = [
        (series.ROUND, {}, (round,)),
        (series.WORLD_SIZE, {}, (2,)),
        (series.REMAINING_RESTARTS, {"role": "default"}, (98,)),
    ]
    for family, values in ((series.RECOVERY, recoveries), (series.WORKER_RESTART, restarts)):
        if values is not None:
            rows.append((family, {"cause": "worker_failed"}, _words(family, values)))
    if seconds is not None:
        rows += [(series.JOB_SECONDS, {"state": state}, (spent,)) for state, spent in seconds.items()]
        rows += [(series.JOB_RESTARTS, {"charged": charged}, (count,)) for charged, count in (("yes", 2), ("no", 3))]
        rows += [(series.JOB_NODES, {}, (2,)), (series.JOB_DESIRED_NODES, {}, (3,))]
    if lost is not None:
        rows.append((series.JOB_LOST, {}, (lost,)))
    for rank in map(str, ranks):
        if memory is not None:
            rows.append((series.WORKER_MEMORY, {"rank": rank}, (memory,)))
        if steps is not None:
            words = _words(series.OPERATION_DURATION, steps)
            rows.append((series.OPERATION_DURATION, {"operation": "train_step", "rank": rank}, words))
    job = {"job_namespace": "team", "elasticjob": "digits"}
    families = families_of((one, {**labels, **job}, words) for one, labels, words in [*rows, *own])
    return generate_latest(cast("CollectorRegistry", SimpleNamespace(collect=lambda: families))).decode()


def _words(family: MetricFamily, values: tuple[float, int]) -> list[float]:
    total, count = values
    return [*[0.0] * len(family.type.buckets), count, total]
