"""The dashboard of one job."""

from __future__ import annotations

from typing import Final

from scripts.monitoring.page import Look, Mark, Needs, Page, Panel, Query, Row, Unit, Variable
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

THIS: Final = 'job_namespace="$job_namespace", elasticjob="$elasticjob"'
S: Final = selector(THIS)
CHARGED: Final = selector(THIS, 'charged="yes"')
FREE: Final = selector(THIS, 'charged="no"')
STEPPED: Final = 'operation="train_step"'
STATES: Final = f"max by (state) ({WALL}{S})"
STATE_RATES: Final = f"max by (state) (rate({WALL}{S}[{RATE}]))"
OPERATIONS: Final = "torchelastic_operation_duration_seconds"
STEP_TIMES: Final = mean(OPERATIONS, jobs=THIS, by="rank", only=STEPPED)
SAVING: Final = "torchelastic_checkpoint_write_latency_seconds"
RECOVERY: Final = "torchelastic_recovery_duration_seconds"
WORKER_RESTART: Final = "torchelastic_worker_restart_duration_seconds"
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
    return Query(expr=f"max({series}{found}) > max({series}{found} offset {MOMENT})")


MARKS: Final = (
    Mark(name="Worker failed", query=_went_up("torchelastic_job_restarts_total", CHARGED), color="red"),
    Mark(name="New round", query=_went_up("torchelastic_round", S), color="blue"),
    Mark(
        name="Desired size changed",
        query=Query(
            expr=f"max(torchelastic_job_desired_nodes{S}) != max(torchelastic_job_desired_nodes{S} offset {MOMENT})"
        ),
        color="purple",
    ),
)

_AT_A_GLANCE: Final = Row(
    title="At a glance",
    panels=(
        Panel(
            title="Goodput",
            about="The share of the time since the creation of the job in which it trained without losing the "
            "result; unknown if the program reports no checkpoints. Where the time went shows the rest.",
            unit=Unit.SHARE,
            look=Look.NUMBER,
            width=4,
            decimals=1,
            good=0.9,
            queries=(Query(expr=goodput(THIS), needs=Needs.CHECKPOINTS),),
        ),
        Panel(
            title="Workers",
            about="Workers that train together; 0 while there are too few nodes.",
            unit=Unit.NUMBER,
            look=Look.NUMBER,
            width=3,
            queries=(Query(expr=f"max(torchelastic_world_size{S})"),),
        ),
        Panel(
            title="Round",
            about="The number of the current round. Each change of the members begins a new round.",
            unit=Unit.NUMBER,
            look=Look.NUMBER,
            width=3,
            queries=(Query(expr=f"max(torchelastic_round{S})"),),
        ),
        Panel(
            title="Age",
            about="The time since the creation of the job, including suspensions.",
            unit=Unit.SECONDS,
            look=Look.NUMBER,
            width=3,
            queries=(Query(expr=f"sum({STATES})"),),
        ),
        Panel(
            title="Lost work",
            about="Training that no checkpoint held when its round ended. Empty if the program does not call "
            "torchelastic.checkpoint.",
            unit=Unit.SECONDS,
            look=Look.NUMBER,
            width=4,
            queries=(Query(expr=f"max({LOST}{S})", needs=Needs.CHECKPOINTS),),
        ),
        Panel(
            title="Restarts",
            about="Restarts of the workers: after a failure, which counts against maxRestarts, or free, after a "
            "change of the members.",
            unit=Unit.NUMBER,
            look=Look.NUMBER,
            width=4,
            queries=(
                Query(expr=f"max(torchelastic_job_restarts_total{CHARGED})", legend="charged"),
                Query(expr=f"max(torchelastic_job_restarts_total{FREE})", legend="free"),
            ),
        ),
        Panel(
            title="Remaining restarts",
            about="The worker failures that the run may still have. At 0, the next failure fails the job.",
            unit=Unit.NUMBER,
            look=Look.NUMBER,
            width=3,
            queries=(Query(expr=f"min(torchelastic_remaining_restarts{S})"),),
        ),
    ),
)

