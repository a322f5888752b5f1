"""Starts a program that the kernel kills when its parent dies, so that nothing outlives a killed ``elasticjob run``.

This file runs in a bare interpreter (``python -I -S``): it asks for SIGKILL at its parent's death (PR_SET_PDEATHSIG),
checks that the parent still lives, and becomes the program. ``preexec_fn`` can deadlock in a process that has threads,
and util-linux' ``setpriv --pdeathsig`` is not available everywhere. The kernel sends the signal when the *thread* that
forked ends; asyncio forks in the thread of its event loop.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9
_CANNOT_EXECUTE = 126


def with_pdeathsig(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command line that runs ``argv`` until the calling process dies."""
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), *argv)


def _main(parent: str, *argv: str) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"cannot tie {argv[0]} to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):  # it died before the request
        os.kill(os.getpid(), _SIGKILL)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - this is the program's own command line, without a shell
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201 - the parent keeps stderr
        sys.exit(_CANNOT_EXECUTE)


if __name__ == "__main__":
    _main(*sys.argv[1:])
