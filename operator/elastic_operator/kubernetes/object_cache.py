"""The operator's cache of objects: plain JSON, trimmed, indexed by UID and by owning job.

Jobs are kept as text, because a template takes up to twenty times as much memory as Python objects. Of a spec that is
too large, only the short values are kept.

Lists, watches and the operator's own writes feed the cache in any order. An older version never overwrites a newer one.
A tombstone remembers the version at which an object was deleted, so that a late update does not restore the object.

Kubernetes guarantees since 1.35 that resource versions can be compared as numbers. They can on earlier servers, too.
"""

from __future__ import annotations

import collections
import json
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elastic_operator.api.json_values import Json, get_dict, get_int, get_str
from elastic_operator.api.spec import GROUP, KIND
from elastic_operator.api.validation import bounded_spec
from elastic_operator.controller.model import EtcdState, Job, Pod
from elastic_operator.kubernetes.client import DEPLOYMENTS, ELASTIC_JOBS, PODS, SERVICES, Resource, with_hint
from elastic_operator.kubernetes.pod_status import pod_of, true_condition
from elastic_operator.resources.owned_objects import etcd_endpoint, etcd_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


_TOMBSTONE_TTL: Final = 900.0
"""Seconds for which the deletion of an object is remembered."""


class ObjectCache:
    """The known objects of some kinds, by UID, and by owner and UID.

    The owner key of an object is its namespace and its owner's UID; the owner key of a job is its namespace and name.

    Args:
        changed: called with the key of a job when the job, or an object that it owns, has changed.
        pod_deleted: called with the metadata and the last known state of a deleted pod.
    """

    def __init__(
        self, *, changed: Callable[[str], None], pod_deleted: Callable[[Json, Pod], None] = lambda _body, _last: None
    ) -> None:
        self._changed = changed
        self._pod_deleted = pod_deleted
        self._objects = collections.defaultdict[Resource, dict[str, Json]](dict)
        self._by_owner = collections.defaultdict[Resource, dict[tuple[str, str], dict[str, Json]]](dict)
        self._pods: dict[str, Pod] = {}
        self._tombstones: dict[str, tuple[float, float]] = {}
        """By UID, the oldest first: the version up to which updates are ignored, and when to forget it."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of all jobs."""
        return tuple(map("/".join, self._by_owner[ELASTIC_JOBS]))

    def job(self, key: str) -> Json | None:
        """Return the job with this key, ``namespace/name``; the later one if two have it."""
        packed = self.packed_job(key)
        return None if packed is None else unpack_job(packed)

    def packed_job(self, key: str) -> Json | None:
        """Return the same job as it is kept, packed by :func:`pack_job`."""
        namespace, _, name = key.partition("/")
        jobs = self._by_owner[ELASTIC_JOBS].get((namespace, name), {})
        return max(jobs.values(), key=version_of, default=None)

    def owned_by(self, resource: Resource, namespace: str, job_uid: str) -> tuple[Json, ...]:
        """Return the objects of a kind that a job owns.

        Only objects in the job's namespace are returned: in others, any user may write the UID into an owner reference.
        """
        return tuple(self._by_owner[resource].get((namespace, job_uid), {}).values())

    def pods(self, namespace: str, job_uid: str) -> tuple[Pod, ...]:
        """Return the worker pods of a job."""
        return tuple(self._pods[body["metadata"]["uid"]] for body in self.owned_by(PODS, namespace, job_uid))

    def count(self, resource: Resource) -> int:
        """Return how many objects of a kind are known."""
        return len(self._objects[resource])

    def put(self, resource: Resource, body: Json) -> None:
        """Put a state of an object into the cache, unless a newer one is known."""
        uid = body["metadata"]["uid"]
        before = self._objects[resource].get(uid)
        tombstone = self._tombstones.get(uid)
        version = version_of(body)
        if tombstone is not None and version <= tombstone[0]:
            return
        if before is not None and version <= version_of(before):
            return
        self._tombstones.pop(uid, None)  # the object exists: it had only lost the watched label
        after = _trimmed(resource, body)
        self._objects[resource][uid] = after
        if resource == PODS:
            self._pods[uid] = pod_of(body)
        owner = _owner_key(resource, after)
        if before is not None and _owner_key(resource, before) != owner:
            self._unlink(resource, before)
        if owner is not None:
            self._by_owner[resource].setdefault(owner, {})[uid] = after
        self._notify(resource, after)

    def remove(self, resource: Resource, body: Json) -> None:
        """Remove an object.

        Args:
            resource: the kind of the object.
            body: its last state, with the version of its deletion; without a version, no update restores the object.
        """
        self._mark_deleted(resource, body, version_of(body) or math.inf)

    def remove_unlisted(
        self, resource: Resource, uids: Collection[str], version: int, namespace: str | None = None
    ) -> None:
        """Remove the objects that a list lacks, unless they are newer than the list.

        Args:
            resource: the kind that was listed.
            uids: the objects in the list.
            version: the resource version of the list.
            namespace: the namespace that was listed; None for all.
        """
        for uid, body in list(self._objects[resource].items()):
            elsewhere = namespace is not None and body["metadata"].get("namespace") != namespace
            if uid not in uids and not elsewhere and version_of(body) <= version:
                self._mark_deleted(resource, body, version)

    def _mark_deleted(self, resource: Resource, body: Json, version: float) -> None:
        uid = body["metadata"]["uid"]
        before = self._objects[resource].get(uid)
        if before is not None and version < version_of(before):
            return
        now = time.monotonic()
        latest = max(version, self._tombstones.pop(uid, (version, 0.0))[0])
        self._tombstones[uid] = (latest, now + _TOMBSTONE_TTL)
        while self._tombstones[oldest := next(iter(self._tombstones))][1] <= now:
            del self._tombstones[oldest]
        if before is None:
            return
        del self._objects[resource][uid]
        self._unlink(resource, before)
        if resource == PODS:
            last = self._pods.pop(uid)
            newer = "spec" in body and version_of(body) > version_of(before)
            self._pod_deleted(before, pod_of(body) if newer else last)
        self._notify(resource, before)

    def _unlink(self, resource: Resource, body: Json) -> None:
        by_owner, owner = self._by_owner[resource], _owner_key(resource, body)
        if owner is not None:
            del by_owner[owner][body["metadata"]["uid"]]
            if not by_owner[owner]:
                del by_owner[owner]

    def _notify(self, resource: Resource, body: Json) -> None:
        metadata, owner = body["metadata"], owner_of(body)
        if resource == ELASTIC_JOBS:
            self._changed(f"{metadata['namespace']}/{metadata['name']}")
        elif owner is not None:
            self._changed(f"{metadata['namespace']}/{owner['name']}")


