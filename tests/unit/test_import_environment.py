"""What imports read of the environment is known, and so is what that means for a process that is forked after them."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

import pytest

from torchelastic.agent.import_environment import ImportEnvironment
from torchelastic.agent.late_settings import LateSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME = "imported_in_a_test"

READS = """
import os
os.environ.get("GOT")
os.getenv("ASKED")
"LOOKED_UP" in os.environ
os.environ.setdefault("SET", "by the module")
"""

COPIES = """
import os
dict(os.environ)
{**os.environ}
os.environ.copy()
{name: value for name, value in os.environ.items()}
[os.environ[name] for name in os.environ]
import platform, tempfile
tempfile.gettempdir()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the module is, whose import leaves nothing behind."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("SET", "GOT"):
        monkeypatch.delenv(name, raising=False)
    plain = type(os.environ)
    yield tmp_path
    os.environ.__class__ = plain
    sys.modules.pop(NAME, None)
    os.environ.pop("SET", None)


def imported(folder: Path, source: str) -> ImportEnvironment:
    (folder / f"{NAME}.py").write_text(source)
    environment = ImportEnvironment()
    with environment.importing(NAME):
        importlib.import_module(NAME)
    return environment


def test_each_variable_that_is_asked_for_is_known(folder: Path) -> None:
    assert imported(folder, READS).read[NAME] == {"GOT", "ASKED", "LOOKED_UP", "SET"}
    assert type(os.environ).__name__ == "_Environ"


def test_neither_a_copy_of_all_nor_what_the_standard_library_asks_for_is_a_reading(folder: Path) -> None:
    assert imported(folder, COPIES).read[NAME] == set()


@pytest.mark.parametrize(
    ("changes", "executed"),
    [
        ({}, False),
        ({"OTHER": "1"}, False),
        ({"RANK": "1", "TORCHELASTIC_EPOCH": "2", "MASTER_ADDR": "there"}, False),
        ({"CUDA_VISIBLE_DEVICES": "1", "NCCL_DEBUG": "INFO", "TORCH_NCCL_BLOCKING_WAIT": "1"}, False),
        ({"GOT": "1"}, True),
        ({"OMP_NUM_THREADS": "1234"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, True),
        ({"PYTHONHASHSEED": "7"}, True),
        ({"LC_ALL": "none"}, True),
        ({"COVERAGE_PROCESS_START": "x"}, True),
    ],
    ids=lambda value: next(iter(value), "nothing") if isinstance(value, dict) else "",
)
def test_what_counts_while_a_process_starts_is_to_be_the_same(
    changes: dict[str, str], executed: bool, folder: Path
) -> None:
    environment = imported(folder, READS)
    assert environment.must_be_executed({**environment.at_start, **changes}) is executed


def test_what_is_missing_counts_as_well(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOT", "1")
    environment = imported(folder, READS)
    assert environment.must_be_executed({n: v for n, v in environment.at_start.items() if n != "GOT"})


def test_what_a_module_sets_is_set_where_the_module_would_have_set_it(folder: Path) -> None:
    environment = imported(folder, READS)
    assert environment.completed({"OTHER": "1"}) == {"OTHER": "1", "SET": "by the module"}
    assert environment.completed({"SET": "before"}) == {"SET": "before"}


def test_what_only_workers_have_is_known_by_name(folder: Path) -> None:
    environment = imported(
        folder, "import os; os.environ.get('LOCAL_RANK'); os.environ.get('RANKS'); os.getenv('TORCHELASTIC_EPOCH')"
    )
    assert environment.of_workers(NAME) == ["LOCAL_RANK", "TORCHELASTIC_EPOCH"]


IMPORTS = [
    f"import {NAME}",
    f"from {NAME} import os",
    f"import importlib; importlib.import_module({NAME!r})",
    f"def late():\n    import {NAME} as module\nlate()",
]


@pytest.mark.parametrize("statement", IMPORTS)
def test_a_change_is_told_once_until_the_program_imports_the_module(statement: str, folder: Path) -> None:
    environment = imported(folder, READS)
    told: list[tuple[str, str]] = []
    LateSettings(environment.at_start, environment.read, lambda *what: told.append(what)).watch()
    os.environ["GOT"] = "1"
    os.environ["GOT"] = "2"
    os.environ["OTHER"] = "1"
    del os.environ["OTHER"], os.environ["GOT"]
    assert told == [("GOT", NAME)]
    exec(statement, {})
    assert type(os.environ).__name__ == "_Environ"
    assert type(sys.modules[NAME].__spec__) is ModuleSpec
    os.environ["ASKED"] = "1"
    del os.environ["ASKED"]
    assert told == [("GOT", NAME)]
