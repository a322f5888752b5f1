"""Records Kubernetes events of jobs, in the background.

The name of an event is a hash of its content and of the job's version: recorded twice, it exists once. So an event that
fails can be retried.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from typing import TYPE_CHECKING, Any, Final, Self

from elastic_operator.api.constants import MANAGED_BY
from elastic_operator.api.wire import rfc3339
from elastic_operator.errors import ClusterError
from elastic_operator.kubernetes.client import ApiError
from elastic_operator.kubernetes.kinds import ELASTIC_JOBS, EVENTS
from torchelastic.protocol import shorten

if TYPE_CHECKING:
    from elastic_operator.api.spec import Json
    from elastic_operator.controller.model import JobEvent
    from elastic_operator.kubernetes.client import Api

_log: Final = logging.getLogger(__name__)

_MAX_PENDING: Final = 2000
_CONCURRENCY: Final = 4
_RETRY_DELAYS: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_STOP_TIMEOUT: Final = 2.0
_MAX_MESSAGE: Final = 1024


class EventRecorder:
    """Records events; an async context manager, at whose end pending events are tried once more.

    Args:
        api: the connection.
        identity: the name of this copy of the operator.
    """

    def __init__(self, api: Api, identity: str) -> None:
        self._api = api
        self._identity = identity
        self._slots = asyncio.Semaphore(_CONCURRENCY)
        self._pending: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        if not self._pending:
            return
        try:
            await asyncio.wait(self._pending, timeout=_STOP_TIMEOUT)
        finally:
            if self._pending:
                _log.debug("%d events were not recorded", len(self._pending))
                for task in self._pending:
                    task.cancel()
                await asyncio.wait(self._pending)

    def event(self, job: Json, event: JobEvent) -> None:
        """Record an event of a job soon.

        Args:
            job: in the version that the event is about.
            event: what happened.
        """
        if len(self._pending) >= _MAX_PENDING:
            _log.debug("too many events are pending; one is dropped: %s", event.message)
            return
        task = asyncio.create_task(self._record(event_object(job, event, identity=self._identity, now=time.time())))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _record(self, event: Json) -> None:
        for pause in (*_RETRY_DELAYS, None):
            last = pause is None or self._stopping.is_set()
            try:
                async with self._slots:
                    await self._api.create(EVENTS, event["metadata"]["namespace"], event)
                return
            except ClusterError as error:
                final = isinstance(error, ApiError) and not error.transient
                if last or final:
                    if not (isinstance(error, ApiError) and error.conflict):  # it was recorded before
                        _log.debug("an event was not recorded: %s", error)
                    return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()


def event_object(job: Json, event: JobEvent, *, identity: str, now: float) -> dict[str, Any]:
    """The Event object.

    Args:
        job: that it is about.
        event: what happened.
        identity: the name of this copy of the operator.
        now: seconds since the Unix epoch.
    """
    about = job["metadata"]
    content = "\n".join((about["uid"], about.get("resourceVersion", ""), event.reason, event.message))
    digest = hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    when = rfc3339(now)
    return {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.kind,
        "metadata": {"name": f"{about['name']}.{digest}", "namespace": about["namespace"]},
        "involvedObject": {
            "apiVersion": ELASTIC_JOBS.api_version,
            "kind": ELASTIC_JOBS.kind,
            "name": about["name"],
            "namespace": about["namespace"],
            "uid": about["uid"],
            "resourceVersion": about.get("resourceVersion", ""),
        },
        "reason": str(event.reason),
        "message": shorten(event.message, _MAX_MESSAGE),
        "type": "Warning" if event.warning else "Normal",
        "source": {"component": MANAGED_BY},
        "reportingComponent": MANAGED_BY,
        "reportingInstance": identity,
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
    }
