"""The dashboard of one job."""

from __future__ import annotations

from typing import Final

from scripts.monitoring.dashboard import Dashboard, Display, Look, Mark, Needs, Query, Row, Unit, Variable
from scripts.monitoring.promql import (
    LOST,
    MOMENT,
    RATE,
    SHOWN,
    WALL,
    goodput,
    mean,
    quantile,
    quantile_of_all,
    selector,
)
from scripts.monitoring.recovery import WORKER_RESTART, time_to_recover

THIS: Final = 'job_namespace="$job_namespace", elasticjob="$elasticjob"'
S: Final = selector(THIS)
CHARGED: Final = selector(THIS, 'charged="yes"')
UNCHARGED: Final = selector(THIS, 'charged="no"')
STEPPED: Final = 'operation="train_step"'
STATES: Final = f"max by (state) ({WALL}{S})"
STATE_RATES: Final = f"max by (state) (rate({WALL}{S}[{RATE}]))"
OPERATIONS: Final = "torchelastic_operation_duration_seconds"
STEP_TIMES: Final = mean(OPERATIONS, jobs=THIS, by="rank", only=STEPPED)
SAVING: Final = "torchelastic_checkpoint_write_latency_seconds"
STORE: Final = "torchelastic_store_request_duration_seconds"
OPERATOR_JOB: Final = "elastic_operator_job"
MOST: Final = 20
"""The maximum number of ranks in a panel, so that the lines can be distinguished."""

_OWN_NAMES: Final = selector(THIS, 'rank!=""', '__name__=~"($group).*"', '__name__!~"(torchelastic|process|python)_.*"')
"""The selector of the program's own series."""


def _named(name: str) -> str:
    """Return the program's own series with this name."""
    return selector(f'__name__="{name}"', THIS, 'rank!=""')


def _went_up(series: str, found: str) -> Query:
    """Return a query that has a value whenever the maximum of a series increases."""
    return Query(f"max({series}{found}) > max({series}{found} offset {MOMENT})")


MARKS: Final = (
    Mark(name="Worker failed", query=_went_up("torchelastic_job_restarts_total", CHARGED), color="red"),
    Mark(name="New round", query=_went_up("torchelastic_round", S), color="blue"),
    Mark(
        name="Desired size changed",
        query=Query(
            f"max(torchelastic_job_desired_nodes{S}) != max(torchelastic_job_desired_nodes{S} offset {MOMENT})"
        ),
        color="purple",
    ),
)

_AT_A_GLANCE: Final = Row(
    "At a glance",
    (
        Display("Goodput", Unit.SHARE, Look.NUMBER, width=4, decimals=1, good=0.9).show(
            "The share of the time since the creation of the job in which it trained without losing the "
            "result; unknown if the program reports no checkpoints. Where the time went shows the rest.",
            Query(goodput(THIS), needs=Needs.CHECKPOINTS),
        ),
        Display("Workers", Unit.NUMBER, Look.NUMBER, width=3).show(
            "Workers that train together; 0 while there are too few nodes.", Query(f"max(torchelastic_world_size{S})")
        ),
        Display("Round", Unit.NUMBER, Look.NUMBER, width=3).show(
            "The number of the current round. Each change of the members begins a new round.",
            Query(f"max(torchelastic_round{S})"),
        ),
        Display("Age", Unit.SECONDS, Look.NUMBER, width=3).show(
            "The time since the creation of the job, including suspensions.", Query(f"sum({STATES})")
        ),
        Display("Lost work", Unit.SECONDS, Look.NUMBER, width=4).show(
            "Training that no checkpoint held when its round ended. Empty if the program does not call "
            "torchelastic.checkpoint.",
            Query(f"max({LOST}{S})", needs=Needs.CHECKPOINTS),
        ),
        Display("Restarts", Unit.NUMBER, Look.NUMBER, width=4).show(
            "Restarts of the workers: after a failure, which counts against maxRestarts, or uncharged, after a "
            "change of the members.",
            Query(f"max(torchelastic_job_restarts_total{CHARGED})", "charged"),
            Query(f"max(torchelastic_job_restarts_total{UNCHARGED})", "uncharged"),
        ),
        Display("Remaining restarts", Unit.NUMBER, Look.NUMBER, width=3).show(
            "The worker failures that the run may still have. At 0, the next failure fails the job.",
            Query(f"min(torchelastic_remaining_restarts{S})"),
        ),
    ),
)

