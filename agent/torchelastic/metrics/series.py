"""Converts the metric names of programs to Prometheus series.

A name becomes ``<group>_<name>`` by Prometheus' conventions: snake_case, base units (names that end in ``.ms`` or
``_ms`` are converted to seconds), and reserved suffixes (``_total``, ``_count``, ``_bucket``, …) only with their
meaning. Different names can lead to the same series name (``stepTime``, ``step.time``); :class:`NameRegistry` makes
them unique. The platform's own series are listed at the end.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, SupportsFloat, SupportsIndex

_log: Final = logging.getLogger(__name__)

PLATFORM_GROUP: Final = "torchelastic"
"""The group of the platform's own metrics, and of values without a group."""


class Kind(enum.StrEnum):
    """The type of a series, as named by the exposition format."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


_SAMPLES: Final = {
    Kind.GAUGE: ("",),
    Kind.COUNTER: ("", "_total", "_created"),
    Kind.HISTOGRAM: ("", "_bucket", "_count", "_sum", "_created"),
}


class Form(NamedTuple):
    """The type of the series of a program's metric.

    Attributes:
        kind: the type.
        buckets: upper bounds of a histogram, in seconds if the name is in milliseconds; ascending and finite.
    """

    kind: Kind = Kind.GAUGE
    buckets: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """The number of words of its values."""
        return len(self.buckets) + 2 if self.kind is Kind.HISTOGRAM else 1


GAUGE: Final = Form()
_COUNTER: Final = Form(Kind.COUNTER)


def forms_of(counters: object, histograms: object) -> dict[str, Form]:
    """Return the declared forms by name.

    Args:
        counters: names whose values are added up.
        histograms: names whose values are counted in buckets, with the upper bounds of the buckets.

    Raises:
        ValueError: an argument has another type, the buckets are not ascending numbers, or a name is declared as both.
    """
    if isinstance(counters, str | bytes) or not isinstance(counters, Iterable) or not isinstance(histograms, Mapping):
        raise ValueError("counters is a collection of names, as ['samples']; histograms maps names to buckets.")  # noqa: TRY004
    forms: dict[str, Form] = {}
    for name in (*counters, *histograms):
        if not isinstance(name, str) or (name in histograms and name in forms):
            raise ValueError(f"counters and histograms have different strings as names; {name!r} cannot be one.")
        forms[name] = Form(Kind.HISTOGRAM, _buckets(name, histograms[name])) if name in histograms else _COUNTER
    return forms


def _buckets(name: str, bounds: object) -> tuple[float, ...]:
    try:
        found = tuple(map(to_number, bounds))  # type: ignore[call-overload] # checked by this
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one is torch's
        found = ()
    text = isinstance(bounds, str | bytes | bytearray)
    if text or not found or not all(map(math.isfinite, found)) or sorted(set(found)) != list(found):
        raise ValueError(f"The buckets of {name!r} must be finite numbers, each above the one before, as [0.1, 1.0].")
    return found


def to_number(value: object) -> float:
    """Return a number, array or tensor with one element as a float; text is refused.

    Raises:
        TypeError, ValueError, RuntimeError: the value is not a number.
        OverflowError: the value is too large for a float.
    """
    if not isinstance(value, int | float) and callable(item := getattr(value, "item", None)):
        value = item()  # torch and numpy may warn about a plain conversion
    if not isinstance(value, SupportsFloat | SupportsIndex):  # float() would parse text
        raise TypeError(f"{type(value).__qualname__} is no number")
    return float(value)


@dataclass(frozen=True, slots=True)
class Series:
    """The series of one source name.

    Attributes:
        name: the name of the family, without the suffix of its kind (``_total``, ``_bucket``, …).
        kind: the type.
        help: the help text of the exposition.
        labels: names and values; all series of a family have the same names.
        one_of: if not empty, the values of the last label: the series of the current value is 1, the others are 0.
        divisor: divides each value: 1000 if values are in milliseconds.
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
        """All sample names of the family; no other family may use them."""
        return frozenset(self.name + ending for ending in _SAMPLES[self.kind])

    @property
    def size(self) -> int:
        """The number of words of its values."""
        return Form(self.kind, self.buckets).size

    def labelled(self, **labels: str) -> Series:
        """Return the series of the family with these labels."""
        return replace(self, labels=tuple((label, printable(value)) for label, value in labels.items()))


