"""The output of ``elasticjob top``: one job in detail, or a table of jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elastic_operator.controller.messages import count
from elastic_operator.views import formatting
from elastic_operator.views.formatting import percent, short_duration
from elastic_operator.views.job_metrics import JobMetrics, Tally, goodput
from torchelastic.protocol import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from elastic_operator.views.job_metrics import CustomMetric, RateTracker
    from elastic_operator.views.job_view import JobView

STATE_COLORS: Final[Mapping[str, str]] = {
    RunState.TRAINING: "green",
    RunState.RESTORING: "cyan",
    RunState.STARTING: "blue",
    RunState.RENDEZVOUS: "magenta",
    RunState.WAITING: "yellow",
    RunState.STOPPING: "red",
    RunState.SUSPENDED: "bright_black",
}
"""The states in the order in which they are shown."""
_SEPARATOR: Final = "   "
_MAX_ROWS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A job at a moment, in seconds since the Unix epoch; ``notes`` are sentences about what is missing."""

    job: JobView
    metrics: JobMetrics
    rates: RateTracker
    now: float
    notes: Sequence[str] = ()

    @property
    def time_breakdown(self) -> tuple[Mapping[str, float], float | None]:
        """Seconds by run state and seconds of lost training: from the leader, or from the status if nothing runs.

        While pods run, the status has the values from before the last resumption.
        """
        status = self.job.status
        kept = status.time_breakdown
        if self.metrics.seconds or kept is None or not (status.finished or status.suspended):
            return self.metrics.seconds, self.metrics.lost
        since = self.now - kept.until if self.job.state == "Suspended" and kept.until else 0.0
        suspended = kept.seconds.get(RunState.SUSPENDED, 0.0) + max(0.0, since)
        seconds = {str(state): spent for state, spent in kept.seconds.items()}
        return seconds | ({str(RunState.SUSPENDED): suspended} if suspended else {}), kept.lost

    @property
    def states(self) -> dict[str, float]:
        """The seconds of the states in which the job has spent time, in the order in which they are shown."""
        spent, _ = self.time_breakdown
        order = (*STATE_COLORS, *sorted(spent.keys() - STATE_COLORS.keys()))
        return {str(state): spent[state] for state in order if spent.get(state)}

    @property
    def goodput(self) -> float | None:
        """The ratio of kept training to all time; None if unknown."""
        return goodput(*self.time_breakdown)

    @property
    def world_size(self) -> int:
        """Workers of the current round."""
        return self.job.status.world_size if self.metrics.world_size is None else self.metrics.world_size

    @property
    def restarts(self) -> tuple[int, int]:
        """Charged and uncharged restarts."""
        status, metrics = self.job.status, self.metrics
        return (
            status.restarts if metrics.restarts is None else metrics.restarts,
            status.uncharged_restarts if metrics.uncharged_restarts is None else metrics.uncharged_restarts,
        )


def job_lines(reading: Reading) -> list[str]:
    """Return all that is shown of one job."""
    notes = [formatting.printed(note.replace("\n", " ")) for note in reading.notes]
    return [
        *_header(reading),
        *_time(reading),
        *_recoveries(reading),
        *_ranks(reading),
        *_gpus(reading),
        *_custom(reading),
        *(["", *notes] if notes else []),
    ]


def jobs_table(readings: Sequence[Reading], *, namespaces: bool = False) -> list[str]:
    """Return the jobs in columns, with the metrics of each one's leader."""
    first = ["NAMESPACE"] if namespaces else []
    rows = [[*first, "NAME", "STATE", "READY", "ROUND", "WORLD", "GOODPUT", "LOST", "RESTARTS", "STEP", "AGE"]]
    for reading in readings:
        job, (charged, uncharged), (_, lost) = reading.job, reading.restarts, reading.time_breakdown
        rows.append(
            [
                *([job.namespace] if namespaces else []),
                job.name,
                job.state,
                job.status.ready,
                str(reading.metrics.round or job.status.round or "-"),
                str(reading.world_size),
                "-" if reading.goodput is None else percent(reading.goodput),
                _seconds(lost),
                f"{charged}+{uncharged}" if uncharged else str(charged),
                _seconds(max(reading.rates.steps.values(), default=None)),
                formatting.since(job.created, reading.now),
            ]
        )
    return formatting.columns(rows)


