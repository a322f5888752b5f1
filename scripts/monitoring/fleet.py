"""The dashboard of all jobs and of the operator."""

from __future__ import annotations

from typing import Final

from scripts.monitoring.page import Look, Needs, Page, Panel, Query, Row, Unit, Variable
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

THESE: Final = 'job_namespace=~"$job_namespace"'
S: Final = selector(THESE)
OPERATOR_JOB: Final = "elastic_operator_job"
SPLIT: Final = total(WALL, THESE, by=f"{JOB}, state", over=SHOWN)
TRAINED: Final = total(WALL, THESE, TRAINING, over=SHOWN)
LOST_WORK: Final = total(LOST, THESE, over=SHOWN)
RATES: Final = f"max by ({JOB}, state) (rate({WALL}{S}[{RATE}]))"
RESTARTS: Final = grown(f"{OPERATOR_JOB}_restarts_total", jobs=THESE, by=f"{JOB}, cause")
RECOVERY: Final = "torchelastic_recovery_duration_seconds"
WORKER_RESTART: Final = "torchelastic_worker_restart_duration_seconds"
HOW_THEY_STAND: Final = "Running|Waiting|Suspended|Invalid|Succeeded|Failed"
"""A regular expression of conditions that usually exclude each other."""


def _jobs_that_are(condition: str) -> str:
    """Return the query for the number of jobs with a condition."""
    found = selector(THESE, f'condition="{condition}"')
    return f"count(max by ({JOB}) ({OPERATOR_JOB}_condition{found}) == 1) or vector(0)"


_AT_A_GLANCE: Final = Row(
    title="At a glance",
    panels=(
        Panel(
            title="Goodput",
            about="The share of the time in which jobs trained without losing the result, since their creation, for "
            "all jobs in the time shown whose programs report checkpoints. An hour of a job counts the same for any "
            "number of workers.",
            unit=Unit.SHARE,
            look=Look.NUMBER,
            width=5,
            decimals=1,
            good=0.9,
            queries=(
                Query(
                    expr=f"sum({TRAINED} - {LOST_WORK}) / sum({SPLIT} and on ({JOB}) {LOST_WORK})",
                    needs=Needs.CHECKPOINTS,
                ),
            ),
        ),
        Panel(
            title="Jobs",
            about="Jobs that the operator manages.",
            unit=Unit.NUMBER,
            look=Look.NUMBER,
            width=3,
            queries=(Query(expr=f"count(max by ({JOB}) ({OPERATOR_JOB}_min_pods{S}))", needs=Needs.OPERATOR),),
        ),
        Panel(
            title="Running",
            about="Jobs that train.",
            unit=Unit.NUMBER,
            look=Look.NUMBER,
            width=3,
            queries=(Query(expr=_jobs_that_are("Running"), needs=Needs.OPERATOR),),
        ),
        Panel(
            title="Waiting",
            about="Jobs with fewer pods than they need to train.",
            unit=Unit.NUMBER,
            look=Look.NUMBER,
            width=3,
            bad=1,
            queries=(Query(expr=_jobs_that_are("Waiting"), needs=Needs.OPERATOR),),
        ),
        Panel(
            title="Workers",
            about="Workers that train now, in all jobs.",
            unit=Unit.NUMBER,
            look=Look.NUMBER,
            width=3,
            queries=(Query(expr=f"sum(max by ({JOB}) (torchelastic_world_size{S}))"),),
        ),
        Panel(
            title="Restarts",
            about="Restarts of workers and pods in the time shown.",
            unit=Unit.NUMBER,
            look=Look.NUMBER,
            width=3,
            decimals=0,
            queries=(Query(expr=f"sum({RESTARTS})", needs=Needs.OPERATOR),),
        ),
        Panel(
            title="Lost work",
            about="Training that no checkpoint held when its round ended, of the jobs in the time shown that call "
            "torchelastic.checkpoint.",
            unit=Unit.SECONDS,
            look=Look.NUMBER,
            width=4,
            queries=(Query(expr=f"sum({LOST_WORK})", needs=Needs.CHECKPOINTS),),
        ),
    ),
)

