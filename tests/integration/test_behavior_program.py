"""The programs in the documentation of the agent work as documented."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import AgentProcess

if TYPE_CHECKING:
    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.integration


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
    save_if_needed(step)
    time.sleep(0.005)
"""


async def test_the_documented_program_trains_and_saves(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{WHOLE}\nprint('saved at step', torch.load(CHECKPOINT)['step'])\n")
    flags = ("--standalone", "--nproc-per-node=2", "--heartbeat-timeout=60")
    async with AgentProcess(*flags, "train.py", cwd=tmp_path) as agent:
        await agent.wait_for_line(r"\[rank 0\] saved at step 200")
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
        await a.wait_for_line("round 1 world 2")
        async with AgentProcess(*nodes) as b:
            await a.wait_for_line("saved together: True")
            await b.wait_for_line("round 2 world 4")
            await a.wait_for_line("round 2 world 4")
            b.kill(signal.SIGTERM)
            await b.wait_for_line("saved together: True")
            assert await b.code() == 143
        await a.wait_for_line("round 3 world 2")
        a.kill(signal.SIGTERM)
        assert await a.code() == 143
    assert "saved together: False" not in a.output + b.output


PRELOADED = """
import random
import numpy.random, torch
DRAWN = [random.random(), numpy.random.rand(), torch.rand(1).item()]
"""

DRAWS = """
import json, multiprocessing, os, random, sys
import numpy, torch
import torch.distributed as dist
import preloaded
own = [random.random(), numpy.random.rand(), torch.rand(1).item()]
key = multiprocessing.current_process().authkey.hex()
print(json.dumps({"own": own, "preloaded": preloaded.DRAWN, "key": key}), flush=True)
dist.init_process_group("gloo")  # so that both ranks have printed before the round ends
dist.barrier()
sys.exit(os.environ["TORCHELASTIC_ROUND"] == "1")
"""


async def test_random_numbers_differ_between_ranks_and_rounds_except_those_drawn_before_the_fork(
    tmp_path: Path,
) -> None:
    (tmp_path / "preloaded.py").write_text(PRELOADED)
    program = tmp_path / "draws.py"
    program.write_text(DRAWS)
    flags = ("--standalone", "--nproc-per-node=2", "--preload=preloaded")
    async with AgentProcess(*flags, program) as agent:
        assert await agent.code() == 0
    drawn = [json.loads(line.partition("] ")[2]) for line in agent.lines if re.match(r"\[rank \d\] \{", line)]
    assert len(drawn) == 4
    assert len({json.dumps(each["preloaded"]) for each in drawn}) == 1
    assert len({each["key"] for each in drawn}) == 4
    for index in range(3):
        assert len({each["own"][index] for each in drawn} | {drawn[0]["preloaded"][index]}) == 5


USES_TORCHS_MODULES = """
import importlib, logging, multiprocessing, os, sys, time

def exceed_the_timer(requests):
    from torchelastic import timer
    timer.configure(timer.LocalTimerClient(requests))
    with timer.expires(after=0.1, scope="download"):
        time.sleep(600)

def main():
    from torchelastic import events, timer

    for part in ("timer", "multiprocessing", "multiprocessing.errors"):
        ours, torchs = (importlib.import_module(f"{of}.{part}") for of in ("torchelastic", "torch.distributed.elastic"))
        names = [name for name in getattr(torchs, "__all__", dir(torchs)) if not name.startswith("_")]
        assert all(getattr(ours, name) is getattr(torchs, name) for name in names), part

    context = multiprocessing.get_context("spawn")
    requests = context.Queue()
    server = timer.LocalTimerServer(requests, max_interval=0.05)
    server.start()
    process = context.Process(target=exceed_the_timer, args=(requests,))
    process.start()
    process.join()
    server.stop()
    print("a process that exceeds its timer exits with", process.exitcode)

    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="")
    events.record(events.Event("step", events.EventSource.WORKER, metadata={"rank": os.environ["RANK"]}), "console")

if __name__ == "__main__":
    main()
"""


@pytest.mark.usefixtures("each_torch")
async def test_timers_events_and_errors_are_those_of_torch(tmp_path: Path) -> None:
    program = tmp_path / "uses_them.py"
    program.write_text(USES_TORCHS_MODULES)
    async with AgentProcess("--standalone", program) as agent:
        assert await agent.code() == 0, agent.output
    assert "[rank 0] a process that exceeds its timer exits with -9" in agent.lines
    assert any('"name": "step"' in line and '"rank": "0"' in line for line in agent.lines)
