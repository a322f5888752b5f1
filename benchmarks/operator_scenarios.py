"""What is done to jobs while the operator is measured, and what is wanted of it."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from benchmarks.operator_audit import writes
from benchmarks.operator_peer import CREATED_ONCE, ONCE, PEER, REPLACED_ONCE
from benchmarks.report import Measurement
from elastic_operator.kubernetes.client import ELASTIC_JOBS
from tests.support.testbed.kwok import LINGERS

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from benchmarks.operator_field import Field

CREATED_WANTED: Final = {300: 1.2, 1000: 4.0}
_REPLACED_WANTED: Final = 0.5
_SCALED_WANTED: Final = 1.5
_MANY: Final = (500, 4)
_MANY_WANTED: Final = 12.0
_SLOWEST_WANTED: Final = 3.0
_LARGE: Final = (500, 10)
_CHANGE_WANTED: Final = 0.1
_MEMORY_WANTED: Final = 286.0  # 300 MB
_START_WANTED: Final = 10.0
_MEBIBYTE: Final = 2**20
_REST: Final = 0.3
"""Seconds between two samples, in which what belongs to the first comes to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How often a job of one size asks the API server, for the table of requests."""

    pods: int
    etcd: str
    requests: int
    per_pod: float
    creates: int
    other_writes: int
    reads: int

    def as_row(self) -> dict[str, Any]:
        """As the report has it."""
        return {name: getattr(self, name) for name in self.__slots__}


async def created(
    field: Field, pods: int, *, repeat: int, peer: Sequence[float] | None = None
) -> tuple[Measurement, Row]:
    """Apply one job of so many pods, with an etcd of its own, and wait until all of them exist.

    Args:
        field: where.
        pods: how many.
        repeat: samples.
        peer: the peer's samples of this run; None for what it did once.
    """
    samples, rows = [], []
    for _ in range(repeat):
        async with field.namespace() as namespace:
            await field.quiet(1.0)
            mark = await field.audit.mark()
            begun = await field.apply(namespace, field.manifest("one", pods, own_etcd=True))
            done = await field.pods.until(lambda ns=namespace: field.pods.count(ns) >= pods)  # type: ignore[misc]
            samples.append(done - begun)
            await field.pods.until_running(namespace, pods + 1)
            await field.quiet(1.0)
            rows.append(row(pods, "its own", await field.audit.since(mark, namespace)))
    once = (CREATED_ONCE[pods],) if pods in CREATED_ONCE else ()
    measurement = Measurement(
        f"{pods} pods exist",
        ours=samples,
        peer=once if peer is None else peer,
        peer_name=ONCE if peer is None else PEER,
        ours_at_most=CREATED_WANTED.get(pods),
        includes="from before the job is applied until the API server has told of the last of its pods; the Service "
        "and the Deployment of its etcd are made first",
    )
    return measurement, rows[-1]


async def replaced(field: Field, samples: int, *, lingers: bool, peer: Sequence[float] | None = None) -> Measurement:
    """Delete one pod after the other of a job of ten, and wait for each one's successor.

    Args:
        field: where.
        samples: how many are deleted.
        lingers: whether those that are deleted stay Terminating.
        peer: the peer's samples of this run; None for what it did once.
    """
    about = {"metadata": {"annotations": {LINGERS: "true"}}} if lingers else {}
    taken = []
    async with field.namespace() as namespace:
        await field.apply(namespace, field.manifest("one", 10, template=about))
        await field.pods.until(lambda: field.pods.count(namespace) >= 10)
        await field.pods.until_running(namespace, 10)
        await field.train(namespace)
        await field.quiet(1.0)
        for _ in range(samples):
            oldest = min(field.pods.live(namespace).values(), key=lambda pod: pod.came)
            taken.append(await field.replace(namespace, oldest))
            await field.pods.until_running(namespace, 10)
            await asyncio.sleep(_REST)
    held = ", the old one Terminating all the while" if lingers else ""
    return Measurement(
        f"a deleted pod is replaced{held}, p95 of {samples}",
        ours=(percentile(taken, 95),),
        peer=() if lingers else (REPLACED_ONCE,) if peer is None else peer,
        peer_name=ONCE if peer is None else PEER,
        ours_at_most=_REPLACED_WANTED,
        includes="from before the request to delete it until the API server has told of its successor",
        details={"samples": taken, "median": statistics.median(taken)},
    )


async def scaled(field: Field, small: int, large: int, *, repeat: int) -> tuple[Measurement, Measurement]:
    """Scale a job up and down again; the pods that stay are not touched."""
    up, down = [], []
    async with field.namespace() as namespace:
        await field.apply(namespace, field.manifest("one", small, maximum=large))
        await field.pods.until(lambda: field.pods.count(namespace) >= small)
        await field.pods.until_running(namespace, small)
        await field.train(namespace)
        await field.quiet(1.0)
        stay = {uid: pod.about["resourceVersion"] for uid, pod in field.pods.live(namespace).items()}
        for _ in range(repeat):
            begun = await _scale(field, namespace, large)
            up.append(await field.pods.until(lambda: field.pods.count(namespace) >= large) - begun)
            await field.pods.until_running(namespace, large)
            await field.quiet(1.0)
            begun = await _scale(field, namespace, small)
            down.append(await field.pods.until(lambda: field.pods.count(namespace) <= small) - begun)
            await field.pods.until(lambda: len(field.pods.there(namespace)) <= small)
            await field.quiet(1.0)
        now = {uid: pod.about["resourceVersion"] for uid, pod in field.pods.live(namespace).items()}
    touched = [] if now == stay else ["a pod that stays was changed, or another one stayed"]
    return (
        Measurement(
            f"scaled from {small} to {large} pods",
            ours=up,
            ours_never=touched,
            ours_at_most=_SCALED_WANTED,
            includes="from before the request to scale until the API server has told of the last new pod; the size is "
            "written to the job's etcd first",
        ),
        Measurement(
            f"scaled from {large} to {small} pods",
            ours=down,
            ours_never=touched,
            ours_at_most=_SCALED_WANTED,
            includes="from before the request to scale until the last pod that goes is Terminating",
        ),
    )


async def many(field: Field, jobs: int = _MANY[0], pods: int = _MANY[1]) -> tuple[Measurement, Measurement, Row]:
    """Apply many jobs at once, and wait until all their pods exist."""
    async with field.namespace() as namespace:
        mark = await field.audit.mark()
        begun = await field.apply_all(namespace, [field.manifest(f"job-{n}", pods) for n in range(jobs)])
        done = await field.pods.until(lambda: field.pods.count(namespace) >= jobs * pods)
        waits = [
            max(pod.came for pod in field.pods.live(namespace).values() if pod.job == name) - at
            for name, at in begun.items()
        ]
        await field.pods.until_running(namespace, jobs * pods)
        await field.quiet()
        counted = row(jobs * pods, f"the field's, {jobs} jobs", await field.audit.since(mark, namespace))
    details = {"median_wait": statistics.median(waits), "slowest_wait": max(waits)}
    return (
        Measurement(
            f"all pods of {jobs} jobs of {pods} exist",
            ours=(done - min(begun.values()),),
            ours_at_most=_MANY_WANTED,
            includes="from before the first of the jobs is applied, 16 side by side, until the API server has told of "
            "the last pod",
            details=details,
        ),
        Measurement(
            "the slowest of them against the median",
            ours=(max(waits) / statistics.median(waits),),
            unit="times",
            ours_at_most=_SLOWEST_WANTED,
            includes="of each job: from before it is applied until its last pod exists",
            details=details,
        ),
        counted,
    )


async def large(
    field: Field, jobs: int = _LARGE[0], pods: int = _LARGE[1], *, idle: float, changes: int
) -> list[Measurement]:
    """Look at an operator of many jobs that train: at rest, when one pod changes, and when it is started again."""
    async with field.namespace() as namespace:
        await field.apply_all(namespace, [field.manifest(f"job-{n}", pods) for n in range(jobs)])
        await field.pods.until(lambda: field.pods.count(namespace) >= jobs * pods)
        await field.pods.until_running(namespace, jobs * pods)
        await field.train(namespace)
        await field.until_states(namespace, lambda found: all(job.get("readyReplicas") == pods for job in found))
        await field.quiet()
        at_rest = await field.writes_within(idle)
        reaction = await _reactions(field, namespace, jobs * pods, changes)
        now, most = field.memory() / _MEBIBYTE, field.memory("VmHWM") / _MEBIBYTE
        mark = await field.audit.mark()
        start = await field.restart(jobs)
        await field.quiet()
        writes_in_start = writes(await field.audit.since(mark))
        after = field.memory("VmHWM") / _MEBIBYTE
    of = f"{jobs} jobs, {jobs * pods} running pods"
    return [
        Measurement(
            f"{of}: writes in {idle:g} s of rest",
            ours=(float(at_rest.total()),),
            unit="writes",
            ours_at_most=0.0,
            includes="all requests of the operator that change something, but those for its own lease",
            details=dict(at_rest),
        ),
        Measurement(
            f"{of}: a pod's change is answered, median of {changes}",
            ours=(statistics.median(reaction),),
            ours_at_most=_CHANGE_WANTED,
            includes="from before the request to delete a pod until the API server has told of its successor",
            details={"samples": reaction, "p95": percentile(reaction, 95)},
        ),
        Measurement(
            f"{of}: memory of the operator",
            ours=(max(now, after),),
            unit="MiB",
            ours_at_most=_MEMORY_WANTED,
            includes="resident: now, and at most while it starts",
            details={"now": now, "at_most": most, "at_most_in_a_start": after},
        ),
        Measurement(
            f"{of}: from the operator's start until all jobs are looked at",
            ours=(start,),
            ours_at_most=_START_WANTED,
            includes="the interpreter, its modules, the listings, the lease (which its predecessor gave back)",
            details={"writes": dict(writes_in_start)},
        ),
    ]


async def _reactions(field: Field, namespace: str, pods: int, changes: int) -> list[float]:
    taken = []
    for number in range(changes):
        live = field.pods.live(namespace)
        taken.append(await field.replace(namespace, list(live.values())[number * 37 % len(live)]))
        await asyncio.sleep(1.0)
        await field.pods.until(lambda: field.pods.count(namespace) >= pods)
    return taken


def row(pods: int, etcd: str, counted: Counter[str]) -> Row:
    """What was asked, for the table."""
    changing = writes(counted)
    creates = changing["create pods"]
    return Row(
        pods=pods,
        etcd=etcd,
        requests=counted.total(),
        per_pod=counted.total() / pods,
        creates=creates,
        other_writes=changing.total() - creates,
        reads=counted.total() - changing.total(),
    )


def percentile(samples: list[float], percent: int) -> float:
    """The smallest sample that so many per cent of them do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


async def _scale(field: Field, namespace: str, replicas: int) -> float:
    begun = time.monotonic()
    await field.api.patch(ELASTIC_JOBS, namespace, "one", {"spec": {"replicas": replicas}}, "scale")
    return begun
