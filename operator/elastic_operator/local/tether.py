"""Ties a process to the one that starts it: when that one dies, however it dies, the kernel kills this one too.

This is how a ``kill -9`` of ``elasticjob run`` leaves no pod, no worker and no etcd behind. The file is run by itself,
by a bare interpreter (``python -I -S``), and becomes the program that it was asked to start: it asks the kernel for
SIGKILL at its parent's death (PR_SET_PDEATHSIG), looks whether the parent had died before that, and only then calls
``exec``, which keeps both the request and the process id. So there is no moment at which the program runs untied.

Rejected: ``preexec_fn``, which runs Python in the child of a process that has threads, where it can deadlock; and
util-linux' ``setpriv --pdeathsig``, which not every machine has and which does not look for a parent that is dead.

The kernel sends the signal when the *thread* that forked ends. asyncio forks in the thread of its loop, which lives as
long as the run.
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


def tethered(argv: Sequence[str]) -> tuple[str, ...]:
    """The command line that starts ``argv`` tied to the calling process."""
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), *argv)


def main(arguments: Sequence[str]) -> None:
    """Tie this process to its parent and become the program.

    Args:
        arguments: the parent's process id, then the program (a path, or a name that is looked up on PATH) and its
            arguments.
    """
    import ctypes

    parent, *argv = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"cannot tie {argv[0]} to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):
        os.kill(os.getpid(), _SIGKILL)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is wanted: this is the program's own command line
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201 - the parent keeps stderr
        sys.exit(_CANNOT_EXECUTE)


if __name__ == "__main__":
    main(sys.argv[1:])