def version_of(body: Json) -> int:
    """Return the resource version of an object; 0 if it has none that can be compared."""
    version = str(body["metadata"].get("resourceVersion") or "")
    return int(version) if version.isdecimal() else 0


def owner_of(body: Json) -> Json | None:
    """Return the reference to the job that controls an object; None if there is none."""
    for reference in body["metadata"].get("ownerReferences") or ():
        is_job = reference.get("kind") == KIND and str(reference.get("apiVersion")).startswith(f"{GROUP}/")
        if is_job and reference.get("controller"):
            owner: Json = reference
            return owner
    return None


def pack_job(body: Json) -> Json:
    """Return a job with its metadata, and everything else as text."""
    return {
        "metadata": body["metadata"],
        "text": json.dumps({name: value for name, value in body.items() if name != "metadata"}),
    }


def unpack_job(packed: Json) -> Json:
    """Return the job that :func:`pack_job` has packed."""
    return {"metadata": packed["metadata"], **json.loads(packed["text"])}


def _owner_key(resource: Resource, body: Json) -> tuple[str, str] | None:
    namespace, owner = body["metadata"].get("namespace", ""), owner_of(body)
    if resource == ELASTIC_JOBS:
        return namespace, body["metadata"]["name"]
    return None if owner is None else (namespace, owner["uid"])


def _trimmed(resource: Resource, body: Json) -> Json:
    """Return the object without the parts that take most memory; a pod's state is kept as a :class:`Pod`."""
    metadata = body["metadata"]
    if resource not in (ELASTIC_JOBS, PODS):
        return {**body, "metadata": {name: value for name, value in metadata.items() if name != "managedFields"}}
    others = ("ownerReferences",) if resource == PODS else ("generation", "creationTimestamp", "deletionTimestamp")
    fields = ("name", "namespace", "uid", "resourceVersion", *others)
    kept = {name: metadata[name] for name in fields if name in metadata}
    if resource == PODS:
        return {"metadata": kept}
    return pack_job({**body, "metadata": kept, "spec": bounded_spec(get_dict(body, "spec"))})


@dataclass(frozen=True, slots=True)
class ManagedEtcd:
    """The etcd that is created for a job.

    Attributes:
        endpoint: host:port; None if the etcd has no address yet.
        blocked: why its pod cannot be created for now; None if it can.
    """

    state: EtcdState
    endpoint: str | None
    blocked: str | None
    service: Json | None
    deployment: Json | None


def managed_etcd(cache: ObjectCache, job: Job) -> ManagedEtcd:
    """Return the job's own etcd; its state is ABSENT if a part is missing or being deleted."""
    name = etcd_name(job.name)
    service, deployment = (
        next((each for each in cache.owned_by(kind, job.namespace, job.uid) if each["metadata"]["name"] == name), None)
        for kind in (SERVICES, DEPLOYMENTS)
    )
    address = get_str(service, "spec", "clusterIP")
    endpoint = etcd_endpoint(address) if address not in ("", "None") else None
    return ManagedEtcd(etcd_state(service, deployment), endpoint, etcd_blocked(deployment), service, deployment)


def etcd_state(service: Json | None, deployment: Json | None) -> EtcdState:
    """Return the state of a job's own etcd."""
    for body in (service, deployment):
        if body is None or get_dict(body, "metadata").get("deletionTimestamp"):
            return EtcdState.ABSENT
    observed = get_int(deployment, "status", "observedGeneration") or 0
    current = observed >= (get_int(deployment, "metadata", "generation") or 0)
    ready = (get_int(deployment, "status", "readyReplicas") or 0) > 0
    return EtcdState.READY if current and ready else EtcdState.STARTING


def etcd_blocked(deployment: Json | None) -> str | None:
    """Return why the pod of a job's own etcd cannot be created for now, for example a quota; None if it can."""
    condition = true_condition(deployment, "ReplicaFailure")
    return with_hint(get_str(condition, "message") or get_str(condition, "reason")) or None
