"""Programs that tests run as a worker and by hand, to compare both."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.workers import next_exit, start_workers, workers_of
from torchelastic.config.settings import LogSettings, Program, ProgramKind, StartMethod

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torchelastic.agent.failures import WorkerExit


def script(
    folder: Path,
    source: str,
    *arguments: str,
    start_method: StartMethod = StartMethod.FORK_SERVER,
    preload: Sequence[str] = (),
) -> Program:
    """Write a source to a file in the folder, and return the program."""
    path = folder / "program.py"
    path.write_text(source)
    return Program(ProgramKind.SCRIPT, (str(path), *arguments), start_method, tuple(preload))


async def run(program: Program, folder: Path, env: Mapping[str, str] | None = None) -> tuple[WorkerExit, str]:
    """Run one worker until it exits, and return its exit and its output."""
    async with workers_of(program, LogSettings(folder, combined=True)) as workers:
        group = await start_workers(workers, env or {})
        end = await next_exit(group)
        await group.stop(0)
    return end, (folder / "round_1/rank_0/output.log").read_text()


async def output_of(program: Program, folder: Path, env: Mapping[str, str] | None = None) -> str:
    """Run one worker, which must succeed, and return its output."""
    end, printed = await run(program, folder, env)
    assert (end.exit_code, end.cause.message) == (0, ""), printed
    return printed


def hand_command(program: Program) -> list[str]:
    """Return the command that starts the program by hand."""
    before = {
        ProgramKind.SCRIPT: [sys.executable],
        ProgramKind.MODULE: [sys.executable, "-m"],
        ProgramKind.COMMAND: [],
    }
    return [*before[program.kind], *program.argv]


def by_hand(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command until it exits, and return the result."""
    return subprocess.run(
        argv,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        check=False,
    )