_MEMBERS: Final = Row(
    title="Members",
    panels=(
        Panel(
            title="World size",
            about="Workers that train together, their nodes, the desired number of nodes, and the minimum for "
            "training.",
            unit=Unit.NUMBER,
            look=Look.STEPS,
            width=12,
            queries=(
                Query(expr=f"max(torchelastic_world_size{S})", legend="workers"),
                Query(expr=f"max(torchelastic_job_nodes{S})", legend="nodes"),
                Query(expr=f"max(torchelastic_job_desired_nodes{S})", legend="desired nodes"),
                Query(expr=f"max(torchelastic_job_min_nodes{S})", legend="minimum nodes"),
            ),
        ),
        Panel(
            title="Round",
            about="Each step is a new round. Many steps in a row mean that the members change often.",
            unit=Unit.NUMBER,
            look=Look.STEPS,
            width=6,
            queries=(Query(expr=f"max(torchelastic_round{S})", legend="round"),),
        ),
        Panel(
            title="Nodes joined and gone",
            about="Since the creation of the job, including the nodes of the first round. died: the node or its "
            "connection failed; left: the node announced it; not_needed: the job became smaller.",
            unit=Unit.NUMBER,
            look=Look.STEPS,
            width=6,
            queries=(
                Query(expr=f"max(torchelastic_job_nodes_joined_total{S})", legend="joined"),
                Query(expr=f"max by (cause) (torchelastic_job_nodes_gone_total{S})", legend="{{cause}}"),
            ),
        ),
        Panel(
            title="Pods",
            about="The desired pods, the ready pods, and the minimum for training, as the operator reports them. "
            "Empty for a job on one machine.",
            unit=Unit.NUMBER,
            look=Look.STEPS,
            width=12,
            queries=(
                Query(expr=f"max({OPERATOR_JOB}_desired_pods{S})", legend="desired", needs=Needs.OPERATOR),
                Query(expr=f"max({OPERATOR_JOB}_ready_pods{S})", legend="ready", needs=Needs.OPERATOR),
                Query(expr=f"max({OPERATOR_JOB}_min_pods{S})", legend="minimum", needs=Needs.OPERATOR),
            ),
        ),
        Panel(
            title="Conditions",
            about="The conditions of the job that are true. `kubectl describe elasticjob` shows their reasons.",
            unit=Unit.NUMBER,
            look=Look.TIMELINE,
            width=12,
            queries=(
                Query(
                    expr=f"max by (condition) ({OPERATOR_JOB}_condition{S})",
                    legend="{{condition}}",
                    needs=Needs.OPERATOR,
                ),
            ),
        ),
    ),
)

