"""What the agents of a job tell under /metrics, as the figures of one job.

Each agent has its own page, and one of them, the leader, tells what is true of the whole job. A page may be missing, be
of another version or hold anything that a program measures: what is not there is None, or left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

from elastic_operator.showing.agent_page import Page, Tally, is_rank, tallies_of, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_GROUP: Final = " of the group "
_OWN: Final = ", as the program measures it."
"""How an agent explains a name that is the program's own: the name, these words, its group, and those."""
_LONGEST: Final = 1e11
"""Seconds; agents themselves believe in no longer time."""
_MOST: Final = 16
"""States, and causes of recoveries; agents know half as many."""

TRAINING: Final = "training"
"""The state whose time is what a job is there for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """What is told of one worker.

    Attributes:
        rank: its global rank.
        pod: on which it runs.
        steps: its steps, in seconds; None where the program does not tell of them.
        memory: bytes of it that are in memory.
        checkpoints: what it took to write them, in seconds.
    """

    rank: int
    pod: str
    steps: Tally | None = None
    memory: float | None = None
    checkpoints: Tally | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFigure:
    """One of the program's own names.

    Attributes:
        group: of the name.
        name: as the program has it.
        kind: gauge, counter or histogram.
        seconds: whether the values are seconds.
        values: by rank: of a gauge the last one, of a counter the sum, of a histogram what it says.
    """

    group: str
    name: str
    kind: str
    seconds: bool
    values: Mapping[int, float | Tally]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """What is told of one GPU.

    Attributes:
        pod: that uses it.
        gpu: its number there.
        used: bytes of its memory.
        total: likewise.
        utilization: the share of the time in which it computes.
    """

    pod: str
    gpu: str
    used: float | None = None
    total: float | None = None
    utilization: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a job; what nobody has told is None or empty.

    Attributes:
        epoch: the latest that any agent knows.
        world_size: workers in it.
        nodes: in it.
        wanted: nodes that there should be.
        seconds: since the job was made, by what it did; empty where nobody accounts for it.
        lost: seconds of training that no checkpoint held.
        restarts: of workers, charged to the job's budget.
        free: those that are not.
        remaining: failures that the job may still have.
        recoveries: by cause, how long the nodes took.
        ranks: the workers, by rank.
        own: the program's own names, by group and name.
        gpus: by pod and number.
    """

    epoch: int | None = None
    world_size: int | None = None
    nodes: int | None = None
    wanted: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    lost: float | None = None
    restarts: int | None = None
    free: int | None = None
    remaining: int | None = None
    recoveries: Mapping[str, Tally] = field(default_factory=dict)
    ranks: tuple[RankFigures, ...] = ()
    own: tuple[OwnFigure, ...] = ()
    gpus: tuple[GpuFigures, ...] = ()

    @property
    def goodput(self) -> float | None:
        """The share of the job's time in which it trained what it still has; None where nobody knows."""
        return goodput(self.seconds, self.lost)


def goodput(seconds: Mapping[str, float], lost: float | None) -> float | None:
    """The share of a job's time in which it trained what it still has.

    Args:
        seconds: by what the job did.
        lost: seconds of training that no checkpoint held; None where nobody knows.

    Returns:
        Between 0 and 1; None where no time has passed.
    """
    whole = sum(seconds.values())
    if whole <= 0:
        return None
    return min(1.0, max(0.0, seconds.get(TRAINING, 0.0) - (lost or 0.0)) / whole)


def figures(pages: Iterable[Page]) -> Figures:
    """The figures of a job.

    Args:
        pages: of those of its agents that have answered.
    """
    # Of what several agents tell, the one in the later epoch knows better.
    known = sorted(pages, key=lambda page: page.value("torchelastic_epoch") or 0)
    latest = known[-1] if known else Page("", "")
    leader = max(known, key=lambda page: sum(_seconds(page).values()), default=latest)
    restarts = {labels.get("charged", ""): value for labels, value in leader.values("torchelastic_job_restarts_total")}
    return Figures(
        epoch=latest.count("torchelastic_epoch"),
        world_size=latest.count("torchelastic_world_size"),
        nodes=leader.count("torchelastic_job_nodes"),
        wanted=leader.count("torchelastic_job_wanted_nodes"),
        seconds=_seconds(leader),
        lost=_lost(leader),
        restarts=whole_number(restarts.get("yes")),
        free=whole_number(restarts.get("no")),
        remaining=latest.count("torchelastic_remaining_restarts"),
        recoveries=_recoveries(known),
        ranks=_ranks(known),
        own=_own(known),
        gpus=_gpus(known),
    )


