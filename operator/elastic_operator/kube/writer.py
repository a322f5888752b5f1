"""Writes to the API server; what it answers is in the cache at once, and not only when the watches bring it."""

from __future__ import annotations

import asyncio
import collections
import re
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.errors import ClusterError
from elastic_operator.kube.advice import with_advice
from elastic_operator.kube.api import ApiError
from elastic_operator.kube.api_error import NoAnswer
from elastic_operator.kube.cache import owner_of
from elastic_operator.kube.resources import ELASTIC_JOBS, PODS
from elastic_operator.names import worker_selector
from elastic_operator.status_json import status_to_json
from elastic_operator.unchecked import mapping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from elastic_operator.kube.api import Api
    from elastic_operator.kube.cache import Cache
    from elastic_operator.kube.resources import Resource
    from elastic_operator.model import Job, JobStatus
    from elastic_operator.spec import Json

_FORBIDDEN: Final = re.compile(r"^\S+( \"[^\"]*\")? is forbidden: ")


class Refused(ClusterError):  # noqa: N818 - it says what happened
    """The API server will never take the object; the message is its own sentence."""


class Hindered(ClusterError):  # noqa: N818
    """The API server does not take the object now, but may later; the message says why."""


class Unmade(ClusterError):  # noqa: N818
    """The API server neither took the object nor said no, which most often passes soon.

    Attributes:
        words: why, without who says it.
    """

    def __init__(self, sentence: str, words: str = "") -> None:
        super().__init__(sentence)
        self.words = words or sentence


_OF_ONE_NAMESPACE: Final = 64
"""So many objects of one namespace are made or removed at once: fewer than there are connections, so that a slow
admission webhook there holds up nobody else."""


