"""What a user sees of ``torchelastic-run`` and of torchrun on two nodes, side by side."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import WithoutSettings, until_gone
from tests.support.ports import free_range

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.etcd import EtcdServer

TORCHRUN, OURS = "torch.distributed.run", "torchelastic.run"

pytestmark = [pytest.mark.integration, pytest.mark.parametrize("module", [TORCHRUN, OURS])]

ENDS_WHEN_TOLD = """
import os, sys
os.write(1, f'restart {os.environ["TORCHELASTIC_RESTART_COUNT"]} of process {os.getpid()}\\n'.encode())
sys.exit(int(open(sys.argv[1]).read()))
"""
"""A worker that exits with the code that it reads from a pipe."""


RECEIVES_IF_TWO = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
os.write(1, f"world size {dist.get_world_size()}\\n".encode())
if dist.get_world_size() == 2:
    dist.recv(torch.zeros(1), src=1 - dist.get_rank())
"""
"""A worker that fails when the other one ends, and succeeds if it is alone."""


class Node(WithoutSettings):
    """A node with a worker that ends when the test says so; ``pipe`` is the path of a new pipe.

    Attributes:
        worker: the process id of the last worker that :meth:`restarts` returned.
    """

    def __init__(self, module: str, pipe: Path, *arguments: str | Path) -> None:
        super().__init__(module, *arguments, pipe)
        os.mkfifo(pipe)
        self._pipe = pipe
        self._seen = 0
        self.worker = 0

    async def restarts(self) -> int:
        """Wait until another worker runs, and return the number of restarts that it sees."""
        found = await self.wait_for_line(r"^restart (\d+) of process (\d+)", since=self._seen)
        self._seen = self.lines.index(found.string) + 1
        self.worker = int(found[2])
        return int(found[1])

    async def end_worker(self, code: int) -> None:
        await asyncio.to_thread(self._pipe.write_text, str(code))


@pytest.fixture
def flags(module: str, etcd: EtcdServer) -> tuple[list[str], list[str]]:
    """The flags of the two nodes of a run; under torchrun, the first node serves the rendezvous."""
    rendezvous = {
        TORCHRUN: ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_range(1).first}"],
        OURS: [f"--rdzv-endpoint={etcd.endpoint}"],
    }[module]
    common = [*rendezvous, f"--rdzv-id={uuid.uuid4()}", "--local-addr=127.0.0.1", "--nnodes=1:2"]
    common += ["--monitor-interval=0.02"]
    first, second = (f"--rdzv-conf=last_call_timeout=100,is_host={is_host}" for is_host in (1, 0))
    return [*common, first], [*common, second]


@pytest.fixture
def nodes(module: str, flags: tuple[list[str], list[str]], max_restarts: int, tmp_path: Path) -> tuple[Node, Node]:
    """Two nodes with the program ``ENDS_WHEN_TOLD``."""
    (program := tmp_path / "ends.py").write_text(ENDS_WHEN_TOLD)
    first, second = (
        Node(module, tmp_path / f"pipe-{number}", *each, f"--max-restarts={max_restarts}", program)
        for number, each in enumerate(flags)
    )
    return first, second


@pytest.mark.differs("`--max-restarts` counts failures on all nodes. torchrun counts for each node.")
@pytest.mark.differs(
    "`TORCHELASTIC_RESTART_COUNT` is equal on all ranks. Under torchrun it counts failures on the node."
)
@pytest.mark.parametrize("max_restarts", [1])
async def test_failures_count_for_the_run_and_under_torchrun_for_the_node(
    module: str, nodes: tuple[Node, Node]
) -> None:
    first, second = nodes
    async with first, second:
        assert [await node.restarts() for node in nodes] == [0, 0]
        await second.end_worker(3)
        assert [await node.restarts() for node in nodes] == ([1, 1] if module == OURS else [0, 1])
        await first.end_worker(3)
        if module == TORCHRUN:
            assert [await node.restarts() for node in nodes] == [1, 1]
            for node in nodes:
                await node.end_worker(0)
        assert [await node.code() for node in nodes] == ([1, 1] if module == OURS else [0, 0])


@pytest.mark.differs(
    "All agents of a run exit with the same outcome. An agent of torchrun exits with 0 if its own workers have "
    "succeeded, even if the run fails."
)
@pytest.mark.parametrize("max_restarts", [0])
async def test_a_failure_ends_the_run_on_all_nodes_and_under_torchrun_on_its_node(
    module: str, nodes: tuple[Node, Node]
) -> None:
    first, second = nodes
    async with first, second:
        for node in nodes:
            await node.restarts()
        await second.end_worker(0)
        await until_gone(second.worker)
        await first.end_worker(3)
        assert [await node.code() for node in nodes] == ([1, 1] if module == OURS else [1, 0])


@pytest.mark.parametrize(
    ("leaver", "max_restarts"),
    [
        pytest.param(
            0,
            1,
            marks=pytest.mark.differs(
                "Any node may leave, also the first one. With torchrun's backend `c10d`, the first node serves the "
                "rendezvous, and the others fail without it."
            ),
        ),
        pytest.param(
            1,
            0,
            marks=pytest.mark.differs(
                "A node that leaves does not count against `--max-restarts`. Under torchrun, the workers on the other "
                "nodes fail, which counts."
            ),
        ),
    ],
)
async def test_the_others_continue_when_a_node_leaves_and_fail_under_torchrun(
    module: str, flags: tuple[list[str], list[str]], leaver: int, max_restarts: int, tmp_path: Path
) -> None:
    (program := tmp_path / "receives.py").write_text(RECEIVES_IF_TWO)
    nodes = [WithoutSettings(module, *each, f"--max-restarts={max_restarts}", program) for each in flags]
    async with nodes[0], nodes[1]:
        for node in nodes:
            await node.wait_for_line("^world size 2")
        nodes[leaver].kill(signal.SIGTERM)
        assert await nodes[1 - leaver].code() == (0 if module == OURS else 1)
