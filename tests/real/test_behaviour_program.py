"""The program on the page about the agent does what the page says of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.agents import AgentProcess

pytestmark = pytest.mark.real

PAGE = Path(__file__).parents[2] / "docs" / "agent.md"


async def test_the_program_of_the_page_trains_and_saves(tmp_path: Path) -> None:
    [source] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(f"{source}\nprint('saved at step', torch.load(CHECKPOINT)['step'])\n")
    flags = ("--standalone", "--nproc-per-node=2", "--heartbeat-timeout=60")
    async with AgentProcess(*flags, "train.py", cwd=tmp_path) as agent:
        await agent.said(r"\[rank 0\] saved at step 200")
        assert await agent.code() == 0
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "checkpoint.pt"}
