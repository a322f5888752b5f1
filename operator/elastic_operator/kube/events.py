"""Events of jobs: what a person would want to know, as ``kubectl describe`` shows it.

They are told beside the work, which never waits for them and never fails with them. An event's name is made of what it
says and of the version of the job of which it is told: told twice, it is there once. So what did not come through is
told again, a few times.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from typing import TYPE_CHECKING, Any, Final, Self

from elastic_operator.errors import ClusterError
from elastic_operator.kube.api import ApiError
from elastic_operator.kube.resources import ELASTIC_JOBS, EVENTS
from elastic_operator.names import MANAGED_BY
from elastic_operator.status_json import rfc3339
from torchelastic.contract import shorten

if TYPE_CHECKING:
    from types import TracebackType

    from elastic_operator.kube.api import Api
    from elastic_operator.model import JobEvent
    from elastic_operator.spec import Json

_log: Final = logging.getLogger(__name__)

_WAITING: Final = 2000
"""So many events wait at most; what comes on top is dropped."""
_SIDE_BY_SIDE: Final = 4
_AGAIN: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds after which an event is told again that did not come through."""
_LAST_ONES: Final = 2.0
"""Seconds that are taken at the end for those that still wait."""
_LONGEST_MESSAGE: Final = 1024
_NAME_BYTES: Final = 8


class Events:
    """Tells events; an async context manager.

    Args:
        api: the connection.
        identity: which copy of the operator tells them.
    """

    def __init__(self, api: Api, identity: str) -> None:
        self._api = api
        self._identity = identity
        self._turns = asyncio.Semaphore(_SIDE_BY_SIDE)
        self._waiting: set[asyncio.Task[None]] = set()
        self._ending = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        try:
            if self._waiting:
                await asyncio.wait(self._waiting, timeout=_LAST_ONES)
        finally:
            if self._waiting:
                _log.debug("%d events were not told", len(self._waiting))
                for task in self._waiting:
                    task.cancel()
                await asyncio.wait(self._waiting)

    def tell(self, job: Json, event: JobEvent) -> None:
        """Tell an event of a job, soon.

        Args:
            job: its object, in the version of which the event speaks.
            event: what happened.
        """
        if len(self._waiting) >= _WAITING:
            _log.debug("too many events wait; one is dropped: %s", event.message)
            return
        task = asyncio.create_task(self._tell(event_object(job, event, identity=self._identity, now=time.time())))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _tell(self, event: Json) -> None:
        """Tell an event, again if need be; at the end, once more at once."""
        for pause in (*_AGAIN, None):
            last = pause is None or self._ending.is_set()
            why = await self._try_to_tell(event)
            if why is None or last:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._ending.wait()
        if why is not None:
            _log.debug("an event was not told: %s", why)

    async def _try_to_tell(self, event: Json) -> ClusterError | None:
        """Try once; gives back why it makes sense to try again, None where it does not."""
        try:
            async with self._turns:
                await self._api.create(EVENTS, event["metadata"]["namespace"], event)
        except ApiError as error:
            if error.passes:
                return error
            if not error.conflict:  # else it was told before
                _log.debug("an event was not told: %s", error)
        except ClusterError as error:
            return error
        except Exception:  # noqa: BLE001 - the others may be told
            _log.exception("an event was not told")
        return None


def event_object(job: Json, event: JobEvent, *, identity: str, now: float) -> dict[str, Any]:
    """An event, ready to be created.

    Args:
        job: of which it is told.
        event: what happened.
        identity: who tells it.
        now: seconds since the Unix epoch.
    """
    about = job["metadata"]
    said = "\n".join((about["uid"], about.get("resourceVersion", ""), event.reason, event.message))
    digest = hashlib.blake2b(said.encode(errors="surrogatepass"), digest_size=_NAME_BYTES).hexdigest()
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
        "message": shorten(event.message, _LONGEST_MESSAGE),
        "type": "Warning" if event.warning else "Normal",
        "source": {"component": MANAGED_BY},
        "reportingComponent": MANAGED_BY,
        "reportingInstance": identity,
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
    }
