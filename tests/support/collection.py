"""Prepares the test bed of the selected tests, distributes the tests over processes, and skips tests.

The test bed is prepared when tests are collected, so that the time limits of tests do not include the preparation.
With pytest-xdist, each file runs in one process, and all tests on the node in one process, because there is one node.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from xdist.scheduler import LoadScopeScheduling

from testbed import availability

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.cache import Missing


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return FileScheduling(config, log)


class FileScheduling(LoadScopeScheduling):
    """Runs the tests of a file in one process, and those of all files that use the node in one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "node" if _uses_node(self.config.rootpath / file) else file


@functools.cache
def _uses_node(file: Path) -> bool:
    return "pytest.mark.node" in file.read_text()


@pytest.hookimpl(trylast=True)  # after -k and -m, so that only selected tests count
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.collectonly:
        return
    if not availability.EXHAUSTIVE and not os.environ.get("ELASTICJOB_TEST_TORCH"):
        later = [item for item in items if any(map(item.get_closest_marker, availability.ONLY_EXHAUSTIVE))]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in later]
    by_part = {part: [item for item in items if item.get_closest_marker(part)] for part in availability.PARTS}
    with _heard(config) as say:
        missing = availability.prepare({part for part, wanted in by_part.items() if wanted}, say)
    if missing and availability.fail_if_unavailable():
        raise pytest.UsageError("; ".join(map(str, missing.values())))
    for part, why in missing.items():
        for item in by_part[part]:
            item.add_marker(pytest.mark.skip(reason=str(why)))
    items.sort(key=_start_order)


def _start_order(item: pytest.Item) -> int:
    """Return a key that sorts the tests on the node first, then those with real processes, then the unit tests."""
    if item.get_closest_marker("node"):
        return 0
    return 2 if item.path.parent.name == "unit" else 1


@contextlib.contextmanager
def _heard(config: pytest.Config) -> Iterator[Any]:
    """Yield a function that prints a line, and suspend pytest's capturing within the block."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        yield reporter.write_line if reporter else print


def unavailable(why: Missing | str) -> NoReturn:
    """Skip the running test because a part is missing; with CI=true, fail the test."""
    if availability.fail_if_unavailable():
        pytest.fail(str(why))
    pytest.skip(str(why))
