"""Fixtures for all tests."""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import uuid
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from tests.support.collection import (  # noqa: F401 - hooks, which pytest finds here
    pytest_collection_modifyitems,
    pytest_xdist_make_scheduler,
)
from tests.support.etcd import EtcdServer
from torchelastic.agent.workers.process_tree import TREE_MARK
from torchelastic.agent.workers.processes import python_code, spawn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytest.register_assert_rewrite("tests.support.store_conformance")  # it has assertions, but is not a test module

# There is no deadline, because durations depend on the load. Each run draws new examples, also in CI.
settings.register_profile("patient", deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("exhaustive", settings.get_profile("patient"), max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "patient"))


# A shell's background jobs ignore these signals, and the processes that the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` ignores it


# A second Ctrl-C ends pytest before the tests have ended their processes, which lead sessions of their own. When pytest
# exits for any reason, a watchdog kills all processes that it, or a process of pytest-xdist, has started.
if TREE_MARK not in os.environ:  # not in a process of pytest-xdist, which inherits the mark
    os.environ[TREE_MARK] = secrets.token_hex(8)
    _watchdog = python_code("torchelastic.agent.workers.process_tree", minimal=True)
    spawn([*_watchdog, str(os.getpid()), os.environ[TREE_MARK], tempfile.mkdtemp()], {}, {1: 2, 2: 2})


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EtcdServer]:
    """A real etcd that all tests share: use only the keys below your `prefix`, and do not stop it."""
    async with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest_asyncio.fixture
async def own_etcd(tmp_path: Path) -> AsyncIterator[EtcdServer]:
    """A real etcd for one test, which may kill, pause, wipe and restart it."""
    async with EtcdServer(tmp_path) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_round() -> Iterator[None]:
    """Remove the variable that a rendezvous in the process of the tests sets for its workers."""
    yield
    os.environ.pop("TORCHELASTIC_ROUND", None)


@pytest.fixture
def prefix() -> str:
    """A key prefix that no other test uses, with a slash at its end."""
    return f"/torchelastic/test-{uuid.uuid4().hex}/"
