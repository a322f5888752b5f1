"""Fixtures of tests with real processes; among them, those that run tests with the oldest supported torch.

If the environment has ELASTICJOB_TEST_TORCH=oldest, all tests in this folder run their programs with the oldest torch,
which is part of the test bed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from testbed import oldest_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

OLDEST_FOR_ALL = os.environ.get("ELASTICJOB_TEST_TORCH", "") == "oldest"


@pytest.fixture(scope="session")
def oldest_torchs_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python like the one that runs the tests, with the oldest torch."""
    return oldest_torch.make_python(tmp_path_factory.mktemp("oldest") / "venv")


@pytest.fixture(params=["newest", pytest.param("oldest", marks=pytest.mark.oldest_torch)])
def each_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test twice: with the torch of this environment, and with the oldest torch in all Python processes."""
    if request.param == "oldest":
        monkeypatch.setattr(sys, "executable", str(request.getfixturevalue("oldest_torchs_python")))


@pytest.fixture
def stop(tmp_path: Path) -> Iterator[Path]:
    """The path of a file; the workers finish when it exists, even those that outlive their launcher."""
    path = tmp_path / "stop"
    yield path
    path.touch()


@pytest.fixture(scope="module", autouse=True)
def _chosen_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use the oldest torch if the environment requests it."""
    with pytest.MonkeyPatch.context() as patch:
        if OLDEST_FOR_ALL:
            patch.setattr(sys, "executable", str(request.getfixturevalue("oldest_torchs_python")))
        yield


@pytest.hookimpl(tryfirst=True)  # before the test bed is prepared
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if OLDEST_FOR_ALL and item.path.is_relative_to(here):
            item.add_marker(pytest.mark.oldest_torch)
