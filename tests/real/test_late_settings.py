"""What a program sets in os.environ before it imports torch, which was imported before the program began."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.programs import by_hand, hand_command, output_of, script
from torchelastic.settings import StartMethod

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.real


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")


SETS_AND_IMPORTS = """
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.update(PYTORCH_ALLOC_CONF="expandable_segments:True", MY_OWN="1", CUDA_VISIBLE_DEVICES="0")
os.environ.setdefault("TORCH_LOGS", "+distributed")
import torch
print(torch.get_num_threads(), type(os.environ).__name__, type(torch.__spec__).__name__)
"""


def too_late(name: str, module: str = "torch") -> str:
    return f"torchelastic: {name} is set too late: {module} was imported before the program began."


async def test_each_variable_that_is_set_too_late_is_told_once_by_name(tmp_path: Path) -> None:
    program = script(tmp_path, SETS_AND_IMPORTS)
    *told, printed = (await output_of(program, tmp_path / "logs")).splitlines()
    assert [line.partition(" Set it")[0] for line in told] == [
        too_late("OMP_NUM_THREADS"),
        too_late("PYTORCH_ALLOC_CONF"),
        too_late("TORCH_LOGS"),
    ]
    assert all("--start-method exec" in line for line in told)
    assert printed == "2 _Environ ModuleSpec"


async def test_an_executed_program_has_what_it_sets(tmp_path: Path) -> None:
    program = script(tmp_path, SETS_AND_IMPORTS, start_method=StartMethod.EXEC)
    printed = await output_of(program, tmp_path / "logs")
    assert printed == "1 _Environ ModuleSpec\n"
    assert printed == by_hand(hand_command(program), {}).stdout


@pytest.mark.parametrize(
    "source",
    [
        "import torch, os; os.environ['OMP_NUM_THREADS'] = '1'",
        "from torch import nn; import os; os.environ['OMP_NUM_THREADS'] = '1'",
        "import os; os.environ['OMP_NUM_THREADS'] = '2'; import torch",
        "import os; os.environ.pop('TORCH_LOGS', None); import torch",
        "import os; os.environ['PYTHONHASHSEED'] = '2'; import torch",
        "import os; os.environ['HOME'] = os.environ['TMPDIR'] = '/nowhere'; import torch",
    ],
    ids=["after the import", "after another import", "the same", "nothing removed", "read at start", "read again"],
)
async def test_what_would_have_no_effect_by_hand_or_has_it_here_is_not_told(source: str, tmp_path: Path) -> None:
    program = script(tmp_path, source)
    assert await output_of(program, tmp_path / "logs") == ""


async def test_what_a_preloaded_module_has_read_is_told_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import os\nSIZE = os.environ.get('MODEL_SIZE')\n")
    source = "import os\nimport torch\nos.environ['MODEL_SIZE'] = '7'\nimport model\nos.environ['MODEL_SIZE'] = '8'"
    printed = await output_of(script(tmp_path, source, preload=["model"]), tmp_path / "logs")
    assert printed.startswith(too_late("MODEL_SIZE", "model"))
    assert len(printed.splitlines()) == 1
