"""Each worker draws its own random numbers, also if it was forked."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import AgentProcess

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.real

PRELOADED = """
import random
import numpy.random, torch
DRAWN = [random.random(), numpy.random.rand(), torch.rand(1).item()]
"""

DRAWS = """
import json, os, random, sys
import numpy, torch
import torch.distributed as dist
import preloaded
own = [random.random(), numpy.random.rand(), torch.rand(1).item()]
print(json.dumps({"own": own, "preloaded": preloaded.DRAWN}), flush=True)
dist.init_process_group("gloo")  # so that both have said so before the round ends
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
    for index in range(3):
        assert len({each["own"][index] for each in drawn} | {drawn[0]["preloaded"][index]}) == 5
