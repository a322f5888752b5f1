"""What the API server has, as far as it is known here: plain JSON, trimmed, by UID.

Three hands feed it: the watches, fresh listings, and whoever writes, with what the API server has returned. They may
come in any order: a newer version of an object is never overwritten by an older one, nor is the news of its end. An end
has a version too, and what has ceased to exist has no newer one, for a UID is never used again. A newer one there is
only of what a watch called gone because it had lost the label by which it is watched, and has been given it again. So
the cache is never older than what was last written, nor than what it has shown before.

Versions are compared as numbers: so all API servers have counted them, and Kubernetes promises it since 1.35.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.kube.observation import pod_of, trimmed_pod
from elastic_operator.kube.resources import ELASTIC_JOBS, PODS
from elastic_operator.spec import GROUP, KIND

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from elastic_operator.kube.resources import Resource
    from elastic_operator.model import Pod
    from elastic_operator.spec import Json

_GRAVE: Final = 900.0
"""Seconds for which it is remembered that an object is gone: news of it come no later."""

_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"


@dataclass(frozen=True, slots=True)
class Owner:
    """The job that an object belongs to.

    Attributes:
        uid: of the job.
        name: of the job.
    """

    uid: str
    name: str


@dataclass(frozen=True, slots=True)
class _Grave:
    """What is remembered of an object that is gone.

    Attributes:
        version: no state up to this one counts any more; infinite where the version of its end is not known.
        until: when it is forgotten, by the monotonic clock.
    """

    version: float
    until: float


@dataclass(slots=True)
class _Kind:
    """The objects of one kind."""

    objects: dict[str, Json] = field(default_factory=dict)
    by_owner: dict[tuple[str, str], dict[str, Json]] = field(default_factory=dict)


class Cache:
    """The objects of some kinds.

    Args:
        changed: called with the key of a job whenever it, or what belongs to it, has changed.
        gone: called with an object's kind and its last known state when it is gone.
    """

    def __init__(
        self, *, changed: Callable[[str], None], gone: Callable[[Resource, Json], None] = lambda _kind, _last: None
    ) -> None:
        self._changed = changed
        self._gone = gone
        self._kinds: dict[Resource, _Kind] = {}
        self._uids: dict[str, str] = {}
        self._understood: dict[str, Pod] = {}
        self._graves: dict[str, _Grave] = {}

    @property
    def keys(self) -> tuple[str, ...]:
        """Of all jobs."""
        return tuple(self._uids)

    def job(self, key: str) -> Json | None:
        """The job of this key, ``namespace/name``."""
        uid = self._uids.get(key)
        return None if uid is None else self._kinds[ELASTIC_JOBS].objects[uid]

    def belongings(self, resource: Resource, namespace: str, job_uid: str) -> tuple[Json, ...]:
        """The objects of a kind that belong to a job.

        Only those in its own namespace: anybody can write another's UID into an object of theirs.
        """
        kind = self._kinds.get(resource)
        return () if kind is None else tuple(kind.by_owner.get((namespace, job_uid), {}).values())

    def pods(self, namespace: str, job_uid: str) -> tuple[Pod, ...]:
        """The worker pods of a job in the words of the plan; each state of a pod is put into these words once."""
        kind = self._kinds.get(PODS)
        return () if kind is None else tuple(map(self._pod, kind.by_owner.get((namespace, job_uid), {}).items()))

    def _pod(self, there: tuple[str, Json]) -> Pod:
        uid, body = there
        pod = self._understood.get(uid)
        if pod is None:
            pod = self._understood[uid] = pod_of(body)
        return pod

    def count(self, resource: Resource) -> int:
        """How many objects of a kind there are."""
        kind = self._kinds.get(resource)
        return 0 if kind is None else len(kind.objects)

    def put(self, resource: Resource, body: Json) -> None:
        """An object is so, or was once."""
        about = body["metadata"]
        uid = about["uid"]
        kind = self._kinds.setdefault(resource, _Kind())
        before = kind.objects.get(uid)
        grave = self._graves.get(uid)
        if grave is not None and version_of(body) <= grave.version:
            return
        if before is not None and version_of(body) <= version_of(before):
            return
        self._graves.pop(uid, None)
        after = _trimmed(resource, body)
        kind.objects[uid] = after
        self._understood.pop(uid, None)
        owner = owner_of(after)
        if before is not None and (former := owner_of(before)) is not None and former != owner:
            self._disown(kind, _home(before, former), uid)
        if owner is not None:
            kind.by_owner.setdefault(_home(after, owner), {})[uid] = after
        if resource == ELASTIC_JOBS:
            self._name(key_of(after), uid)
        self._tell(resource, after)

    def remove(self, resource: Resource, body: Json) -> None:
        """An object is gone, or was once.

        Args:
            resource: its kind.
            body: its last state, with the version of its end; without a version, it is gone for good.
        """
        self._bury(resource, body, version_of(body) or math.inf)

    def _bury(self, resource: Resource, body: Json, version: float) -> None:
        uid = body["metadata"]["uid"]
        kind = self._kinds.get(resource)
        before = kind.objects.get(uid) if kind is not None else None
        if before is not None and version < version_of(before):
            return
        former = self._graves.get(uid)
        last_known = version if former is None else max(version, former.version)
        self._graves[uid] = _Grave(last_known, time.monotonic() + _GRAVE)
        if kind is None or before is None:
            return
        del kind.objects[uid]
        self._understood.pop(uid, None)
        if (owner := owner_of(before)) is not None:
            self._disown(kind, _home(before, owner), uid)
        if resource == ELASTIC_JOBS:
            self._unname(key_of(before), uid)
        last = _trimmed(resource, body) if "spec" in body and version_of(body) > version_of(before) else before
        self._gone(resource, last)
        self._tell(resource, before)

    def keep_only(self, resource: Resource, uids: Collection[str], version: int, namespace: str | None = None) -> None:
        """A listing had these objects and no others: what is missing is gone, unless it was made since.

        Args:
            resource: their kind.
            uids: of the objects in the listing.
            version: of the listing.
            namespace: the listing was of this one only; None: of all.
        """
        kind = self._kinds.setdefault(resource, _Kind())
        for uid, body in list(kind.objects.items()):
            elsewhere = namespace is not None and body["metadata"].get("namespace") != namespace
            if uid not in uids and not elsewhere and version_of(body) <= version:
                self._bury(resource, body, version)
        now = time.monotonic()
        self._graves = {uid: grave for uid, grave in self._graves.items() if grave.until > now}

    def _name(self, key: str, uid: str) -> None:
        """The job of a key is this one, unless a later one is."""
        holder = self._uids.get(key)
        jobs = self._kinds[ELASTIC_JOBS].objects
        if holder is None or version_of(jobs[holder]) <= version_of(jobs[uid]):
            self._uids[key] = uid

    def _unname(self, key: str, uid: str) -> None:
        if self._uids.get(key) != uid:
            return
        del self._uids[key]
        for other, body in self._kinds[ELASTIC_JOBS].objects.items():
            if key_of(body) == key:  # it took the place of the one that is gone before the news of the end came
                self._name(key, other)

    @staticmethod
    def _disown(kind: _Kind, home: tuple[str, str], uid: str) -> None:
        owned = kind.by_owner.get(home, {})
        owned.pop(uid, None)
        if not owned:
            kind.by_owner.pop(home, None)

    def _tell(self, resource: Resource, body: Json) -> None:
        if resource == ELASTIC_JOBS:
            self._changed(key_of(body))
        elif (owner := owner_of(body)) is not None:
            self._changed(f"{body['metadata']['namespace']}/{owner.name}")


def key_of(job: Json) -> str:
    """What a job is called in the queue: ``namespace/name``."""
    return f"{job['metadata']['namespace']}/{job['metadata']['name']}"


def version_of(body: Json) -> int:
    """The version of an object; 0 where it has none that can be compared."""
    version = str(body["metadata"].get("resourceVersion") or "")
    return int(version) if version.isdecimal() else 0


def owner_of(body: Json) -> Owner | None:
    """The job that controls an object; None where none does."""
    for reference in body["metadata"].get("ownerReferences") or ():
        ours = reference.get("kind") == KIND and str(reference.get("apiVersion")).startswith(f"{GROUP}/")
        if ours and reference.get("controller"):
            return Owner(uid=reference["uid"], name=reference["name"])
    return None


def _home(body: Json, owner: Owner) -> tuple[str, str]:
    """The namespace in which an object is, and the UID of the job that it says it belongs to."""
    return body["metadata"].get("namespace", ""), owner.uid


def _trimmed(resource: Resource, body: Json) -> Json:
    """Without what nobody here reads and much memory goes to."""
    if resource == PODS:
        pod = trimmed_pod(body)
        if (grace := body["metadata"].get("deletionGracePeriodSeconds")) is not None:
            pod["metadata"]["deletionGracePeriodSeconds"] = grace
        return pod
    about: dict[str, Any] = {name: value for name, value in body["metadata"].items() if name != "managedFields"}
    if _LAST_APPLIED in about.get("annotations", {}):
        about["annotations"] = {k: v for k, v in about["annotations"].items() if k != _LAST_APPLIED}
    return {**body, "metadata": about}
