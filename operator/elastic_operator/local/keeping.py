"""What is kept of a run on this machine when its store goes: the report in its folder."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from elastic_operator.errors import BadInput
from elastic_operator.plan.keeping import report_of
from elastic_operator.plan.times import at_a_turn
from elastic_operator.report_json import decode_report, encode_report, merged

if TYPE_CHECKING:
    from elastic_operator.local.run_folder import RunFolder
    from elastic_operator.model import Job, Observed
    from elastic_operator.report import Report


def keep_report(folder: RunFolder, report: Report) -> None:
    """Write a report into the run's folder, together with what was kept before the job was suspended.

    Raises:
        OSError: the folder cannot be written.
    """
    before = folder.read_report()
    after = with_what_was_kept(before, report)
    if after != before:
        folder.write_report(after)


def with_what_was_kept(before: bytes | None, report: Report) -> bytes:
    """A report as it is written, with what was kept before the job was suspended.

    Args:
        before: what was kept then; None where nothing was.
        report: the one of now.
    """
    return encode_report(merged(_decoded(before), report))


def report_of_going_on(job: Job, observed: Observed) -> Report:
    """The report of a job that goes on, up to what its leader has told last.

    Args:
        job: as it stands.
        observed: the last that is known of it.
    """
    return report_of(job, replace(job.status, split=observed.split or job.status.split), observed)


def report_of_unfinished(job: Job, observed: Observed, now: float) -> Report:
    """The report of a job that is taken down before it has finished.

    Args:
        job: as it stands.
        observed: the last that is known of it.
        now: seconds since the Unix epoch.
    """
    report = report_of(job, replace(job.status, split=at_a_turn(job, observed, now)), observed)
    return replace(report, rested=(round(now, 3),))


def _decoded(data: bytes | None) -> Report | None:
    if data is None:
        return None
    try:
        return decode_report(data)
    except BadInput:
        return None
