"""The output of workers is complete, even with other writers, slow readers and several runs."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import TIMEOUT, AgentProcess
from tests.support.workers import text_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

LONG = 200_000
"""The length in bytes of a line that exceeds a pipe's buffer."""

TALKATIVE = f"""
import os, sys
rank, round = os.environ["RANK"], os.environ["TORCHELASTIC_ROUND"]
children = []
for child in range(2):
    if (pid := os.fork()) == 0:
        for number in range(100):
            os.write(1, b"child %d line %d\\n" % (child, number))
        os._exit(0)
    children.append(pid)
os.write(2, rank.encode() * {LONG} + b"\\n")
for pid in children:
    os.waitpid(pid, 0)
for number in range(100):
    for piece in ("piece ", str(number), " is ", "whole\\n"):
        sys.stdout.write(piece)
        sys.stdout.flush()
sys.stdout.write("the end without a newline")
sys.stdout.flush()
if round == "1" and rank == "0":
    import signal
    open(f"{{sys.argv[1]}}/complete", "w").close()
    signal.pause()
if round == "1":
    import time
    while not os.path.exists(f"{{sys.argv[1]}}/complete"):
        time.sleep(0.01)
    os._exit(7)
open(f"{{sys.argv[1]}}/up.{{rank}}", "w").close()
"""


async def test_lines_are_intact_with_many_writers_and_a_slow_reader(tmp_path: Path) -> None:
    program = tmp_path / "talkative.py"
    program.write_text(TALKATIVE)
    agent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "torchelastic.run", "--standalone", "--prefix", "--max-restarts=1"),
        *("--nproc-per-node=2", "--node-name=one"),
        *(program, tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        limit=16,  # the reader buffers this number of bytes; the rest stays in the pipe
    )
    assert agent.stdout
    assert agent.stderr
    try:
        # A slow reader does not block the agent: a worker fails, is reported, and the next round runs.
        for rank in (0, 1):
            await text_of(tmp_path / f"up.{rank}")
        async with asyncio.timeout(TIMEOUT):
            out, err = await asyncio.gather(agent.stdout.read(), agent.stderr.read())
            assert await agent.wait() == 0
    finally:
        if agent.returncode is None:
            agent.kill()
            await agent.wait()

    of_workers: dict[bytes, list[bytes]] = {b"0": [], b"1": []}
    for line in out.splitlines():
        match = re.fullmatch(rb"\[rank ([01])\] (.*)", line)
        assert match, line
        of_workers[match[1]].append(match[2])
    for rank in (b"0", b"1"):
        lines = of_workers[rank]
        for expected in (
            *(b"child %d line %d" % (child, number) for child in range(2) for number in range(100)),
            *(b"piece %d is whole" % number for number in range(100)),
            b"the end without a newline",
        ):
            assert lines.count(expected) == 2, expected
        assert len(lines) == 2 * 301

    own, theirs = [], []
    for line in err.splitlines():
        (theirs if line.startswith(b"[rank") else own).append(line)
    assert sorted(theirs) == [b"[rank %s] %s" % (rank, rank * LONG) for rank in (b"0", b"0", b"1", b"1")]
    assert all(re.match(rb"[0-9:]{8} \[one\] ", line) for line in own), own
    assert [line for line in own if b"rank 1 on one" in line and b"exit code 7" in line]


async def test_log_files_survive_restarts_and_the_next_run(tmp_path: Path) -> None:
    program = tmp_path / "failing.py"
    program.write_text(
        """if True:
            import os, sys
            print(f"rank {os.environ['RANK']} of round {os.environ['TORCHELASTIC_ROUND']}", end="", flush=True)
            print("oh", end="", file=sys.stderr, flush=True)
            sys.exit(os.environ["TORCHELASTIC_ROUND"] == "1" and 7)
        """
    )
    logs = tmp_path / "logs"
    flags = ("--standalone", "--nproc-per-node=2", f"--log-dir={logs}", "--tee=0:1,1:3", "--redirects=0:2")
    for _ in range(2):
        async with AgentProcess(*flags, program) as agent:
            assert await agent.code() == 0
        assert {f"[rank {rank}] rank {rank} of round 2" for rank in (0, 1)} <= {*agent.lines}
        assert "[rank 1] oh" in agent.lines
        assert "[rank 0] oh" not in agent.lines
    found = {os.fspath(path.relative_to(logs)): path.read_text() for path in logs.rglob("*.log")}
    ended = {f"round_1/rank_{rank}/{stream}.log" for rank in (0, 1) for stream in ("stdout", "stderr")}
    for name, text in found.items():
        round, rank = int(name[6]), int(name[13])
        line = "oh" if "stderr" in name else f"rank {rank} of round {round}"
        # The first failure in round 1 stops the other worker, perhaps before that worker has printed.
        assert text in ({f"{line}\n{line}"} if name not in ended else {f"{line}\n{line}", line, ""}), name
    assert found.keys() == {
        f"round_{round}/rank_{rank}/{stream}.log"
        for round in (1, 2)
        for rank in (0, 1)
        for stream in ("stdout", "stderr")
    }
