"""``elasticjob top``: fetch the metrics that a job's agents serve, combine them, and show one job or a table of jobs.

Each agent serves one page; the page of the leader also has the metrics of the whole job. A page may be missing, come
from another version or contain any metrics of the program. Missing values are None. A reading takes at most a few
seconds, and omits agents that do not answer in this time.
"""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TextIO, TypeVar, cast

from prometheus_client.parser import text_fd_to_metric_families

from elastic_operator.controller.messages import count
from elastic_operator.errors import ClusterError
from elastic_operator.views import formatting
from elastic_operator.views.formatting import percent, short_duration
from torchelastic.protocol.codec import shorten
from torchelastic.protocol.records import RunState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from elastic_operator.views.job_view import JobView, PodView

    Fetch = Callable[[PodView], Awaitable[str]]
    """Fetches a pod's page; raises ClusterError."""

Default = TypeVar("Default")

STRAGGLER_RATIO: Final = 1.1
"""A rank straggles if its steps take more than this many times the median of the other ranks."""
MAX_PAGE: Final = 8 << 20
"""Maximum size of a page in bytes; 16 workers with a hundred histograms and a thousand other metrics need 6 MiB."""
TIMEOUT: Final = 4.0
"""Seconds for all agents together; one agent may take half of this time."""
_CONCURRENCY: Final = 64
_MAX_LEADER_CANDIDATES: Final = 3

_MAX_LINE: Final = 2048
"""Maximum length of a line, because parsing takes quadratic time; an agent's lines have at most 1200 characters."""
_IGNORED_SUFFIXES: Final = ("_bucket", "_created")
_MAX_LABEL: Final = 60
_MAX_REASON: Final = 100
_MAX_VALUE: Final = 2**53
"""Maximum of a value; negative and larger values are omitted."""
STATE_COLORS: Final[Mapping[str, str]] = {
    RunState.TRAINING: "green",
    RunState.RESTORING: "cyan",
    RunState.STARTING: "blue",
    RunState.RENDEZVOUS: "magenta",
    RunState.WAITING: "yellow",
    RunState.STOPPING: "red",
    RunState.SUSPENDED: "bright_black",
}
"""The color of each state; the states are shown in this order."""
_SEPARATOR: Final = "   "
_MAX_ROWS: Final = 64


@dataclass(frozen=True, slots=True)
class Tally:
    """The sum (``total``) and the count of a histogram's values."""

    total: float
    count: int

    @property
    def mean(self) -> float | None:
        """The mean; None if there are no values."""
        return self.total / self.count if self.count > 0 else None

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.total + other.total, self.count + other.count)


class MetricsPage:
    """The metrics of one agent, parsed from Prometheus' text format.

    Attributes:
        pod: name of the agent's pod.

    Raises:
        ClusterError: the text is invalid.
    """

    def __init__(self, pod: str, text: str) -> None:
        self.pod = pod
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        lines = (
            line
            for line in io.StringIO(text)
            if len(line) <= _MAX_LINE and not line.partition("{")[0].endswith(_IGNORED_SUFFIXES)
        )
        try:
            for family in text_fd_to_metric_families(cast("TextIO", lines)):
                for name, labels, value, *_ in family.samples:
                    number = float(str(value))  # the parser returns some values as int, which may be too large
                    if 0 <= number <= _MAX_VALUE:
                        shown = {key: formatting.printed(label)[:_MAX_LABEL] for key, label in labels.items()}
                        self._samples.setdefault(name, []).append((shown, number))
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            reason = shorten(str(error), _MAX_REASON)
            raise ClusterError(f"its response cannot be read as metrics{reason and f' ({reason})'}") from None

    def value(self, name: str, default: Default) -> float | Default:
        """Return the value of this name, the minimum if there are several."""
        return min((value for _, value in self._samples.get(name, ())), default=default)

    def by_label(self, name: str, label: str, **only: str) -> dict[str, float]:
        """Return the values of this name whose labels include ``only``, by the value of the label ``label``."""
        return {
            labels.get(label, ""): value
            for labels, value in self._samples.get(name, ())
            if all(labels.get(key) == wanted for key, wanted in only.items())
        }

    def tallies(self, name: str, label: str, **only: str) -> dict[str, Tally]:
        """Return the histograms of this name whose labels include ``only``, by the value of the label ``label``."""
        sums, counts = (self.by_label(f"{name}_{part}", label, **only) for part in ("sum", "count"))
        return {key: Tally(sums[key], int(counts[key])) for key in sums.keys() & counts.keys()}


