"""What is known of a job on Kubernetes: from the cache, from the mirrors of the stores, and from what was met before.

The API server is asked only for what stands nowhere else, where something takes its time.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from elastic_operator.kube.managed_etcd import PATIENCE as ETCD_PATIENCE
from elastic_operator.kube.readiness import explained, if_serving, serving
from elastic_operator.model import EtcdState, JobState, Observed, PodPhase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elastic_operator.kube.cache import Cache
    from elastic_operator.kube.departed import Departed
    from elastic_operator.kube.etcd_secrets import EtcdSecrets
    from elastic_operator.kube.ledger import Ledger
    from elastic_operator.kube.managed_etcd import EtcdSeen, ManagedEtcd
    from elastic_operator.kube.pod_starts import PodStarts
    from elastic_operator.kube.stores import Stores
    from elastic_operator.model import Job, Pod
    from elastic_operator.store_mirror import StoreMirror


_OVERDUE: Final = 60.0
"""Seconds that a kubelet which lives takes at most, by far, to remove a pod of which nothing runs."""


class Observing:
    """Looks at jobs.

    Args:
        cache: what the API server has.
        etcd: the jobs' own etcds.
        starts: what keeps pods from starting.
        stores: what the agents say.
        ledger: remembers what could not be made.
        departed: remembers pods that are gone.
        secrets: the credentials for etcds that are not of our making.
        wake: called with a job's key, and the seconds after which it is to be looked at once more.
    """

    def __init__(
        self,
        *,
        cache: Cache,
        etcd: ManagedEtcd,
        starts: PodStarts,
        stores: Stores,
        ledger: Ledger,
        departed: Departed,
        secrets: EtcdSecrets,
        wake: Callable[[str, float], None],
    ) -> None:
        self._cache = cache
        self._etcd = etcd
        self._starts = starts
        self._stores = stores
        self._ledger = ledger
        self._departed = departed
        self._secrets = secrets
        self._wake = wake

    async def observe(self, key: str, job: Job, held: Job, *, unguarded: str | None) -> Observed:
        """All that is known of a job.

        Args:
            key: under which it is looked at.
            job: as it is.
            held: the job with the spec that its pods are made from.
            unguarded: why it has not the disruption budget that it asks for; None where it has.
        """
        if (wait := await self._starts.look(job, self._cache.pods(job.namespace, job.uid))) is not None:
            self._wake(key, wait)
        managed = self._etcd.seen(job) if held.spec.etcd.endpoint is None else None
        complaint = await self._etcd.complaint(job, managed.state) if managed is not None else None
        # From here on nothing is waited for: all that is told is of one moment.
        managed = self._etcd.seen(job) if managed is not None else None
        there = (self._unless_overdue(key, pod) for pod in self._cache.pods(job.namespace, job.uid))
        pods = [self._starts.explained(job, pod) for pod in there]
        closed = self._closed_store(held)
        mirror = self._mirror(held, key, pods, managed) if closed is None else None
        names = serving(job, mirror) if closed is None else None
        told = self._told(held)
        unread = None if told is None else f"the operator cannot read the job's store: {told}"
        if managed is not None and managed.state is EtcdState.STARTING:
            self._wake(key, ETCD_PATIENCE)
        ready = (if_serving(pod, names) for pod in pods)
        return Observed(
            pods=(*(explained(pod, complaint or unread) for pod in ready), *self._departed.of(job.uid, pods)),
            etcd=managed.state if managed is not None else EtcdState.READY,
            store_read=mirror is not None and mirror.readable,
            epoch=mirror.epoch if mirror is not None else None,
            outcome=mirror.outcome if mirror is not None else None,
            size=mirror.size if mirror is not None else None,
            split=mirror.split if mirror is not None else None,
            history=mirror.history if mirror is not None else None,
            refusal=self._ledger.refusal(job),
            hindrance=self._ledger.hindrance(job) or (managed.hindrance if managed is not None else None),
            etcd_hindered=managed is not None and managed.hindrance is not None,
            store_trouble=closed or told,
            store_closed=closed is not None,
            etcd_trouble=complaint,
            unguarded=unguarded,
        )

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self._starts.forget(uid)
        self._departed.forget(uid)
        self._etcd.forget(uid)

    def _unless_overdue(self, key: str, pod: Pod) -> Pod:
        """A pod; one that never ran, and should have been gone for a while, is over: its node is silent."""
        if pod.due_to_go is None or pod.phase is not PodPhase.PENDING:
            return pod
        left = pod.due_to_go + _OVERDUE - time.time()
        if left > 0:
            self._wake(key, left)
            return pod
        return replace(pod, phase=PodPhase.FAILED, ended=pod.due_to_go)

    def _told(self, job: Job) -> str | None:
        """Why a store cannot be used that should be there; None where it can, or where nobody needs to know."""
        trouble = self._stores.trouble(job.uid)
        if trouble is None or job.spec.etcd.endpoint is not None:
            return trouble
        return (
            f"the job's etcd is ready, but the operator cannot reach it, as if a NetworkPolicy kept it from "
            f"there, or the node of etcd's pod had just died ({trouble})"
        )

    def _closed_store(self, job: Job) -> str | None:
        """Why the operator will not even try to read the job's store, in words; None where it does."""
        secret = job.spec.etcd.tls_secret
        return self._secrets.closed(job.namespace, secret) if secret is not None else None

    def _mirror(self, job: Job, key: str, pods: Sequence[Pod], managed: EtcdSeen | None) -> StoreMirror | None:
        """What stands in the job's store, which is followed as long as anything can happen there."""
        # As long as something is pinned, its store is needed, or has still to say whether the run has ended.
        resting = job.status.state is JobState.SUSPENDED and job.spec.suspend and job.status.pinned is None
        over = (job.status.state.finished or resting) and all(pod.phase.ended for pod in pods)
        if managed is not None:
            if managed.endpoint is not None and not over:
                up = managed.state is EtcdState.READY
                return self._stores.follow(job.uid, key, managed.endpoint, lasts=False, up=up)
        elif (endpoint := job.spec.etcd.endpoint) is not None and not over:
            return self._stores.follow(job.uid, key, endpoint, lasts=True, up=True, secret=job.spec.etcd.tls_secret)
        return self._stores.of(job.uid)
