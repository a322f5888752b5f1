"""The Prometheus series of torchelastic, and the conversion of the metric names of programs to series names.

A name becomes ``<group>_<name>`` by Prometheus' conventions: snake_case, base units (values whose names end in
``.ms`` or ``_ms`` are converted to seconds), and reserved suffixes (``_total``, ``_count``, ``_bucket``, …) only with
their meaning. Different names can lead to the same series name (``stepTime``, ``step.time``); :class:`SeriesNames`
makes the series names unique.
"""

from __future__ import annotations

import enum
import hashlib
import re
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

DEFAULT_GROUP: Final = "torchelastic"
"""The group of torchelastic's own metrics, and of values without a group."""


class Kind(enum.StrEnum):
    """The kinds of series, as named by the exposition format."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


_SAMPLES: Final = {
    Kind.GAUGE: ("",),
    Kind.COUNTER: ("", "_total", "_created"),
    Kind.HISTOGRAM: ("", "_bucket", "_count", "_sum", "_created"),
}


class MetricType(NamedTuple):
    """The type of a metric: its kind and, for a histogram, its buckets.

    Attributes:
        kind: gauge, counter or histogram.
        buckets: upper bounds of a histogram, in the unit of the series; ascending and finite.
    """

    kind: Kind = Kind.GAUGE
    buckets: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """The number of words that hold the values."""
        return len(self.buckets) + 2 if self.kind is Kind.HISTOGRAM else 1


GAUGE: Final = MetricType()
COUNTER: Final = MetricType(Kind.COUNTER)


class MetricKey(NamedTuple):
    """A metric of a program: its group, its name and its type."""

    group: str
    name: str
    type: MetricType


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A family of series, or one series of it.

    Attributes:
        name: the name of the family, without the suffix of its kind (``_total``, ``_bucket``, …).
        type: the kind and the buckets.
        help: the help text of the exposition.
        divisor: the number by which each value is divided: 1000 if values are in milliseconds.
        labels: pairs of name and value; all series of a family have the same names.
    """

    name: str
    type: MetricType
    help: str
    divisor: float = 1.0
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def samples(self) -> frozenset[str]:
        """All sample names of the family; no other family may use them."""
        return frozenset(self.name + ending for ending in _SAMPLES[self.type.kind])

    def labeled(self, **labels: str) -> MetricFamily:
        """Return the series of the family with these labels."""
        return replace(self, labels=tuple((label, printable(value)) for label, value in labels.items()))


def printable(text: str) -> str:
    """Return the string; characters that UTF-8 cannot encode become escape sequences."""
    return text.encode("utf-8", "backslashreplace").decode()


# The series of torchelastic

