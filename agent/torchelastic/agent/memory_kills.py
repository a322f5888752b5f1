"""How many processes the kernel has killed for memory in this process's memory cgroup."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

OUT_OF_MEMORY: Final = "killed by SIGKILL: out of memory"
"""How the end of a process that was killed for memory is told, whatever process it was."""

_ROOT: Final = Path("/sys/fs/cgroup")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")
_MACHINE: Final = Path("/proc/vmstat")


class MemoryKills:
    """A counter of kills; a worker's SIGKILL is put down to memory if it has risen in the worker's time.

    Args:
        root: where cgroups are mounted.
        membership: the file that names our cgroups.
        machine: the file with the whole machine's counters, for where there is no cgroup's.
    """

    def __init__(self, *, root: Path = _ROOT, membership: Path = _MEMBERSHIP, machine: Path = _MACHINE) -> None:
        self._files = [*_candidates(root, membership), machine]

    def count(self) -> int:
        """How many so far; 0 where nothing counts them."""
        for path in self._files:
            try:
                for line in path.read_text().splitlines():
                    name, _, value = line.partition(" ")
                    if name == "oom_kill":
                        return int(value)
            except (OSError, ValueError):
                continue
        return 0

    def explains(self, exit_code: int, *, since: int) -> bool:
        """Whether a process is taken to have been killed for memory.

        Args:
            exit_code: of the process; the negative number of the signal that ended it.
            since: how many had been killed before it began.
        """
        return exit_code == -signal.SIGKILL and self.count() > since


def _candidates(root: Path, membership: Path) -> Iterator[Path]:
    """Where the counter may stand: in a container, our own cgroup is often mounted as the root."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, found, path = rest.partition(":")
        if not found:
            continue
        if controllers == "":  # version 2
            yield root / path.lstrip("/") / "memory.events"
            yield root / "memory.events"
        elif "memory" in controllers.split(","):
            yield root / "memory" / path.lstrip("/") / "memory.oom_control"
            yield root / "memory" / "memory.oom_control"
