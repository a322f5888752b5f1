"""Writes to the API server; responses update the cache of objects at once, before the watches report the changes."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import itertools
import logging
import re
import time
from typing import TYPE_CHECKING, Any, Final, Self

from elastic_operator.api.constants import MANAGED_BY, ROLE_REPORT, report_name, worker_selector
from elastic_operator.api.json_values import get_dict, get_str, rfc3339
from elastic_operator.api.status import REPORT_KEY, Report, decode_report, encode_report, merged, status_to_json
from elastic_operator.errors import BadInput, ClusterError
from elastic_operator.kubernetes import client
from elastic_operator.kubernetes.object_cache import ObjectCache, owner_of
from elastic_operator.resources.owned_objects import own_metadata
from torchelastic.protocol.codec import shorten

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from elastic_operator.api.json_values import Json
    from elastic_operator.api.status import JobStatus
    from elastic_operator.controller.model import Job, JobEvent

logger: Final = logging.getLogger(__name__)

_FORBIDDEN: Final = re.compile(r"^\S+( \"[^\"]*\")? is forbidden: ")
_MAX_PER_NAMESPACE: Final = 64
"""Maximum number of concurrent writes of objects that the jobs of a namespace own."""
_MAX_OF_JOBS: Final = 16
"""Maximum number of concurrent writes of the jobs of a namespace and their reports. The sum of both limits is less than
the number of connections, so that a slow webhook in one namespace does not delay other namespaces."""
_MAX_PENDING: Final = 2000
_CONCURRENT_EVENTS: Final = 4
_EVENT_TRIES: Final = 8
_FIRST_RETRY: Final = 0.25
_STOP_TIMEOUT: Final = 2.0
_MAX_MESSAGE: Final = 1024


class Rejected(ClusterError):  # noqa: N818 - a result rather than an error
    """The API server will never accept the object; the message is that of the server."""


class Blocked(ClusterError):  # noqa: N818
    """The API server does not accept the object now, but may later; the message says why."""


class Writer:
    """Writes through the cache of objects; an async context manager.

    Events are recorded in the background; the exit of the context waits at most two seconds for pending events. The
    name of an event contains a hash of its content and of the job's version. So an event that is recorded twice exists
    once, and a failed attempt can be repeated.

    Args:
        api: the connection.
        cache: the cache of objects, which receives the responses.
        identity: the name of this copy of the operator.
        created: called with the kind of each created object.
    """

    def __init__(
        self,
        api: client.Api,
        cache: ObjectCache,
        identity: str = "elastic-operator",
        created: Callable[[client.Resource], None] = lambda _resource: None,
    ) -> None:
        self._api = api
        self._cache = cache
        self._identity = identity
        self._created = created
        self._event_slots = asyncio.Semaphore(_CONCURRENT_EVENTS)
        self._pending: set[asyncio.Task[None]] = set()
        self._slots = collections.defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(_MAX_PER_NAMESPACE))
        self._job_slots = collections.defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(_MAX_OF_JOBS))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._pending:
            late = (await asyncio.wait(self._pending, timeout=_STOP_TIMEOUT))[1]
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def event(self, job: Json, event: JobEvent) -> None:
        """Record an event of a job in the background.

        Args:
            job: the version of the job to which the event belongs.
            event: what happened.
        """
        if len(self._pending) >= _MAX_PENDING:
            logger.debug("too many events are pending; one is dropped: %s", event.message)
            return
        task = asyncio.create_task(self._record(event_object(job, event, identity=self._identity, now=time.time())))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _record(self, event: Json) -> None:
        for delay in itertools.islice(client.backoff(_FIRST_RETRY, 60.0), _EVENT_TRIES):
            try:
                async with self._event_slots:
                    await self._api.create(client.EVENTS, event["metadata"]["namespace"], event)
                return
            except ClusterError as error:
                logger.debug("an event was not recorded: %s", error)  # perhaps because it was recorded before
                if isinstance(error, client.ApiError) and not error.transient:
                    return
            await asyncio.sleep(delay)

    async def create(self, resource: client.Resource, job: Job, wanted: Json | Callable[[], Json]) -> None:
        """Create an object that a job owns, unless it exists.

        Args:
            resource: the kind of the object.
            job: the owner.
            wanted: the object, or a function that returns it, which is called when the write begins.

        Raises:
            Rejected: the object will never be accepted.
            Blocked: the object is not accepted now.
            ClusterError: another attempt may succeed.
        """
        try:
            async with self._slots[job.namespace]:
                body = wanted() if callable(wanted) else wanted
                made = await self._api.create(resource, job.namespace, body)
        except client.ApiError as error:
            if error.reason != "AlreadyExists":
                raise _classified(error) from None
            made = await self._existing(resource, job, body["metadata"]["name"])
        else:
            self._created(resource)
        self._cache.put(resource, made)

    async def apply(self, resource: client.Resource, job: Job, uid: str, body: Json) -> bool:
        """Apply an object that a job owns; return False if it no longer exists. Raises the errors of :meth:`create`."""
        name = body["metadata"]["name"]
        this_one = {**body, "metadata": {**body["metadata"], "uid": uid}}
        answer = self._api.apply(resource, job.namespace, name, this_one)
        return await self._update(resource, job.namespace, name, uid, answer)

    async def put(self, resource: client.Resource, job: Job, body: Json) -> None:
        """Create or replace an object that a job owns and no watch reports. Raises the errors of :meth:`create`."""
        try:
            async with self._slots[job.namespace]:
                await self._api.apply(resource, job.namespace, body["metadata"]["name"], body)
        except client.ApiError as error:
            raise _classified(error) from None

    async def annotate(
        self, resource: client.Resource, namespace: str, name: str, uid: str, annotations: Mapping[str, str]
    ) -> None:
        """Add annotations to an object, unless it is gone.

        Raises:
            ClusterError: another attempt may succeed.
        """
        change = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        await self._update(resource, namespace, name, uid, self._api.patch(resource, namespace, name, change))

    async def delete(self, resource: client.Resource, namespace: str, name: str, uid: str) -> None:
        """Delete an object, unless it is gone.

        Raises:
            ClusterError: another attempt may succeed.
        """
        left: Json = {}
        try:
            async with self._slots[namespace]:
                left = await self._api.delete(resource, namespace, name, uid=uid)
        except client.ApiError as error:
            # Another UID causes a conflict, and so may an overloaded server.
            gone = await self._is_gone(resource, namespace, name, uid) if error.conflict else error.not_found
            if not gone:
                raise
        metadata = get_dict(left, "metadata")  # for some kinds, this is a Status without them
        if metadata.get("deletionGracePeriodSeconds") or metadata.get("finalizers"):
            self._cache.put(resource, left)
        else:
            self._cache.remove(resource, left if metadata.get("uid") else {"metadata": {"uid": uid}})

    async def write_replicas(self, body: Json, replicas: int) -> Json:
        """Write ``spec.replicas`` of a job; return the new job.

        Raises:
            ClusterError: the job has changed since, or another attempt may succeed.
        """
        metadata = body["metadata"]
        change = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "spec": {"replicas": replicas}}
        async with self._job_slots[metadata["namespace"]]:
            scale = await self._api.patch(client.ELASTIC_JOBS, metadata["namespace"], metadata["name"], change, "scale")
        if (version := scale["metadata"]["resourceVersion"]) == metadata["resourceVersion"]:
            return body
        # The response is only the scale; nothing else in the job has changed.
        changed = {**metadata, "resourceVersion": version, "generation": metadata["generation"] + 1}
        after = {**body, "metadata": changed, "spec": {**body["spec"], "replicas": replicas}}
        self._cache.put(client.ELASTIC_JOBS, after)
        return after

    async def write_status(self, body: Json, status: JobStatus) -> None:
        """Write the status of a job.

        Raises:
            ClusterError: the job has changed since, or another attempt may succeed.
        """
        metadata = body["metadata"]
        document: dict[str, Any] = {
            "apiVersion": client.ELASTIC_JOBS.api_version,
            "kind": client.ELASTIC_JOBS.kind,
            "metadata": {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")},
            "status": {**status_to_json(status), "selector": worker_selector(metadata["name"])},
        }
        async with self._job_slots[metadata["namespace"]]:
            after = await self._api.replace(
                client.ELASTIC_JOBS, metadata["namespace"], metadata["name"], document, "status"
            )
        self._cache.put(client.ELASTIC_JOBS, after)

    async def write_report(self, job: Job, report: Report) -> None:
        """Write the report of a run into a ConfigMap, merged with an existing report.

        The ConfigMap belongs to the job, and keeps the report after the job's etcd is gone. Raises the errors of
        :meth:`create`.
        """
        name = report_name(job.name)
        wanted: dict[str, Any] = {
            "apiVersion": client.CONFIG_MAPS.api_version,
            "kind": client.CONFIG_MAPS.kind,
            "metadata": own_metadata(job, name, ROLE_REPORT),
            "data": {REPORT_KEY: encode_report(report).decode()},
        }
        try:
            async with self._job_slots[job.namespace]:
                await self._put_report(job, wanted, report)
        except client.ApiError as error:
            raise (error if error.webhook_failed else _classified(error)) from None

    async def _put_report(self, job: Job, wanted: dict[str, Any], report: Report) -> None:
        name = wanted["metadata"]["name"]
        try:
            await self._api.create(client.CONFIG_MAPS, job.namespace, wanted)
            return
        except client.ApiError as error:
            if error.reason != "AlreadyExists":
                raise
        existing = await self._api.get(client.CONFIG_MAPS, job.namespace, name)
        _check_owner(existing, client.CONFIG_MAPS, job)
        former = None
        try:
            former = decode_report(get_str(existing, "data", REPORT_KEY))
        except BadInput as error:
            logger.warning("%s: %s", name, error)
        wanted["data"] = {REPORT_KEY: encode_report(merged(former, report)).decode()}
        if get_str(existing, "data", REPORT_KEY) != wanted["data"][REPORT_KEY]:
            wanted["metadata"]["uid"] = existing["metadata"]["uid"]
            await self._api.apply(client.CONFIG_MAPS, job.namespace, name, wanted)

    async def _update(
        self, resource: client.Resource, namespace: str, name: str, uid: str, answer: Awaitable[Json]
    ) -> bool:
        """Store the response to a change of an object; return False if the object is gone."""
        try:
            async with self._slots[namespace]:
                self._cache.put(resource, await answer)
        except client.ApiError as error:
            # A wrong UID is reported as a conflict, or as invalid.
            perhaps = error.not_found or ((error.conflict or error.invalid) and uid in error.message)
            if not perhaps or not await self._is_gone(resource, namespace, name, uid):
                raise _classified(error) from None
            self._cache.remove(resource, {"metadata": {"uid": uid}})
            return False
        return True

    async def _is_gone(self, resource: client.Resource, namespace: str, name: str, uid: str) -> bool:
        found, _ = await self._api.list(resource, namespace, name=name)
        return not found or found[0]["metadata"]["uid"] != uid

    async def _existing(self, resource: client.Resource, job: Job, name: str) -> Json:
        found, _ = await self._api.list(resource, job.namespace, name=name)
        if not found:
            raise ClusterError(f"the {resource.kind} {name} existed a moment ago and is gone now")
        _check_owner(found[0], resource, job)
        if resource != client.PODS and get_dict(found[0], "metadata").get("deletionTimestamp"):
            raise ClusterError(f"the {resource.kind} {name} of this job is still being removed")
        return found[0]


def _check_owner(found: Json, resource: client.Resource, job: Job) -> None:
    """Raise an error if an object with a name that a job needs does not belong to the job."""
    name = found["metadata"]["name"]
    owner = owner_of(found)
    if owner is not None and owner["uid"] != job.uid and owner["name"] == job.name:
        raise ClusterError(f"the {resource.kind} {name} of the former job of this name is still being removed")
    if owner is None or owner["uid"] != job.uid:
        raise Blocked(
            f"a {resource.kind} named {name} exists and does not belong to this job: delete it, or give the job "
            "another name"
        )


def raise_worst(results: Iterable[object]) -> None:
    """Raise the most important error, if there is one: rejections come first, then blocks, then other errors."""
    errors = [result for result in results if isinstance(result, BaseException)]
    for kind in (Rejected, Blocked, BaseException):
        for error in errors:
            if isinstance(error, kind):
                raise error


def _classified(error: client.ApiError) -> ClusterError:
    if error.invalid:
        return Rejected(error.message)
    if error.blocked:
        return Blocked(client.with_hint(_FORBIDDEN.sub("", error.message)))
    return error


def event_object(job: Json, event: JobEvent, *, identity: str, now: float) -> dict[str, Any]:
    """Return the Event object.

    Args:
        job: the job of the event.
        event: what happened.
        identity: the name of this copy of the operator.
        now: seconds since the Unix epoch.
    """
    metadata = job["metadata"]
    content = "\n".join((metadata["uid"], metadata.get("resourceVersion", ""), event.reason, event.message))
    digest = hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    when = rfc3339(now)
    return {
        "apiVersion": client.EVENTS.api_version,
        "kind": client.EVENTS.kind,
        "metadata": {"name": f"{metadata['name']}.{digest}", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": client.ELASTIC_JOBS.api_version,
            "kind": client.ELASTIC_JOBS.kind,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
            "resourceVersion": metadata.get("resourceVersion", ""),
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
