"""From the names that programs measure under to series that Prometheus accepts and people can query.

Pure: what a (group, name) is called, of which kind it is, which labels and unit it has. A user's name becomes a gauge
``<group>_<name>``, or the histogram or counter that the handler was asked for. Prometheus' conventions hold:
snake_case, base units (what ends in ``.ms`` or ``_ms`` is given in seconds), and endings that mean something
(``_total``, ``_count``, ``_bucket``, …) only where they mean it. The platform's own names have a table.

Different names can come out alike (``stepTime``, ``step.time``). Whoever holds the series keeps them apart, with
:class:`NameRegistry`.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, SupportsFloat, SupportsIndex

if TYPE_CHECKING:
    from collections.abc import Sequence


_log: Final = logging.getLogger(__name__)


class Kind(enum.StrEnum):
    """What a series is, with the word that the exposition has for it."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


_SAMPLES: Final[Mapping[Kind, Sequence[str]]] = {
    Kind.GAUGE: ("",),
    Kind.COUNTER: ("", "_total", "_created"),
    Kind.HISTOGRAM: ("", "_bucket", "_count", "_sum", "_created"),
}


@dataclass(frozen=True, slots=True)
class Form:
    """What the values of a user's name are to become.

    Attributes:
        kind: of series.
        buckets: upper bounds of a histogram, in seconds where the name is in milliseconds; ascending, and finite.

    Raises:
        ValueError: the buckets are none.
    """

    kind: Kind = Kind.GAUGE
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        ascending = all(map(math.isfinite, self.buckets)) and sorted(set(self.buckets)) == list(self.buckets)
        if not ascending or bool(self.buckets) != (self.kind is Kind.HISTOGRAM):
            raise ValueError(f"must be finite numbers, each above the one before: {self.buckets}")


def forms_of(counters: object, histograms: object) -> dict[str, Form]:
    """The forms that are asked for, by name.

    Args:
        counters: names whose values are added up; what a program has given, whatever that is.
        histograms: names whose values are counted in buckets, and the buckets' upper bounds.

    Raises:
        ValueError: they are not that, the buckets are not ascending numbers, or a name is asked for as both.
    """
    # To callers a wrong type is one error with all others of what they ask for, hence TRY004.
    if isinstance(counters, str):
        raise ValueError(f"counters is a collection of names, as [{counters!r}], and not one name.")  # noqa: TRY004
    if isinstance(counters, bytes | bytearray) or not isinstance(counters, Iterable):
        raise ValueError(f"counters is a collection of names, as ['samples'], and not {_a_thing(counters)}.")  # noqa: TRY004
    if not isinstance(histograms, Mapping):
        example = "{'size': [0.1, 1.0]}"
        raise ValueError(f"histograms maps names to buckets, as {example}, and is not {_a_thing(histograms)}.")  # noqa: TRY004
    names = list(counters)
    for name in (*names, *histograms):
        if not isinstance(name, str):
            raise ValueError(f"The names of counters and histograms are texts, and not {_a_thing(name)}.")  # noqa: TRY004
    if both := sorted(set(names) & histograms.keys()):
        raise ValueError(f"{both[0]!r} is asked for both as a counter and as a histogram.")
    forms = dict.fromkeys(names, Form(Kind.COUNTER))
    for name, bounds in histograms.items():
        try:
            forms[name] = Form(Kind.HISTOGRAM, _numbers(bounds))
        except ValueError as error:
            raise ValueError(f"The buckets of {name!r} {error}.") from None
    return forms


def _numbers(bounds: object) -> tuple[float, ...]:
    must = "must be finite numbers, each above the one before"
    if isinstance(bounds, str | bytes | bytearray) or not isinstance(bounds, Iterable):
        raise ValueError(f"{must}, as [0.1, 1.0], and not {_a_thing(bounds)}")  # noqa: TRY004 - as above
    try:
        return tuple(map(to_number, bounds))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # the last one is torch's
        raise ValueError(f"{must}: {error}") from None


def _a_thing(thing: object) -> str:
    return f"something of the type {type(thing).__qualname__}"


def to_number(value: object) -> float:
    """A value as a number: of whatever is one, and of an array or a tensor with one element; of no text.

    Raises:
        TypeError, ValueError, RuntimeError: it is none.
        OverflowError: it is too large for a float.
    """
    if not isinstance(value, int | float) and callable(item := getattr(value, "item", None)):
        value = item()  # torch and numpy would warn of what a plain conversion might hide
    # A text or bytes would be read by float(), and nobody has meant that.
    if not isinstance(value, SupportsFloat | SupportsIndex):
        raise TypeError(f"{_a_thing(value)} is no number")
    return float(value)