class RankMetrics(NamedTuple):
    """Metrics of one worker: ``steps`` and ``checkpoints`` are durations in seconds, ``memory`` is in bytes."""

    rank: int
    pod: str
    steps: Tally | None
    memory: float | None
    checkpoints: Tally | None


class JobMetrics:
    """A job at a moment, with the metrics of its agents; unknown values are None or empty.

    Args:
        now: the moment, in seconds since the Unix epoch.
        rates: the rates of the previous reading; they are updated with this reading.
        notes: sentences about missing metrics.

    Attributes:
        seconds: the job's time by run state.
        lost: seconds of training that no checkpoint holds.
        restarts: restarts of workers that count against ``maxRestarts``; ``uncharged_restarts`` do not.
        goodput: see :func:`goodput`.
        recoveries: durations by cause, from a failure or change until the first training step.
        worker_restarts: durations by cause, from a failure or change until the workers have started again.
    """

    def __init__(
        self, job: JobView, pages: Iterable[MetricsPage], now: float, rates: RateTracker, notes: Sequence[str] = ()
    ) -> None:
        self.job, self.now, self.notes = job, now, notes
        # If several agents have the same metric, the value of the latest round is correct.
        self.pages = sorted(pages, key=lambda page: page.value("torchelastic_round", 0))
        latest = self.pages[-1] if self.pages else MetricsPage("", "")
        leader = max(self.pages, key=lambda page: sum(_job_seconds(page).values()), default=latest)
        restarts = leader.by_label("torchelastic_job_restarts_total", "charged")
        self.round = int(latest.value("torchelastic_round", 0)) or job.status.round
        self.world_size = int(latest.value("torchelastic_world_size", job.status.world_size))
        self.nodes = leader.value("torchelastic_job_nodes", None)
        self.desired_nodes = leader.value("torchelastic_job_desired_nodes", None)
        self.restarts = int(restarts.get("yes", job.status.restarts))
        self.uncharged_restarts = int(restarts.get("no", job.status.uncharged_restarts))
        self.remaining_restarts = latest.value("torchelastic_remaining_restarts", None)
        self.seconds: Mapping[str, float] = _job_seconds(leader)
        self.lost = leader.value("torchelastic_job_lost_seconds_total", None)
        kept = job.status.time_breakdown
        # While pods run, the status has the values from before the last resumption.
        if not self.seconds and kept is not None and (job.status.finished or job.status.suspended):
            since = max(0.0, now - kept.until) if job.state == "Suspended" and kept.until else 0.0
            suspended = kept.seconds.get(RunState.SUSPENDED, 0.0) + since
            self.seconds = {str(state): spent for state, spent in kept.seconds.items()}
            self.seconds |= {str(RunState.SUSPENDED): suspended} if suspended else {}
            self.lost = kept.lost
        self.goodput = goodput(self.seconds, self.lost)
        self.recoveries = _durations_of(self.pages, "torchelastic_recovery_duration_seconds")
        self.worker_restarts = _durations_of(self.pages, "torchelastic_worker_restart_duration_seconds")
        self.ranks = _ranks_of(self.pages)
        self.rates = rates.update(self)


def goodput(seconds: Mapping[str, float], lost: float | None) -> float | None:
    """Return the ratio of preserved training time to all ``seconds`` (by run state).

    None if no time has passed, or if no checkpoint was reported: then it is unknown what was lost.
    """
    total = sum(seconds.values())
    if lost is None or total <= 0:
        return None
    return min(1.0, max(0.0, seconds.get(RunState.TRAINING, 0.0) - lost) / total)


