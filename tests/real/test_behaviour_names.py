"""The torchelastic names for torch's own functions work in a worker as in any program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.agents import AgentProcess

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.real

USES_THEM = """
import importlib, logging, multiprocessing, os, sys, time

def holds_on_to_it(requests):
    from torchelastic import timer
    timer.configure(timer.LocalTimerClient(requests))
    with timer.expires(after=0.1, scope="download"):
        time.sleep(600)

def main():
    from torchelastic import events, timer

    for part in ("timer", "events", "multiprocessing", "multiprocessing.errors"):
        ours, torchs = (importlib.import_module(f"{of}.{part}") for of in ("torchelastic", "torch.distributed.elastic"))
        assert all(getattr(ours, name) is getattr(torchs, name) for name in ours.__all__), part

    context = multiprocessing.get_context("spawn")
    requests = context.Queue()
    server = timer.LocalTimerServer(requests, max_interval=0.05)
    server.start()
    process = context.Process(target=holds_on_to_it, args=(requests,))
    process.start()
    process.join()
    server.stop()
    print("who holds on to it for too long ends with", process.exitcode)

    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="")
    events.record(events.Event("step", events.EventSource.WORKER, metadata={"rank": os.environ["RANK"]}), "console")

if __name__ == "__main__":
    main()
"""


@pytest.mark.usefixtures("each_torch")
async def test_timers_events_and_errors_are_those_of_torch(tmp_path: Path) -> None:
    program = tmp_path / "uses_them.py"
    program.write_text(USES_THEM)
    async with AgentProcess("--standalone", program) as agent:
        assert await agent.code() == 0, agent.output
    assert "[rank 0] who holds on to it for too long ends with -9" in agent.lines
    assert any('"name": "step"' in line and '"rank": "0"' in line for line in agent.lines)
