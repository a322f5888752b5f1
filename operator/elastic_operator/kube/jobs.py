"""What ``elasticjob`` asks of a cluster: which jobs there are, all that is known of one, another size, its end."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING, Final

from elastic_operator.errors import BadInput, ClusterError, NotFound
from elastic_operator.kube.api import ApiError
from elastic_operator.kube.etcd_objects import etcd_endpoint, etcd_name
from elastic_operator.kube.observation import etcd_state
from elastic_operator.kube.resources import CONFIG_MAPS, DEPLOYMENTS, ELASTIC_JOBS, EVENTS, PODS, SERVICES
from elastic_operator.kube.snapshot import object_of, snapshot_of
from elastic_operator.kube.user_api import in_words
from elastic_operator.model import JobState
from elastic_operator.names import LABEL_JOB, LABEL_ROLE, ROLE_WORKER, report_name, worker_selector
from elastic_operator.report_json import REPORT_KEY
from elastic_operator.unchecked import mappings, text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from elastic_operator.kube.resources import Resource
    from elastic_operator.kube.user_api import UserApi
    from elastic_operator.spec import Json

    Tell = Callable[[str], object]
    """Gets a sentence for the user that is no part of the answer."""

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_WHAT_THERE_IS: Final = "`elasticjob get` with the same flags lists what there is"
_LONG: Final = 10.0
"""Seconds after which somebody who waits is told for what."""
_NAMES_TOLD: Final = 5


class ClusterJobs:
    """The jobs of one namespace.

    Args:
        api: the connection, open.
        tell: for what is no part of an answer.
    """

    def __init__(self, api: UserApi, tell: Tell) -> None:
        self._api = api
        self._tell = tell
        self.namespace = api.namespace

    async def objects(self, *, all_namespaces: bool = False) -> list[Json]:
        """All jobs, of this namespace or of all, by namespace and name, as ``kubectl get -o json`` has them.

        Raises:
            ElasticJobError: it could not be done; the message says why. So for every method.
        """
        with in_words("there are no ElasticJobs"):
            found, _ = await self._api.list(ELASTIC_JOBS, None if all_namespaces else self.namespace)
        found.sort(key=lambda job: (job["metadata"]["namespace"], job["metadata"]["name"]))
        # In a list, objects come without these two.
        head = {"apiVersion": ELASTIC_JOBS.api_version, "kind": ELASTIC_JOBS.kind}
        return [object_of({**head, **job}) for job in found]

    async def object(self, name: str) -> Json:
        """One job, as ``kubectl get -o json`` has it.

        Raises:
            NotFound: there is none of this name.
        """
        if not _NAME.fullmatch(name):
            raise BadInput(f"no job can be called {name!r}; {_WHAT_THERE_IS}")
        with self._in_words(name):
            return object_of(await self._api.get(ELASTIC_JOBS, self.namespace, name))

    async def snapshot(self, name: str) -> Json:
        """All that is known of one job.

        Raises:
            NotFound: there is none of this name.
        """
        job = await self.object(name)
        uid = job["metadata"]["uid"]
        pods = await self.workers(name)
        events = await self._as_far_as_allowed("events", self._events(uid))
        return snapshot_of(job, pods, events, await self._etcd(job))

    async def workers(self, name: str = "", *, all_namespaces: bool = False) -> list[Json]:
        """The worker pods of a job; where none is named, those of all jobs. None where they may not be seen.

        Args:
            name: of the job.
            all_namespaces: those in other namespaces, too.
        """
        selector = worker_selector(name) if name else f"{LABEL_JOB},{LABEL_ROLE}={ROLE_WORKER}"
        return await self._as_far_as_allowed("pods", self._pods(None if all_namespaces else self.namespace, selector))

    async def report(self, name: str) -> str:
        """The report of a job, as it is kept.

        Raises:
            NotFound: none is kept, and the message says why; or there is no such job.
        """
        job = await self.object(name)
        about = f"the job {name} is still {text(job, 'status', 'state') or 'Pending'}"
        missing = (
            f"no report of the job {name} is kept, though it is over; was it over before this version was installed?"
            if has_finished(job)
            else f"{about}: its report is kept when it has ended, or rests; `elasticjob top {name}` shows how it trains"
        )
        with in_words(missing):
            kept = await self._api.get(CONFIG_MAPS, self.namespace, report_name(name))
        if not _belongs(kept, job["metadata"]["uid"]):
            raise NotFound(missing)
        return text(kept, "data", REPORT_KEY)

    async def scale(self, name: str, replicas: int) -> None:
        """Ask for another number of pods.

        Raises:
            BadInput: that number can't be, or the job is over; the message says why.
            NotFound: there is no such job.
        """
        await self._unfinished(name)
        with self._in_words(name):
            await self._api.patch(ELASTIC_JOBS, self.namespace, name, {"spec": {"replicas": replicas}}, "scale")

    async def suspend(self, name: str, *, rest: bool) -> None:
        """Have a job rest, or go on.

        Raises:
            BadInput: the job is over.
            NotFound: there is no such job.
        """
        await self._unfinished(name)
        with self._in_words(name):
            await self._api.patch(ELASTIC_JOBS, self.namespace, name, {"spec": {"suspend": rest}})

    async def delete(self, name: str, *, wait: bool) -> None:
        """End a job and remove it with all that belongs to it.

        Args:
            name: the job's name.
            wait: come back only when all of that is gone.

        Raises:
            NotFound: there is no such job.
        """
        uid = (await self.object(name))["metadata"]["uid"]
        with self._in_words(name):
            try:
                await self._api.delete(ELASTIC_JOBS, self.namespace, name, uid=uid)
            except ApiError as error:
                if error.conflict:
                    raise ClusterError(f"another job {name} has taken the place of this one; try again") from None
                raise
        if not wait:
            return
        with self._in_words(name):
            await self._gone(ELASTIC_JOBS, name, {uid})
            for kind in (PODS, SERVICES, DEPLOYMENTS):  # what else there is goes with these
                await self._dependents_gone(kind, name, uid)

    async def _unfinished(self, name: str) -> None:
        """See that a job may still be changed.

        Raises:
            BadInput: it is over.
            NotFound: there is none of this name.
        """
        job = await self.object(name)
        if has_finished(job):
            state = text(job, "status", "state")
            raise BadInput(f"the job {name} is over ({state}) and does not change any more")

    async def _pods(self, namespace: str | None, selector: str) -> list[Json]:
        found, _ = await self._api.list(PODS, namespace, labels=selector)
        return found

    async def _events(self, uid: str) -> list[Json]:
        found, _ = await self._api.list(EVENTS, self.namespace, fields=f"involvedObject.uid={uid}")
        return found

    async def _etcd(self, job: Json) -> Json | None:
        """Where the job's store is, and how it stands, as far as that can be seen."""
        given = text(job, "spec", "etcd", "endpoint")
        if given:
            return {"endpoint": given}
        name = etcd_name(job["metadata"]["name"])
        service = await self._if_there(SERVICES, name)
        address = text(service, "spec", "clusterIP")
        if not address:
            return None
        deployment = await self._if_there(DEPLOYMENTS, name)
        state = etcd_state(service, deployment)
        return {"endpoint": etcd_endpoint(address), "state": f"service {name}, {state.lower()}"}

    async def _if_there(self, kind: Resource, name: str) -> Json | None:
        try:
            return await self._api.get(kind, self.namespace, name)
        except ApiError:  # it is gone, or none of our business
            return None

    async def _as_far_as_allowed(self, what: str, listing: Awaitable[list[Json]]) -> list[Json]:
        try:
            return await listing
        except ApiError as error:
            if error.status != 403:
                raise
            self._tell(f"you may not see the {what} of this namespace, so none are shown")
            return []

    async def _dependents_gone(self, kind: Resource, name: str, uid: str) -> None:
        labels = f"{LABEL_JOB}={name}"
        try:
            found, _ = await self._api.list(kind, self.namespace, labels=labels)
            # A job that is made anew with the same name has pods of its own.
            of_ours = {each["metadata"]["uid"] for each in found if _belongs(each, uid)}
            await self._gone(kind, name, of_ours, labels=labels)
        except ApiError as error:
            if error.status != 403:
                raise
            if kind is PODS:
                self._tell("you may not see the pods of this namespace, so whether they are gone is not known")

    async def _gone(self, kind: Resource, name: str, uids: set[str], *, labels: str = "") -> None:
        """Wait until none of these is there any more."""
        states = self._api.states(kind, self.namespace, labels=labels, name="" if labels else name)
        left: list[str] = []

        async def all_gone() -> None:
            async for state in states:
                left[:] = [each["metadata"]["name"] for uid, each in state.items() if uid in uids]
                if not left:
                    return

        async with contextlib.aclosing(states):
            waiting = asyncio.ensure_future(all_gone())
            try:
                done, _ = await asyncio.wait([waiting], timeout=_LONG)
                if not done:
                    more = f" and {len(left) - _NAMES_TOLD} more" if len(left) > _NAMES_TOLD else ""
                    self._tell(f"waiting until these are gone: {kind.plural} {', '.join(left[:_NAMES_TOLD])}{more}")
                await waiting
            finally:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)

    def _in_words(self, name: str) -> contextlib.AbstractContextManager[None]:
        return in_words(f"there is no job {name} in the namespace {self.namespace}; {_WHAT_THERE_IS}")


def _belongs(dependent: Json, uid: str) -> bool:
    """Whether it is this job's, by itself or by what another one of its objects has made."""
    owners = mappings(dependent, "metadata", "ownerReferences")
    jobs = {text(owner, "uid") for owner in owners if owner.get("kind") == ELASTIC_JOBS.kind}
    return not jobs or uid in jobs


def has_finished(job: Json) -> bool:
    """Whether nothing more will happen to a job."""
    return text(job, "status", "state") in {state for state in JobState if state.finished}
