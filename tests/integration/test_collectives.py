"""States that real ranks send each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.agents import AgentProcess

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

PROGRAM = """
import collections
import torch
import torch.distributed as dist
import torchelastic

dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = dist.get_rank()
types = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int64, torch.uint64,
    torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
]
numbers = torch.arange(12.0)
ones = torch.ones(3)

def state_of(make):
    large = make(torch.full((5_000_001,), 7.0))  # more than one broadcast
    return dict(
        types=[make(numbers.to(each)) for each in types],
        forms=(make(torch.tensor(3.0)), make(torch.empty(0, 2)), make(numbers.view(3, 4).t()), make(ones.expand(2, 3))),
        conjugate=make(torch.tensor([1 + 2j]).conj()),
        sparse=make(torch.eye(3)).to_sparse(),
        shared=[large, large],
        ordered=collections.OrderedDict(b=1, a=make(ones)),
        plain={"set": {1, 2}, "text": "a", "none": None, 3: 1.5, "size": torch.Size([2])},
    )

expected = state_of(lambda tensor: tensor)
for initial in (torch.zeros_like, lambda tensor: torch.zeros(2, 3)):  # of the same form, and of another one
    state = torchelastic.TorchState(**(expected if rank == 1 else state_of(initial)))
    if rank == 1:
        state.commit()
    state.restore()
    assert state.commits == 1
    found, wanted = (dict(each) for each in (state.state_dict()["values"], expected))
    assert found.pop("plain") == wanted.pop("plain")
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert state.shared[0] is state.shared[1]
    assert list(state.ordered) == ["b", "a"] and type(state.ordered) is collections.OrderedDict

# Each rank has run another part of the step that is repeated.
state = torchelastic.TorchState(norm=torch.nn.BatchNorm1d(2), seen=rank)
state.restore()
for _ in range(1 + rank):
    state.norm(torch.randn(4, 2))
state.seen = rank
state.restore()
assert (state.seen, int(state.norm.num_batches_tracked)) == (0, 1)
print(f"rank {rank} has it")
dist.destroy_process_group()
"""


async def test_all_ranks_get_the_same_state_with_each_kind_of_tensor(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(PROGRAM)
    async with AgentProcess("--standalone", "--nproc-per-node=3", "--local-addr=127.0.0.1", program) as agent:
        assert await agent.code() == 0, agent.output
    assert sum("has it" in line for line in agent.lines) == 3, agent.output