_MEMBERS: Final = Row(
    "Members",
    (
        Display("World size", Unit.NUMBER, Look.STEPS, width=12).show(
            "Workers that train together, their nodes, the desired number of nodes, and the minimum for training.",
            Query(f"max(torchelastic_world_size{S})", "workers"),
            Query(f"max(torchelastic_job_nodes{S})", "nodes"),
            Query(f"max(torchelastic_job_desired_nodes{S})", "desired nodes"),
            Query(f"max(torchelastic_job_min_nodes{S})", "minimum nodes"),
        ),
        Display("Round", Unit.NUMBER, Look.STEPS, width=6).show(
            "Each step is a new round. Many steps in a row mean that the members change often.",
            Query(f"max(torchelastic_round{S})", "round"),
        ),
        Display("Nodes joined and departed", Unit.NUMBER, Look.STEPS, width=6).show(
            "Since the creation of the job, including the nodes of the first round. died: the node or its "
            "connection failed; left: the node announced it; not_needed: the job became smaller.",
            Query(f"max(torchelastic_job_nodes_joined_total{S})", "joined"),
            Query(f"max by (cause) (torchelastic_job_nodes_departed_total{S})", "{{cause}}"),
        ),
        Display("Pods", Unit.NUMBER, Look.STEPS, width=12).show(
            "The desired pods, the ready pods, and the minimum for training, as the operator reports them. "
            "Empty for a job on one machine.",
            Query(f"max({OPERATOR_JOB}_desired_pods{S})", "desired", needs=Needs.OPERATOR),
            Query(f"max({OPERATOR_JOB}_ready_pods{S})", "ready", needs=Needs.OPERATOR),
            Query(f"max({OPERATOR_JOB}_min_pods{S})", "minimum", needs=Needs.OPERATOR),
        ),
        Display("Conditions", Unit.NUMBER, Look.TIMELINE, width=12).show(
            "The conditions of the job that are true. `kubectl describe elasticjob` shows their reasons.",
            Query(f"max by (condition) ({OPERATOR_JOB}_condition{S})", "{{condition}}", needs=Needs.OPERATOR),
        ),
    ),
)

_TIME: Final = Row(
    "Where the time went",
    (
        Display("Time by state", Unit.SECONDS, Look.STACK).show(
            "The time since the creation of the job by state: waiting for pods, rendezvous, starting and "
            "stopping processes, restoring from a checkpoint, training, and suspended. If the program does not "
            "call torchelastic.step, restoring counts as training.",
            Query(STATES, "{{state}}"),
        ),
        Display("State over time", Unit.SHARE, Look.STACK).show(
            "The share of each state over time.",
            Query(f"{STATE_RATES} / ignoring (state) group_left () sum({STATE_RATES})", "{{state}}"),
        ),
        Display("Goodput", Unit.SHARE).show(
            "The share of the time since the creation of the job in which it trained without losing the "
            "result; unknown if the program reports no checkpoints. Every state except training lowers it, and so does "
            "lost work.",
            Query(goodput(THIS), "goodput", needs=Needs.CHECKPOINTS),
        ),
        Display("Lost work", Unit.SECONDS, Look.STEPS).show(
            "Training that no checkpoint held when its round ended, in total. If it grows much with each "
            "failure, write checkpoints more often.",
            Query(f"max({LOST}{S})", "lost", needs=Needs.CHECKPOINTS),
        ),
        time_to_recover(THIS),
        Display("Recoveries", Unit.NUMBER, Look.BARS).show(
            "How often the workers of a node started again, by cause, on all nodes in the time shown.",
            Query(f"sum by (cause) (max_over_time({WORKER_RESTART}_count{S}[{SHOWN}]))", "{{cause}}"),
        ),
    ),
)

_STEPS: Final = Row(
    "Steps and checkpoints",
    (
        Display("Step time by rank", Unit.SECONDS).show(
            f"The mean time from one torchelastic.step to the next; the {MOST} slowest ranks. If ranks wait for "
            "each other in each step, all of them are as slow as the slowest.",
            Query(f"topk({MOST}, {STEP_TIMES})", "rank {{rank}}", needs=Needs.STEPS),
        ),
        Display("Stragglers", Unit.TIMES).show(
            "The step time of the slowest rank, divided by the median of all ranks; 1 if all are equal.",
            Query(f"max({STEP_TIMES}) / quantile(0.5, {STEP_TIMES})", "slowest / median", needs=Needs.STEPS),
        ),
        Display("Steps per second", Unit.PER_SECOND).show(
            "The median of the ranks.",
            Query(
                f"quantile(0.5, sum by (rank) (rate({OPERATIONS}_count{selector(THIS, STEPPED)}[{RATE}])))",
                "steps",
                needs=Needs.STEPS,
            ),
        ),
        Display("Writing checkpoints", Unit.SECONDS).show(
            "The mean time that the program spends in torchelastic.checkpoint, by rank, in each interval; the "
            f"{MOST} slowest ranks.",
            Query(f"topk({MOST}, {mean(SAVING, jobs=THIS, by='rank')})", "rank {{rank}}", needs=Needs.CHECKPOINTS),
        ),
        Display("Checkpoints written", Unit.NUMBER, Look.BARS).show(
            "The number of checkpoints by rank, on all nodes in the time shown.",
            Query(
                f"topk({MOST}, sum by (rank) (max_over_time({SAVING}_count{S}[{SHOWN}])))",
                "rank {{rank}}",
                needs=Needs.CHECKPOINTS,
            ),
        ),
        Display("Slowest checkpoints", Unit.SECONDS, Look.BARS).show(
            "The 99th percentile of the time to write a checkpoint, by rank, in the time shown.",
            Query(
                f"topk({MOST}, {quantile_of_all(0.99, SAVING, jobs=THIS, by='rank')})",
                "rank {{rank}}",
                needs=Needs.CHECKPOINTS,
            ),
        ),
    ),
)

