"""The etcd that is made for a job: there as long as the plan wants it.

Its pod is Kubernetes' to make and to replace, and nobody here looks at it, unless it takes its time: then a person
should know why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elastic_operator.errors import ClusterError
from elastic_operator.kube.container_state import container_states, is_over
from elastic_operator.kube.etcd_objects import ETCD, etcd_deployment, etcd_endpoint, etcd_name, etcd_service
from elastic_operator.kube.observation import etcd_hindrance, etcd_state, told_cluster_ip
from elastic_operator.kube.pod_starts import why_not_started
from elastic_operator.kube.pod_words import why_waiting
from elastic_operator.kube.resources import DEPLOYMENTS, PODS, SERVICES
from elastic_operator.kube.writer import Hindered, Refused, raise_first
from elastic_operator.model import EtcdState
from elastic_operator.names import LABEL_JOB_UID
from elastic_operator.unchecked import mapping, text

if TYPE_CHECKING:
    from elastic_operator.kube.api import Api
    from elastic_operator.kube.cache import Cache
    from elastic_operator.kube.resources import Resource
    from elastic_operator.kube.settings import PodSettings
    from elastic_operator.kube.writer import Writer
    from elastic_operator.model import Job
    from elastic_operator.spec import Json


_log: Final = logging.getLogger(__name__)

PATIENCE: Final = 15.0
"""Seconds that an etcd may take to serve before it is seen to what keeps it; and again so many later."""


_ANEW_AFTER: Final = 30.0
_LONGEST_ANEW: Final = 240.0
_TOLD_WITHIN: Final = 10.0
"""Seconds within which a Deployment that is made says that its pod cannot be made."""


@dataclass(slots=True)
class _Start:
    """An etcd that does not serve yet.

    Attributes:
        due: when it is to be seen to; a monotonic time.
        complaint: what kept it when it was seen to last, in words; empty where nothing is known to.
    """

    due: float
    complaint: str = ""


@dataclass(slots=True)
class _Anew:
    """An etcd whose pod cannot be made.

    Attributes:
        due: when its Deployment is made anew; a monotonic time.
        wait: seconds from the last time to that.
        why: why its pod could not be made the last time; empty before that.
        until: when it is known whether it can be made by now.
    """

    due: float
    wait: float
    why: str = ""
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class EtcdSeen:
    """What is known of a job's own etcd.

    Attributes:
        state: where it stands.
        endpoint: host:port under which it is found; None where it has none yet.
        hindrance: why its pod can't be made for now, in words; None where it can.
    """

    state: EtcdState
    endpoint: str | None
    hindrance: str | None


class ManagedEtcd:
    """Service and deployment of the jobs' own etcds.

    Args:
        api: is asked for an etcd's pod where that takes its time.
        cache: what is there.
        writer: makes and removes.
        settings: what pods are made with where the job does not say.
        patience: seconds after which it is asked, and asked again.
        anew_after: seconds after which a Deployment is made anew whose pod cannot be made; then later each time.
    """

    def __init__(
        self,
        api: Api,
        cache: Cache,
        writer: Writer,
        settings: PodSettings,
        *,
        patience: float = PATIENCE,
        anew_after: float = _ANEW_AFTER,
    ) -> None:
        self._api = api
        self._patience = patience
        self._anew_after = anew_after
        self._anew: dict[str, _Anew] = {}
        self._starts: dict[str, _Start] = {}
        self._cache = cache
        self._writer = writer
        self._settings = settings

    def seen(self, job: Job) -> EtcdSeen:
        """What is known of it."""
        service, deployment = self._service(job), self._deployment(job)
        state, hindrance = etcd_state(service, deployment), etcd_hindrance(deployment)
        if state is EtcdState.READY:
            self._anew.pop(job.uid, None)
        elif hindrance is None and (anew := self._anew.get(job.uid)) is not None and time.monotonic() < anew.until:
            hindrance = anew.why
        return EtcdSeen(state, _endpoint(service), hindrance)

    async def complaint(self, job: Job, state: EtcdState) -> str | None:
        """What keeps a job's etcd from serving, as a clause; None where nothing is known to, or it is too early."""
        if state is not EtcdState.STARTING:
            self._starts.pop(job.uid, None)
            return None
        if (hindrance := etcd_hindrance(self._deployment(job))) is not None:
            return f"its etcd does not serve yet: its pod cannot be made for now: {hindrance}"
        now = time.monotonic()
        start = self._starts.setdefault(job.uid, _Start(now + self._patience))
        if start.due <= now:
            start.due = now + self._patience
            try:
                pods, _ = await self._api.list(PODS, job.namespace, labels=f"{LABEL_JOB_UID}={job.uid}")
                complaints = [await self._why_waiting(job, pod) for pod in pods]
            except ClusterError as error:
                _log.debug("%s/%s: its etcd's pod cannot be looked at: %s", job.namespace, job.name, error)
            else:
                start.complaint = next(filter(None, complaints), "")
        return f"its etcd does not serve yet: {start.complaint}" if start.complaint else None

    async def _why_waiting(self, job: Job, pod: Json) -> str:
        """What keeps the etcd's pod from serving, as a clause; empty where nothing is known to."""
        if (why := why_waiting(pod, ETCD)) or not text(pod, "spec", "nodeName"):
            return why
        if any(container.running is not None for container in container_states(pod)):
            return ""
        return await why_not_started(self._api, job.namespace, text(pod, "metadata", "uid"))

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self._starts.pop(uid, None)
        self._anew.pop(uid, None)

    async def ensure(self, job: Job) -> str:
        """Have it there.

        Returns:
            host:port under which it is found.

        Raises:
            Refused: the API server will never take it.
            Hindered: it does not take it now.
            ClusterError: trying again may help.
        """
        service = self._service(job)
        missing = []
        await self._begin_anew(job)
        if self._deployment(job) is None:
            missing.append(self._writer.create(DEPLOYMENTS, job, etcd_deployment(job, self._settings)))
        if service is None:
            missing.append(self._make_service(job))
        results = await asyncio.gather(*missing, return_exceptions=True)
        raise_first(results)
        endpoint = _endpoint(self._service(job))
        if endpoint is None:
            raise ClusterError(f"the Service {etcd_name(job.name)} has no address yet")
        return endpoint

    async def _begin_anew(self, job: Job) -> None:
        """Remove a Deployment whose pod could not be made for a while: by itself it is tried ever less often."""
        deployment = self._deployment(job)
        if deployment is None or (why := etcd_hindrance(deployment)) is None:
            return
        now = time.monotonic()
        anew = self._anew.setdefault(job.uid, _Anew(now + self._anew_after, self._anew_after))
        if anew.due <= now:
            anew.wait = min(anew.wait * 2, _LONGEST_ANEW)
            anew.due = now + anew.wait
            anew.why, anew.until = why, now + _TOLD_WITHIN
            about = deployment["metadata"]
            await self._writer.remove(DEPLOYMENTS, about["namespace"], about["name"], about["uid"])

    async def remove(self, job: Job) -> None:
        """Have it gone.

        Raises:
            ClusterError: trying again may help.
        """
        there = [
            (resource, body)
            for resource, body in ((DEPLOYMENTS, self._deployment(job)), (SERVICES, self._service(job)))
            if body is not None and not mapping(body, "metadata").get("deletionTimestamp")
        ]
        for resource, body in there:
            about = body["metadata"]
            await self._writer.remove(resource, about["namespace"], about["name"], about["uid"])

    async def _make_service(self, job: Job) -> Json:
        """Make the service, under the address that living pods know."""
        pods = (pod for pod in self._cache.belongings(PODS, job.namespace, job.uid) if not _goes(pod))
        told = next(filter(None, map(told_cluster_ip, pods)), None)
        try:
            return await self._writer.create(SERVICES, job, etcd_service(job, cluster_ip=told))
        except Refused as refusal:
            if told is None or told not in str(refusal):
                raise
            raise Hindered(
                f"the address {told}, at which the pods of this job look for their etcd, belongs to another service by "
                f"now: delete these pods, so that new ones are told another ({refusal})"
            ) from None

    def _service(self, job: Job) -> Json | None:
        return self._object(SERVICES, job)

    def _deployment(self, job: Job) -> Json | None:
        return self._object(DEPLOYMENTS, job)

    def _object(self, resource: Resource, job: Job) -> Json | None:
        name = etcd_name(job.name)
        for body in self._cache.belongings(resource, job.namespace, job.uid):
            if text(body, "metadata", "name") == name:
                return body
        return None


def _goes(pod: Json) -> bool:
    """Whether a pod has ended, or is about to."""
    return is_over(pod) or bool(mapping(pod, "metadata").get("deletionTimestamp"))


def _endpoint(service: Json | None) -> str | None:
    address = text(service, "spec", "clusterIP")
    return etcd_endpoint(address) if address not in ("", "None") else None
