"""The alerts. A page in docs/runbooks describes the diagnosis and the remedy of each alert."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from scripts.monitoring.promql import JOB, TRAINING, WALL, grown, total

RUNBOOKS: Final = "docs/runbooks"
"""The folder of the runbooks' pages; a value of the chart replaces it."""
OPERATOR_JOB: Final = "elastic_operator_job"
WORKER_FAILED: Final = 'restarts_total{cause="worker_failed"}'
POD_FAILED: Final = 'restarts_total{cause="pod_failed"}'
WHICH: Final = "{{ $labels.job_namespace }}/{{ $labels.elasticjob }}"


class Severity(enum.StrEnum):
    """The urgency of an alert."""

    CRITICAL = "critical"
    """The alert needs action now."""
    WARNING = "warning"
    """The alert needs action today."""
    INFO = "info"
    """The alert needs no urgent action."""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert.

    Attributes:
        name: the name of the alert and of its page.
        expr: the query; each of its results is one alert.
        lasting: the time for which a result must exist before the alert fires.
        severity: the urgency.
        summary: the problem in one line.
        about: the meaning, in sentences; Prometheus inserts the labels and the value.
    """

    name: str
    expr: str
    lasting: str
    severity: Severity
    summary: str
    about: str


def _holds(*conditions: str) -> str:
    """Return the query for the jobs with one of these conditions."""
    return f'max by ({JOB}) ({OPERATOR_JOB}_condition{{condition=~"{"|".join(conditions)}"}}) == 1'


def _of_jobs(series: str) -> str:
    return f"max by ({JOB}) ({OPERATOR_JOB}_{series})"


def _nearly(budget: str, spent: str, field: str) -> str:
    """Return the query for the jobs that have used part of a budget and have at most a fifth of it, or 1, left."""
    left = f"{_of_jobs(budget)} - {_of_jobs(spent)} <= clamp_min(0.2 * {_of_jobs(budget)}, 1) and {_of_jobs(spent)} > 0"
    return f'label_replace({left}, "budget", "{field}", "", "")'


def _restarted(which: str) -> str:
    """Return the query for the number of restarts of each job in 15 minutes, by causes that a matcher selects."""
    restarts = grown(f"{OPERATOR_JOB}_restarts_total", jobs=which, by=f"{JOB}, cause", window="15m", step="1m")
    return f"sum by ({JOB}) ({restarts})"


_FAILURES: Final = _restarted('cause!="uncharged"')
_UNCHARGED: Final = _restarted('cause="uncharged"')
_STEPS: Final = 'torchelastic_operation_duration_seconds_count{operation="train_step"}'
_STEPPING: Final = 'torchelastic_operation_duration_seconds_sum{operation="train_step"}'
_IDLE: Final = f"{total(WALL, TRAINING, over='10m')} - min by ({JOB}) (min_over_time({WALL}{{{TRAINING}}}[10m])) < 60"
# In the first round of a run, the training counter does not increase while the program restores its state.
_MAKES_STEPS: Final = f"max by ({JOB}) (increase({_STEPPING}[10m])) >= 60"

_RECONCILES: Final = "elastic_operator_reconciles_total"
_DONE: Final = f'{_RECONCILES}{{result="success"}}'
_FAILED: Final = f'sum(rate({_RECONCILES}{{result!="success"}}[15m]))'
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
        expr=f"{_FAILURES} >= 5 or {_UNCHARGED} >= 20",
        lasting="0m",
        severity=Severity.WARNING,
        summary=f"ElasticJob {WHICH} restarts again and again.",
        about=f"The workers or pods of {WHICH} restarted {{{{ $value | humanize }}}} times in 15 minutes. "
        "Each restart loses the training since the last checkpoint.",
    ),
    Alert(
        name="ElasticJobNotTraining",
        expr=f"{_IDLE} unless on ({JOB}) ({_holds('Suspended', 'Finished')}) unless on ({JOB}) {_MAKES_STEPS}",
        lasting="20m",
        severity=Severity.WARNING,
        summary=f"ElasticJob {WHICH} has its pods but hardly trains.",
        about=f"In each 10 minutes of the last half hour, {WHICH} had agents, but trained for less than a minute "
        "({{ $value | humanizeDuration }} in the last 10 minutes).",
    ),
    Alert(
        name="ElasticJobNoSteps",
        expr=f"sum by ({JOB}) (increase({_STEPS}[5m])) == 0"
        f" and on ({JOB}) max by ({JOB}) (torchelastic_world_size) > 0",
        lasting="25m",
        severity=Severity.WARNING,
        summary=f"No worker of ElasticJob {WHICH} has made a step for half an hour.",
        about=f"The workers of {WHICH} run, but none of them has called torchelastic.step for half an hour. The "
        "program hangs, or it is busy between two steps.",
    ),
    Alert(
        name="ElasticJobBudgetNearlySpent",
        expr=f"({_nearly('max_restarts', WORKER_FAILED, 'maxRestarts')}"
        f" or {_nearly('backoff_limit', POD_FAILED, 'backoffLimit')}) unless on ({JOB}) ({_holds('Finished')})",
        lasting="0m",
        severity=Severity.WARNING,
        summary=f"ElasticJob {WHICH} will fail after few more failures.",
        about=f"{WHICH} has {{{{ $value }}}} failures of spec.{{{{ $labels.budget }}}} left. When none is left, the "
        "next failure fails the job.",
    ),
    Alert(
        name="ElasticJobStoreUnreachable",
        expr=_holds("StoreUnreachable"),
        lasting="10m",
        severity=Severity.WARNING,
        summary=f"The operator cannot use the etcd of ElasticJob {WHICH}.",
        about=f"The operator has not reached the etcd of {WHICH} for 10 minutes. Training continues, but changes of "
        "the size and the status of the run are delayed.",
    ),
    Alert(
        name="ElasticJobCertificateExpires",
        expr=f"{_of_jobs('etcd_certificate_expiry_timestamp_seconds')} - time() < 7 * 86400",
        lasting="15m",
        severity=Severity.WARNING,
        summary=f"A certificate for the etcd of ElasticJob {WHICH} expires within a week.",
        about=f"A certificate in the Secret that {WHICH} names in spec.etcd.tlsSecret expires within a week, or has "
        "expired. After that, the operator and the agents cannot reach etcd.",
    ),
    Alert(
        name="ElasticJobNotScraped",
        expr=f"{_holds('Running')} unless on ({JOB}) max by ({JOB}) (torchelastic_round)",
        lasting="15m",
        severity=Severity.INFO,
        summary=f"Prometheus sees no agent of ElasticJob {WHICH}.",
        about=f"{WHICH} trains, but Prometheus has no metrics of its agents. Its dashboard is empty, and the alerts "
        "that need these metrics cannot fire.",
    ),
)

OPERATOR: Final = (
    Alert(
        name="ElasticOperatorDown",
        expr="absent(elastic_operator_queue_depth) or max(elastic_operator_leader) == 0",
        lasting="5m",
        severity=Severity.CRITICAL,
        summary="No operator manages the ElasticJobs.",
        about="For 5 minutes no copy of the operator was running, or none was active, because it could not list "
        "objects or get the Lease. Training continues and recovers by itself, but pods that end are not replaced, and "
        "new jobs do not start.",
    ),
    Alert(
        name="ElasticOperatorNotReconciling",
        # Failed jobs are reconciled each minute, idle jobs every five: with few jobs, one bad job causes most results.
        expr=f"(sum(increase({_RECONCILES}[15m])) == 0 and on () {_ELASTICJOBS} > 0)"
        f" or (sum(increase({_DONE}[15m])) == 0 and on () {_ELASTICJOBS} > 1)"
        f" or ({_FAILED} / sum(rate({_RECONCILES}[15m])) > 0.5"
        f" and on () {_FAILED} * 60 > 0.7 * {_ELASTICJOBS} and on () {_ELASTICJOBS} > 1)",
        lasting="5m",
        severity=Severity.CRITICAL,
        summary="The operator of the ElasticJobs runs, but its reconciliations fail.",
        about="In 15 minutes no reconciliation of a job succeeded, although each job is reconciled every 5 minutes; or "
        "most of them failed, for more than one job. Pods that end may not be replaced.",
    ),
)

GROUPS: Final = {"elasticjobs": JOBS, "elastic-operator": OPERATOR}
"""All alerts, by the name of their group."""