@dataclass(frozen=True, slots=True)
class Series:
    """What becomes of one source name.

    Attributes:
        name: of the family, without the ending that its kind adds (``_total``, ``_bucket``, …).
        kind: what it is.
        help: for the exposition.
        labels: names and values; the names are the same for every series of a family.
        one_of: where not empty, the values of the last label of which one holds: it is 1 there and 0 at the others.
        divisor: what a value is divided by: 1000 where it is in milliseconds.
        buckets: upper bounds of a histogram, in the unit of the series.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    one_of: tuple[str, ...] = ()
    divisor: float = 1.0
    buckets: tuple[float, ...] = ()

    @property
    def samples(self) -> frozenset[str]:
        """All names that the family takes up; no other family may have any of them."""
        return frozenset(self.name + ending for ending in _SAMPLES[self.kind])


_RESERVED_ENDINGS: Final = ("_total", "_created", "_count", "_sum", "_bucket", "_info", "_gcount", "_gsum")
_RESERVED_BEGINNINGS: Final = ("process_", "python_", "scrape_", "elastic_operator_")
"""Beginnings of series that Prometheus, its client library and the operator make themselves. ``up`` and ``ALERTS``
need no guard: every name here has a group, an underscore and no capitals. Of the platform's own group the single names
are guarded, by :class:`NameRegistry`, since programs may measure in it."""
_LONGEST_NAME: Final = 200
_AS_GAUGE: Final = Form()


def source_of(group: str, name: object) -> tuple[str, ...]:
    """What tells a (group, name) from all others; a name that is no string is another one than its text."""
    return (group, name) if isinstance(name, str) else (str(group), str(name), type(name).__qualname__)


def user_series(group: str, name: str, form: Form = _AS_GAUGE) -> Series:
    """What a name becomes that is not in the platform's table.

    Args:
        group: the group.
        name: the name.
        form: what its values are to become.
    """
    body = snake_case(name)
    in_milliseconds = body == "ms" or body.endswith("_ms")
    if in_milliseconds:
        body = body[:-2].rstrip("_")
    elif not body:
        body = f"metric_{_digest(name)}"
    full = f"{_prefix(group)}_{body}".rstrip("_")
    if f"{full}_".startswith(_RESERVED_BEGINNINGS):  # an ending may follow
        full = f"group_{full}"
    while form.kind is Kind.COUNTER and full.endswith("_total"):
        full = full.removesuffix("_total")
    if len(full) > _LONGEST_NAME:
        full = f"{full[:_LONGEST_NAME]}_{_digest(name)}"
    if full.endswith(_RESERVED_ENDINGS) and form.kind is not Kind.COUNTER and not in_milliseconds:
        full += "_value"
    return Series(
        full + "_seconds" * in_milliseconds,
        form.kind,
        f"{printable(name):.200} of the group {printable(group):.200}, as the program measures it.",
        divisor=1000 if in_milliseconds else 1,
        buckets=form.buckets,
    )


def _prefix(group: str) -> str:
    """The group as the beginning of a name: not empty, and not a digit first."""
    prefix = snake_case(group)
    if not prefix:
        return f"group_{_digest(group)}"
    return f"group_{prefix}" if prefix[0].isdigit() else prefix


def tagged(series: Series, source: str) -> Series:
    """The series under a name that only this source has, for where another source has taken the plain one."""
    stem = series.name.removesuffix("_seconds") if series.divisor == 1000 else series.name
    return replace(series, name=f"{stem}_{_digest(source)}{series.name[len(stem) :]}")


def snake_case(text: str) -> str:
    """Lower-case letters, digits and single underscores, none of these at an end: ``trainLoss.7`` is train_loss_7."""
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", text)
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_").lower()


def printable(text: str) -> str:
    """The text with what UTF-8 cannot hold spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:8]


# The platform's own series

WORKER_STATES: Final = ("unknown", "init", "healthy", "unhealthy", "stopped", "succeeded", "failed")
"""The states of a node's workers, as torchelastic names them."""

