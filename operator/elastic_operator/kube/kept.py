"""What stands beside a job's pods as long as the plan wants it: the PodGroup of its gang, and its disruption budget.

They are made like pods, and changed by server-side apply: what others say in them stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_operator.errors import ClusterError
from elastic_operator.kube.api import ApiError
from elastic_operator.kube.disruption_budget import disruption_budget
from elastic_operator.kube.pod_group import POD_GROUPS, not_installed, pod_group
from elastic_operator.kube.resources import DISRUPTION_BUDGETS
from elastic_operator.kube.writer import Hindered, Refused, Unmade
from elastic_operator.names import ConditionType
from elastic_operator.unchecked import mapping

if TYPE_CHECKING:
    from elastic_operator.kube.cache import Cache
    from elastic_operator.kube.resources import Resource
    from elastic_operator.kube.writer import Writer
    from elastic_operator.model import Job
    from elastic_operator.spec import Json


class Unguarded(ClusterError):  # noqa: N818 - it says what happened
    """The API server does not take a disruption budget; the message says why. Trying again may help."""


def unguarded_before(job: Job) -> str | None:
    """Why, as far as the status says, the job's disruption budget could not be made; None where it does not say so."""
    conditions = (each for each in job.status.conditions if each.type == ConditionType.UNGUARDED and each.status)
    return next((each.message for each in conditions), None)


class Kept:
    """The jobs' PodGroups and disruption budgets.

    Args:
        cache: what is there.
        writer: makes, changes and removes.
    """

    def __init__(self, cache: Cache, writer: Writer) -> None:
        self._cache = cache
        self._writer = writer

    async def gang(self, job: Job, together: int | None) -> None:
        """Have the job's PodGroup there, or gone.

        Args:
            job: whose it is.
            together: how many pods get their places together; None where there is to be no PodGroup.

        Raises:
            Refused: the API server will never take it.
            Hindered: it does not take it now, or knows no PodGroups.
            ClusterError: trying again may help.
        """
        wanted = job.spec.scheduling.gang if together is not None else None
        for gang, resource in POD_GROUPS.items():
            if gang is not wanted or together is None:
                await self._remove(resource, job)
        if wanted is None or together is None:
            return
        try:
            await self._ensure(POD_GROUPS[wanted], job, pod_group(job, wanted, together))
        except ApiError as error:
            if error.not_found:
                raise Hindered(not_installed(wanted)) from None
            raise

    def has_gang(self, job: Job) -> bool:
        """Whether the PodGroup that the job's pods name is there."""
        gang = job.spec.scheduling.gang
        return gang is None or bool(self._cache.belongings(POD_GROUPS[gang], job.namespace, job.uid))

    async def guard(self, job: Job, guarded: int | None) -> None:
        """Have the job's disruption budget there, or gone.

        Args:
            job: whose it is.
            guarded: how many workers no eviction may touch; None where there is to be no budget.

        Raises:
            Unguarded: the API server does not take it. That is no reason to make no pods.
            ClusterError: trying again may help.
        """
        if guarded is None:
            await self._remove(DISRUPTION_BUDGETS, job)
            return
        try:
            await self._ensure(DISRUPTION_BUDGETS, job, disruption_budget(job, guarded))
        except (Refused, Hindered) as error:
            raise Unguarded(f"the disruption budget of the job cannot be made for now: {error}") from None
        except Unmade as error:
            raise ClusterError(f"the disruption budget of the job could not be made: {error}") from None

    async def _ensure(self, resource: Resource, job: Job, wanted: Json) -> None:
        there = self._cache.belongings(resource, job.namespace, job.uid)
        if not there:
            await self._writer.create(resource, job, wanted)
            return
        about = mapping(there[0], "metadata")
        outdated = not about.get("deletionTimestamp") and not _says(there[0].get("spec"), wanted["spec"])
        if outdated and not await self._writer.apply(resource, job, about["uid"], wanted):
            await self._writer.create(resource, job, wanted)  # somebody else has removed it

    async def _remove(self, resource: Resource, job: Job) -> None:
        for body in self._cache.belongings(resource, job.namespace, job.uid):
            about = mapping(body, "metadata")
            if not about.get("deletionTimestamp"):
                await self._writer.remove(resource, about["namespace"], about["name"], about["uid"])


def _says(there: object, wanted: object) -> bool:
    """Whether all that is wanted stands there, whatever else does."""
    if isinstance(wanted, dict):
        return isinstance(there, dict) and all(_says(there.get(key), value) for key, value in wanted.items())
    return there == wanted
