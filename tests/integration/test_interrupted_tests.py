"""Interrupted tests leave no process behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.agents import until_gone
from tests.support.workers import poll_until
from torchelastic.agent.workers.process_tree import TREE_MARK, read_table, with_descendants

pytestmark = pytest.mark.integration

BLOCKS = """
import asyncio
from pathlib import Path
from tests.support.agents import AgentProcess

async def test_blocks(own_etcd, tmp_path):
    async with AgentProcess("--standalone", "--no-python", "sh", "-c", "echo begun; exec sleep 600") as agent:
        await agent.wait_for_line("begun")
        Path(__file__).with_name("begun").touch()
        await asyncio.Event().wait()
"""


@pytest.mark.parametrize("parallel", [(), ("--numprocesses=1",)], ids=["one process", "pytest-xdist"])
async def test_no_process_outlives_interrupted_tests(tmp_path: Path, parallel: tuple[str, ...]) -> None:
    (tmp_path / "test_blocks.py").write_text(BLOCKS)
    tests = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", "--config-file=pyproject.toml", f"--rootdir={tmp_path}"),
        *("-p", "tests.conftest", *parallel, f"--basetemp={tmp_path / 'base'}", tmp_path / "test_blocks.py"),
        cwd=Path(__file__).parents[2],
        env={name: value for name, value in os.environ.items() if name != TREE_MARK and "PYTEST" not in name},
        stdout=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    await poll_until((tmp_path / "begun").exists)
    table = read_table()
    started = [table[pid] for pid in with_descendants(table, [tests.pid])]
    assert len({entry.session for entry in started}) >= 3  # pytest, the launcher and its worker
    while tests.returncode is None:  # an impatient user presses Ctrl-C several times
        os.killpg(tests.pid, signal.SIGINT)
        await asyncio.wait([asyncio.ensure_future(tests.wait())], timeout=0.2)
    for entry in started:
        await until_gone(entry.pid)
