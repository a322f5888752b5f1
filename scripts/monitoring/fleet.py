"""The dashboard of all jobs and of the operator."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from scripts.monitoring.dashboard import Dashboard, Display, Look, Needs, Query, Row, Unit, Variable
from scripts.monitoring.promql import (
    JOB,
    LOST,
    RATE,
    SHOWN,
    TRAINING,
    WALL,
    goodput,
    grown,
    quantile,
    quantile_of_all,
    selector,
    total,
)
from scripts.monitoring.recovery import time_to_recover

if TYPE_CHECKING:
    from collections.abc import Callable

THESE: Final = 'job_namespace=~"$job_namespace"'
S: Final = selector(THESE)
OPERATOR_JOB: Final = "elastic_operator_job"
SPLIT: Final = total(WALL, THESE, by=f"{JOB}, state", over=SHOWN)
TRAINED: Final = total(WALL, THESE, TRAINING, over=SHOWN)
LOST_WORK: Final = total(LOST, THESE, over=SHOWN)
RATES: Final = f"max by ({JOB}, state) (rate({WALL}{S}[{RATE}]))"
RESTARTS: Final = grown(f"{OPERATOR_JOB}_restarts_total", jobs=THESE, by=f"{JOB}, cause")
HOW_THEY_STAND: Final = "Running|Waiting|Suspended|Invalid|Succeeded|Failed"
"""A regular expression of conditions that usually exclude each other."""

_reported: Final = partial(Query, needs=Needs.OPERATOR)
"""Returns a query whose series the operator reports."""


def _quantiles(expression: Callable[[float, str], str], histogram: str, high: float) -> list[Query]:
    """Return the queries for the median and for a higher quantile of a histogram of the operator."""
    legends = {0.5: "median", high: f"{100 * high:g} %"}
    return [_reported(expression(share, histogram), legend) for share, legend in legends.items()]


def _jobs_that_are(condition: str) -> str:
    """Return the query for the number of jobs with a condition."""
    found = selector(THESE, f'condition="{condition}"')
    return f"count(max by ({JOB}) ({OPERATOR_JOB}_condition{found}) == 1) or vector(0)"


_AT_A_GLANCE: Final = Row(
    "At a glance",
    (
        Display("Goodput", Unit.SHARE, Look.NUMBER, width=5, decimals=1, good=0.9).show(
            "The share of the time in which jobs trained without losing the result, since their creation, for "
            "all jobs in the time shown whose programs report checkpoints. An hour of a job counts the same for any "
            "number of workers.",
            Query(f"sum({TRAINED} - {LOST_WORK}) / sum({SPLIT} and on ({JOB}) {LOST_WORK})", needs=Needs.CHECKPOINTS),
        ),
        Display("Jobs", Unit.NUMBER, Look.NUMBER, width=3).show(
            "Jobs that the operator manages.",
            _reported(f"count(max by ({JOB}) ({OPERATOR_JOB}_min_pods{S}))"),
        ),
        Display("Running", Unit.NUMBER, Look.NUMBER, width=3).show(
            "Jobs that train.", _reported(_jobs_that_are("Running"))
        ),
        Display("Waiting", Unit.NUMBER, Look.NUMBER, width=3, bad=1).show(
            "Jobs with fewer pods than they need to train.", _reported(_jobs_that_are("Waiting"))
        ),
        Display("Workers", Unit.NUMBER, Look.NUMBER, width=3).show(
            "Workers that train now, in all jobs.", Query(f"sum(max by ({JOB}) (torchelastic_world_size{S}))")
        ),
        Display("Restarts", Unit.NUMBER, Look.NUMBER, width=3, decimals=0).show(
            "Restarts of workers and pods in the time shown.", _reported(f"sum({RESTARTS})")
        ),
        Display("Lost work", Unit.SECONDS, Look.NUMBER, width=4).show(
            "Training that no checkpoint held when its round ended, of the jobs in the time shown that call "
            "torchelastic.checkpoint.",
            Query(f"sum({LOST_WORK})", needs=Needs.CHECKPOINTS),
        ),
    ),
)

_JOBS: Final = Row(
    "Jobs",
    (
        Display(
            "Jobs", Unit.NUMBER, Look.TABLE, width=24, units=(("Goodput", Unit.SHARE), ("Lost work", Unit.SECONDS))
        ).show(
            "One line for each job; its name is a link to its dashboard. Goodput and lost work count since the "
            "creation of the job.",
            _reported(
                f"max by ({JOB}, condition) ({OPERATOR_JOB}_condition"
                + selector(THESE, f'condition=~"{HOW_THEY_STAND}"')
                + ") == 1",
                "Holds",
            ),
            Query(goodput(THESE), "Goodput", needs=Needs.CHECKPOINTS),
            Query(f"max by ({JOB}) (torchelastic_world_size{S})", "Workers"),
            _reported(f"max by ({JOB}) ({OPERATOR_JOB}_ready_pods{S})", "Ready"),
            _reported(f"max by ({JOB}) ({OPERATOR_JOB}_desired_pods{S})", "Desired"),
            _reported(f"sum by ({JOB}) (max by ({JOB}, cause) ({OPERATOR_JOB}_restarts_total{S}))", "Restarts"),
            Query(f"max by ({JOB}) ({LOST}{S})", "Lost work", needs=Needs.CHECKPOINTS),
        ),
        Display("Jobs by condition", Unit.NUMBER, Look.STEPS, width=12).show(
            "The number of jobs with each condition. A job may have several.",
            _reported(
                f"sum by (condition) (max by ({JOB}, condition) ({OPERATOR_JOB}_condition{S})) > 0", "{{condition}}"
            ),
        ),
        Display("Workers by job", Unit.NUMBER, Look.STACK, width=12).show(
            "Workers that train, in each job.",
            Query(f"max by ({JOB}) (torchelastic_world_size{S})", "{{job_namespace}}/{{elasticjob}}"),
        ),
    ),
)

_TIME: Final = Row(
    "Where the time went",
    (
        Display("Time by state", Unit.SECONDS, Look.BARS).show(
            "The time in each state since the creation of the jobs that existed in the time shown.",
            Query(f"sum by (state) ({SPLIT})", "{{state}}"),
        ),
        Display("What jobs did", Unit.NUMBER, Look.STACK).show(
            "The number of jobs in each state over time.", Query(f"sum by (state) ({RATES})", "{{state}}")
        ),
        Display("Lowest goodput", Unit.SHARE, Look.BARS).show(
            "The ten jobs with the lowest goodput, of those that existed in the time shown.",
            Query(
                f"bottomk(10, {goodput(THESE, over=SHOWN)})",
                "{{job_namespace}}/{{elasticjob}}",
                needs=Needs.CHECKPOINTS,
            ),
        ),
        Display("Restarts by cause", Unit.NUMBER, Look.BARS, decimals=0).show(
            "In the time shown. worker_failed: counts against maxRestarts; uncharged: does not count, for example "
            "after a change of the size; pod_failed: a pod ended unexpectedly.",
            _reported(f"sum by (cause) ({RESTARTS})", "{{cause}}"),
        ),
        Display("Most restarts", Unit.NUMBER, Look.BARS, decimals=0).show(
            "The ten jobs with the most restarts in the time shown.",
            _reported(f"topk(10, sum by ({JOB}) ({RESTARTS}) > 0)", "{{job_namespace}}/{{elasticjob}}"),
        ),
        time_to_recover(THESE),
    ),
)

_OPERATOR: Final = Row(
    "The operator",
    (
        Display("Leader", Unit.NUMBER, Look.STEPS, width=6).show(
            "1 for the copy that is the leader, 0 for a copy on standby. Without a leader, jobs continue "
            "to train, but their pods are not replaced.",
            _reported("max by (instance) (elastic_operator_leader)", "{{instance}}"),
        ),
        Display("Reconciles", Unit.PER_SECOND, width=6).show(
            "Reconciles per second by result: success, error (retried), panic (a defect of the operator).",
            _reported(f"sum by (result) (rate(elastic_operator_reconciles_total[{RATE}]))", "{{result}}"),
        ),
        Display("Reconcile duration", Unit.SECONDS, width=6).show(
            "The duration of a reconcile of a job.",
            *_quantiles(quantile, "elastic_operator_reconcile_duration_seconds", 0.99),
        ),
        Display("Queue", Unit.NUMBER, width=6).show(
            "Jobs that wait for a reconcile. If the queue does not empty, the operator is too slow.",
            _reported("max by (instance) (elastic_operator_queue_depth)", "{{instance}}"),
        ),
        Display("Time in the queue", Unit.SECONDS, width=6).show(
            "The time that a job waits for a reconcile.",
            *_quantiles(quantile, "elastic_operator_queue_latency_seconds", 0.99),
        ),
        Display("Requests to the API server", Unit.PER_SECOND, width=6).show(
            "By verb and status code; 0 means no answer. An occasional 409 is harmless.",
            _reported(
                f"sum by (verb, code) (rate(elastic_operator_api_requests_total[{RATE}])) > 0", "{{verb}} {{code}}"
            ),
        ),
        Display("From apply to running", Unit.SECONDS, Look.BARS, width=6).show(
            "The time from creation to training, of jobs that started to train in the time shown.",
            *_quantiles(quantile_of_all, "elastic_operator_apply_to_running_seconds", 0.95),
        ),
        Display("Memory", Unit.BYTES, width=6).show(
            "Resident memory of each copy of the operator.",
            _reported(
                "max by (instance) (process_resident_memory_bytes and on (job, instance) elastic_operator_queue_depth)",
                "{{instance}}",
            ),
        ),
    ),
)

FLEET_DASHBOARD: Final = Dashboard(
    uid="elasticjobs",
    title="ElasticJobs: fleet",
    about="All elastic jobs: their goodput, which of them wait or fail, and the state of the operator.",
    variables=(
        Variable(
            name="job_namespace",
            label="Namespace",
            about="The namespaces of the jobs that are shown.",
            values='label_values({__name__=~"torchelastic_round|elastic_operator_job_min_pods"}, job_namespace)',
            many=True,
        ),
    ),
    rows=(_AT_A_GLANCE, _JOBS, _TIME, _OPERATOR),
    since="now-24h",
)
