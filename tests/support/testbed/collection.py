"""pytest's hooks by which the wanted tests get what they run on, or clear words that it cannot be had.

It is made when tests are collected, so that no test's time limit has to hold for it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.testbed import availability
from tests.support.testbed.availability import Bed
from tests.support.testbed.cache import Missing

if TYPE_CHECKING:
    from collections.abc import Iterator

MISSING = pytest.StashKey[dict[Bed, Missing]]()
LEFT_OUT = pytest.StashKey[Counter[Bed]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MISSING] = {}
    config.stash[LEFT_OUT] = Counter()


@pytest.hookimpl(trylast=True)  # after -k and -m: nothing is made for tests that are not wanted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.collectonly:
        return
    by_bed = {bed: [item for item in items if item.get_closest_marker(bed)] for bed in availability.BEDS}
    with _heard(config) as say:
        missing = availability.prepare({bed for bed, wanted in by_bed.items() if wanted}, say)
    config.stash[MISSING].update(missing)
    config.stash[LEFT_OUT].update({bed: len(by_bed[bed]) for bed in missing})
    left_out = [item for bed in missing for item in by_bed[bed]]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if missing := config.stash[MISSING]:
        terminalreporter.section("tests that did not run", red=True, bold=True)
        for line in availability.closing_words(missing, config.stash[LEFT_OUT]):
            terminalreporter.line(line, red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash[MISSING] and availability.must_not_miss():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@contextlib.contextmanager
def _heard(config: pytest.Config) -> Iterator[Any]:
    """Let what takes minutes be told while it goes on; pytest keeps what is printed to itself."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        yield reporter.write_line if reporter else print
