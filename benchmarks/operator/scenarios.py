"""The scenarios of the operator benchmark, and the wanted values."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import TYPE_CHECKING, Final

from benchmarks.operator.audit import writes
from benchmarks.operator.nodes import LINGERS
from benchmarks.operator.training_operator import CREATED_ONCE, ONCE, REPLACED_ONCE, TRAINING_OPERATOR
from benchmarks.support.report import Measurement
from elastic_operator.kubernetes.client import ELASTIC_JOBS

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from benchmarks.operator.cluster import OperatedCluster

CREATED_WANTED: Final = {300: 1.2, 1000: 4.0}
_REPLACED_WANTED: Final = 0.5
_SCALED_WANTED: Final = 1.5
_MANY_WANTED: Final = 12.0
_SLOWEST_WANTED: Final = 3.0
_CHANGE_WANTED: Final = 0.1
_MEMORY_WANTED: Final = 286.0  # 300 MB
_START_WANTED: Final = 10.0
_MEBIBYTE: Final = 2**20
_REST: Final = 0.3
"""Seconds between two samples; the pause keeps the first from affecting the second."""


Row = dict[str, str | int | float]
"""A row of the table of requests."""


async def created(
    cluster: OperatedCluster, pods: int, *, repeat: int, baseline: Sequence[float] | None = None
) -> tuple[Measurement, Row]:
    """Apply a job with its own etcd, and wait until all its pods exist.

    Args:
        cluster: the cluster.
        pods: the number of pods.
        repeat: the number of samples.
        baseline: the baseline's samples of this run; None to report those of an earlier run.
    """
    samples, rows = [], []
    for _ in range(repeat):
        async with cluster.namespace() as namespace:
            await cluster.quiet(1.0)
            mark = await cluster.audit.mark()
            begun = await cluster.apply(namespace, cluster.manifest("one", pods, own_etcd=True))
            done = await cluster.pods.until(lambda ns=namespace: cluster.pods.count(ns) >= pods)  # type: ignore[misc]
            samples.append(done - begun)
            await cluster.pods.until_running(namespace, pods + 1)
            await cluster.quiet(1.0)
            rows.append(row(pods, "its own", await cluster.audit.since(mark, namespace)))
    once = (CREATED_ONCE[pods],) if pods in CREATED_ONCE else ()
    measurement = Measurement(
        f"{pods} pods exist",
        ours=samples,
        baseline=once if baseline is None else baseline,
        baseline_name=ONCE if baseline is None else TRAINING_OPERATOR,
        ours_at_most=CREATED_WANTED.get(pods),
        includes="from before the apply until the watch reports the last pod, including the creation of the etcd's "
        "Service and Deployment",
    )
    return measurement, rows[-1]


async def replaced(
    cluster: OperatedCluster, samples: int, *, lingers: bool, baseline: Sequence[float] | None = None
) -> Measurement:
    """Delete pods of a job with ten pods, one after the other, and wait for each replacement.

    Args:
        cluster: the cluster.
        samples: the number of deleted pods.
        lingers: whether the deleted pods stay Terminating.
        baseline: the baseline's samples of this run; None to report those of an earlier run.
    """
    template = {"metadata": {"annotations": {LINGERS: "true"}}} if lingers else {}
    taken = []
    async with cluster.namespace() as namespace:
        await cluster.apply(namespace, cluster.manifest("one", 10, template=template))
        await cluster.pods.until(lambda: cluster.pods.count(namespace) >= 10)
        await cluster.pods.until_running(namespace, 10)
        await cluster.train(namespace)
        await cluster.quiet(1.0)
        for _ in range(samples):
            oldest = min(cluster.pods.live(namespace).values(), key=lambda pod: pod.seen_at)
            taken.append(await cluster.replace(namespace, oldest))
            await cluster.pods.until_running(namespace, 10)
            await asyncio.sleep(_REST)
    held = " while the old one stays Terminating" if lingers else ""
    return Measurement(
        f"a deleted pod is replaced{held}, p95 of {samples}",
        ours=(percentile(taken, 95),),
        baseline=() if lingers else (REPLACED_ONCE,) if baseline is None else baseline,
        baseline_name=ONCE if baseline is None else TRAINING_OPERATOR,
        ours_at_most=_REPLACED_WANTED,
        includes="from before the request to delete it until the watch reports its replacement",
        details={"samples": taken, "median": statistics.median(taken)},
    )


async def scaled(cluster: OperatedCluster, small: int, large: int, *, repeat: int) -> tuple[Measurement, Measurement]:
    """Scale a job up and down repeatedly, and check that the remaining pods do not change."""
    up, down = [], []
    async with cluster.namespace() as namespace:
        await cluster.apply(namespace, cluster.manifest("one", small, maximum=large))
        await cluster.pods.until(lambda: cluster.pods.count(namespace) >= small)
        await cluster.pods.until_running(namespace, small)
        await cluster.train(namespace)
        await cluster.quiet(1.0)
        stay = {uid: pod.metadata["resourceVersion"] for uid, pod in cluster.pods.live(namespace).items()}
        for _ in range(repeat):
            begun = await _scale(cluster, namespace, large)
            up.append(await cluster.pods.until(lambda: cluster.pods.count(namespace) >= large) - begun)
            await cluster.pods.until_running(namespace, large)
            await cluster.quiet(1.0)
            begun = await _scale(cluster, namespace, small)
            down.append(await cluster.pods.until(lambda: cluster.pods.count(namespace) <= small) - begun)
            await cluster.pods.until(lambda: len(cluster.pods.there(namespace)) <= small)
            await cluster.quiet(1.0)
        now = {uid: pod.metadata["resourceVersion"] for uid, pod in cluster.pods.live(namespace).items()}
    touched = [] if now == stay else ["a remaining pod was changed or replaced"]
    return (
        Measurement(
            f"scaled from {small} to {large} pods",
            ours=up,
            ours_never=touched,
            ours_at_most=_SCALED_WANTED,
            includes="from before the request to scale until the watch reports the last new pod; the size is written "
            "to the job's etcd first",
        ),
        Measurement(
            f"scaled from {large} to {small} pods",
            ours=down,
            ours_never=touched,
            ours_at_most=_SCALED_WANTED,
            includes="from before the request to scale until the last surplus pod is Terminating",
        ),
    )


async def many(cluster: OperatedCluster, jobs: int, pods: int) -> tuple[Measurement, Measurement, Row]:
    """Apply many jobs at once, and wait until all their pods exist."""
    async with cluster.namespace() as namespace:
        mark = await cluster.audit.mark()
        begun = await cluster.apply_all(namespace, [cluster.manifest(f"job-{n}", pods) for n in range(jobs)])
        done = await cluster.pods.until(lambda: cluster.pods.count(namespace) >= jobs * pods)
        waits = [
            max(pod.seen_at for pod in cluster.pods.live(namespace).values() if pod.job == name) - at
            for name, at in begun.items()
        ]
        await cluster.pods.until_running(namespace, jobs * pods)
        await cluster.quiet()
        counted = row(jobs * pods, f"shared by {jobs} jobs", await cluster.audit.since(mark, namespace))
    details = {"median_wait": statistics.median(waits), "slowest_wait": max(waits)}
    return (
        Measurement(
            f"all pods of {jobs} jobs of {pods} exist",
            ours=(done - min(begun.values()),),
            ours_at_most=_MANY_WANTED,
            includes="from before the first apply (16 at a time) until the watch reports the last pod",
            details=details,
        ),
        Measurement(
            "the slowest of them against the median",
            ours=(max(waits) / statistics.median(waits),),
            unit="times",
            ours_at_most=_SLOWEST_WANTED,
            includes="for each job, from before its apply until its last pod exists",
            details=details,
        ),
        counted,
    )


async def large(cluster: OperatedCluster, jobs: int, pods: int, *, idle: float, changes: int) -> list[Measurement]:
    """Measure an operator with many training jobs: at rest, after pods are deleted, and when the operator restarts."""
    async with cluster.namespace() as namespace:
        await cluster.apply_all(namespace, [cluster.manifest(f"job-{n}", pods) for n in range(jobs)])
        await cluster.pods.until(lambda: cluster.pods.count(namespace) >= jobs * pods)
        await cluster.pods.until_running(namespace, jobs * pods)
        await cluster.train(namespace)
        await cluster.until_states(namespace, lambda found: all(job.get("readyReplicas") == pods for job in found))
        await cluster.quiet()
        at_rest = await cluster.writes_within(idle)
        reaction = await _reactions(cluster, namespace, jobs * pods, changes)
        now, most = cluster.memory() / _MEBIBYTE, cluster.memory("VmHWM") / _MEBIBYTE
        mark = await cluster.audit.mark()
        start = await cluster.restart(jobs)
        await cluster.quiet()
        writes_in_start = writes(await cluster.audit.since(mark))
        after = cluster.memory("VmHWM") / _MEBIBYTE
    of = f"{jobs} jobs, {jobs * pods} running pods"
    return [
        Measurement(
            f"{of}: writes in {idle:g} s of rest",
            ours=(float(at_rest.total()),),
            unit="writes",
            ours_at_most=0.0,
            includes="all writing requests of the operator, except those for its lease",
            details=dict(at_rest),
        ),
        Measurement(
            f"{of}: reaction to a pod's change, median of {changes}",
            ours=(statistics.median(reaction),),
            ours_at_most=_CHANGE_WANTED,
            includes="from before the request to delete a pod until the watch reports its replacement",
            details={"samples": reaction, "p95": percentile(reaction, 95)},
        ),
        Measurement(
            f"{of}: memory of the operator",
            ours=(max(now, after),),
            unit="MiB",
            ours_at_most=_MEMORY_WANTED,
            includes="the resident set: now, or the maximum during a start",
            details={"now": now, "at_most": most, "at_most_in_a_start": after},
        ),
        Measurement(
            f"{of}: from the operator's start until all jobs are reconciled",
            ours=(start,),
            ours_at_most=_START_WANTED,
            includes="the interpreter, the imports, the lists, and the lease (which the previous process released)",
            details={"writes": dict(writes_in_start)},
        ),
    ]


async def _reactions(cluster: OperatedCluster, namespace: str, pods: int, changes: int) -> list[float]:
    taken = []
    for number in range(changes):
        live = cluster.pods.live(namespace)
        taken.append(await cluster.replace(namespace, list(live.values())[number * 37 % len(live)]))
        await asyncio.sleep(1.0)
        await cluster.pods.until(lambda: cluster.pods.count(namespace) >= pods)
    return taken


def row(pods: int, etcd: str, counted: Counter[str]) -> Row:
    """Return a row of the table of requests."""
    changing = writes(counted)
    creates = changing["create pods"]
    return {
        "pods": pods,
        "etcd": etcd,
        "requests": counted.total(),
        "per_pod": counted.total() / pods,
        "creates": creates,
        "other_writes": changing.total() - creates,
        "reads": counted.total() - changing.total(),
    }


def percentile(samples: list[float], percent: int) -> float:
    """Return a percentile of the samples, by the nearest-rank method."""
    ordered = sorted(samples)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


async def _scale(cluster: OperatedCluster, namespace: str, replicas: int) -> float:
    begun = time.monotonic()
    await cluster.api.patch(ELASTIC_JOBS, namespace, "one", {"spec": {"replicas": replicas}}, "scale")
    return begun
