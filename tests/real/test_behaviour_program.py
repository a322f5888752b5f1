"""The programs in the documentation of the agent do what it says."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import AgentProcess

if TYPE_CHECKING:
    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.real

PAGE = Path(__file__).parents[2] / "docs" / "agent.md"
WHOLE, TOGETHER = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)

SAVES_TOGETHER = f"""
import os, time
import torch
import torch.distributed as dist
import torchelastic

{TOGETHER}

def save_together(step):
    steps = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(steps, torch.tensor([float(step)]))
    print("saved together:", len({{each.item() for each in steps}}) == 1, flush=True)

dist.init_process_group("gloo")
torchelastic.ask_for_notice(seconds=600)
print(f"round {{os.environ['TORCHELASTIC_ROUND']}} world {{dist.get_world_size()}}", flush=True)
for step in range(1_000_000):
    save_if_need_be(step)
    time.sleep(0.005)
"""


async def test_the_documented_program_trains_and_saves(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{WHOLE}\nprint('saved at step', torch.load(CHECKPOINT)['step'])\n")
    flags = ("--standalone", "--nproc-per-node=2", "--heartbeat-timeout=60")
    async with AgentProcess(*flags, "train.py", cwd=tmp_path) as agent:
        await agent.said(r"\[rank 0\] saved at step 200")
        assert await agent.code() == 0
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "checkpoint.pt"}


async def test_ranks_that_agree_on_a_notice_save_together_and_the_change_follows_at_once(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    program = tmp_path / "together.py"
    program.write_text(SAVES_TOGETHER)
    flags = (f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={tmp_path}", "--local-addr=127.0.0.1", "--notice=600")
    nodes = (*flags, "--nnodes=1:3", "--nproc-per-node=2", "--rdzv-conf=last_call_timeout=0,lease=1", program)
    async with AgentProcess(*nodes) as a:
        await a.said("round 1 world 2")
        async with AgentProcess(*nodes) as b:
            await a.said("saved together: True")
            await b.said("round 2 world 4")
            await a.said("round 2 world 4")
            b.kill(signal.SIGTERM)
            await b.said("saved together: True")
            assert await b.code() == 143
        await a.said("round 3 world 2")
        a.kill(signal.SIGTERM)
        assert await a.code() == 143
    assert "saved together: False" not in a.output + b.output
