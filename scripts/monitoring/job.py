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
    Mark(name="Worker failed", query=_went_up("torchelastic_job_restarts_total", CHARGED), colour="red"),
    Mark(name="New round", query=_went_up("torchelastic_round", S), colour="blue"),
    Mark(
        name="Another size is wanted",
        query=Query(
            expr=f"max(torchelastic_job_wanted_nodes{S}) != max(torchelastic_job_wanted_nodes{S} offset {MOMENT})"
        ),
        colour="purple",
    ),
)

_AT_A_GLANCE: Final = Row(
    title="At a glance",
    panels=(
        Panel(
            title="Goodput",
            about="Share of the time since the job was made in which it trained and kept what it trained. The rest is "
            "under Where the time went.",
            unit=Unit.SHARE,
            look=Look.NUMBER,
            width=4,
            decimals=1,
            good=0.9,
            queries=(Query(expr=goodput(THIS)),),
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
            about="Training that no checkpoint held when it ended. Empty for a program that tells of no checkpoints: "
            "see torchelastic.checkpoint.",
            unit=Unit.SECONDS,
            look=Look.NUMBER,
            width=4,
            queries=(Query(expr=f"max({LOST}{S})", needs=Needs.CHECKPOINTS),),
        ),
        Panel(
            title="Restarts",
            about="Times that the workers were started anew: after a failure, which is charged to the job's budget, "
            "and for free, for a change of membership.",
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
            about="The remaining worker failures of the run. At 0, the next failure fails the job.",
            unit=Unit.NUMBER,
            look=Look.NUMBER,
            width=3,
            queries=(Query(expr=f"min(torchelastic_remaining_restarts{S})"),),
        ),
    ),
)

