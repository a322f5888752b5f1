"""Variables that torch reads when it is imported, set by the program itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.programs import by_hand, hand_command, output_of, script
from torchelastic.config.settings import StartMethod

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.real


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")


WAYS = {
    "assigned": 'os.environ["OMP_NUM_THREADS"] = "1"',
    "default": 'os.environ.pop("OMP_NUM_THREADS"); os.environ.setdefault("OMP_NUM_THREADS", "1")',
    "updated": 'os.environ.update(OMP_NUM_THREADS="1")',
}


@pytest.mark.parametrize("method", StartMethod)
@pytest.mark.parametrize("statement", WAYS.values(), ids=WAYS)
async def test_a_program_sees_variables_that_it_sets_before_importing_torch(
    statement: str, method: StartMethod, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = f"import os, sys\n{statement}\nimport torch\nprint(torch.get_num_threads())"
    program = script(tmp_path, source, start_method=method)
    assert await output_of(program, tmp_path / "logs") == "1\n" == by_hand(hand_command(program), {}).stdout
    told = "program.py sets OMP_NUM_THREADS, which torch reads when it is imported"
    assert caplog.text.count(told) == (method is StartMethod.FORK_SERVER)


@pytest.mark.parametrize(
    "source",
    [
        "import torch, os; os.environ['OMP_NUM_THREADS'] = '1'",
        "from torch import nn; import os; os.environ['OMP_NUM_THREADS'] = '1'",
        "import os; os.environ['HOME'] = os.environ['TMPDIR'] = '/nowhere'; import torch",
        "import os; os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['TORCH_NCCL_BLOCKING_WAIT'] = '0'; import torch",
        "import os; print(end=os.environ.get('OMP_NUM_THREADS') == '7' and 'x' or ''); import torch",
    ],
    ids=["after the import", "after another import", "read again", "read at use", "not set"],
)
async def test_any_other_program_is_forked(source: str, tmp_path: Path) -> None:
    program = script(tmp_path, f"import sys; print('torch' in sys.modules)\n{source}")
    assert await output_of(program, tmp_path / "logs") == "True\n"