def _header(reading: Reading) -> Iterator[str]:
    job, metrics, status = reading.job, reading.metrics, reading.job.status
    yield f"{job.name}  {job.state}  {formatting.duration(job.age(reading.now))}"
    nodes = "" if metrics.nodes is None else f" on {count(metrics.nodes, 'node')}"
    desired = "" if metrics.desired_nodes in (None, metrics.nodes) else f", {metrics.desired_nodes} wanted"
    size, (charged, uncharged) = reading.world_size, reading.restarts
    left = "" if metrics.remaining_restarts is None else f", {metrics.remaining_restarts} left"
    facts = [
        f"round {metrics.round or status.round or '-'}",
        f"world size {size}{nodes if size else ''}{desired}",
        *([] if job.completed else [f"pods ready {status.ready}"]),
        f"restarts {charged} charged, {uncharged} uncharged{left}",
    ]
    yield _SEPARATOR.join(facts)


def _time(reading: Reading) -> Iterator[str]:
    states, (_, lost), good = reading.states, reading.time_breakdown, reading.goodput
    if good is None:
        return
    yield ""
    yield f"goodput {percent(good)}" + ("" if lost is None else f"{_SEPARATOR}lost {short_duration(lost)}")
    total = sum(states.values())
    yield _SEPARATOR.join(
        f"{state} {short_duration(spent)} ({percent(spent / total)})" for state, spent in states.items()
    )


def _recoveries(reading: Reading) -> list[str]:
    last = reading.rates.recoveries
    rows = [
        (cause.replace("_", " "), formatting.number(tally.count), _seconds(tally.mean), _seconds(last.get(cause)))
        for cause, tally in reading.metrics.recoveries.items()
    ]
    return _table(("RECOVERIES AFTER", "COUNT", "MEAN", "LAST"), rows, "cause")


def _ranks(reading: Reading) -> list[str]:
    rates, ranks = reading.rates, reading.metrics.ranks
    if len(ranks) > _MAX_ROWS:  # the straggler is shown in any case
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


def _gpus(reading: Reading) -> list[str]:
    rows = []
    for page in sorted(reading.metrics.pages, key=lambda page: page.pod):
        used, total = (page.by_label(f"torchelastic_gpu_memory_{which}_bytes", "gpu") for which in ("used", "total"))
        busy = page.by_label("torchelastic_gpu_utilization_ratio", "gpu")
        for gpu in sorted(used.keys() | total.keys() | busy.keys()):
            memory = " of ".join(formatting.size(each[gpu]) for each in (used, total) if gpu in each)
            rows.append((gpu, page.pod, memory or "-", percent(busy[gpu]) if gpu in busy else "-"))
    return _table(("GPU", "POD", "MEMORY", "BUSY"), rows, "GPU")


def _custom(reading: Reading) -> list[str]:
    rows = [
        (
            formatting.printed(f"{each.group} {each.name}")[:60],
            *_custom_value(each, reading.rates.counters.get((each.group, each.name))),
        )
        for each in reading.metrics.custom
    ]
    return _table(("MEASURED", "VALUE", ""), rows, "name")


def _custom_value(metric: CustomMetric, rate: float | None) -> tuple[str, str]:
    """Return a metric's value over all ranks, and a remark."""
    written = short_duration if metric.seconds else formatting.number
    tallies = [value for value in metric.values.values() if isinstance(value, Tally)]
    if tallies:
        total = sum(tallies, Tally(0.0, 0.0))
        return "-" if total.mean is None else written(total.mean), f"mean of {total.count:.0f}"
    values = [value for value in metric.values.values() if isinstance(value, float)]
    if metric.kind == "counter":
        return written(sum(values)), "" if rate is None else f"{formatting.number(rate)} in a second"
    differ = any(value != values[0] for value in values)
    return written(values[0]), f"{written(min(values))} to {written(max(values))} over the ranks" if differ else ""


def _seconds(value: float | None) -> str:
    return "-" if value is None else short_duration(value)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], thing: str) -> list[str]:
    if not rows:
        return []
    head, *lines = formatting.columns([header, *rows])
    left = len(lines) - _MAX_ROWS
    return ["", head, *lines[:_MAX_ROWS], *([f"and {count(left, f'more {thing}')}"] if left > 0 else [])]