DURATION_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Upper bounds in seconds: from a recovery that nobody notices to a program that takes half an hour to start."""


OPERATIONS: Final[Mapping[str, str]] = {
    "SimpleElasticAgent.run": "run",
    "SimpleElasticAgent._rendezvous": "rendezvous",
    "SimpleElasticAgent._initialize_workers": "initialize_workers",
    "SimpleElasticAgent._restart_workers": "restart_workers",
    "SimpleElasticAgent._assign_worker_ranks": "assign_worker_ranks",
    "LocalElasticAgent._start_workers": "start_workers",
    "LocalElasticAgent._stop_workers": "stop_workers",
    "LocalElasticAgent._monitor_workers": "monitor_workers",
    "train_step": "train_step",
}
"""The operations whose outcome and duration are measured: the name before ``.success``, and the label's value."""

_OPERATION: Final = re.compile(r"(?P<operation>.+)\.(?P<what>success|failure|duration\.ms)")
_WORKERS: Final = re.compile(r"workers\.(?P<role>.+)\.(?P<what>\w+)", re.DOTALL)
_RECOVERY: Final = re.compile(r"recovery\.(?P<cause>\w+)\.duration\.ms")
_RUN_OUTCOMES: Final = {
    "run_success_with_retries": ("success", "yes"),
    "run_success_no_retries": ("success", "no"),
    "run_failed_with_retries": ("failure", "yes"),
    "run_failed_no_retries": ("failure", "no"),
}

_EXACT: Final = {
    "round": Series(
        "torchelastic_round", Kind.GAUGE, "Number of the current round: how often it was agreed on who trains together."
    ),
    "world_size": Series("torchelastic_world_size", Kind.GAUGE, "Workers that train together in the current round."),
    "checkpoint.write_latency_ms": Series(
        "torchelastic_checkpoint_write_latency_seconds",
        Kind.HISTOGRAM,
        "Time that writing a checkpoint took.",
        divisor=1000,
        buckets=DURATION_BUCKETS,
    ),
}

DROPPED: Final = Series("torchelastic_metrics_dropped", Kind.COUNTER, "Measured values that were not taken, by reason.")
"""What the handler counts by itself."""


def platform_series(name: str) -> Series | None:
    """What a name of the group ``torchelastic`` becomes; None where it is not one of the platform's own."""
    if (series := _EXACT.get(name)) is not None:
        return series
    if match := _WORKERS.fullmatch(name):
        return _of_workers(printable(match["role"]), match["what"])
    if match := _RECOVERY.fullmatch(name):
        return Series(
            "torchelastic_recovery_duration_seconds",
            Kind.HISTOGRAM,
            "Time from a failure or change until the workers of this node were started again, by cause.",
            (("cause", match["cause"]),),
            divisor=1000,
            buckets=DURATION_BUCKETS,
        )
    if (match := _OPERATION.fullmatch(name)) and (operation := OPERATIONS.get(match["operation"])) is not None:
        return _of_operation(operation, match["what"])
    return None


def _of_workers(role: str, what: str) -> Series | None:
    by_role = (("role", role),)
    if what in WORKER_STATES:
        return Series(
            "torchelastic_worker_state",
            Kind.GAUGE,
            "State of the workers of this node: 1 for the one that they are in, 0 for the others.",
            (*by_role, ("state", what)),
            one_of=WORKER_STATES,
        )
    if what in _RUN_OUTCOMES:
        outcome, retries = _RUN_OUTCOMES[what]
        return Series(
            "torchelastic_run_outcomes",
            Kind.COUNTER,
            "Runs that ended, by their outcome and whether workers had to be restarted.",
            (*by_role, ("outcome", outcome), ("retries", retries)),
        )
    match what:
        case "remaining_restarts":
            about = "Failures of workers that the run may still have."
            return Series("torchelastic_remaining_restarts", Kind.GAUGE, about, by_role)
        case "run_total":
            return Series("torchelastic_runs", Kind.COUNTER, "Runs that ended.", by_role)
        case "flakiness":
            about = "Share of the restart budget that the run has spent; 1 where it failed."
            return Series("torchelastic_flakiness_ratio", Kind.GAUGE, about, by_role, divisor=100)
        case _:
            return None


def _of_operation(operation: str, what: str) -> Series:
    by_operation = (("operation", operation),)
    if what == "duration.ms":
        return Series(
            "torchelastic_operation_duration_seconds",
            Kind.HISTOGRAM,
            "Time that an operation of the agent took.",
            by_operation,
            divisor=1000,
            buckets=DURATION_BUCKETS,
        )
    return Series(
        "torchelastic_operations",
        Kind.COUNTER,
        "Operations of the agent, by outcome.",
        (*by_operation, ("outcome", what)),
    )