class Writer:
    """Writes through the cache.

    Args:
        api: the connection.
        cache: what gets the answers.
        made: called with the kind of each object that was made.
    """

    def __init__(self, api: Api, cache: Cache, made: Callable[[Resource], None] = lambda _resource: None) -> None:
        self._api = api
        self._cache = cache
        self._made = made
        self._turns = collections.defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(_OF_ONE_NAMESPACE))

    async def create(self, resource: Resource, job: Job, body: Json) -> Json:
        """Make an object that belongs to a job; one that is there already, and the job's, is as good.

        Raises:
            Refused: the API server will never take it.
            Hindered: it does not take it now.
            Unmade: it failed.
            ClusterError: trying again may help.
        """
        try:
            async with self._turns[job.namespace]:
                made = await self._api.create(resource, job.namespace, body)
        except NoAnswer as error:
            raise Unmade(str(error)) from None
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise _meaning(error) from None
            made = await self._existing(resource, job, body["metadata"]["name"])
        else:
            self._made(resource)
        self._cache.put(resource, made)
        return made

    async def apply(self, resource: Resource, job: Job, uid: str, body: Json) -> bool:
        """Have an object that belongs to a job say this, by server-side apply.

        Args:
            resource: its kind.
            job: whose it is.
            uid: only if it is this very one.
            body: what it is to say.

        Returns:
            False where it is not there any more.

        Raises:
            Refused: the API server will never take it.
            Hindered: it does not take it now.
            Unmade: it failed.
            ClusterError: trying again may help.
        """
        name = body["metadata"]["name"]
        this_one = {**body, "metadata": {**body["metadata"], "uid": uid}}
        try:
            made = await self._api.apply(resource, job.namespace, name, this_one)
        except NoAnswer as error:
            raise Unmade(str(error)) from None
        except ApiError as error:
            await self._see_that_it_is_gone(error, resource, job.namespace, name, uid)
            return False
        self._cache.put(resource, made)
        return True

    async def remove_job(self, job: Job) -> None:
        """Begin to remove a job with all that belongs to it; one that is gone, or has a successor, is as good.

        Raises:
            ClusterError: trying again may help.
        """
        try:
            left = await self._api.delete(ELASTIC_JOBS, job.namespace, job.name, uid=job.uid)
        except ApiError as error:
            if not await self._is_gone(error, ELASTIC_JOBS, job.namespace, job.name, job.uid):
                raise
            return
        if mapping(left, "metadata").get("deletionTimestamp"):  # somebody's finalizer holds it
            self._cache.put(ELASTIC_JOBS, left)

    async def remove(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        """Begin to remove an object; one that is gone, or has a successor of its name, is as good.

        Raises:
            ClusterError: trying again may help.
        """
        try:
            async with self._turns[namespace]:
                left = await self._api.delete(resource, namespace, name, uid=uid)
        except ApiError as error:
            if not await self._is_gone(error, resource, namespace, name, uid):
                raise
            left = {}
        about = mapping(left, "metadata")
        stays = about.get("deletionGracePeriodSeconds") or about.get("finalizers")
        if resource == PODS and stays:
            self._cache.put(resource, left)
        else:
            self._cache.remove(resource, left if resource == PODS and left else {"metadata": {"uid": uid}})

    async def annotate(
        self, resource: Resource, namespace: str, name: str, uid: str, annotations: Mapping[str, str]
    ) -> None:
        """Add annotations to an object; one that is gone, or has a successor of its name, is as good.

        Raises:
            ClusterError: trying again may help.
        """
        change = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        try:
            after = await self._api.patch(resource, namespace, name, change)
        except ApiError as error:
            await self._see_that_it_is_gone(error, resource, namespace, name, uid)
        else:
            self._cache.put(resource, after)

    async def write_replicas(self, body: Json, replicas: int) -> Json:
        """Write the number of replicas into a job's spec; gives back the job as it is now.

        Raises:
            ClusterError: the job has changed since, or trying again may help.
        """
        about = body["metadata"]
        change = {"metadata": {"resourceVersion": about["resourceVersion"]}, "spec": {"replicas": replicas}}
        scale = await self._api.patch(ELASTIC_JOBS, about["namespace"], about["name"], change, "scale")
        if (version := scale["metadata"]["resourceVersion"]) == about["resourceVersion"]:
            return body
        # What it answers is the scale alone; of the job, this and nothing else has changed.
        changed = {**about, "resourceVersion": version, "generation": about["generation"] + 1}
        after = {**body, "metadata": changed, "spec": {**body["spec"], "replicas": replicas}}
        self._cache.put(ELASTIC_JOBS, after)
        return after

    async def write_status(self, body: Json, status: JobStatus) -> Json:
        """Write a job's status; gives back the job as it is now.

        Raises:
            ClusterError: the job has changed since, or trying again may help.
        """
        about = body["metadata"]
        document: dict[str, Any] = {
            "apiVersion": ELASTIC_JOBS.api_version,
            "kind": ELASTIC_JOBS.kind,
            "metadata": {key: about[key] for key in ("name", "namespace", "uid", "resourceVersion")},
            "status": {**status_to_json(status), "selector": worker_selector(about["name"])},
        }
        after = await self._api.replace(ELASTIC_JOBS, about["namespace"], about["name"], document, "status")
        self._cache.put(ELASTIC_JOBS, after)
        return after

    async def _see_that_it_is_gone(
        self, error: ApiError, resource: Resource, namespace: str, name: str, uid: str
    ) -> None:
        """An object was not changed because it is not there any more; where that is not why, raise what is."""
        # What does not fit the UID may be called a conflict, or invalid.
        perhaps = error.not_found or ((error.conflict or error.rejects_object) and uid in error.words)
        if not perhaps or not await self._is_not_there(resource, namespace, name, uid):
            raise _meaning(error) from None
        self._cache.remove(resource, {"metadata": {"uid": uid}})

    async def _is_gone(self, error: ApiError, resource: Resource, namespace: str, name: str, uid: str) -> bool:
        """Whether an object was not removed because it is not there any more.

        A conflict is what a successor of its name causes, and also what a server says that is in trouble.
        """
        if not error.conflict:
            return error.not_found
        return await self._is_not_there(resource, namespace, name, uid)

    async def _is_not_there(self, resource: Resource, namespace: str, name: str, uid: str) -> bool:
        """Whether there is no object of this name, or another one."""
        found, _ = await self._api.list(resource, namespace, name=name)
        return not found or found[0]["metadata"]["uid"] != uid

    async def _existing(self, resource: Resource, job: Job, name: str) -> Json:
        """The object that has the name already."""
        found, _ = await self._api.list(resource, job.namespace, name=name)
        if not found:
            raise ClusterError(f"the {resource.kind} {name} was there a moment ago and is not now")
        owner = owner_of(found[0])
        if owner is not None and owner.uid != job.uid and owner.name == job.name:
            raise Unmade(f"the {resource.kind} {name} of the former job of this name is still being removed")
        if owner is None or owner.uid != job.uid:
            raise Hindered(
                f"a {resource.kind} called {name} is there that does not belong to this job: remove it, or give the "
                "job another name"
            )
        if resource != PODS and mapping(found[0], "metadata").get("deletionTimestamp"):
            raise ClusterError(f"the {resource.kind} {name} of this job is still being removed")
        return found[0]


def _meaning(error: ApiError) -> ClusterError:
    """What it means that an object was not taken."""
    if error.rejects_object:
        return Refused(error.words)
    if error.status == 403 or error.of_a_policy:
        return Hindered(with_advice(_FORBIDDEN.sub("", error.words)))
    return Unmade(str(error), error.words) if error.passes else error


def raise_first(results: Iterable[object]) -> None:
    """Raise the error that says most: what will never work, then what does not work now."""
    errors = [result for result in results if isinstance(result, BaseException)]
    for kind in (Refused, Hindered, Unmade, BaseException):
        for error in errors:
            if isinstance(error, kind):
                raise error
