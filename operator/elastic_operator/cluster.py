"""What the reconciler needs of a place where jobs run: Kubernetes, or this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from elastic_operator.model import Job, Observed, Plan


class Cluster(Protocol):
    """A place where jobs run.

    A cluster tells the reconciler that something may have changed by calling ``wake(key)``, which it was given when it
    was made; it never decides anything by itself.
    """

    async def observe(self, key: str) -> tuple[Job, Observed] | None:
        """The job and all that is known of it; None where there is no such job (any more).

        It may be a little old, but never older than what was observed of this job before, nor than what ``apply`` last
        wrote for it.

        Raises:
            ClusterError: it could not be read; the reconciler tries again, later and later.
        """

    async def apply(self, job: Job, plan: Plan) -> None:
        """Do what the plan says, in its order.

        The replicas and the status are written only onto the very version of the job that was observed; where that
        fails, nothing further is done, for all else rests upon them. A size that cannot be written does not keep the
        pods from being changed; it is raised behind them. A pod to be removed that is gone, or whose name belongs to
        another by now, and a pod to be made that is there already, are as good as done.

        Raises:
            ClusterError: something of it could not be done; the reconciler tries again, later and later.
        """