_MEMBERS: Final = Row(
    title="Who trains",
    panels=(
        Panel(
            title="World size",
            about="Workers that train together, and the nodes they are on, beside how many nodes are wanted and the "
            "least with which the job trains.",
            unit=Unit.NUMBER,
            look=Look.STEPS,
            width=12,
            queries=(
                Query(expr=f"max(torchelastic_world_size{S})", legend="workers"),
                Query(expr=f"max(torchelastic_job_nodes{S})", legend="nodes"),
                Query(expr=f"max(torchelastic_job_wanted_nodes{S})", legend="nodes wanted"),
                Query(expr=f"max(torchelastic_job_min_nodes{S})", legend="fewest nodes"),
            ),
        ),
        Panel(
            title="Round",
            about="Each step is a new round. Many steps in a row mean that the members change again and again.",
            unit=Unit.NUMBER,
            look=Look.STEPS,
            width=6,
            queries=(Query(expr=f"max(torchelastic_round{S})", legend="round"),),
        ),
        Panel(
            title="Nodes that came and went",
            about="Since the job was made; those of the first round came, too. Died: the node or its connection broke; "
            "left: it said so before; not needed: the job was made smaller.",
            unit=Unit.NUMBER,
            look=Look.STEPS,
            width=6,
            queries=(
                Query(expr=f"max(torchelastic_job_nodes_joined_total{S})", legend="came"),
                Query(expr=f"max by (cause) (torchelastic_job_nodes_gone_total{S})", legend="{{cause}}"),
            ),
        ),
        Panel(
            title="Pods",
            about="As the operator sees them: how many there should be, how many are ready, and the fewest with which "
            "the job trains. Empty for a job on one machine.",
            unit=Unit.NUMBER,
            look=Look.STEPS,
            width=12,
            queries=(
                Query(expr=f"max({OPERATOR_JOB}_desired_pods{S})", legend="desired", needs=Needs.OPERATOR),
                Query(expr=f"max({OPERATOR_JOB}_ready_pods{S})", legend="ready", needs=Needs.OPERATOR),
                Query(expr=f"max({OPERATOR_JOB}_min_pods{S})", legend="fewest", needs=Needs.OPERATOR),
            ),
        ),
        Panel(
            title="Conditions",
            about="What holds of the job, as the operator says. `kubectl describe elasticjob` has the reasons, in "
            "sentences.",
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
            about="The time since the job was made, cut into what it did: waiting for pods, agreeing (rendezvous), "
            "starting and stopping processes, restoring from a checkpoint, training, and being suspended. Restoring is "
            "told apart from training only where the program calls torchelastic.step.",
            unit=Unit.SECONDS,
            look=Look.STACK,
            queries=(Query(expr=STATES, legend="{{state}}"),),
        ),
        Panel(
            title="What it did",
            about="The same over time: the share of each state.",
            unit=Unit.SHARE,
            look=Look.STACK,
            queries=(
                Query(expr=f"{STATE_RATES} / ignoring (state) group_left () sum({STATE_RATES})", legend="{{state}}"),
            ),
        ),
        Panel(
            title="Goodput",
            about="Share of the time since the job was made in which it trained and kept what it trained. It falls "
            "with all that What it did shows beside training, and with lost work.",
            unit=Unit.SHARE,
            queries=(Query(expr=goodput(THIS), legend="goodput"),),
        ),
        Panel(
            title="Lost work",
            about="Training that no checkpoint held when it ended, added up. Where it grows much with each failure, "
            "write checkpoints more often.",
            unit=Unit.SECONDS,
            look=Look.STEPS,
            queries=(Query(expr=f"max({LOST}{S})", legend="lost", needs=Needs.CHECKPOINTS),),
        ),
        Panel(
            title="Time to recover",
            about="From a failure or change until the workers of a node were started again, by what had happened: of "
            "all nodes that were there in the time shown, the median and the slowest of twenty.",
            unit=Unit.SECONDS,
            look=Look.BARS,
            queries=(
                Query(expr=quantile_of_all(0.5, RECOVERY, jobs=THIS, by="cause"), legend="{{cause}}, median"),
                Query(expr=quantile_of_all(0.95, RECOVERY, jobs=THIS, by="cause"), legend="{{cause}}, slowest"),
            ),
        ),
        Panel(
            title="Recoveries",
            about="How often a node's workers were started again, by what had happened, on all nodes that were there "
            "in the time shown.",
            unit=Unit.NUMBER,
            look=Look.BARS,
            queries=(
                Query(
                    expr=f"sum by (cause) (max_over_time({RECOVERY}_count{S}[{SHOWN}]))",
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
            about=f"Mean time from one torchelastic.step to the next; the {MOST} slowest ranks. Where ranks wait for "
            "each other in each step, all are as slow as the slowest.",
            unit=Unit.SECONDS,
            queries=(Query(expr=f"topk({MOST}, {STEP_TIMES})", legend="rank {{rank}}", needs=Needs.STEPS),),
        ),
        Panel(
            title="Stragglers",
            about="How long the slowest rank takes for a step, in steps of the rank in the middle: 1 where all are "
            "alike.",
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
            about="How long the program is in torchelastic.checkpoint, by rank: the mean of those that ended in each "
            f"stretch; the {MOST} slowest ranks.",
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
            about="By the ranks that wrote any, on all nodes that were there in the time shown.",
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
            about="Of a hundred, the one that took longest, by rank, in the time shown.",
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
            about=f"Resident memory of each worker; the {MOST} largest. One that only grows will meet the pod's limit.",
            unit=Unit.BYTES,
            queries=(
                Query(
                    expr=f"topk({MOST}, max by (rank) (torchelastic_worker_memory_bytes{S}))", legend="rank {{rank}}"
                ),
            ),
        ),
        Panel(
            title="Memory of the agents",
            about=f"Resident memory of the agents' own processes; the {MOST} largest.",
            unit=Unit.BYTES,
            queries=(
                Query(
                    expr=f"topk({MOST}, max by (instance) (process_resident_memory_bytes{S}))", legend="{{instance}}"
                ),
            ),
        ),
        Panel(
            title="Store",
            about="How long requests to the job's etcd take, of twenty the slowest. Training goes on without it; "
            "changes of membership wait for it.",
            unit=Unit.SECONDS,
            queries=(Query(expr=quantile(0.95, STORE, jobs=THIS, by="request"), legend="{{request}}"),),
        ),
        Panel(
            title="Memory of GPUs",
            about=f"Share of each GPU's memory that is in use; the {MOST} fullest. Empty where there is no GPU.",
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
            title="Work of GPUs",
            about=f"Share of time in which each GPU had something to do; the {MOST} idlest. Empty where there is none.",
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
            about=f"As the program measures it, by rank; the {MOST} highest.",
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
            about=f"How fast it grows, by rank; the {MOST} fastest.",
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
            about=f"The mean of what was measured in each stretch, by rank; the {MOST} highest.",
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
    about="One elastic job: who trains, where the time went, how its steps go, and what its program measures.",
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
            about="How the names of the program's own metrics begin that are to be shown: a group, such as my_app.",
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
