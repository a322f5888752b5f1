"""What the reconciler needs of a place where jobs run: Kubernetes, or this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from elastic_operator.controller.model import Job, Observed, Plan


class Cluster(Protocol):
    """A place where jobs run. It calls ``wake(key)`` of the reconciler when something may have changed."""

    async def observe(self, key: str) -> tuple[Job, Observed] | None:
        """The job and what is known of it; None if it does not exist.

        It may be outdated, but never older than an earlier observation of this job, nor than what ``apply`` wrote.

        Raises:
            ClusterError: it could not be read; the reconciler retries.
        """

    async def apply(self, job: Job, plan: Plan) -> float | None:
        """Carry out the plan in its order; returns seconds after which to reconcile again, or None.

        The replicas and the status are written only onto the observed version of the job; if that fails, nothing else
        is done. If the size cannot be written, pods are still changed, and the error is raised afterwards. A pod to
        delete that is gone or was replaced, and a pod to create that exists, count as done.

        Raises:
            ClusterError: a part could not be done; the reconciler retries.
        """
