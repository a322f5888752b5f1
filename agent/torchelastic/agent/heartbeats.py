"""Signs of life of workers: files whose time of change is the last one, so that any program can give them.

A file costs the worker a system call, and the agent nothing but a look when the time could be over: the next look is
due when the worker that was silent for longest would have been silent for too long.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

_LATE: Final = 0.25
"""The share of the time-out by which a look may be late. Where it is later, the agent was held up itself (a paused
container, a suspended machine), and its workers with it: their time begins anew."""

_TOGETHER: Final = 0.9
"""The share of the time-out for which a worker is silent that fell silent together with one that is for all of it."""


@dataclass(slots=True)
class _Sign:
    """What was last seen of a worker.

    Attributes:
        path: its file.
        changed: the file's time of change, in nanoseconds.
        beat: when that was, by the loop's clock.
    """

    path: Path
    changed: int
    beat: float


class Heartbeats:
    """The heartbeats of one epoch's workers on this node.

    Args:
        folder: for the files.
        timeout: seconds without a heartbeat, or since the start, after which a worker counts as hung.
    """

    def __init__(self, folder: Path, timeout: float) -> None:
        self.timeout = timeout
        self._folder = folder
        self._signs: dict[int, _Sign] = {}

    def file(self, local_rank: int) -> Path:
        """The file of a worker that is about to be started.

        Raises:
            OSError: it cannot be made.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / str(local_rank)
        path.touch()
        now = asyncio.get_running_loop().time()
        self._signs[local_rank] = _Sign(path, path.stat().st_mtime_ns, now)
        return path

    async def silent(self, running: Callable[[], Collection[int]]) -> list[int]:
        """Wait until a worker has been silent for too long.

        Args:
            running: gives the local ranks of those that run.

        Returns:
            Its local rank, and those of all that fell silent at about the same time, the longest silent first; none
            where no worker runs any more.
        """
        clock = asyncio.get_running_loop().time
        while watched := [self._signs[local_rank] for local_rank in running()]:
            due = min(sign.beat for sign in watched) + self.timeout
            await asyncio.sleep(max(due - clock(), 0.0))
            now = clock()
            if now > due + self.timeout * _LATE:
                for sign in self._signs.values():
                    sign.beat = now
            for sign in self._signs.values():
                _look(sign, now)
            silence = {rank: now - self._signs[rank].beat for rank in running()}
            if max(silence.values(), default=0.0) >= self.timeout:
                together = [rank for rank in silence if silence[rank] >= self.timeout * _TOGETHER]
                return sorted(together, key=lambda rank: -silence[rank])
        return []


def _look(sign: _Sign, now: float) -> None:
    try:
        changed = sign.path.stat().st_mtime_ns
    except OSError:  # taken away: nothing can be told by it any more
        return
    if changed != sign.changed:
        sign.changed = changed
        # Files go by the wall clock. Where that was set meanwhile, the change came just now for all that is known.
        age = time.time() - changed / 1e9
        sign.beat = now - age if 0 <= age <= now - sign.beat else now
