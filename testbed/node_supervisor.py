"""Create a node, and remove it when the tests close a pipe or exit.

The supervisor is a separate process in its own session, so that it survives ``kill -9`` and Ctrl-C of the tests. When
the supervisor exits, the node's first process is killed. The supervisor cleans up after its node, unless the supervisor
itself is killed. In that case, processes, mounts and links vanish with their namespaces, and the next node that starts
removes the rest: empty control groups, and files below the cache folder.

A node uses a *place*: a folder below the cache folder, with a lock. The first place keeps containerd's root with the
imported images between runs; other places are for concurrent nodes, and are removed with these nodes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from testbed import node_cgroups
from testbed.node_config import CONTAINERD, KUBELET, NodeConfig
from testbed.node_syscalls import Namespace, die_with_parent, unshare

if TYPE_CHECKING:
    from collections.abc import Iterator

_GROUPS = "groups.json"
_ROOT = Path(__file__).parents[1]


def main(folder: str) -> int:
    """Run and then remove the node that this folder describes, and return the exit code."""
    config = NodeConfig.read(Path(folder, "node.json").read_text())
    asked_to_end = _asked_to_end()
    with _place(Path(config.cache)) as place:
        groups = node_cgroups.plan(node_cgroups.of_this_machine(), f"elastic-operator-node-{secrets.token_hex(6)}")
        (place / _GROUPS).write_text(node_cgroups.written(groups))
        try:
            node_cgroups.make(groups)
            process = _started(folder, place, groups)
            say("started", pid=process.pid, place=str(place))
            try:
                select.select([*asked_to_end, os.pidfd_open(process.pid)], [], [])
            finally:
                process.kill()
                process.wait()  # it exits only after all other processes in its PID namespace
        except (OSError, subprocess.SubprocessError) as error:
            say("failed", words=f"the kernel refuses what a node needs: {error}")
        finally:
            left = tidy(place)
    for what in left:
        print(f"could not be removed: {what}", file=sys.stderr)
    return 1 if left else 0


def say(event: str, **more: object) -> None:
    """Report to the tests, which may have exited."""
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps({"event": event, **more}), flush=True)


def sweep(cache: Path) -> None:
    """Remove what remains of nodes whose supervisor was killed."""
    for lock in sorted(_places(cache).glob("*.lock")):
        place = lock.with_suffix("")
        with _lock(lock) as taken:
            if taken:
                tidy(place)
                _remove_unless_kept(place)


def tidy(place: Path) -> list[str]:
    """Remove all files and groups of a node except images, and return those that could not be removed."""
    left = []
    if (place / _GROUPS).exists():
        left = node_cgroups.remove(node_cgroups.read((place / _GROUPS).read_text()))
        if not left:
            (place / _GROUPS).unlink()
    shutil.rmtree(place / KUBELET.name, ignore_errors=True)
    if (place / KUBELET.name).exists():
        left.append(str(place / KUBELET.name))
    return left


@contextlib.contextmanager
def _place(cache: Path) -> Iterator[Path]:
    """Yield the first free place, which is locked within the block, after cleaning up all free places."""
    for number in count(1):
        place = _places(cache) / str(number)
        with _lock(place.with_suffix(".lock")) as taken:
            if taken:
                tidy(place)
                sweep(cache)
                for folder in (CONTAINERD, KUBELET):
                    (place / folder.name).mkdir(parents=True, exist_ok=True)
                try:
                    yield place
                finally:
                    _remove_unless_kept(place)
                return


def _places(cache: Path) -> Path:
    folder = cache / "nodes"
    folder.mkdir(exist_ok=True)
    return folder


def _remove_unless_kept(place: Path) -> None:
    if place.name != "1":
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Try to take the lock, and yield whether it is held. The file stays, because a new file would be another lock."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _started(folder: str, place: Path, groups: node_cgroups.Groups) -> subprocess.Popen[bytes]:
    """Start the node's first process, in its groups and namespaces."""
    unshare(Namespace.PID)  # for the child
    others = Namespace.MOUNT | Namespace.NET | Namespace.IPC | Namespace.UTS | Namespace.CGROUP

    def become_the_node() -> None:
        die_with_parent()
        node_cgroups.join(groups)
        unshare(others)

    return subprocess.Popen(
        [sys.executable, "-m", "testbed.node_init", folder, str(place)],
        stdin=subprocess.DEVNULL,
        preexec_fn=become_the_node,  # noqa: PLW1509 - safe, because this process has one thread
        cwd=_ROOT,
    )


def _asked_to_end() -> list[int]:
    """Return file descriptors, one of which becomes readable when the tests end."""
    by_signal, signalled = os.pipe()
    os.set_blocking(signalled, False)
    signal.set_wakeup_fd(signalled)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    parent = os.getppid()
    descriptors = [sys.stdin.fileno(), by_signal]
    # Another child of the tests may hold the pipe open.
    with contextlib.suppress(ProcessLookupError):
        descriptors.append(os.pidfd_open(parent))
    return descriptors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
