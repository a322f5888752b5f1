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
        """The job and all that is known of it; None where there is no such job (any more)."""

    async def apply(self, job: Job, plan: Plan) -> None:
        """Do what the plan says, in its order.

        Raises:
            ClusterError: something of it could not be done; the reconciler tries again, later and later.
        """