DURATION_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Upper bounds in seconds, from a short recovery to a program that takes half an hour to start."""
_REQUEST_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_families: list[MetricFamily] = []


def _family(name: str, metric_type: MetricType, help_text: str, divisor: float = 1.0) -> MetricFamily:
    _families.append(MetricFamily(f"torchelastic_{name}", metric_type, help_text, divisor))
    return _families[-1]


def _durations(name: str, help_text: str) -> MetricFamily:
    """Return a histogram in seconds for values in milliseconds."""
    return _family(name, MetricType(Kind.HISTOGRAM, DURATION_BUCKETS), help_text, 1000)


ROUND: Final = _family("round", GAUGE, "Number of the current round.")
WORLD_SIZE: Final = _family("world_size", GAUGE, "Number of workers in the current round.")
WORKER_STATE: Final = _family("worker_state", GAUGE, "1 for the state of the workers of this node, 0 for the others.")
REMAINING_RESTARTS: Final = _family(
    "remaining_restarts", GAUGE, "Failures of workers that are left in the restart budget of the run."
)
RECOVERY: Final = _durations(
    "recovery_duration_seconds", "Time from a failure or change until the first training step, by cause."
)
WORKER_RESTART: Final = _durations(
    "worker_restart_duration_seconds", "Time from a failure or change until workers run, by cause."
)
RUNS: Final = _family("runs", COUNTER, "Runs that ended.")
RUN_OUTCOMES: Final = _family("run_outcomes", COUNTER, "Runs that ended, by outcome and whether workers restarted.")
FLAKINESS: Final = _family(
    "flakiness_ratio", GAUGE, "Share of the restart budget that is used; 1 if the run failed.", 100
)
OPERATION_OUTCOMES: Final = _family("operations", COUNTER, "Operations of the agent, by outcome.")
OPERATION_DURATION: Final = _durations("operation_duration_seconds", "Time that an operation of the agent took.")
CHECKPOINT_WRITE: Final = _durations("checkpoint_write_latency_seconds", "Time that writing a checkpoint took.")
DROPPED: Final = _family("metrics_dropped", COUNTER, "Values that were rejected, by reason.")
STORE_REQUEST: Final = _family(
    "store_request_duration_seconds",
    MetricType(Kind.HISTOGRAM, _REQUEST_BUCKETS),
    "Duration of requests to the store (etcd), by request and outcome.",
)
WORKER_MEMORY: Final = _family("worker_memory_bytes", GAUGE, "Resident memory of a worker and its child processes.")
GPU_MEMORY_USED: Final = _family("gpu_memory_used_bytes", GAUGE, "Used memory of the GPU.")
GPU_MEMORY_TOTAL: Final = _family("gpu_memory_total_bytes", GAUGE, "Total memory of the GPU.")
GPU_UTILIZATION: Final = _family(
    "gpu_utilization_ratio", GAUGE, "Share of the last moments in which the GPU executed a kernel.", 100
)
JOB_SECONDS: Final = _family("job_seconds", COUNTER, "Time since the job was created, by state; shown by its leader.")
JOB_LOST: Final = _family("job_lost_seconds", COUNTER, "Time of training that no checkpoint held when its round ended.")
JOB_RESTARTS: Final = _family("job_restarts", COUNTER, "Restarts of the workers, by whether the run was charged.")
JOB_JOINED: Final = _family("job_nodes_joined", COUNTER, "Nodes that joined, those of the first round included.")
JOB_DEPARTURES: Final = _family("job_nodes_departed", COUNTER, "Nodes that left a round, by cause.")
JOB_NODES: Final = _family("job_nodes", GAUGE, "Number of nodes in the current round.")
JOB_DESIRED_NODES: Final = _family("job_desired_nodes", GAUGE, "Desired number of nodes.")
JOB_MIN_NODES: Final = _family("job_min_nodes", GAUGE, "Minimum number of nodes for training.")

BUILT_IN_SAMPLES: Final = frozenset().union(*(series.samples for series in _families))
"""The sample names of all series of torchelastic; metrics of programs never have one of them."""

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

TRAINING_OPERATIONS: Final = (
    "rendezvous_barrier",
    "init_process_group",
    "load_checkpoint",
    "state_sync",
    "train_step",
    "monitor_progress",
    "should_save_checkpoint",
    "save_checkpoint",
    "should_rendezvous",
    "report_progress",
    "on_error",
    "should_stop_training",
    "signal_training_done",
    "inner_train_loop",
    "outer_train_loop",
)
"""The operations of :func:`torchelastic.train`."""

BUILT_IN_FAMILIES: Final = {
    "round": ROUND,
    "world_size": WORLD_SIZE,
    "checkpoint.write_latency_ms": CHECKPOINT_WRITE,
}
"""The series of torchelastic's group by metric name, in any process; torch's own agent uses some of these names."""
for _name in OPERATIONS + TRAINING_OPERATIONS:
    _operation = _name.rpartition(".")[2].lstrip("_")
    BUILT_IN_FAMILIES[f"{_name}.duration.ms"] = OPERATION_DURATION.labeled(operation=_operation)
    for _outcome in ("success", "failure"):
        BUILT_IN_FAMILIES[f"{_name}.{_outcome}"] = OPERATION_OUTCOMES.labeled(operation=_operation, outcome=_outcome)


# The series of programs

_RESERVED_ENDINGS: Final = ("_total", "_created", "_count", "_sum", "_bucket", "_info", "_gcount", "_gsum")
RESERVED_BEGINNINGS: Final = ("process_", "python_", "scrape_", "elastic_operator_")
"""Prefixes of the series of Prometheus, its client library and the operator. ``up`` and ``ALERTS`` cannot collide,
because every series name of a program has a group, an underscore and no capitals."""
_LONGEST_NAME: Final = 200


def family_of(key: MetricKey) -> MetricFamily:
    """Return the series of a key: torchelastic's own series, or a series with the preferred name."""
    series = BUILT_IN_FAMILIES.get(key.name) if key.group == DEFAULT_GROUP else None
    return user_family(key) if series is None or series.type != key.type else series


def user_family(key: MetricKey) -> MetricFamily:
    """Return the series of a key that does not belong to torchelastic."""
    group, name, metric_type = key
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
    while metric_type.kind is Kind.COUNTER and full.endswith("_total") and full != f"{prefix}_total":
        full = full.removesuffix("_total")
    if len(full) > _LONGEST_NAME:
        full = f"{full[:_LONGEST_NAME]}_{_digest(name)}"
    if full.endswith(_RESERVED_ENDINGS) and metric_type.kind is not Kind.COUNTER and not in_milliseconds:
        full += "_value"
    return MetricFamily(
        full + ("_seconds" if in_milliseconds else ""),
        metric_type,
        f"{printable(name):.200} of the group {printable(group):.200}, as the program measures it.",
        divisor=1000 if in_milliseconds else 1,
    )


def snake_case(text: str) -> str:
    """Return a name in snake case, without leading and trailing underscores: ``trainLoss.7`` becomes train_loss_7."""
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", text)
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_").lower()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:8]


class SeriesNames:
    """The series of the keys on one page: different keys never share a sample name."""

    def __init__(self) -> None:
        self._series: dict[MetricKey, MetricFamily] = {}
        self._keys: dict[str, MetricKey] = {}

    def of(self, key: MetricKey) -> MetricFamily:
        """Return the series of a key, with a digest in its name if another key has its preferred name."""
        if (known := self._series.get(key)) is not None:
            return known
        series = family_of(key)
        if series is not BUILT_IN_FAMILIES.get(key.name):
            while any(sample in BUILT_IN_SAMPLES or self._keys.get(sample, key) != key for sample in series.samples):
                stem = series.name.removesuffix("_seconds") if series.divisor == 1000 else series.name
                series = replace(series, name=f"{stem}_{_digest(repr(key))}{series.name[len(stem) :]}")
            self._keys |= dict.fromkeys(series.samples, key)
        self._series[key] = series
        return series