_MACHINES: Final = Row(
    "Memory, GPUs, store",
    (
        Display("Memory by rank", Unit.BYTES).show(
            f"The resident memory of each worker; the {MOST} largest. Memory that only grows will reach the "
            "pod's limit.",
            Query(f"topk({MOST}, max by (rank) (torchelastic_worker_memory_bytes{S}))", "rank {{rank}}"),
        ),
        Display("Memory of the agents", Unit.BYTES).show(
            f"The resident memory of the agents' processes; the {MOST} largest.",
            Query(f"topk({MOST}, max by (instance) (process_resident_memory_bytes{S}))", "{{instance}}"),
        ),
        Display("Store", Unit.SECONDS).show(
            "The 95th percentile of the duration of requests to the job's etcd. Training continues without "
            "etcd; changes of the members wait for it.",
            Query(quantile(0.95, STORE, jobs=THIS, by="request"), "{{request}}"),
        ),
        Display("GPU memory", Unit.SHARE).show(
            f"The share of each GPU's memory that is in use; the {MOST} highest. Empty without GPUs.",
            Query(
                f"topk({MOST}, max by (instance, gpu) (torchelastic_gpu_memory_used_bytes{S}"
                f" / torchelastic_gpu_memory_total_bytes{S}))",
                "{{instance}} GPU {{gpu}}",
                needs=Needs.GPU,
            ),
        ),
        Display("GPU utilization", Unit.SHARE).show(
            f"The share of time in which each GPU executed a kernel; the {MOST} lowest. Empty without GPUs.",
            Query(
                f"bottomk({MOST}, max by (instance, gpu) (torchelastic_gpu_utilization_ratio{S}))",
                "{{instance}} GPU {{gpu}}",
                needs=Needs.GPU,
            ),
        ),
    ),
)

_OWN: Final = Row(
    "The program's own metrics",
    (
        Display("$gauge", Unit.NUMBER, repeat="gauge").show(
            f"The value that the program reports, by rank; the {MOST} highest.",
            Query(f"topk({MOST}, max by (rank) ({_named('$gauge')}))", "rank {{rank}}", needs=Needs.OWN_METRICS),
        ),
        Display("$counter, per second", Unit.PER_SECOND, repeat="counter").show(
            f"The increase per second, by rank; the {MOST} highest.",
            Query(
                f"topk({MOST}, sum by (rank) (rate({_named('$counter')}[{RATE}])))",
                "rank {{rank}}",
                needs=Needs.OWN_METRICS,
            ),
        ),
        Display("$histogram", Unit.NUMBER, repeat="histogram").show(
            f"The mean of the values in each interval, by rank; the {MOST} highest.",
            Query(
                f"topk({MOST}, sum by (rank) (rate({_named('${histogram}_sum')}[{RATE}]))"
                f" / (sum by (rank) (rate({_named('${histogram}_count')}[{RATE}])) > 0))",
                "rank {{rank}}",
                needs=Needs.OWN_METRICS,
            ),
        ),
    ),
)

_NAMES: Final = f"label_values({_OWN_NAMES}, __name__)"
JOB_DASHBOARD: Final = Dashboard(
    uid="elasticjob",
    title="ElasticJob",
    about="One elastic job: its members, where the time went, its steps and checkpoints, and the metrics of its "
    "program.",
    variables=(
        Variable(
            name="job_namespace",
            label="Namespace",
            about="The job's namespace.",
            values="label_values(torchelastic_round, job_namespace)",
        ),
        Variable(
            name="elasticjob",
            label="Job",
            about="The job's name.",
            values='label_values(torchelastic_round{job_namespace="$job_namespace"}, elasticjob)',
        ),
        Variable(
            name="group",
            label="Group of own metrics",
            about="The group of the program's own metrics to show, such as my_app.",
        ),
        Variable(
            name="gauge",
            label="Gauges",
            about="The program's own gauges.",
            values=_NAMES,
            # Counters and the parts of histograms end in one of these.
            regex="/^(?!.*_(?:total|created|bucket|sum|count)$)(.*)$/",
            many=True,
        ),
        Variable(
            name="counter", label="Counters", about="Its counters.", values=_NAMES, regex="/^(.*_total)$/", many=True
        ),
        Variable(
            name="histogram",
            label="Histograms",
            about="Its histograms.",
            values=_NAMES,
            regex="/^(.*)_bucket$/",
            many=True,
        ),
    ),
    marks=MARKS,
    rows=(_AT_A_GLANCE, _MEMBERS, _TIME, _STEPS, _MACHINES, _OWN),
)
