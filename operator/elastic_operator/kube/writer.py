"""Writes to the API server; what it answers is in the cache at once, and not only when the watches bring it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.errors import ClusterError
from elastic_operator.kube.api import ApiError
from elastic_operator.kube.cache import owner_of
from elastic_operator.kube.resources import ELASTIC_JOBS, PODS
from elastic_operator.names import worker_selector
from elastic_operator.status_json import status_to_json
from elastic_operator.unchecked import mapping

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_operator.kube.api import Api
    from elastic_operator.kube.cache import Cache
    from elastic_operator.kube.resources import Resource
    from elastic_operator.model import Job, JobStatus
    from elastic_operator.spec import Json

_FORBIDDEN: Final = re.compile(r"^\S+ \"[^\"]*\" is forbidden: ")


class Refused(ClusterError):  # noqa: N818 - it says what happened
    """The API server will never take the object; the message is its own sentence."""


class Hindered(ClusterError):  # noqa: N818
    """The API server does not take the object now, but may later; the message says why."""


class Writer:
    """Writes through the cache.

    Args:
        api: the connection.
        cache: what gets the answers.
    """

    def __init__(self, api: Api, cache: Cache) -> None:
        self._api = api
        self._cache = cache

    async def create(self, resource: Resource, job: Job, body: Json) -> Json:
        """Make an object that belongs to a job; one that is there already, and the job's, is as good.

        Raises:
            Refused: the API server will never take it.
            Hindered: it does not take it now.
            ClusterError: trying again may help.
        """
        try:
            made = await self._api.create(resource, job.namespace, body)
        except ApiError as error:
            if error.rejects_object:
                raise Refused(error.words) from None
            if error.status == 403 or error.of_a_policy:
                raise Hindered(_FORBIDDEN.sub("", error.words)) from None
            if error.reason != "AlreadyExists":
                raise
            made = await self._existing(resource, job, body["metadata"]["name"])
        self._cache.put(resource, made)
        return made

    async def remove(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        """Begin to remove an object; one that is gone, or has a successor of its name, is as good.

        Raises:
            ClusterError: trying again may help.
        """
        try:
            left = await self._api.delete(resource, namespace, name, uid=uid)
        except ApiError as error:
            if not error.not_found and not error.conflict:
                raise
            left = {}
        about = mapping(left, "metadata")
        stays = about.get("deletionGracePeriodSeconds") or about.get("finalizers")
        if resource == PODS and stays:
            self._cache.put(resource, left)
        else:
            self._cache.remove(resource, left if resource == PODS and left else {"metadata": {"uid": uid}})

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

    async def _existing(self, resource: Resource, job: Job, name: str) -> Json:
        """The object that has the name already."""
        found, _ = await self._api.list(resource, job.namespace, name=name)
        if not found:
            raise ClusterError(f"the {resource.kind} {name} was there a moment ago and is not now")
        owner = owner_of(found[0])
        if owner is None or owner.uid != job.uid:
            raise Hindered(
                f"a {resource.kind} called {name} is there that does not belong to this job: remove it, or give the "
                "job another name"
            )
        if resource != PODS and mapping(found[0], "metadata").get("deletionTimestamp"):
            raise ClusterError(f"the {resource.kind} {name} of this job is still being removed")
        return found[0]


def raise_first(results: Iterable[object]) -> None:
    """Raise the error that says most: what will never work, then what does not work now."""
    errors = [result for result in results if isinstance(result, BaseException)]
    for kind in (Refused, Hindered, BaseException):
        for error in errors:
            if isinstance(error, kind):
                raise error
