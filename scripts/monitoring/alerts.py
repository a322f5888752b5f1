"""What somebody is told of at once. Each alert has a page in docs/runbooks that says how to look and what to do."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from scripts.monitoring.promql import JOB, TRAINING, WALL, grown, total

RUNBOOKS: Final = "docs/runbooks"
"""Where the pages are; the chart puts an address of yours in its place."""
OPERATOR_JOB: Final = "elastic_operator_job"
WORKER_FAILED: Final = 'restarts_total{cause="worker_failed"}'
POD_FAILED: Final = 'restarts_total{cause="pod_failed"}'
WHICH: Final = "{{ $labels.job_namespace }}/{{ $labels.elasticjob }}"


class Severity(enum.StrEnum):
    """How soon somebody has to look."""

    CRITICAL = "critical"
    """Now."""
    WARNING = "warning"
    """Today."""
    INFO = "info"
    """When there is time."""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert.

    Attributes:
        name: its name, and that of its page.
        expr: answers with what it is about.
        lasting: for so long it must have answered.
        severity: how soon somebody has to look.
        summary: what is wrong, in one line.
        about: what it means, in sentences; labels and value are filled in by Prometheus.
    """

    name: str
    expr: str
    lasting: str
    severity: Severity
    summary: str
    about: str


def _holds(*conditions: str) -> str:
    """The jobs of which one of these conditions holds."""
    return f'max by ({JOB}) ({OPERATOR_JOB}_condition{{condition=~"{"|".join(conditions)}"}}) == 1'


def _of_jobs(series: str) -> str:
    return f"max by ({JOB}) ({OPERATOR_JOB}_{series})"


def _nearly(budget: str, spent: str, field: str) -> str:
    """The jobs that have spent something of a budget and have a fifth of it left at most, or one."""
    left = f"{_of_jobs(budget)} - {_of_jobs(spent)} <= clamp_min(0.2 * {_of_jobs(budget)}, 1) and {_of_jobs(spent)} > 0"
    return f'label_replace({left}, "budget", "{field}", "", "")'


def _restarted(which: str) -> str:
    """How often each job was started anew in 15 minutes, for one of these causes."""
    restarts = grown(f"{OPERATOR_JOB}_restarts_total", jobs=which, by=f"{JOB}, cause", window="15m", step="1m")
    return f"sum by ({JOB}) ({restarts})"


_FAILURES: Final = _restarted('cause!="free"')
_FREE: Final = _restarted('cause="free"')
_STEPS: Final = 'torchelastic_operation_duration_seconds_count{operation="train_step"}'
_STEPPING: Final = 'torchelastic_operation_duration_seconds_sum{operation="train_step"}'
_IDLE: Final = f"{total(WALL, TRAINING, over='10m')} - min by ({JOB}) (min_over_time({WALL}{{{TRAINING}}}[10m])) < 60"
# In a run's first round the counter of training stands still for as long as restoring took.
_MAKES_STEPS: Final = f"max by ({JOB}) (increase({_STEPPING}[10m])) >= 60"

_LOOKS: Final = "elastic_operator_reconciles_total"
_DONE: Final = f'{_LOOKS}{{result="success"}}'
_FAILED: Final = f'sum(rate({_LOOKS}{{result!="success"}}[15m]))'
_ELASTICJOBS: Final = "max(elastic_operator_elasticjobs)"

