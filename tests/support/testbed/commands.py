"""Commands of a cluster's user, and their results."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIMIT = 180.0
"""The default time limit of a command in seconds."""


@dataclass(frozen=True)
class Result:
    """The result of a command."""

    stdout: str
    stderr: str
    returncode: int


class CommandFailed(AssertionError):  # noqa: N818 - the name is the reason
    """A required command failed, or took too long."""

    def __init__(self, argv: Sequence[str], how: str, output: str) -> None:
        super().__init__(f"`{' '.join(argv)}` {how}:\n{output}")


async def run(
    *argv: str,
    environ: Mapping[str, str],
    stdin: str | None = None,
    check: bool = True,
    timeout: float = LIMIT,  # noqa: ASYNC109 - as subprocess has it
) -> Result:
    """Run a command to its end.

    Args:
        argv: the program and its arguments.
        environ: its complete environment.
        stdin: its input; None for no input.
        check: whether it must succeed.
        timeout: seconds after which it is killed with all its processes.

    Raises:
        CommandFailed: it failed although it must not, or it took too long.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=environ,
        stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout):
            out, err = await process.communicate(None if stdin is None else stdin.encode())
    except TimeoutError:
        raise CommandFailed(argv, f"took longer than {timeout:.0f} s", "") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    assert process.returncode is not None
    result = Result(out.decode(errors="replace"), err.decode(errors="replace"), process.returncode)
    if check and result.returncode != 0:
        raise CommandFailed(argv, f"ended with {result.returncode}", result.stdout + result.stderr)
    return result