def _seconds(page: Page) -> dict[str, float]:
    """Where the job's time went: the leader alone accounts for it. What can be no time is left out."""
    told = page.values("torchelastic_job_seconds_total")
    found = {labels.get("state", "?"): value for labels, value in told if _is_time(value)}
    return dict(islice(found.items(), _MOST))


def _lost(page: Page) -> float | None:
    lost = page.value("torchelastic_job_lost_seconds_total")
    return lost if lost is not None and _is_time(lost) else None


def _is_time(seconds: float) -> bool:
    return 0 <= seconds <= _LONGEST


def _times(tallies: Mapping[str, Tally]) -> dict[str, Tally]:
    """Those that can be times which were measured."""
    return {
        key: tally
        for key, tally in tallies.items()
        if _is_time(tally.total) and whole_number(tally.count) == tally.count
    }


def _recoveries(pages: Iterable[Page]) -> dict[str, Tally]:
    """By cause: each node measures its own, so there are as many as the node has seen that has seen most."""
    most: dict[str, float] = {}
    together: dict[str, Tally] = {}
    for page in pages:
        for cause, tally in _times(page.tallies("torchelastic_recovery_duration_seconds", "cause")).items():
            if tally.count > 0:
                most[cause] = max(most.get(cause, 0.0), tally.count)
                together[cause] = together.get(cause, Tally(0.0, 0.0)) + tally
    return {
        cause: Tally(tally.total / tally.count * most[cause], most[cause])
        for cause, tally in islice(sorted(together.items()), _MOST)
    }


def _ranks(pages: Iterable[Page]) -> tuple[RankFigures, ...]:
    found: dict[int, RankFigures] = {}
    for page in pages:
        operations = page.families.get("torchelastic_operation_duration_seconds")
        steps = _times(tallies_of(operations, "rank", operation="train_step"))
        memory = {labels.get("rank", ""): value for labels, value in page.values("torchelastic_worker_memory_bytes")}
        checkpoints = _times(page.tallies("torchelastic_checkpoint_write_latency_seconds", "rank"))
        for rank in steps.keys() | memory.keys() | checkpoints.keys():
            if not is_rank(rank):
                continue
            # A pod that has given a rank away still counts what that rank did there.
            if rank not in memory and (known := found.get(int(rank))) is not None and known.memory is not None:
                continue
            found[int(rank)] = RankFigures(
                rank=int(rank),
                pod=page.pod,
                steps=steps.get(rank),
                memory=memory.get(rank),
                checkpoints=checkpoints.get(rank),
            )
    living = [rank for rank in found.values() if rank.memory is not None]
    return tuple(sorted(living or found.values(), key=lambda each: each.rank))


def _own(pages: Iterable[Page]) -> tuple[OwnFigure, ...]:
    found: dict[tuple[str, str, str, bool], dict[int, float | Tally]] = {}
    for page in pages:
        for family in page.families.values():
            name, is_own, group = family.about.removesuffix(_OWN).rpartition(_GROUP)
            own = is_own and family.about.endswith(_OWN)
            if not own or family.kind not in ("gauge", "counter", "histogram"):
                continue
            values = found.setdefault((group, name, family.kind, family.name.endswith("_seconds")), {})
            if family.kind == "histogram":
                values |= {int(rank): each for rank, each in tallies_of(family, "rank").items() if is_rank(rank)}
            else:
                ranks = ((series.labels.get("rank", ""), series.value) for series in family.series)
                values |= {int(rank): value for rank, value in ranks if is_rank(rank)}
    return tuple(
        OwnFigure(group=group, name=name, kind=kind, seconds=seconds, values=dict(sorted(values.items())))
        for (group, name, kind, seconds), values in sorted(found.items())
        if values
    )


def _gpus(pages: Iterable[Page]) -> tuple[GpuFigures, ...]:
    found = []
    for page in pages:
        used, total, busy = (
            {labels.get("gpu", ""): value for labels, value in page.values(f"torchelastic_gpu_{what}")}
            for what in ("memory_used_bytes", "memory_total_bytes", "utilization_ratio")
        )
        busy = {gpu: share for gpu, share in busy.items() if 0 <= share <= 1}
        found += [
            GpuFigures(pod=page.pod, gpu=gpu, used=used.get(gpu), total=total.get(gpu), utilization=busy.get(gpu))
            for gpu in used.keys() | total.keys() | busy.keys()
        ]
    return tuple(sorted(found, key=lambda each: (each.pod, each.gpu)))
