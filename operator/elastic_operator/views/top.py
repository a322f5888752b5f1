"""The output of ``elasticjob top``: one job in detail, or a table of jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from elastic_operator.controller.messages import count
from elastic_operator.views import formatting
from elastic_operator.views.formatting import percent, short_duration
from torchelastic.protocol import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from elastic_operator.views.job_metrics import Reading

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


def job_lines(reading: Reading) -> list[str]:
    """Return the lines about one job."""
    notes = [formatting.printed(note.replace("\n", " ")) for note in reading.notes]
    return [
        *_header(reading),
        *_time(reading),
        *_recoveries(reading),
        *_ranks(reading),
        *_gpus(reading),
        *(["", *notes] if notes else []),
    ]


def jobs_table(readings: Sequence[Reading], *, namespaces: bool = False) -> list[str]:
    """Return the jobs in columns, with the metrics of each one's leader."""
    first = ["NAMESPACE"] if namespaces else []
    rows = [[*first, "NAME", "STATE", "READY", "ROUND", "WORLD", "GOODPUT", "LOST", "RESTARTS", "STEP", "AGE"]]
    for reading in readings:
        job, uncharged = reading.job, reading.uncharged_restarts
        rows.append(
            [
                *([job.namespace] if namespaces else []),
                job.name,
                job.state,
                job.status.ready,
                str(reading.round or "-"),
                str(reading.world_size),
                "-" if reading.goodput is None else percent(reading.goodput),
                _seconds(reading.lost),
                f"{reading.restarts}+{uncharged}" if uncharged else str(reading.restarts),
                _seconds(max(reading.rates.steps.values(), default=None)),
                formatting.since(job.created, reading.now),
            ]
        )
    return formatting.columns(rows)


def states(reading: Reading) -> dict[str, float]:
    """Return the seconds of the states in which the job has spent time, in the order in which they are shown."""
    spent = reading.seconds
    order = (*STATE_COLORS, *sorted(spent.keys() - STATE_COLORS.keys()))
    return {str(state): spent[state] for state in order if spent.get(state)}


def _header(reading: Reading) -> Iterator[str]:
    job, nodes, wanted, left = reading.job, reading.nodes, reading.desired_nodes, reading.remaining_restarts
    yield f"{job.name}  {job.state}  {formatting.duration(job.age(reading.now))}"
    facts = [
        f"round {reading.round or '-'}",
        f"world size {reading.world_size}"
        + ("" if nodes is None or not reading.world_size else f" on {count(int(nodes), 'node')}")
        + ("" if wanted in (None, nodes) else f", {wanted:.0f} wanted"),
        *([] if job.completed else [f"pods ready {job.status.ready}"]),
        f"restarts {reading.restarts} charged, {reading.uncharged_restarts} uncharged"
        + ("" if left is None else f", {left:.0f} left"),
    ]
    yield _SEPARATOR.join(facts)


def _time(reading: Reading) -> Iterator[str]:
    if reading.goodput is None:
        return
    yield ""
    lost = "" if reading.lost is None else f"{_SEPARATOR}lost {short_duration(reading.lost)}"
    yield f"goodput {percent(reading.goodput)}{lost}"
    spent = states(reading)
    total = sum(spent.values())
    yield _SEPARATOR.join(f"{state} {short_duration(each)} ({percent(each / total)})" for state, each in spent.items())


def _recoveries(reading: Reading) -> list[str]:
    last = reading.rates.recoveries
    rows = [
        (cause.replace("_", " "), f"{tally.count:.0f}", _seconds(tally.mean), _seconds(last.get(cause)))
        for cause, tally in reading.recoveries.items()
    ]
    return _table(("RECOVERIES AFTER", "COUNT", "MEAN", "LAST"), rows, "cause")


def _ranks(reading: Reading) -> list[str]:
    rates, ranks = reading.rates, reading.ranks
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
    for page in sorted(reading.pages, key=lambda page: page.pod):
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
