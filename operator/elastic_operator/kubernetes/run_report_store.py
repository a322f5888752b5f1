"""The ConfigMap that keeps the report of a job's run after its etcd is gone; the job owns it.

It is written before the status that refers to it, and before the etcd is deleted. If the API server fails, the etcd
waits for a while; if the API server rejects the ConfigMap, the etcd is deleted and the user is told.
"""

from __future__ import annotations

import hashlib
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.api.constants import ROLE_REPORT, report_name
from elastic_operator.api.json_access import text
from elastic_operator.api.report import REPORT_KEY, decode_report, encode_report, merged
from elastic_operator.errors import BadInput, ClusterError
from elastic_operator.kubernetes.client import ApiError
from elastic_operator.kubernetes.error_hints import with_hint
from elastic_operator.kubernetes.kinds import CONFIG_MAPS
from elastic_operator.kubernetes.store import owner_of
from elastic_operator.kubernetes.writer import Blocked
from elastic_operator.resources.metadata import own_metadata

if TYPE_CHECKING:
    from elastic_operator.api.report import Report
    from elastic_operator.controller.model import Job
    from elastic_operator.kubernetes.client import Api
    from elastic_operator.kubernetes.job_record import ReportWrite

_log: Final = logging.getLogger(__name__)

_PATIENCE: Final = 60.0
"""Seconds for which the API server may fail before a report is given up."""


class RunReportStore:
    """Writes the reports of jobs.

    Args:
        api: the connection.
        patience: seconds for which the API server may fail before a report is given up.
    """

    def __init__(self, api: Api, *, patience: float = _PATIENCE) -> None:
        self._api = api
        self._patience = patience

    async def keep(self, job: Job, report: Report, write: ReportWrite) -> str | None:
        """Write a report, merged with the one that exists, unless it was written last.

        Args:
            job: the owner.
            report: what to write.
            write: how far the writing is; it is updated.

        Returns:
            Why the report is given up; None if it was written, or is to be tried again.
        """
        digest = hashlib.blake2b(encode_report(report), digest_size=16).digest()
        if write.written == digest:
            return None
        if write.pending != digest:
            write.pending, write.error = digest, None
        why = ""
        try:
            await self._write(job, report)
        except ClusterError as error:
            now = time.monotonic()
            if write.error is None:
                write.failing_since = now
            if not _is_final(error) and now - write.failing_since < self._patience:
                write.error = str(error)
                return None
            why = with_hint(error.message if isinstance(error, ApiError) else str(error))
        write.written, write.error = digest, None
        if not why:
            return None
        return f"what is known of its run cannot be kept in the ConfigMap {report_name(job.name)}: {why}"

    async def _write(self, job: Job, report: Report) -> None:
        name = report_name(job.name)
        try:
            await self._api.create(CONFIG_MAPS, job.namespace, _config_map(job, report))
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
        else:
            return
        existing = await self._api.get(CONFIG_MAPS, job.namespace, name)
        owner = owner_of(existing)
        if owner is None or owner.uid != job.uid:
            if owner is not None and owner.name == job.name:
                raise ClusterError(f"the ConfigMap {name} of the former job of this name is still being removed")
            raise Blocked(f"a ConfigMap called {name} is there that does not belong to this job")
        former = None
        try:
            former = decode_report(text(existing, "data", REPORT_KEY))
        except BadInput as error:
            _log.warning("%s: %s", name, error)
        wanted = _config_map(job, merged(former, report))
        if text(existing, "data", REPORT_KEY) != wanted["data"][REPORT_KEY]:
            wanted["metadata"]["uid"] = existing["metadata"]["uid"]
            await self._api.apply(CONFIG_MAPS, job.namespace, name, wanted)


def _config_map(job: Job, report: Report) -> dict[str, Any]:
    return {
        "apiVersion": CONFIG_MAPS.api_version,
        "kind": CONFIG_MAPS.kind,
        "metadata": own_metadata(job, report_name(job.name), ROLE_REPORT),
        "data": {REPORT_KEY: encode_report(report).decode()},
    }


def _is_final(error: ClusterError) -> bool:
    """Whether trying again soon is useless."""
    if isinstance(error, ApiError):
        return error.invalid or error.status == 403 or error.by_policy
    return isinstance(error, Blocked)
