"""Combine the metrics that a job's agents serve into the metrics of the job.

Each agent serves one page; the page of the leader also has the metrics of the whole job. A page may be missing, come
from another version or hold anything that a program measures: missing values are None.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TextIO, cast

from prometheus_client.parser import text_fd_to_metric_families

from elastic_operator.errors import ClusterError
from elastic_operator.views import formatting

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from prometheus_client import Metric

TRAINING: Final = "training"

_MAX_LINE: Final = 2048
"""The parser's time grows with the square of a line's length; an agent's longest lines have 1200 characters."""
_IGNORED_SUFFIXES: Final = ("_bucket", "_created")
_MAX_LABEL: Final = 60
_MAX_REASON: Final = 100
_MAX_VALUE: Final = 2**53
"""What an agent measures is between 0 and this; other values are left out."""
_CUSTOM_HELP: Final = " of the group "
_CUSTOM_HELP_END: Final = ", as the program measures it."
"""The help text of a program's own metric is its name, these words, its group, and those."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Sum and count of a histogram."""

    total: float
    count: float

    @property
    def mean(self) -> float | None:
        """The mean; None without a value."""
        return self.total / self.count if self.count > 0 else None

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.total + other.total, self.count + other.count)


class _Sample(NamedTuple):
    labels: Mapping[str, str]
    value: float


class MetricsPage:
    """The metrics of one agent, parsed from Prometheus' text format.

    Attributes:
        pod: name of the agent's pod.
        custom: the families of the program's own metrics.

    Raises:
        ClusterError: the text is invalid.
    """

    def __init__(self, pod: str, text: str) -> None:
        self.pod = pod
        self.custom: list[Metric] = []
        self._samples: dict[str, list[_Sample]] = {}
        lines = (
            line
            for line in io.StringIO(text)
            if len(line) <= _MAX_LINE and not line.partition("{")[0].endswith(_IGNORED_SUFFIXES)
        )
        try:
            for family in text_fd_to_metric_families(cast("TextIO", lines)):
                for name, labels, value, *_ in family.samples:
                    number = float(str(value))  # the parser returns some values as int, even larger ones than any float
                    if 0 <= number <= _MAX_VALUE or not name.startswith("torchelastic_"):
                        shown = {key: formatting.printed(label)[:_MAX_LABEL] for key, label in labels.items()}
                        self._samples.setdefault(name, []).append(_Sample(shown, number))
                if family.documentation.endswith(_CUSTOM_HELP_END) and _CUSTOM_HELP in family.documentation:
                    self.custom.append(family)
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            reason = formatting.shortened(str(error), _MAX_REASON)
            raise ClusterError(f"what it shows cannot be read as metrics{reason and f' ({reason})'}") from None

    @staticmethod
    def is_leader(text: str) -> bool:
        """Return whether a page that is not parsed yet is the leader's."""
        return "torchelastic_job_seconds_total" in text

    def value(self, name: str) -> float | None:
        """Return the value of this name, the smallest if there are several; None if there is none."""
        return min((sample.value for sample in self._samples.get(name, ())), default=None)

    def by_label(self, name: str, label: str, **only: str) -> dict[str, float]:
        """Return the values of this name whose labels include ``only``, by the value of a label."""
        return {
            labels.get(label, ""): value
            for labels, value in self._samples.get(name, ())
            if all(labels.get(key) == wanted for key, wanted in only.items())
        }

    def tallies(self, name: str, label: str, **only: str) -> dict[str, Tally]:
        """Return the histograms of this name whose labels include ``only``, by the value of a label."""
        sums, counts = (self.by_label(f"{name}_{part}", label, **only) for part in ("sum", "count"))
        return {key: Tally(sums[key], counts[key]) for key in sums.keys() & counts.keys()}

    def samples(self, name: str) -> Sequence[_Sample]:
        """Return all samples of this name."""
        return self._samples.get(name, ())


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _is_rank(label: str) -> bool:
    return label.isdecimal() and len(label) <= 9


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMetrics:
    """Metrics of one worker; ``memory`` in bytes, the others in seconds."""

    rank: int
    pod: str
    steps: Tally | None = None
    memory: float | None = None
    checkpoints: Tally | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomMetric:
    """A gauge, counter or histogram of the program's own, by rank; ``seconds`` says whether that is its unit."""

    group: str
    name: str
    kind: str
    seconds: bool
    values: Mapping[int, float | Tally]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMetrics:
    """Metrics of one GPU; memory in bytes, utilization between 0 and 1."""

    pod: str
    gpu: str
    used: float | None = None
    total: float | None = None
    utilization: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMetrics:
    """Metrics of a job; unknown values are None or empty.

    Attributes:
        seconds: the job's time by run state.
        lost: seconds of training that no checkpoint holds.
        restarts: restarts of workers that are charged to ``maxRestarts``; ``uncharged_restarts`` are not.
        recoveries: duration of recoveries by cause.
    """

    round: int | None = None
    world_size: int | None = None
    nodes: int | None = None
    desired_nodes: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    lost: float | None = None
    restarts: int | None = None
    uncharged_restarts: int | None = None
    remaining_restarts: int | None = None
    recoveries: Mapping[str, Tally] = field(default_factory=dict)
    ranks: tuple[RankMetrics, ...] = ()
    custom: tuple[CustomMetric, ...] = ()
    gpus: tuple[GpuMetrics, ...] = ()

    @classmethod
    def of(cls, pages: Iterable[MetricsPage]) -> JobMetrics:
        """Combine the pages of a job's agents."""
        # If several agents have the same value, that of the latest round is right.
        known = sorted(pages, key=lambda page: page.value("torchelastic_round") or 0)
        latest = known[-1] if known else MetricsPage("", "")
        leader = max(known, key=lambda page: sum(_job_seconds(page).values()), default=latest)
        restarts = leader.by_label("torchelastic_job_restarts_total", "charged")
        return cls(
            round=_whole(latest.value("torchelastic_round")),
            world_size=_whole(latest.value("torchelastic_world_size")),
            nodes=_whole(leader.value("torchelastic_job_nodes")),
            desired_nodes=_whole(leader.value("torchelastic_job_wanted_nodes")),
            seconds=_job_seconds(leader),
            lost=leader.value("torchelastic_job_lost_seconds_total"),
            restarts=_whole(restarts.get("yes")),
            uncharged_restarts=_whole(restarts.get("no")),
            remaining_restarts=_whole(latest.value("torchelastic_remaining_restarts")),
            recoveries=_recoveries(known),
            ranks=_ranks(known),
            custom=_custom(known),
            gpus=_gpus(known),
        )


