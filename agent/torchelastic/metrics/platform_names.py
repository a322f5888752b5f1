"""The platform's own names, and the series that they become: a fixed table.

A role, a state, an outcome and an operation are labels here, not parts of a name. The names are those that torchelastic
documents for its group; ``epoch``, ``world_size`` and ``recovery.<cause>.duration.ms`` are ours.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from torchelastic.metrics.names import Kind, Series, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

WORKER_STATES: Final = ("unknown", "init", "healthy", "unhealthy", "stopped", "succeeded", "failed")
"""The states of a node's workers, as torchelastic names them."""

DURATION_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Upper bounds in seconds: from a recovery that nobody notices to a program that takes half an hour to start."""


_METHODS: Final = {
    "SimpleElasticAgent": (
        "run",
        "_rendezvous",
        "_initialize_workers",
        "_restart_workers",
        "_assign_worker_ranks",
    ),
    "LocalElasticAgent": ("_start_workers", "_stop_workers", "_monitor_workers"),
}
_COORDINATOR: Final = (
    "rendezvous_barrier",
    "init_process_group",
    "should_save_checkpoint",
    "should_rendezvous",
    "should_stop_training",
    "signal_training_done",
    "monitor_progress",
    "report_progress",
    "on_error",
    "load_checkpoint",
    "save_checkpoint",
    "state_sync",
    "train_step",
    "inner_train_loop",
    "outer_train_loop",
)
OPERATIONS: Final[Mapping[str, str]] = {
    f"{owner}.{method}": method.removeprefix("_") for owner, methods in _METHODS.items() for method in methods
} | {name: name for name in _COORDINATOR}
"""What the platform measures the success and the duration of: the name before ``.success``, and the label's value."""

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
    "epoch": Series(
        "torchelastic_epoch", Kind.GAUGE, "Number of the current epoch: how often it was agreed on who trains together."
    ),
    "world_size": Series("torchelastic_world_size", Kind.GAUGE, "Workers that train together in the current epoch."),
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
    "torchelastic_job_nodes_joined", Kind.COUNTER, "Nodes that came, those of the first epoch included."
)
JOB_GONE: Final = Series(
    "torchelastic_job_nodes_gone",
    Kind.COUNTER,
    "Nodes that an epoch had and the next one had not, by what became of them.",
)
JOB_NODES: Final = Series("torchelastic_job_nodes", Kind.GAUGE, "Nodes of the present epoch.")
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