_TIME: Final = Row(
    title="Where the time went",
    panels=(
        Panel(
            title="Time by state",
            about="The time since the creation of the job by state: waiting for pods, rendezvous, starting and "
            "stopping processes, restoring from a checkpoint, training, and suspended. If the program does not "
            "call torchelastic.step, restoring counts as training.",
            unit=Unit.SECONDS,
            look=Look.STACK,
            queries=(Query(expr=STATES, legend="{{state}}"),),
        ),
        Panel(
            title="State over time",
            about="The share of each state over time.",
            unit=Unit.SHARE,
            look=Look.STACK,
            queries=(
                Query(expr=f"{STATE_RATES} / ignoring (state) group_left () sum({STATE_RATES})", legend="{{state}}"),
            ),
        ),
        Panel(
            title="Goodput",
            about="The share of the time since the creation of the job in which it trained without losing the "
            "result; unknown if the program reports no checkpoints. Every state except training lowers it, and so does "
            "lost work.",
            unit=Unit.SHARE,
            queries=(Query(expr=goodput(THIS), legend="goodput", needs=Needs.CHECKPOINTS),),
        ),
        Panel(
            title="Lost work",
            about="Training that no checkpoint held when its round ended, in total. If it grows much with each "
            "failure, write checkpoints more often.",
            unit=Unit.SECONDS,
            look=Look.STEPS,
            queries=(Query(expr=f"max({LOST}{S})", legend="lost", needs=Needs.CHECKPOINTS),),
        ),
        Panel(
            title="Time to recover",
            about="The time from a failure or change until the first training step of a node's new workers, by cause: "
            "the median and the 95th percentile of all nodes in the time shown. The agents' share ends when the "
            "workers have started.",
            unit=Unit.SECONDS,
            look=Look.BARS,
            queries=(
                Query(expr=quantile_of_all(0.5, RECOVERY, jobs=THIS, by="cause"), legend="{{cause}}, median"),
                Query(expr=quantile_of_all(0.95, RECOVERY, jobs=THIS, by="cause"), legend="{{cause}}, 95 %"),
                Query(
                    expr=quantile_of_all(0.5, WORKER_RESTART, jobs=THIS, by="cause"),
                    legend="{{cause}}, agents' share, median",
                ),
            ),
        ),
        Panel(
            title="Recoveries",
            about="How often the workers of a node started again, by cause, on all nodes in the time shown.",
            unit=Unit.NUMBER,
            look=Look.BARS,
            queries=(
                Query(
                    expr=f"sum by (cause) (max_over_time({WORKER_RESTART}_count{S}[{SHOWN}]))",
                    legend="{{cause}}",
                ),
            ),
        ),
    ),
)

_STEPS: Final = Row(
    title="Steps and checkpoints",
    panels=(
        Panel(
            title="Step time by rank",
            about=f"The mean time from one torchelastic.step to the next; the {MOST} slowest ranks. If ranks wait for "
            "each other in each step, all of them are as slow as the slowest.",
            unit=Unit.SECONDS,
            queries=(Query(expr=f"topk({MOST}, {STEP_TIMES})", legend="rank {{rank}}", needs=Needs.STEPS),),
        ),
        Panel(
            title="Stragglers",
            about="The step time of the slowest rank, divided by the median of all ranks; 1 if all are equal.",
            unit=Unit.TIMES,
            queries=(
                Query(
                    expr=f"max({STEP_TIMES}) / quantile(0.5, {STEP_TIMES})",
                    legend="slowest / median",
                    needs=Needs.STEPS,
                ),
            ),
        ),
        Panel(
            title="Steps per second",
            about="The median of the ranks.",
            unit=Unit.PER_SECOND,
            queries=(
                Query(
                    expr=f"quantile(0.5, sum by (rank) (rate({OPERATIONS}_count{selector(THIS, STEPPED)}[{RATE}])))",
                    legend="steps",
                    needs=Needs.STEPS,
                ),
            ),
        ),
        Panel(
            title="Writing checkpoints",
            about="The mean time that the program spends in torchelastic.checkpoint, by rank, in each interval; the "
            f"{MOST} slowest ranks.",
            unit=Unit.SECONDS,
            queries=(
                Query(
                    expr=f"topk({MOST}, {mean(SAVING, jobs=THIS, by='rank')})",
                    legend="rank {{rank}}",
                    needs=Needs.CHECKPOINTS,
                ),
            ),
        ),
        Panel(
            title="Checkpoints written",
            about="The number of checkpoints by rank, on all nodes in the time shown.",
            unit=Unit.NUMBER,
            look=Look.BARS,
            queries=(
                Query(
                    expr=f"topk({MOST}, sum by (rank) (max_over_time({SAVING}_count{S}[{SHOWN}])))",
                    legend="rank {{rank}}",
                    needs=Needs.CHECKPOINTS,
                ),
            ),
        ),
        Panel(
            title="Slowest checkpoints",
            about="The 99th percentile of the time to write a checkpoint, by rank, in the time shown.",
            unit=Unit.SECONDS,
            look=Look.BARS,
            queries=(
                Query(
                    expr=f"topk({MOST}, {quantile_of_all(0.99, SAVING, jobs=THIS, by='rank')})",
                    legend="rank {{rank}}",
                    needs=Needs.CHECKPOINTS,
                ),
            ),
        ),
    ),
)

