"""Heartbeats, and the message about a worker that hangs."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import pytest

from torchelastic.agent.workers.heartbeat_monitor import HeartbeatMonitor, explain
from torchelastic.protocol.records import FailureKind

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT = 20.0


async def test_workers_that_stop_together_are_reported_together(tmp_path: Path) -> None:
    heartbeats = HeartbeatMonitor(tmp_path, 0.5)
    for local_rank in (0, 1):
        heartbeats.create_file(local_rank)
    async with asyncio.timeout(TIMEOUT):
        assert await heartbeats.wait_for_hang(lambda: {1, 0}) == [0, 1]


async def test_time_during_which_the_agent_is_suspended_does_not_count(tmp_path: Path) -> None:
    heartbeats = HeartbeatMonitor(tmp_path, 1.0)
    heartbeats.create_file(0)
    waiting = asyncio.create_task(heartbeats.wait_for_hang(lambda: {0}))
    await asyncio.sleep(0)
    time.sleep(2.0)  # noqa: ASYNC251 - blocks the event loop, as a paused container does
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    async with asyncio.timeout(TIMEOUT):
        assert await waiting == [0]


async def test_a_change_of_the_system_clock_has_no_effect(tmp_path: Path) -> None:
    heartbeats = HeartbeatMonitor(tmp_path, 0.5)
    file = heartbeats.create_file(0)
    waiting = asyncio.create_task(heartbeats.wait_for_hang(lambda: {0}))
    stamps = iter((0.0, 2e9, 1.0))
    async with asyncio.timeout(TIMEOUT):
        for _ in range(3):
            stamp = next(stamps)
            os.utime(file, (stamp, stamp))
            await asyncio.sleep(0.3)
            assert not waiting.done()
        assert await waiting == [0]


# -- messages

DUMP = """\
step 7
Fatal Python error: Aborted

Thread 0x00007f2a (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f2b [python] (most recent call first):
  File "/home/me/data.py", line 12 in read
  File "/home/me/train.py", line 30 in <module>

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""


def words(tail: str) -> str:
    return explain("no heartbeat for 30 s", tail).message


def test_only_the_innermost_frames_of_the_program_in_the_last_dump_are_reported() -> None:
    frame = '  File "/venv/lib/torchelastic/agent/workers/fork_server_main.py", line 3 in run\n'
    line = '  File "/home/me/train.py", line 30 in <module>\n'
    assert words(DUMP.replace("read", "earlier") + DUMP.replace(line, line + frame)) == words(DUMP)
    assert words(DUMP.replace(line, 90 * line)).count("train.py") == 7


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (DUMP, "no heartbeat for 30 s; it was in read (data.py:12), called by <module> (train.py:30)"),
        ("no stack here\n", "no heartbeat for 30 s"),
        ("Fatal Python error: Aborted\n\n<no Python frame>\n", "no heartbeat for 30 s"),
        (DUMP.partition("Thread")[0], "no heartbeat for 30 s"),
    ],
)
def test_a_hang_is_reported_with_the_innermost_frames_of_the_main_thread(tail: str, expected: str) -> None:
    assert explain("no heartbeat for 30 s", tail) == (FailureKind.PROGRAM, expected, False)


@pytest.mark.parametrize(
    "path", ["/venv/lib/python3.12/site-packages/torch/distributed/c10d.py", "/x/torch/autograd/graph.py"]
)
def test_a_hang_in_a_collective_is_a_communication_failure(path: str) -> None:
    waiting = DUMP.replace("/home/me/data.py", path)
    assert explain("silence", waiting).kind is FailureKind.COMMUNICATION