def _job_seconds(page: MetricsPage) -> dict[str, float]:
    return page.by_label("torchelastic_job_seconds_total", "state")


def _durations_of(pages: Iterable[MetricsPage], name: str) -> dict[str, Tally]:
    """Return the durations by cause, of the node with the most values and, among these, of the slowest one.

    Each node counts all recoveries since it joined, and a recovery ends with the last node.
    """
    found: dict[str, Tally] = {}
    for page in pages:
        for cause, tally in page.tallies(name, "cause").items():
            if tally.count > 0:
                found[cause] = max(found.get(cause, tally), tally, key=lambda each: (each.count, each.total))
    return found


def _ranks_of(pages: Iterable[MetricsPage]) -> list[RankMetrics]:
    found: dict[int, RankMetrics] = {}
    for page in pages:
        steps = page.tallies("torchelastic_operation_duration_seconds", "rank", operation="train_step")
        memory = page.by_label("torchelastic_worker_memory_bytes", "rank")
        checkpoints = page.tallies("torchelastic_checkpoint_write_latency_seconds", "rank")
        labels = steps.keys() | memory.keys() | checkpoints.keys()
        for rank in (label for label in labels if label.isdecimal() and len(label) <= 9):
            # A pod still has the counters of a rank that has moved to another pod.
            known = found.get(int(rank))
            if rank in memory or known is None or known.memory is None:
                found[int(rank)] = RankMetrics(
                    int(rank), page.pod, steps.get(rank), memory.get(rank), checkpoints.get(rank)
                )
    living = [rank for rank in found.values() if rank.memory is not None]
    return sorted(living or found.values(), key=lambda each: each.rank)


class RateTracker:
    """The rates at the latest reading.

    Attributes:
        steps: mean seconds per step by rank, from the latest reading with new steps.
        recoveries: seconds of the latest recovery by cause, if it was observed.
        straggler: the rank whose steps take much longer than the others'; None if there is none.
    """

    def __init__(self) -> None:
        self.steps: Mapping[int, float] = {}
        self.recoveries: dict[str, float] = {}
        self.straggler: int | None = None
        self._started = False
        self._last: dict[tuple[str, object], tuple[Tally, float | None]] = {}

    def update(self, metrics: JobMetrics) -> Self:
        """Update the rates with a reading."""
        for cause, tally in metrics.recoveries.items():
            mean = self._mean(("recovery", cause), tally)
            if not self._started and tally.count > 1:  # only the mean of several recoveries is known
                self._last["recovery", cause] = tally, None
            elif mean is not None:
                self.recoveries[cause] = mean
        means = {each.rank: self._mean((each.pod, each.rank), each.steps) for each in metrics.ranks if each.steps}
        self.steps = {rank: mean for rank, mean in means.items() if mean is not None}
        self.straggler = _straggler(self.steps)
        self._started = True
        return self

    def _mean(self, key: tuple[str, object], now: Tally) -> float | None:
        """Return the mean of the values that were added to a histogram last."""
        before, mean = self._last.get(key, (None, None))
        if before is None or now.count < before.count:
            mean = now.mean
        elif now.count > before.count:
            mean = (now.total - before.total) / (now.count - before.count)
        self._last[key] = now, mean
        return mean


def _straggler(steps: Mapping[int, float]) -> int | None:
    if len(steps) < 2:
        return None
    slowest = max(steps, key=lambda rank: steps[rank])
    others = median(seconds for rank, seconds in steps.items() if rank != slowest)
    return slowest if steps[slowest] > STRAGGLER_RATIO * others else None


