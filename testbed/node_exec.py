"""Run a command inside a node's namespaces, forward signals to the command, and exit like the command.

A bare interpreter (``python -I -S``) runs this file, with the process id of its parent, that of the
node's first process, a folder, and the command. The command is killed when this process exits, and this
process is killed when its parent exits, so that ``kill -9`` leaves no process.

``nsenter`` of util-linux does not forward signals: a terminated command would continue inside.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""The flags of the mount, cgroup, UTS, IPC, PID and network namespaces."""
_HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_CANNOT_EXECUTE = 126


def command_prefix(pid: int, folder: str) -> tuple[str, ...]:
    """Return the prefix of a command line that runs a command in the namespaces of a process, in a folder."""
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), str(pid), folder)


def main(arguments: list[str]) -> int:
    """Run the command in the namespaces.

    Args:
        arguments: the parent's process id, the id of the process whose namespaces are entered, the working folder,
            and the command.

    Returns:
        The exit code of the command.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)
    folder, *command = arguments[2:]
    try:
        entered = libc.setns(os.pidfd_open(int(arguments[1])), _NAMESPACES) == 0
    except ProcessLookupError:
        entered = False
    if not entered:
        print("the node has ended", file=sys.stderr)
        return _CANNOT_EXECUTE
    # Signals are blocked until the command exists.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDED_ON)
    child = os.fork()
    if child == 0:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDED_ON)
        try:
            os.chdir(folder)
            os.execvp(command[0], command)
        except OSError as error:
            print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(_CANNOT_EXECUTE)
    for number in _HANDED_ON:
        signal.signal(number, lambda received, _: os.kill(child, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDED_ON)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = signal.Signals(os.WTERMSIG(status))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