JOBS: Final = (
    Alert(
        name="ElasticJobBelowMinimum",
        expr=f"({_of_jobs('ready_pods')} < {_of_jobs('min_pods')} and on ({JOB}) {_of_jobs('desired_pods')} > 0)"
        f" unless on ({JOB}) ({_holds('Suspended', 'Finished', 'Invalid')})",
        lasting="10m",
        severity=Severity.WARNING,
        summary=f"ElasticJob {WHICH} has fewer pods than it needs to train.",
        about=f"{WHICH} has had {{{{ $value }}}} ready pods for 10 minutes, fewer than its minReplicas, and does not "
        "train.",
    ),
    Alert(
        name="ElasticJobRestartStorm",
        expr=f"{_FAILURES} >= 5 or {_FREE} >= 20",
        lasting="0m",
        severity=Severity.WARNING,
        summary=f"ElasticJob {WHICH} is started anew again and again.",
        about=f"The workers or pods of {WHICH} were started anew {{{{ $value | humanize }}}} times in 15 minutes. "
        "Each time it loses what it trained since its last checkpoint.",
    ),
    Alert(
        name="ElasticJobNotTraining",
        expr=f"{_IDLE} unless on ({JOB}) ({_holds('Suspended', 'Finished')}) unless on ({JOB}) {_MAKES_STEPS}",
        lasting="20m",
        severity=Severity.WARNING,
        summary=f"ElasticJob {WHICH} has its pods and hardly trains.",
        about=f"In each stretch of 10 minutes of the last half hour, agents of {WHICH} were there, and it trained "
        "for less than a minute ({{ $value | humanizeDuration }} in the last one).",
    ),
    Alert(
        name="ElasticJobNoSteps",
        expr=f"sum by ({JOB}) (increase({_STEPS}[5m])) == 0"
        f" and on ({JOB}) max by ({JOB}) (torchelastic_world_size) > 0",
        lasting="25m",
        severity=Severity.WARNING,
        summary=f"No worker of ElasticJob {WHICH} has made a step for half an hour.",
        about=f"The workers of {WHICH} run, and none of them has called torchelastic.step for half an hour: it "
        "hangs, or does something between two steps that takes long.",
    ),
    Alert(
        name="ElasticJobBudgetNearlySpent",
        expr=f"({_nearly('max_restarts', WORKER_FAILED, 'maxRestarts')}"
        f" or {_nearly('backoff_limit', POD_FAILED, 'backoffLimit')}) unless on ({JOB}) ({_holds('Finished')})",
        lasting="0m",
        severity=Severity.WARNING,
        summary=f"ElasticJob {WHICH} will fail for good after few more failures.",
        about=f"Of spec.{{{{ $labels.budget }}}}, {WHICH} has {{{{ $value }}}} left; it fails for good when there is "
        "nothing left and another one fails.",
    ),
    Alert(
        name="ElasticJobStoreUnreachable",
        expr=_holds("StoreUnreachable"),
        lasting="10m",
        severity=Severity.WARNING,
        summary=f"The operator cannot use the etcd of ElasticJob {WHICH}.",
        about=f"The operator has not reached the etcd of {WHICH} for 10 minutes. What trains goes on; a change of "
        "size, and what the operator knows of the run, wait.",
    ),
    Alert(
        name="ElasticJobNotScraped",
        expr=f"{_holds('Running')} unless on ({JOB}) max by ({JOB}) (torchelastic_round)",
        lasting="15m",
        severity=Severity.INFO,
        summary=f"Prometheus sees no agent of ElasticJob {WHICH}.",
        about=f"{WHICH} trains, and Prometheus has no metrics of its agents: its page is empty, and the alerts that "
        "need them cannot fire.",
    ),
)

OPERATOR: Final = (
    Alert(
        name="ElasticOperatorDown",
        expr="absent(elastic_operator_queue_depth) or max(elastic_operator_leader) == 0",
        lasting="5m",
        severity=Severity.CRITICAL,
        summary="No operator looks after the ElasticJobs.",
        about="For 5 minutes no copy of the operator was there, or none acted: it could not list what there is, or "
        "not get the Lease. What trains goes on and recovers by itself; pods that end are not replaced, and new jobs "
        "do not start.",
    ),
    Alert(
        name="ElasticOperatorNotReconciling",
        # What fails is looked at each minute, and an idle job each five: one bad job makes most looks of a few fail.
        expr=f"(sum(increase({_LOOKS}[15m])) == 0 and on () {_ELASTICJOBS} > 0)"
        f" or (sum(increase({_DONE}[15m])) == 0 and on () {_ELASTICJOBS} > 1)"
        f" or ({_FAILED} / sum(rate({_LOOKS}[15m])) > 0.5"
        f" and on () {_FAILED} * 60 > 0.7 * {_ELASTICJOBS} and on () {_ELASTICJOBS} > 1)",
        lasting="5m",
        severity=Severity.CRITICAL,
        summary="The operator of the ElasticJobs is there and does not get its work done.",
        about="In 15 minutes no look at a job was brought to its end, though each job is looked at every 5 minutes; "
        "or most looks failed, and so many that it is not one job alone. Pods that end may not be replaced.",
    ),
)

GROUPS: Final = {"elasticjobs": JOBS, "elastic-operator": OPERATOR}
"""All alerts, by the name of their group."""