async def scrape(
    jobs: Sequence[tuple[Sequence[PodView], Fetch]],
    *,
    leaders: bool = False,
    timeout: float = TIMEOUT,  # noqa: ASYNC109 - for all requests together
) -> list[tuple[list[MetricsPage], list[str]]]:
    """Fetch the pages of all pods of each job; return them and a sentence for each problem.

    With ``leaders``, fetch only the pages of the oldest pods; one of them is usually the leader.
    """
    gate, deadline = asyncio.Semaphore(_CONCURRENCY), asyncio.get_running_loop().time() + timeout

    async def read(pod: PodView, fetch: Fetch) -> MetricsPage | ClusterError | TimeoutError:
        try:
            async with asyncio.timeout_at(deadline), gate, asyncio.timeout(timeout / 2):
                return MetricsPage(pod.name, await fetch(pod))
        except (ClusterError, TimeoutError) as error:
            return error

    async def read_job(pods: Sequence[PodView], fetch: Fetch) -> tuple[list[MetricsPage], list[str]]:
        serving = [pod for pod in pods if pod.metrics_url and not pod.over]
        if leaders:
            serving = sorted(serving, key=lambda pod: pod.created)[:_MAX_LEADER_CANDIDATES]
        serving.sort(key=lambda pod: (pod.index, pod.name))
        pages = await asyncio.gather(*(read(pod, fetch) for pod in serving))
        found = dict(zip((pod.name for pod in serving), pages, strict=True))
        return [page for page in found.values() if isinstance(page, MetricsPage)], _notes(found)

    return await asyncio.gather(*(read_job(*job) for job in jobs))


def _notes(found: Mapping[str, MetricsPage | ClusterError | TimeoutError]) -> list[str]:
    """Return a sentence for each problem, with the name of the first pod that has the problem."""
    pods: dict[str, list[str]] = {}
    for name, page in found.items():
        if not isinstance(page, MetricsPage):
            pods.setdefault(str(page) or "its agent does not answer in time", []).append(name)
    return [
        f"{first} and {count(len(others), 'more pod')}: {problem}" if others else f"{first}: {problem}"
        for problem, (first, *others) in pods.items()
    ]


def job_lines(metrics: JobMetrics) -> list[str]:
    """Return the lines about one job."""
    notes = [formatting.printed(note.replace("\n", " ")) for note in metrics.notes]
    return [
        *_header(metrics),
        *_time(metrics),
        *_recoveries(metrics),
        *_ranks(metrics),
        *_gpus(metrics),
        *(["", *notes] if notes else []),
    ]


def jobs_table(metrics_of_jobs: Sequence[JobMetrics], *, namespaces: bool = False) -> list[str]:
    """Return the jobs in columns, with the metrics of each job's leader."""
    first = ["NAMESPACE"] if namespaces else []
    rows = [[*first, "NAME", "STATE", "READY", "ROUND", "WORLD", "GOODPUT", "LOST", "RESTARTS", "STEP", "AGE"]]
    for metrics in metrics_of_jobs:
        job, uncharged = metrics.job, metrics.uncharged_restarts
        rows.append(
            [
                *([job.namespace] if namespaces else []),
                job.name,
                job.state,
                job.status.ready,
                str(metrics.round or "-"),
                str(metrics.world_size),
                "-" if metrics.goodput is None else percent(metrics.goodput),
                _seconds(metrics.lost),
                f"{metrics.restarts}+{uncharged}" if uncharged else str(metrics.restarts),
                _seconds(max(metrics.rates.steps.values(), default=None)),
                formatting.since(job.created, metrics.now),
            ]
        )
    return formatting.columns(rows)


def states(metrics: JobMetrics) -> dict[str, float]:
    """Return the seconds of the states in which the job has spent time, in the order in which they are shown."""
    spent = metrics.seconds
    order = (*STATE_COLORS, *sorted(spent.keys() - STATE_COLORS.keys()))
    return {str(state): spent[state] for state in order if spent.get(state)}


