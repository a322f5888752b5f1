"""What is kept of the job's run, which its store, about to go, is the last to know."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from elastic_operator.model import EtcdState, JobState
from elastic_operator.report import Report
from torchelastic.contract import HistoryRecord

if TYPE_CHECKING:
    from elastic_operator.model import Job, JobStatus, Observed


def report_at_rest(job: Job, status: JobStatus, observed: Observed) -> Report | None:
    """The report of a job that has come to rest; None where its store has nothing to tell."""
    return report_of(job, status, observed) if _is_told(observed) else None


def report_at_the_end(job: Job, status: JobStatus, observed: Observed) -> Report | None:
    """The report of a job that has finished; None once its store is gone, or has nothing more to tell.

    Args:
        job: with the status that it had.
        status: the one that says how it has finished.
        observed: what was observed of it.
    """
    has_just_finished = not job.status.state.finished
    has_store_of_its_own = job.spec.etcd.endpoint is None and observed.etcd is not EtcdState.ABSENT
    wanted = has_just_finished or has_store_of_its_own or _is_told(observed)
    return report_of(job, status, observed) if wanted else None


def _is_told(observed: Observed) -> bool:
    return observed.history is not None or observed.split is not None


def report_of(job: Job, status: JobStatus, observed: Observed) -> Report:
    """The report of a job with this status.

    It is the same one for the same end, however often it is asked for, also once the status has been read again.
    """
    history = observed.history or HistoryRecord()
    completed = status.completed
    if completed is not None:
        completed = status.split.until if status.split is not None else float(math.floor(completed))
    failed = status.state is JobState.FAILED and status.last_failure is not None
    return Report(
        namespace=job.namespace,
        name=job.name,
        uid=job.uid,
        created=job.created,
        state=status.state,
        completed=completed,
        message=status.last_failure.message if failed and status.last_failure is not None else "",
        split=status.split,
        history=HistoryRecord(created=job.created, epochs=history.epochs, omitted=history.omitted),
        outcome=observed.outcome,
        rested=(round(status.split.until, 3),) if status.state is JobState.SUSPENDED and status.split else (),
    )