STORE_REQUESTS: Final = Series(
    "torchelastic_store_request_duration_seconds",
    Kind.HISTOGRAM,
    "Time until the store (etcd) answered, or had not, by request and outcome.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
WORKER_MEMORY: Final = Series(
    "torchelastic_worker_memory_bytes", Kind.GAUGE, "Resident memory of a worker and all that it has started."
)
GPU_MEMORY_USED: Final = Series("torchelastic_gpu_memory_used_bytes", Kind.GAUGE, "Memory of the GPU that is in use.")
GPU_MEMORY_TOTAL: Final = Series("torchelastic_gpu_memory_total_bytes", Kind.GAUGE, "Memory that the GPU has.")
GPU_UTILIZATION: Final = Series(
    "torchelastic_gpu_utilization_ratio", Kind.GAUGE, "Share of the last moments in which the GPU computed."
)
JOB_SECONDS: Final = Series(
    "torchelastic_job_seconds",
    Kind.COUNTER,
    "Time since the job was made, by what it did then; a total of the whole run, shown by its leader.",
)
JOB_LOST: Final = Series(
    "torchelastic_job_lost_seconds",
    Kind.COUNTER,
    "Time of training that no checkpoint held when it ended; a total of the whole run.",
)
JOB_RESTARTS: Final = Series(
    "torchelastic_job_restarts",
    Kind.COUNTER,
    "Times that workers were started anew: for a failure that was charged to the run, or for another reason.",
)
JOB_JOINED: Final = Series(
    "torchelastic_job_nodes_joined", Kind.COUNTER, "Nodes that came, those of the first round included."
)
JOB_GONE: Final = Series(
    "torchelastic_job_nodes_gone",
    Kind.COUNTER,
    "Nodes that a round had and the next one had not, by what became of them.",
)
JOB_NODES: Final = Series("torchelastic_job_nodes", Kind.GAUGE, "Nodes of the present round.")
JOB_WANTED_NODES: Final = Series("torchelastic_job_wanted_nodes", Kind.GAUGE, "Nodes that there should be.")
JOB_MIN_NODES: Final = Series("torchelastic_job_min_nodes", Kind.GAUGE, "Nodes below which nobody trains.")
NOT_MEASURED: Final = (
    *(DROPPED, STORE_REQUESTS, WORKER_MEMORY, GPU_MEMORY_USED, GPU_MEMORY_TOTAL, GPU_UTILIZATION),
    *(JOB_SECONDS, JOB_LOST, JOB_RESTARTS, JOB_JOINED, JOB_GONE, JOB_NODES, JOB_WANTED_NODES, JOB_MIN_NODES),
)
"""What no value stands behind that was measured under a name: the agent's page makes these by itself."""


PLATFORM_SAMPLES: Final = frozenset[str]().union(
    *(series.samples for series in NOT_MEASURED),
    *(
        series.samples
        for name in (
            *_EXACT,
            *(
                f"workers.role.{what}"
                for what in ("healthy", "remaining_restarts", "run_total", "flakiness", *_RUN_OUTCOMES)
            ),
            "recovery.other.duration.ms",
            *(f"train_step.{what}" for what in ("success", "duration.ms")),
        )
        if (series := platform_series(name)) is not None
    ),
)
"""All sample names that the platform's table can give; no user's name becomes one of them."""


class NameRegistry:
    """Which source has which names of samples; the platform's own are taken from the beginning."""

    def __init__(self) -> None:
        self._sources: dict[str, str] = {}

    def take(self, series: Series, source: Sequence[str]) -> Series:
        """The series under a name that no other source has; the same for the same source in every process.

        Args:
            series: as it would be called.
            source: what tells its source from all others, the group and the name first.
        """
        text = repr(tuple(source))  # so that no text in it, whatever it holds, makes it look like another one
        plain = series.name
        while not self._free(series, text):
            series = tagged(series, text)
        self._sources |= dict.fromkeys(series.samples, text)
        if series.name != plain:
            _log.warning(
                "%r of the group %r would be %s, which is taken by another name; it is %s.",
                source[1],
                source[0],
                plain,
                series.name,
            )
        return series

    def _free(self, series: Series, source: str) -> bool:
        return PLATFORM_SAMPLES.isdisjoint(series.samples) and not any(
            self._sources.get(sample, source) != source for sample in series.samples
        )
