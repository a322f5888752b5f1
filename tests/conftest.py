"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
import uuid
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from tests.support.etcd import EtcdServer
from tests.support.testbed.collection import (  # noqa: F401 - hooks, which pytest finds here
    pytest_collection_modifyitems,
    pytest_xdist_make_scheduler,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytest.register_assert_rewrite("tests.support.store_conformance")  # it asserts too, and is no test module

# The time that an example takes depends on the machine's load. Each run draws other examples, also in CI.
settings.register_profile("patient", deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("exhaustive", settings.get_profile("patient"), max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "patient"))


# A shell that starts something in the background has it ignore these; what the tests start would ignore them, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` has it ignored


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EtcdServer]:
    """A real etcd that all tests share: keep to a prefix of your own, and leave it running."""
    async with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest_asyncio.fixture
async def own_etcd(tmp_path: Path) -> AsyncIterator[EtcdServer]:
    """A real etcd for one test, to be killed, paused, wiped and started again as it likes."""
    async with EtcdServer(tmp_path) as server:
        yield server


@pytest.fixture
def prefix() -> str:
    """The beginning of keys that no other test uses, ending in a slash."""
    return f"/torchelastic/test-{uuid.uuid4().hex}/"
