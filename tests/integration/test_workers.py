"""Workers start, meet, exit and are stopped; each exit is reported once, with its cause."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from torch.distributed import TCPStore  # type: ignore[attr-defined] # not listed in its __all__

from tests.support.workers import ANY_PROGRAM, TELL, WorkerRunner, next_exit, start_workers, workers_of
from torchelastic.protocol.records import FailureKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

ALL_REDUCE = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WorkerRunner]:
    async with WorkerRunner(tmp_path_factory.mktemp("workers")) as runner:
        yield runner


@pytest_asyncio.fixture(loop_scope="module")
async def runner(shared: WorkerRunner) -> AsyncIterator[WorkerRunner]:
    yield shared
    await shared.clear()


async def test_a_convolutional_network_trains_with_threads_and_data_loader_workers(runner: WorkerRunner) -> None:
    group = await runner.start_with_store(
        """
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset
        torch.set_num_threads(2)
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 30 * 30, 10)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))
        for images, labels in DataLoader(data, batch_size=16, num_workers=2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        print("trained", torch.get_num_threads())
        dist.destroy_process_group()
        """
    )
    ends = [await next_exit(group), await next_exit(group)]
    assert [(end.exit_code, end.cause.message) for end in ends] == [(0, ""), (0, "")]
    assert "trained 2" in runner.log(0)


async def test_workers_that_exit_at_once_are_each_reported_once(runner: WorkerRunner) -> None:
    group = await runner.start("import os; os._exit(int(os.environ['RANK']) + 10)", 8)
    ends = [await next_exit(group) for _ in range(8)]
    assert sorted(end.exit_code for end in ends) == list(range(10, 18))


@pytest.mark.parametrize(
    ("source", "exit_code", "message"),
    [
        ("raise SystemExit", 0, ""),
        ("import sys; sys.exit(3)", 3, "exit code 3"),
        ("import sys; sys.exit('the data is missing')", 1, "exit code 1; it last printed: the data is missing"),
        ("import atexit, os; atexit.register(os._exit, 9)", 9, "exit code 9"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, "killed by SIGTERM"),
        ("import os; os.abort()", -6, "killed by SIGABRT"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
            -2,
            "KeyboardInterrupt (program.py:1) (killed by SIGINT)",
        ),
    ],
)
async def test_the_reported_exit_is_the_programs_exit(
    runner: WorkerRunner, source: str, exit_code: int, message: str
) -> None:
    end = await runner.end_of(source)
    assert (end.exit_code, end.cause.message) == (exit_code, message)


async def test_an_exception_is_reported_with_its_place_and_printed_as_in_a_plain_interpreter(
    runner: WorkerRunner,
) -> None:
    end = await runner.end_of(
        """
        def train():
            raise ValueError("bad input")

        train()
        """
    )
    assert end.exit_code == 1
    assert end.cause == (FailureKind.PROGRAM, "ValueError: bad input (program.py:3)", False)
    assert runner.log().startswith("Traceback (most recent call last):\n")
    assert runner.log().endswith("ValueError: bad input\n")
    assert "torchelastic" not in runner.log()


async def test_a_broken_collective_is_not_a_program_failure(runner: WorkerRunner) -> None:
    group = await runner.start_with_store(
        f"""
{ALL_REDUCE}
{TELL}
if dist.get_rank() == 1:
    import signal
    tell("met")
    signal.pause()
dist.all_reduce(total)
"""
    )
    await runner.text_of("met")
    os.kill(group.workers[1].child.pid, signal.SIGKILL)
    first, second = await next_exit(group), await next_exit(group)
    assert (first.rank, first.cause.kind) == (1, FailureKind.PROGRAM)
    assert (second.rank, second.cause.kind) == (0, FailureKind.COMMUNICATION)
    assert "program.py:" in second.cause.message


async def test_the_tcp_store_of_the_next_round_runs_before_the_round_begins() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        workers, host = workers_of(ANY_PROGRAM), listener.getsockname()
        workers.tcp_store_listener = lambda: listener
        async with workers:
            early = await asyncio.to_thread(TCPStore, *host, timeout=timedelta(seconds=60))
            early.set("early", "yes")
            group = await start_workers(workers, {}, listener=listener)
            assert group.tcp_store_process is not None
            assert group.tcp_store_process.running
            assert TCPStore(*host).get("early") == b"yes"
            os.kill(group.tcp_store_process.pid, signal.SIGKILL)
            await group.tcp_store_process.ended
            with pytest.raises(RuntimeError):
                early.get("early")
