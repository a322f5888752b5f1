"""The ConfigMap that keeps what is known of a job's run when its store goes; it goes with the job.

It is written before the status that says so, and before the store is removed. Where the API server fails for a while,
the store waits, but not for long; where it does not take the ConfigMap at all, the store goes, and a person is told.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.errors import BadInput, ClusterError
from elastic_operator.kube.advice import with_advice
from elastic_operator.kube.api import ApiError
from elastic_operator.kube.cache import owner_of
from elastic_operator.kube.ownership import own_metadata
from elastic_operator.kube.resources import CONFIG_MAPS
from elastic_operator.names import ROLE_REPORT, report_name
from elastic_operator.report_json import REPORT_KEY, decode_report, encode_report, merged
from elastic_operator.unchecked import text

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_operator.kube.api import Api
    from elastic_operator.model import Job
    from elastic_operator.report import Report
    from elastic_operator.spec import Json

_log: Final = logging.getLogger(__name__)

PATIENCE: Final = 60.0
"""Seconds for which the API server may fail before a report is given up."""


class _Occupied(ClusterError):  # noqa: N818 - it says what happened
    """The ConfigMap's name belongs to somebody else."""


@dataclass(slots=True)
class _Writing:
    """How far the report of a job is.

    Attributes:
        done: digest of the one that was written, or given up, last.
        wanted: digest of the next one, which could not be written yet.
        failing_since: when that was tried first, a monotonic time; None where there is none.
        trouble: why it could not be.
    """

    done: bytes = b""
    wanted: bytes = b""
    failing_since: float | None = None
    trouble: str = ""


class Reports:
    """The ConfigMaps with the reports of jobs.

    Args:
        api: the connection. Nobody reads these objects but here, so they are not cached.
        clock: a monotonic time in seconds.
    """

    def __init__(self, api: Api, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._writings: dict[str, _Writing] = {}

    async def keep(self, job: Job, report: Report) -> str | None:
        """Write a report, together with what was kept before, if it is not the one that was written last.

        Returns:
            Why it is given up, to be told; None where it was written, or is to be tried again.
        """
        writing = self._writings.setdefault(job.uid, _Writing())
        digest = hashlib.blake2b(encode_report(report), digest_size=16).digest()
        if writing.done == digest:
            return None
        if writing.wanted != digest:  # one that is not asked for any more has used up none of this one's time
            writing.wanted, writing.failing_since, writing.trouble = digest, None, ""
        why = ""
        try:
            await self._write(job, report)
        except ClusterError as error:
            if not _is_refusal(error) and self._may_try_again(writing, str(error)):
                return None
            why = with_advice(error.words if isinstance(error, ApiError) else str(error))
        writing.done, writing.failing_since, writing.trouble = digest, None, ""
        return (
            f"what is known of its run cannot be kept in the ConfigMap {report_name(job.name)}: {why}" if why else None
        )

    def pending(self, job: Job) -> str | None:
        """Why the report could not be written yet, so that the store has to stay; None where nothing is to be written.

        Args:
            job: whose it is.
        """
        writing = self._writings.get(job.uid)
        return None if writing is None or writing.failing_since is None else writing.trouble

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self._writings.pop(uid, None)

    def _may_try_again(self, writing: _Writing, trouble: str) -> bool:
        now = self._clock()
        writing.trouble = trouble
        if writing.failing_since is None:
            writing.failing_since = now
        return now - writing.failing_since < PATIENCE

    async def _write(self, job: Job, report: Report) -> None:
        name = report_name(job.name)
        try:
            await self._api.create(CONFIG_MAPS, job.namespace, _config_map(job, report))
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
        else:
            return
        there = await self._api.get(CONFIG_MAPS, job.namespace, name)
        owner = owner_of(there)
        if owner is None or owner.uid != job.uid:
            if owner is not None and owner.name == job.name:
                raise ClusterError(f"the ConfigMap {name} of the former job of this name is still being removed")
            raise _Occupied(f"a ConfigMap called {name} is there that does not belong to this job")
        wanted = _config_map(job, merged(_kept(there), report))
        if text(there, "data", REPORT_KEY) != wanted["data"][REPORT_KEY]:
            wanted["metadata"]["uid"] = there["metadata"]["uid"]
            await self._api.apply(CONFIG_MAPS, job.namespace, name, wanted)


def _config_map(job: Job, report: Report) -> dict[str, Any]:
    return {
        "apiVersion": CONFIG_MAPS.api_version,
        "kind": CONFIG_MAPS.kind,
        "metadata": own_metadata(job, report_name(job.name), ROLE_REPORT),
        "data": {REPORT_KEY: encode_report(report).decode()},
    }


def _kept(there: Json) -> Report | None:
    """The report in a ConfigMap; None where somebody has written something else there."""
    try:
        return decode_report(text(there, "data", REPORT_KEY))
    except BadInput as error:
        _log.warning("%s: %s", text(there, "metadata", "name"), error)
        return None


def _is_refusal(error: ClusterError) -> bool:
    """Whether it makes no sense to try again soon."""
    if isinstance(error, ApiError):
        return error.rejects_object or error.status == 403 or error.of_a_policy
    return isinstance(error, _Occupied)