def goodput(seconds: Mapping[str, float], lost: float | None) -> float | None:
    """Return the ratio of kept training to all time (by run state); None if no time has passed."""
    total = sum(seconds.values())
    return min(1.0, max(0.0, seconds.get(TRAINING, 0.0) - (lost or 0.0)) / total) if total > 0 else None


def _job_seconds(page: MetricsPage) -> dict[str, float]:
    return page.by_label("torchelastic_job_seconds_total", "state")


def _recoveries(pages: Iterable[MetricsPage]) -> dict[str, Tally]:
    """Return the recoveries by cause: every node counts each, so take the largest count and the common mean."""
    found: dict[str, list[Tally]] = {}
    for page in pages:
        for cause, tally in page.tallies("torchelastic_recovery_duration_seconds", "cause").items():
            if tally.count > 0:
                found.setdefault(cause, []).append(tally)
    recoveries = {}
    for cause, tallies in sorted(found.items()):
        most, total = max(each.count for each in tallies), sum(tallies, Tally(0.0, 0.0))
        recoveries[cause] = Tally(total.total / total.count * most, most)
    return recoveries


def _ranks(pages: Iterable[MetricsPage]) -> tuple[RankMetrics, ...]:
    found: dict[int, RankMetrics] = {}
    for page in pages:
        steps = page.tallies("torchelastic_operation_duration_seconds", "rank", operation="train_step")
        memory = page.by_label("torchelastic_worker_memory_bytes", "rank")
        checkpoints = page.tallies("torchelastic_checkpoint_write_latency_seconds", "rank")
        for rank in filter(_is_rank, steps.keys() | memory.keys() | checkpoints.keys()):
            # A pod keeps the counters of a rank that has moved to another pod.
            known = found.get(int(rank))
            if rank in memory or known is None or known.memory is None:
                found[int(rank)] = RankMetrics(
                    rank=int(rank),
                    pod=page.pod,
                    steps=steps.get(rank),
                    memory=memory.get(rank),
                    checkpoints=checkpoints.get(rank),
                )
    living = [rank for rank in found.values() if rank.memory is not None]
    return tuple(sorted(living or found.values(), key=lambda each: each.rank))


def _custom(pages: Iterable[MetricsPage]) -> tuple[CustomMetric, ...]:
    found: dict[tuple[str, str, str, bool], dict[int, float | Tally]] = {}
    for page in pages:
        for family in page.custom:
            name, _, group = family.documentation.removesuffix(_CUSTOM_HELP_END).rpartition(_CUSTOM_HELP)
            values = dict(_custom_values(page, family))
            if values:
                found.setdefault((group, name, family.type, family.name.endswith("_seconds")), {}).update(values)
    return tuple(
        CustomMetric(group=group, name=name, kind=kind, seconds=seconds, values=dict(sorted(values.items())))
        for (group, name, kind, seconds), values in sorted(found.items())
    )


def _custom_values(page: MetricsPage, family: Metric) -> Iterator[tuple[int, float | Tally]]:
    values: Iterable[tuple[str, float | Tally]] = ()
    if family.type == "histogram":
        values = page.tallies(family.name, "rank").items()
    elif family.type in ("gauge", "counter"):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        values = [(labels.get("rank", ""), value) for labels, value in page.samples(name)]
    return ((int(rank), value) for rank, value in values if _is_rank(rank))


def _gpus(pages: Iterable[MetricsPage]) -> tuple[GpuMetrics, ...]:
    found = []
    for page in pages:
        used = page.by_label("torchelastic_gpu_memory_used_bytes", "gpu")
        total = page.by_label("torchelastic_gpu_memory_total_bytes", "gpu")
        busy = page.by_label("torchelastic_gpu_utilization_ratio", "gpu")
        found += [
            GpuMetrics(pod=page.pod, gpu=gpu, used=used.get(gpu), total=total.get(gpu), utilization=busy.get(gpu))
            for gpu in used.keys() | total.keys() | busy.keys()
        ]
    return tuple(sorted(found, key=lambda each: (each.pod, each.gpu)))
