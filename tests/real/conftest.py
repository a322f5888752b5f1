"""The two ends of the range of torch that is supported, for tests that ask for them, or for all.

With ELASTICJOB_TEST_TORCH=oldest in the environment every test here runs its programs with the oldest torch. What is
needed for that is installed when tests are collected, so that no test's time limit has to hold for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import oldest_torch
from tests.support.testbed import availability
from tests.support.testbed.cache import Missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MISSING = pytest.StashKey[tuple[Missing, int]]()

OLDEST_FOR_ALL = os.environ.get("ELASTICJOB_TEST_TORCH", "") == "oldest"


@pytest.fixture(scope="session")
def oldest_torchs_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python like the one that runs the tests, with the oldest torch."""
    return oldest_torch.make_python(tmp_path_factory.mktemp("oldest") / "venv")


@pytest.fixture
def with_oldest_torch(oldest_torchs_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All Pythons that the test starts have the oldest torch; such a test carries the marker oldest_torch, too."""
    monkeypatch.setattr(sys, "executable", str(oldest_torchs_python))


@pytest.fixture(params=["newest", pytest.param("oldest", marks=pytest.mark.oldest_torch)])
def each_torch(request: pytest.FixtureRequest) -> str:
    """Run the test twice: all Pythons that it starts have this environment's torch, and then the oldest one."""
    if request.param == "oldest":
        request.getfixturevalue("with_oldest_torch")
    return str(request.param)


@pytest.fixture(autouse=True)
def _chosen_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where the oldest torch was asked for, that."""
    with pytest.MonkeyPatch.context() as patch:
        if OLDEST_FOR_ALL:
            patch.setattr(sys, "executable", str(request.getfixturevalue("oldest_torchs_python")))
        yield


@pytest.hookimpl(trylast=True)  # after -k and -m: nothing is made for tests that are not wanted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = [item for item in items if item.get_closest_marker("oldest_torch")]
    if config.option.collectonly or oldest_torch.is_ready() or not (wanted or OLDEST_FOR_ALL):
        return
    try:
        with _heard(config) as say:
            say(f"torch {oldest_torch.VERSION} is installed for the tests: up to {oldest_torch.MINUTES:g} minutes.")
            oldest_torch.packages()
    except Missing as why:
        config.stash[MISSING] = (why, len(wanted))
        config.hook.pytest_deselected(items=wanted)
        items[:] = [item for item in items if item not in wanted]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if MISSING in config.stash:
        why, count = config.stash[MISSING]
        terminalreporter.section("the oldest torch", red=True, bold=True)
        terminalreporter.line(f"{count} tests with torch {oldest_torch.VERSION} did NOT run.", red=True)
        terminalreporter.line(f"  missing: {why.part}", red=True)
        terminalreporter.line(f"  what brings it: {why.remedy}", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if MISSING in session.config.stash and availability.must_not_miss():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@contextlib.contextmanager
def _heard(config: pytest.Config) -> Iterator[Any]:
    """Let what takes a while be told while it goes on; pytest keeps what is printed to itself."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        yield reporter.write_line if reporter else print