_JOBS: Final = Row(
    title="Jobs",
    panels=(
        Panel(
            title="Jobs",
            about="One line for each job; its name is a link to its dashboard. Goodput and lost work count since the "
            "creation of the job.",
            unit=Unit.NUMBER,
            look=Look.TABLE,
            width=24,
            units=(("Goodput", Unit.SHARE), ("Lost work", Unit.SECONDS)),
            queries=(
                Query(
                    expr=f"max by ({JOB}, condition) ({OPERATOR_JOB}_condition"
                    + selector(THESE, f'condition=~"{HOW_THEY_STAND}"')
                    + ") == 1",
                    legend="Holds",
                    needs=Needs.OPERATOR,
                ),
                Query(expr=goodput(THESE), legend="Goodput", needs=Needs.CHECKPOINTS),
                Query(expr=f"max by ({JOB}) (torchelastic_world_size{S})", legend="Workers"),
                Query(expr=f"max by ({JOB}) ({OPERATOR_JOB}_ready_pods{S})", legend="Ready", needs=Needs.OPERATOR),
                Query(expr=f"max by ({JOB}) ({OPERATOR_JOB}_desired_pods{S})", legend="Desired", needs=Needs.OPERATOR),
                Query(
                    expr=f"sum by ({JOB}) (max by ({JOB}, cause) ({OPERATOR_JOB}_restarts_total{S}))",
                    legend="Restarts",
                    needs=Needs.OPERATOR,
                ),
                Query(expr=f"max by ({JOB}) ({LOST}{S})", legend="Lost work", needs=Needs.CHECKPOINTS),
            ),
        ),
        Panel(
            title="Jobs by condition",
            about="The number of jobs with each condition. A job may have several.",
            unit=Unit.NUMBER,
            look=Look.STEPS,
            width=12,
            queries=(
                Query(
                    expr=f"sum by (condition) (max by ({JOB}, condition) ({OPERATOR_JOB}_condition{S})) > 0",
                    legend="{{condition}}",
                    needs=Needs.OPERATOR,
                ),
            ),
        ),
        Panel(
            title="Workers by job",
            about="Workers that train, in each job.",
            unit=Unit.NUMBER,
            look=Look.STACK,
            width=12,
            queries=(
                Query(expr=f"max by ({JOB}) (torchelastic_world_size{S})", legend="{{job_namespace}}/{{elasticjob}}"),
            ),
        ),
    ),
)

_TIME: Final = Row(
    title="Where the time went",
    panels=(
        Panel(
            title="Time by state",
            about="The time in each state since the creation of the jobs that existed in the time shown.",
            unit=Unit.SECONDS,
            look=Look.BARS,
            queries=(Query(expr=f"sum by (state) ({SPLIT})", legend="{{state}}"),),
        ),
        Panel(
            title="What jobs did",
            about="The number of jobs in each state over time.",
            unit=Unit.NUMBER,
            look=Look.STACK,
            queries=(Query(expr=f"sum by (state) ({RATES})", legend="{{state}}"),),
        ),
        Panel(
            title="Lowest goodput",
            about="The ten jobs with the lowest goodput, of those that existed in the time shown.",
            unit=Unit.SHARE,
            look=Look.BARS,
            queries=(
                Query(
                    expr=f"bottomk(10, {goodput(THESE, over=SHOWN)})",
                    legend="{{job_namespace}}/{{elasticjob}}",
                    needs=Needs.CHECKPOINTS,
                ),
            ),
        ),
        Panel(
            title="Restarts by cause",
            about="In the time shown. worker_failed: counts against maxRestarts; free: does not count, for example "
            "after a change of the size; pod_failed: a pod ended unexpectedly.",
            unit=Unit.NUMBER,
            look=Look.BARS,
            decimals=0,
            queries=(Query(expr=f"sum by (cause) ({RESTARTS})", legend="{{cause}}", needs=Needs.OPERATOR),),
        ),
        Panel(
            title="Most restarts",
            about="The ten jobs with the most restarts in the time shown.",
            unit=Unit.NUMBER,
            look=Look.BARS,
            decimals=0,
            queries=(
                Query(
                    expr=f"topk(10, sum by ({JOB}) ({RESTARTS}) > 0)",
                    legend="{{job_namespace}}/{{elasticjob}}",
                    needs=Needs.OPERATOR,
                ),
            ),
        ),
        Panel(
            title="Time to recover",
            about="The time from a failure or change until the first training step of a node's new workers, by cause: "
            "the median and the 95th percentile. The agents' share ends when the workers have started.",
            unit=Unit.SECONDS,
            look=Look.BARS,
            queries=(
                Query(expr=quantile_of_all(0.5, RECOVERY, jobs=THESE, by="cause"), legend="{{cause}}, median"),
                Query(expr=quantile_of_all(0.95, RECOVERY, jobs=THESE, by="cause"), legend="{{cause}}, 95 %"),
                Query(
                    expr=quantile_of_all(0.5, WORKER_RESTART, jobs=THESE, by="cause"),
                    legend="{{cause}}, agents' share, median",
                ),
            ),
        ),
    ),
)