_MACHINES: Final = Row(
    title="Memory, GPUs, store",
    panels=(
        Panel(
            title="Memory by rank",
            about=f"The resident memory of each worker; the {MOST} largest. Memory that only grows will reach the "
            "pod's limit.",
            unit=Unit.BYTES,
            queries=(
                Query(
                    expr=f"topk({MOST}, max by (rank) (torchelastic_worker_memory_bytes{S}))", legend="rank {{rank}}"
                ),
            ),
        ),
        Panel(
            title="Memory of the agents",
            about=f"The resident memory of the agents' processes; the {MOST} largest.",
            unit=Unit.BYTES,
            queries=(
                Query(
                    expr=f"topk({MOST}, max by (instance) (process_resident_memory_bytes{S}))", legend="{{instance}}"
                ),
            ),
        ),
        Panel(
            title="Store",
            about="The 95th percentile of the duration of requests to the job's etcd. Training continues without "
            "etcd; changes of the members wait for it.",
            unit=Unit.SECONDS,
            queries=(Query(expr=quantile(0.95, STORE, jobs=THIS, by="request"), legend="{{request}}"),),
        ),
        Panel(
            title="GPU memory",
            about=f"The share of each GPU's memory that is in use; the {MOST} highest. Empty without GPUs.",
            unit=Unit.SHARE,
            queries=(
                Query(
                    expr=f"topk({MOST}, max by (instance, gpu) (torchelastic_gpu_memory_used_bytes{S}"
                    f" / torchelastic_gpu_memory_total_bytes{S}))",
                    legend="{{instance}} GPU {{gpu}}",
                    needs=Needs.GPU,
                ),
            ),
        ),
        Panel(
            title="GPU utilization",
            about=f"The share of time in which each GPU executed a kernel; the {MOST} lowest. Empty without GPUs.",
            unit=Unit.SHARE,
            queries=(
                Query(
                    expr=f"bottomk({MOST}, max by (instance, gpu) (torchelastic_gpu_utilization_ratio{S}))",
                    legend="{{instance}} GPU {{gpu}}",
                    needs=Needs.GPU,
                ),
            ),
        ),
    ),
)

_OWN: Final = Row(
    title="The program's own metrics",
    panels=(
        Panel(
            title="$gauge",
            about=f"The value that the program reports, by rank; the {MOST} highest.",
            unit=Unit.NUMBER,
            repeat="gauge",
            queries=(
                Query(
                    expr=f"topk({MOST}, max by (rank) ({_named('$gauge')}))",
                    legend="rank {{rank}}",
                    needs=Needs.OWN_METRICS,
                ),
            ),
        ),
        Panel(
            title="$counter, per second",
            about=f"The increase per second, by rank; the {MOST} highest.",
            unit=Unit.PER_SECOND,
            repeat="counter",
            queries=(
                Query(
                    expr=f"topk({MOST}, sum by (rank) (rate({_named('$counter')}[{RATE}])))",
                    legend="rank {{rank}}",
                    needs=Needs.OWN_METRICS,
                ),
            ),
        ),
        Panel(
            title="$histogram",
            about=f"The mean of the values in each interval, by rank; the {MOST} highest.",
            unit=Unit.NUMBER,
            repeat="histogram",
            queries=(
                Query(
                    expr=f"topk({MOST}, sum by (rank) (rate({_named('${histogram}_sum')}[{RATE}]))"
                    f" / (sum by (rank) (rate({_named('${histogram}_count')}[{RATE}])) > 0))",
                    legend="rank {{rank}}",
                    needs=Needs.OWN_METRICS,
                ),
            ),
        ),
    ),
)

_NAMES: Final = f"label_values({_OWN_NAMES}, __name__)"
JOB_PAGE: Final = Page(
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
