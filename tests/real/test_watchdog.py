"""The watchdog ends the processes of a dead agent, whenever it died."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import AgentProcess
from tests.support.crew import gone
from tests.support.programs import script
from torchelastic.agent.workers.processes import python_code

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.real


def test_a_watchdog_removes_memory_even_if_its_agent_died_during_its_start(tmp_path: Path) -> None:
    folder = tmp_path / "a name\nof two lines"
    folder.mkdir()
    (folder / "file").touch()
    agent = subprocess.Popen([sys.executable, "-c", ""])
    agent.wait(60)
    watchdog = python_code("torchelastic.agent.workers.watchdog", minimal=True)
    subprocess.run(
        [*watchdog, str(agent.pid), "a mark that nothing carries", folder], input=b"", timeout=60, check=True
    )
    assert not folder.exists()


CHILD_WITHOUT_ENVIRONMENT = """
import subprocess
child = subprocess.Popen(["env", "-i", "sleep", "600"])
while "sleep" not in open(f"/proc/{child.pid}/cmdline").read().split("\\0")[0]:
    pass
print("child", child.pid, flush=True)
child.wait()
"""


async def test_a_killed_agent_leaves_no_child_of_a_worker_without_its_environment(tmp_path: Path) -> None:
    [program] = script(tmp_path, CHILD_WITHOUT_ENVIRONMENT).argv
    async with AgentProcess("--standalone", program) as agent:
        child = int((await agent.said(r"child (\d+)"))[1])
        agent.kill()
        await gone(child)