_RESERVED_ENDINGS: Final = ("_total", "_created", "_count", "_sum", "_bucket", "_info", "_gcount", "_gsum")
RESERVED_BEGINNINGS: Final = ("process_", "python_", "scrape_", "elastic_operator_")
"""Prefixes of the series of Prometheus, its client library and the operator. ``up`` and ``ALERTS`` cannot collide,
because every name here has a group, an underscore and no capitals."""
_LONGEST_NAME: Final = 200


def user_series(group: str, name: str, form: Form) -> Series:
    """Return the series of a name that does not belong to the platform."""
    prefix = snake_case(group) or f"group_{_digest(group)}"
    if prefix[0].isdigit():
        prefix = f"group_{prefix}"
    body = snake_case(name)
    in_milliseconds = body == "ms" or body.endswith("_ms")
    if in_milliseconds:
        body = body[:-2].rstrip("_")
    elif not body:
        body = f"metric_{_digest(name)}"
    full = f"{prefix}_{body}".rstrip("_")
    if f"{full}_".startswith(RESERVED_BEGINNINGS):  # a suffix may follow
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


def snake_case(text: str) -> str:
    """Return a name in snake case, without leading and trailing underscores: ``trainLoss.7`` becomes train_loss_7."""
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", text)
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_").lower()


def printable(text: str) -> str:
    """Return the text with characters that UTF-8 cannot encode as escape sequences."""
    return text.encode("utf-8", "backslashreplace").decode()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:8]


class NameRegistry:
    """Assigns sample names to the sources of programs; a source never gets a sample name of the platform."""

    def __init__(self) -> None:
        self._sources: dict[str, tuple[str, ...]] = {}

    def take(self, series: Series, source: tuple[str, ...]) -> Series:
        """Return the series with a unique name; a source gets the same name in every process.

        Args:
            series: the series with its preferred name.
            source: the group, the name and other parts of the identity of the source.
        """
        plain = series.name
        while not PLATFORM_SAMPLES.isdisjoint(series.samples) or any(
            self._sources.get(sample, source) != source for sample in series.samples
        ):
            stem = series.name.removesuffix("_seconds") if series.divisor == 1000 else series.name
            series = replace(series, name=f"{stem}_{_digest(repr(source))}{series.name[len(stem) :]}")
        self._sources |= dict.fromkeys(series.samples, source)
        if series.name != plain:
            _log.warning(
                "%r of the group %r would be %s, which is taken by another name; it is %s.",
                source[1],
                source[0],
                plain,
                series.name,
            )
        return series


# The platform's own series

WORKER_STATES: Final = ("unknown", "init", "healthy", "unhealthy", "stopped", "succeeded", "failed")
"""The states of a node's workers, as torchelastic names them."""

