"""How many pods there should be, what the agents are told of it, and which pods go when there are too many.

The first size travels with the pods. A later one is written to the store before a pod is changed, with the names of the
pods that go, so that the agents form one epoch without them. What the agents know is not remembered but observed: it
stands in the store and with the pods, and the highest generation holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_operator.model import EtcdState
from torchelastic.contract import SizeRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_operator.model import Job, Observed, Pod
    from elastic_operator.plan.roster import Roster


@dataclass(frozen=True, slots=True)
class Sizing:
    """What follows from the wanted size.

    Attributes:
        record: what new pods are started with.
        tell: what to write into the store; None where it need not be, or cannot be now.
        going: pods that there are too many.
    """

    record: SizeRecord
    tell: SizeRecord | None
    going: tuple[Pod, ...]


def settle_size(job: Job, observed: Observed, roster: Roster) -> Sizing:
    """Compare what the agents know with what is wanted."""
    known = [pod.size for pod in roster.live + roster.past if pod.size is not None]
    if observed.size is not None:
        known.append(observed.size)
    newest = max((size.generation for size in known), default=0)
    spec = job.spec
    agreed = bool(known) and all(
        (size.min, size.max, size.wanted) == (spec.min_replicas, spec.max_replicas, spec.desired)
        for size in known
        if size.generation == newest
    )
    # What was announced may stand where it can't be read now: a new generation lies above that, too.
    generation = max(newest if agreed else max(newest + 1, job.generation), job.status.size_generation)
    record = SizeRecord(generation=generation, min=spec.min_replicas, max=spec.max_replicas, wanted=spec.desired)
    stored = observed.size.generation if observed.size is not None else 0
    announced = observed.size.going if agreed and observed.size is not None and stored == newest else ()
    going = _too_many(roster.live, spec.desired, announced)
    unaware = [pod for pod in roster.live if pod.size is None or pod.size.generation < generation]
    if not (unaware and observed.store_read and stored < generation):
        return Sizing(record, None, going)
    names = tuple(sorted(pod.name for pod in going))
    told = SizeRecord(generation=generation, min=record.min, max=record.max, wanted=record.wanted, going=names)
    return Sizing(record, told, going)


def store_comes_first(observed: Observed) -> bool:
    """Whether the store's own pod is not taken, by a quota for example: more workers would only take its room."""
    return observed.etcd_hindered and observed.etcd is not EtcdState.READY


def giving_way(job: Job, observed: Observed, staying: Sequence[Pod]) -> tuple[Pod, ...]:
    """The pods above the minimum that make room for the store's own pod, highest index first.

    Only before the job has ever trained: no pod is of use without the store then, and none has anything to lose. They
    are made again as soon as the store's is taken.
    """
    if job.status.started is not None or not store_comes_first(observed):
        return ()
    by_use = sorted(staying, key=lambda pod: (pod.ready, -pod.index))
    return tuple(by_use[: max(len(staying) - job.spec.min_replicas, 0)])


def _too_many(live: Sequence[Pod], desired: int, announced: Sequence[str]) -> tuple[Pod, ...]:
    """The pods that go.

    First those of which the agents have been told already, for no epoch takes them any more; then the younger one of
    two in one place, which only two operators at once can have made; then, as long as there are too many, those that
    are not ready, and then those with the highest index.
    """
    going = [pod for pod in live if pod.name in announced]
    others = [pod for pod in live if pod.name not in announced]
    places: dict[int, Pod] = {}
    for pod in sorted(others, key=lambda pod: (not pod.ready, pod.created, pod.uid)):
        if pod.index in places:
            going.append(pod)
        else:
            places[pod.index] = pod
    staying = sorted(places.values(), key=lambda pod: (pod.ready, -pod.index))
    return (*going, *staying[: max(len(staying) - max(desired, 0), 0)])