def _header(metrics: JobMetrics) -> Iterator[str]:
    job, nodes, wanted, left = metrics.job, metrics.nodes, metrics.desired_nodes, metrics.remaining_restarts
    yield f"{job.name}  {job.state}  {formatting.duration(job.age(metrics.now))}"
    facts = [
        f"round {metrics.round or '-'}",
        f"world size {metrics.world_size}"
        + ("" if nodes is None or not metrics.world_size else f" on {count(int(nodes), 'node')}")
        + ("" if wanted in (None, nodes) else f", {wanted:.0f} desired"),
        *([] if job.completed else [f"pods ready {job.status.ready}"]),
        f"restarts {metrics.restarts} charged, {metrics.uncharged_restarts} uncharged"
        + ("" if left is None else f", {left:.0f} left"),
    ]
    yield _SEPARATOR.join(facts)


def _time(metrics: JobMetrics) -> Iterator[str]:
    spent = states(metrics)
    total = sum(spent.values())
    if not total:
        return
    yield ""
    if metrics.goodput is None or metrics.lost is None:
        yield f"goodput -{_SEPARATOR}no checkpoints reported"
    else:
        yield f"goodput {percent(metrics.goodput)}{_SEPARATOR}lost {short_duration(metrics.lost)}"
    yield _SEPARATOR.join(f"{state} {short_duration(each)} ({percent(each / total)})" for state, each in spent.items())


def _recoveries(metrics: JobMetrics) -> list[str]:
    last, none = metrics.rates.recoveries, Tally(0.0, 0)
    unknown = "-" if RunState.RESTORING in metrics.seconds else "no steps reported"
    rows = []
    for cause in sorted(metrics.recoveries.keys() | metrics.worker_restarts.keys()):
        recovery, restart = (each.get(cause, none) for each in (metrics.recoveries, metrics.worker_restarts))
        mean = unknown if recovery.mean is None else short_duration(recovery.mean)
        count = f"{restart.count or recovery.count}"
        rows.append((cause.replace("_", " "), count, mean, _seconds(last.get(cause)), _seconds(restart.mean)))
    return _table(("RECOVERIES AFTER", "COUNT", "MEAN", "LAST", "AGENT"), rows, "cause")


def _ranks(metrics: JobMetrics) -> list[str]:
    rates, ranks = metrics.rates, metrics.ranks
    if len(ranks) > _MAX_ROWS:  # the straggler comes first, so that it is shown
        ranks = sorted(ranks, key=lambda each: each.rank != rates.straggler)
    rows = [
        (
            str(each.rank),
            each.pod,
            _seconds(rates.steps.get(each.rank)),
            "-" if each.memory is None else formatting.size(each.memory),
            f"{each.checkpoints.count:.0f}, {_seconds(each.checkpoints.mean)} each" if each.checkpoints else "-",
            "straggles" if each.rank == rates.straggler else "",
        )
        for each in ranks
    ]
    return _table(("RANK", "POD", "STEP", "MEMORY", "CHECKPOINTS", ""), rows, "rank")


def _gpus(metrics: JobMetrics) -> list[str]:
    rows = []
    for page in sorted(metrics.pages, key=lambda page: page.pod):
        used, total = (page.by_label(f"torchelastic_gpu_memory_{which}_bytes", "gpu") for which in ("used", "total"))
        busy = page.by_label("torchelastic_gpu_utilization_ratio", "gpu")
        for gpu in sorted(used.keys() | total.keys() | busy.keys()):
            memory = " of ".join(formatting.size(each[gpu]) for each in (used, total) if gpu in each)
            rows.append((gpu, page.pod, memory or "-", percent(busy[gpu]) if gpu in busy else "-"))
    return _table(("GPU", "POD", "MEMORY", "BUSY"), rows, "GPU")


def _seconds(value: float | None) -> str:
    return "-" if value is None else short_duration(value)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], thing: str) -> list[str]:
    if not rows:
        return []
    head, *lines = formatting.columns([header, *rows])
    left = len(lines) - _MAX_ROWS
    return ["", head, *lines[:_MAX_ROWS], *([f"and {count(left, f'more {thing}')}"] if left > 0 else [])]
