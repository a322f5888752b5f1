"""Leader election among replicas of the operator, on a real API server."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from elastic_operator.kubernetes.client import LEASES
from elastic_operator.kubernetes.leader_election import LeaderElector
from testbed.control_plane import ControlPlane
from tests.support.operator_process import TIMEOUT
from tests.support.watching_api import WatchingApi

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from testbed.cluster import Cluster

pytestmark = [pytest.mark.control_plane, pytest.mark.asyncio(loop_scope="session")]


class Candidate:
    """A candidate for the lease, which records whether it leads."""

    def __init__(self, api: WatchingApi, namespace: str, identity: str, *, duration: int = 60) -> None:
        self.elector = LeaderElector(
            api=api,
            namespace=namespace,
            name="lease",
            identity=identity,
            lease_duration=duration,
            retry_period=0.1,
            renew_deadline=1.0,
            poll_period=0.05,
        )
        self.working = asyncio.Event()
        self.stopped = asyncio.Event()
        self.task = asyncio.create_task(self.elector.run(self._work))

    async def _work(self) -> None:
        self.stopped.clear()
        self.working.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.working.clear()
            self.stopped.set()

    async def end(self) -> None:
        """Stop the candidate as SIGTERM does."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


class Candidates:
    """Creates candidates for one lease, and stops them."""

    def __init__(self, api: WatchingApi, namespace: str) -> None:
        self.api = api
        self.namespace = namespace
        self.all: list[Candidate] = []

    def candidate(self, identity: str, *, duration: int = 60) -> Candidate:
        self.all.append(Candidate(self.api, self.namespace, identity, duration=duration))
        return self.all[-1]

    async def change(self, **spec: str | None) -> None:
        await self.api.patch(LEASES, self.namespace, "lease", {"spec": spec})


@pytest_asyncio.fixture(loop_scope="session")
async def candidates(control_plane: Cluster) -> AsyncIterator[Candidates]:
    async with (
        await WatchingApi.from_kubeconfig(str(control_plane.kubeconfig)) as api,
        control_plane.namespace() as namespace,
    ):
        made = Candidates(api, namespace)
        yield made
        for candidate in made.all:
            await candidate.end()


async def wait_for_event(event: asyncio.Event) -> None:
    async with asyncio.timeout(TIMEOUT):
        await event.wait()


async def test_a_restarted_candidate_acquires_its_own_lease_at_once(candidates: Candidates) -> None:
    first = candidates.candidate("first")
    await wait_for_event(first.working)
    first.task.cancel()
    await candidates.change(holderIdentity="second")  # the second candidate is killed and restarts
    second = candidates.candidate("second")
    await wait_for_event(second.working)


async def test_a_renewed_lease_is_respected_beyond_its_duration(candidates: Candidates) -> None:
    first = candidates.candidate("first", duration=1)
    await wait_for_event(first.working)
    second = candidates.candidate("second", duration=1)
    states = candidates.api.states(LEASES, candidates.namespace, name="lease")
    async with asyncio.timeout(TIMEOUT), contextlib.aclosing(states) as leases:
        async for found in leases:
            (lease,) = found.values()
            acquired, renewed = (datetime.fromisoformat(lease["spec"][when]) for when in ("acquireTime", "renewTime"))
            if renewed - acquired > timedelta(seconds=2.5):
                break
    assert first.working.is_set()
    assert not second.working.is_set()


async def test_work_stops_when_another_holds_the_lease_and_restarts_when_it_is_free(
    candidates: Candidates,
) -> None:
    first = candidates.candidate("first")
    await wait_for_event(first.working)
    await candidates.change(holderIdentity="thief")
    await wait_for_event(first.stopped)
    await candidates.change(holderIdentity=None)
    await wait_for_event(first.working)


async def test_work_stops_during_a_long_api_server_outage(tmp_path: Path) -> None:
    async with ControlPlane(tmp_path) as plane, await WatchingApi.from_kubeconfig(str(plane.kubeconfig)) as api:
        leader = Candidate(api, "default", "leader")
        await wait_for_event(leader.working)
        plane.daemons["kube-apiserver"].pause()
        await wait_for_event(leader.stopped)
        plane.daemons["kube-apiserver"].resume()
        await wait_for_event(leader.working)
        await leader.end()