DURATION_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Upper bounds in seconds, from a short recovery to a program that takes half an hour to start."""

_samples: set[str] = set()


def _platform(
    name: str,
    kind: Kind,
    about: str,
    *,
    one_of: tuple[str, ...] = (),
    divisor: float = 1,
    buckets: tuple[float, ...] = (),
) -> Series:
    series = Series(f"torchelastic_{name}", kind, about, (), one_of, divisor, buckets)
    _samples.update(series.samples)
    return series


def _milliseconds(name: str, about: str) -> Series:
    """Return a histogram in seconds for values in milliseconds."""
    return _platform(name, Kind.HISTOGRAM, about, divisor=1000, buckets=DURATION_BUCKETS)


ROUND: Final = _platform(
    "round", Kind.GAUGE, "Number of the current round: how often it was agreed on who trains together."
)
WORLD_SIZE: Final = _platform("world_size", Kind.GAUGE, "Workers that train together in the current round.")
WORKER_STATE: Final = _platform(
    "worker_state",
    Kind.GAUGE,
    "State of the workers of this node: 1 for the one that they are in, 0 for the others.",
    one_of=WORKER_STATES,
)
REMAINING_RESTARTS: Final = _platform(
    "remaining_restarts", Kind.GAUGE, "Failures of workers that the run may still have."
)
RECOVERY: Final = _milliseconds(
    "recovery_duration_seconds",
    "Time from a failure or change until the workers of this node were started again, by cause.",
)
RUNS: Final = _platform("runs", Kind.COUNTER, "Runs that ended.")
RUN_OUTCOMES: Final = _platform(
    "run_outcomes", Kind.COUNTER, "Runs that ended, by their outcome and whether workers had to be restarted."
)
FLAKINESS: Final = _platform(
    "flakiness_ratio", Kind.GAUGE, "Share of the restart budget that the run has spent; 1 if it failed.", divisor=100
)
OPERATION_OUTCOMES: Final = _platform("operations", Kind.COUNTER, "Operations of the agent, by outcome.")
OPERATION_DURATION: Final = _milliseconds("operation_duration_seconds", "Time that an operation of the agent took.")
CHECKPOINT_WRITE: Final = _milliseconds("checkpoint_write_latency_seconds", "Time that writing a checkpoint took.")
DROPPED: Final = _platform("metrics_dropped", Kind.COUNTER, "Measured values that were not taken, by reason.")
STORE_REQUEST: Final = _platform(
    "store_request_duration_seconds",
    Kind.HISTOGRAM,
    "Time until the store (etcd) answered, or had not, by request and outcome.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
WORKER_MEMORY: Final = _platform(
    "worker_memory_bytes", Kind.GAUGE, "Resident memory of a worker and all that it has started."
)
GPU_MEMORY_USED: Final = _platform("gpu_memory_used_bytes", Kind.GAUGE, "Memory of the GPU that is in use.")
GPU_MEMORY_TOTAL: Final = _platform("gpu_memory_total_bytes", Kind.GAUGE, "Memory that the GPU has.")
GPU_UTILIZATION: Final = _platform(
    "gpu_utilization_ratio", Kind.GAUGE, "Share of the last moments in which the GPU computed."
)
JOB_SECONDS: Final = _platform(
    "job_seconds",
    Kind.COUNTER,
    "Time since the job was created, by what it did then; a total of the run, shown by its leader.",
)
JOB_LOST: Final = _platform(
    "job_lost_seconds",
    Kind.COUNTER,
    "Time of training that no checkpoint held when it ended; a total of the whole run.",
)
JOB_RESTARTS: Final = _platform(
    "job_restarts",
    Kind.COUNTER,
    "Times that workers were started again: for a failure that was charged to the run, or for another reason.",
)
JOB_JOINED: Final = _platform("job_nodes_joined", Kind.COUNTER, "Nodes that joined, those of the first round included.")
JOB_GONE: Final = _platform(
    "job_nodes_gone", Kind.COUNTER, "Nodes that a round had and the next one had not, by what became of them."
)
JOB_NODES: Final = _platform("job_nodes", Kind.GAUGE, "Nodes of the current round.")
JOB_WANTED_NODES: Final = _platform("job_wanted_nodes", Kind.GAUGE, "Nodes that there should be.")
JOB_MIN_NODES: Final = _platform("job_min_nodes", Kind.GAUGE, "Nodes without which the job does not train.")

PLATFORM_SAMPLES: Final = frozenset(_samples)
"""The sample names of all platform series; metrics of programs never get one of them."""

OPERATIONS: Final = (
    "SimpleElasticAgent.run",
    "SimpleElasticAgent._rendezvous",
    "SimpleElasticAgent._initialize_workers",
    "SimpleElasticAgent._restart_workers",
    "SimpleElasticAgent._assign_worker_ranks",
    "LocalElasticAgent._start_workers",
    "LocalElasticAgent._stop_workers",
    "LocalElasticAgent._monitor_workers",
)
"""The operations of the agent whose outcome and duration are measured."""

PLATFORM_SERIES: Final = {
    "round": ROUND,
    "world_size": WORLD_SIZE,
    "train_step.duration.ms": OPERATION_DURATION.labelled(operation="train_step"),
    "checkpoint.write_latency_ms": CHECKPOINT_WRITE,
}
"""The series by name of the platform's group; names with a role, a cause or a request are declared on first use."""
for _name in OPERATIONS:
    _operation = _name.rpartition(".")[2].lstrip("_")
    PLATFORM_SERIES[f"{_name}.duration.ms"] = OPERATION_DURATION.labelled(operation=_operation)
    for _outcome in ("success", "failure"):
        PLATFORM_SERIES[f"{_name}.{_outcome}"] = OPERATION_OUTCOMES.labelled(operation=_operation, outcome=_outcome)