_OPERATOR: Final = Row(
    title="The operator",
    panels=(
        Panel(
            title="Leader",
            about="1 for the copy that is the leader, 0 for a copy on standby. Without a leader, jobs continue "
            "to train, but their pods are not replaced.",
            unit=Unit.NUMBER,
            look=Look.STEPS,
            width=6,
            queries=(
                Query(expr="max by (instance) (elastic_operator_leader)", legend="{{instance}}", needs=Needs.OPERATOR),
            ),
        ),
        Panel(
            title="Reconciles",
            about="Reconciles per second by result: success, error (retried), panic (a defect of the operator).",
            unit=Unit.PER_SECOND,
            width=6,
            queries=(
                Query(
                    expr=f"sum by (result) (rate(elastic_operator_reconciles_total[{RATE}]))",
                    legend="{{result}}",
                    needs=Needs.OPERATOR,
                ),
            ),
        ),
        Panel(
            title="Reconcile duration",
            about="The duration of a reconcile of a job.",
            unit=Unit.SECONDS,
            width=6,
            queries=(
                Query(
                    expr=quantile(0.5, "elastic_operator_reconcile_duration_seconds"),
                    legend="median",
                    needs=Needs.OPERATOR,
                ),
                Query(
                    expr=quantile(0.99, "elastic_operator_reconcile_duration_seconds"),
                    legend="99 %",
                    needs=Needs.OPERATOR,
                ),
            ),
        ),
        Panel(
            title="Queue",
            about="Jobs that wait for a reconcile. If the queue does not empty, the operator is too slow.",
            unit=Unit.NUMBER,
            width=6,
            queries=(
                Query(
                    expr="max by (instance) (elastic_operator_queue_depth)",
                    legend="{{instance}}",
                    needs=Needs.OPERATOR,
                ),
            ),
        ),
        Panel(
            title="Time in the queue",
            about="The time that a job waits for a reconcile.",
            unit=Unit.SECONDS,
            width=6,
            queries=(
                Query(
                    expr=quantile(0.5, "elastic_operator_queue_latency_seconds"),
                    legend="median",
                    needs=Needs.OPERATOR,
                ),
                Query(
                    expr=quantile(0.99, "elastic_operator_queue_latency_seconds"),
                    legend="99 %",
                    needs=Needs.OPERATOR,
                ),
            ),
        ),
        Panel(
            title="Requests to the API server",
            about="By verb and status code; 0 means no answer. An occasional 409 is harmless.",
            unit=Unit.PER_SECOND,
            width=6,
            queries=(
                Query(
                    expr=f"sum by (verb, code) (rate(elastic_operator_api_requests_total[{RATE}])) > 0",
                    legend="{{verb}} {{code}}",
                    needs=Needs.OPERATOR,
                ),
            ),
        ),
        Panel(
            title="From apply to running",
            about="The time from creation to training, of jobs that started to train in the time shown.",
            unit=Unit.SECONDS,
            look=Look.BARS,
            width=6,
            queries=(
                Query(
                    expr=quantile_of_all(0.5, "elastic_operator_apply_to_running_seconds"),
                    legend="median",
                    needs=Needs.OPERATOR,
                ),
                Query(
                    expr=quantile_of_all(0.95, "elastic_operator_apply_to_running_seconds"),
                    legend="95 %",
                    needs=Needs.OPERATOR,
                ),
            ),
        ),
        Panel(
            title="Memory",
            about="Resident memory of each copy of the operator.",
            unit=Unit.BYTES,
            width=6,
            queries=(
                Query(
                    expr="max by (instance) (process_resident_memory_bytes and on (job, instance)"
                    " elastic_operator_queue_depth)",
                    legend="{{instance}}",
                    needs=Needs.OPERATOR,
                ),
            ),
        ),
    ),
)

FLEET_PAGE: Final = Page(
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
