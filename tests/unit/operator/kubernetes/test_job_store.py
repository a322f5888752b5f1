"""The mirrors of all jobs' stores: an error of one does not affect the others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, NoReturn

import pytest
from kubernetes.aio.client import Configuration

from elastic_operator.kubernetes.client import Api
from elastic_operator.kubernetes.job_store import JobStores
from elastic_operator.store_mirror import MemoryBudget, StoreMirror
from tests.support.certificates import CERTIFICATES
from torchelastic.errors import SettingsError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_operator.store_mirror import SettingsSource

TIMEOUT = 30
NO_API = Api(Configuration())


class FakeMirror(StoreMirror):
    """A mirror without a store, for which a test reports errors."""

    def __init__(
        self,
        run_id: str,
        *,
        changed: Callable[[], None],
        away: Callable[[StoreError | SettingsError], None],
        budget: MemoryBudget,
    ) -> None:
        super().__init__(run_id, changed=changed, away=away, budget=budget)
        self.report = away

    async def run(self, settings: SettingsSource, available: asyncio.Event | None) -> None:
        assert available is not None
        self.available = available
        await asyncio.Event().wait()


def fail(mirror: StoreMirror, error: str) -> None:
    assert isinstance(mirror, FakeMirror)
    mirror.report(SettingsError(error))


async def test_a_store_is_reported_as_unreachable_only_while_it_should_be_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("elastic_operator.kubernetes.job_store.StoreMirror", FakeMirror)
    woken = []
    async with asyncio.timeout(TIMEOUT), JobStores(NO_API, woken.append, CERTIFICATES, managed_timeout=0.0) as stores:

        def own(*, available: bool) -> StoreMirror:
            return stores.follow("uid", "team/digits", "127.9.9.9:2379", external=False, available=available)

        mirror = own(available=False)
        fail(mirror, "no route")
        assert stores.error("uid") is None
        own(available=True)
        fail(mirror, "no route")
        assert (stores.error("uid"), woken) == ("no route", ["team/digits"])
        own(available=False)
        assert stores.error("uid") is None
        fail(mirror, "no route")
        assert stores.error("uid") is None


async def test_an_unexpected_error_while_a_store_is_followed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(_mirror: StoreMirror, _settings: SettingsSource, _available: asyncio.Event | None) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(StoreMirror, "run", run)
    woken = asyncio.Event()
    async with (
        asyncio.timeout(TIMEOUT),
        JobStores(NO_API, lambda _key: woken.set(), CERTIFICATES, managed_timeout=0.0) as stores,
    ):
        stores.follow("uid", "team/digits", "127.9.9.9:2379", external=False, available=True)
        await woken.wait()
        assert stores.error("uid") == "an unexpected error: ZeroDivisionError('a defect')"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that the test sets; all mirrors are fake mirrors."""
    now = SimpleNamespace(time=0.0)
    monkeypatch.setattr("elastic_operator.kubernetes.job_store.StoreMirror", FakeMirror)
    monkeypatch.setattr("elastic_operator.kubernetes.job_store.time", SimpleNamespace(monotonic=lambda: now.time))
    return now


async def test_a_store_error_is_reported_after_a_delay_and_changes_at_most_twice_a_minute(
    now: SimpleNamespace,
) -> None:
    woken: list[str] = []
    async with asyncio.timeout(TIMEOUT), JobStores(NO_API, woken.append, CERTIFICATES, timeout=0.0) as stores:
        own = stores.follow("own", "team/own", "127.9.9.9:2379", external=False, available=True)
        for now.time, reported in ((0.0, None), (50.0, None), (60.0, "no route")):
            fail(own, "no route")
            assert stores.error("own") == reported, (
                "the job's own etcd is reported only after a minute, in which it may move to another node"
            )
        woken.clear()
        mirror = stores.follow("uid", "team/digits", "127.9.9.9:2379", external=True, available=True)
        for now.time, error, reported in (
            (0.0, "no route", "no route"),
            (1.0, "no answer", "no route"),
            (29.0, "no answer", "no route"),
            (30.0, "no route", "no route"),
            (31.0, "no answer", "no answer"),
            (60.0, "no route", "no answer"),
            (61.0, "no route", "no route"),
        ):
            fail(mirror, error)
            assert stores.error("uid") == reported
        assert len(woken) == 3


async def test_no_connection_is_tried_while_the_store_is_not_up(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = asyncio.Event()

    def at(_endpoint: str, _tls: object) -> NoReturn:
        connected.set()
        raise StoreError("no route")

    monkeypatch.setattr("elastic_operator.kubernetes.job_store.store_at", at)
    async with asyncio.timeout(TIMEOUT), JobStores(NO_API, lambda _key: None, CERTIFICATES) as stores:
        for available in (False, True):
            stores.follow("uid", "team/digits", "127.9.9.9:2379", external=False, available=available)
            for _ in range(9):
                await asyncio.sleep(0)
            assert connected.is_set() is available
