"""Start a program that the kernel kills when its parent exits, so that no process outlives ``elasticjob run``.

This file runs in a bare interpreter (``python -I -S``): it requests SIGKILL at its parent's exit (PR_SET_PDEATHSIG),
checks that the parent still runs, and executes the program. The alternatives have drawbacks: ``preexec_fn`` can
deadlock in a process with threads, and ``setpriv --pdeathsig`` (util-linux) is not available everywhere. The kernel
sends the signal when the *thread* that forked ends; asyncio forks in the thread of its event loop.
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
    """Return the command line that runs ``argv`` at most until the calling process exits."""
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), *argv)


def _main(parent: str, *argv: str) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"cannot request a signal for {argv[0]} at its parent's exit: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):  # the parent exited before the request
        os.kill(os.getpid(), _SIGKILL)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - this is the program's own command line, without a shell
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201 - stderr is the log of the process
        sys.exit(_CANNOT_EXECUTE)


if __name__ == "__main__":
    _main(*sys.argv[1:])
