"""Where the demo is played: the job as it is, and ways to wait for what it does."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from elastic_operator.errors import ElasticJobError
from elastic_operator.local.ending import How
from elastic_operator.local.log_files import LogFile, log_files
from elastic_operator.showing import words
from elastic_operator.showing.shown import Shown, ShownPod
from elastic_operator.showing.wanted_logs import Wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_operator.local.view import View

Found = TypeVar("Found")

_ACT_LIMIT: Final = 90.0
"""Seconds for one act to have its effect."""
_SETTLE_LIMIT: Final = 20.0
"""Seconds for which a program may be silent before the next act comes anyway."""
_LOOK_EVERY: Final = 1000
"""Milliseconds after which logs are looked at though nothing seems to have happened."""
_SETTLED_LINES: Final = 4
"""So many lines of rank 0 show that training goes on, and let it save a checkpoint."""


class ActFailed(ElasticJobError):  # noqa: N818 - it names what happened
    """An act of the demo did not have the effect that it should have."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Training goes on.

    Attributes:
        epoch: in this epoch.
        pods: with so many pods.
        workers: with so many workers.
        at: when rank 0 said so; of a clock that never goes back.
    """

    epoch: int
    pods: int
    workers: int
    at: float


class Stage:
    """The job that the demo is played on: what is known of it, and ways to wait for what it does."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._shown: Shown | None = None
        self._changed = asyncio.Event()
        self._logs: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        self._first_lines: dict[int, float] = {}

    def on_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        """The job has changed."""
        self._shown = Shown.of(snapshot)
        self._view.on_snapshot(snapshot)
        if not self._logs.done() and self._shown.run.logs:
            self._logs.set_result(Path(self._shown.run.logs))
        self._tell()

    async def watch_logs(self) -> None:
        """Notice what the workers print; runs until it is cancelled."""
        from watchfiles import awatch

        logs = await self._logs
        # What is written into a folder in the moment in which that is made goes unnoticed: so now and then one looks.
        async for _ in awatch(
            logs, debounce=20, step=5, watch_filter=None, rust_timeout=_LOOK_EVERY, yield_on_timeout=True
        ):
            self._tell()

    def say_ending(self, why: str) -> None:
        """The run is being ended."""
        self._view.say_ending(why)

    @property
    def ended(self) -> bool:
        """Whether the run has come to its end."""
        return self.shown.run.ended is not None

    @property
    def taken_away(self) -> bool:
        """Whether the user has ended the run."""
        return self.shown.run.ended is not None and self.shown.run.ended.how in (How.DELETED, How.INTERRUPTED)

    @property
    def shown(self) -> Shown:
        """The job as it is now."""
        return self._shown or Shown()

    @property
    def training_pods(self) -> list[ShownPod]:
        """The pods whose workers are part of the current epoch, in rank order."""
        return sorted((pod for pod in self.shown.living_pods if pod.ranks), key=lambda pod: pod.ranks or ())

    def rank_file(self, rank: int, *, after: int = 0) -> LogFile | None:
        """Where a rank prints, in the latest epoch that it has had; None if that is not later than ``after``."""
        files = log_files(Path(self.shown.run.logs), Wanted(rank)) if self.shown.run.logs else []
        return files[-1] if files and files[-1].epoch > after else None

    async def until(self, look: Callable[[], Found | None], *, limit: float, what: str) -> Found:
        """What ``look`` finds, as soon as it finds something.

        Args:
            look: tried again whenever something changes.
            limit: seconds.
            what: is waited for, in words.

        Raises:
            ActFailed: it did not come in time, or the job ended before.
        """
        try:
            async with asyncio.timeout(limit):
                while True:
                    changed = self._changed
                    if (found := look()) is not None:
                        return found
                    if self.shown.status.finished or self.ended:
                        state = self.shown.status.state
                        raise ActFailed(f"the job ended ({state}) while the demo waited for {what}")
                    await changed.wait()
        except TimeoutError:
            raise ActFailed(f"waited {limit:.0f} s in vain for {what}") from None

    async def resumed(self, *, after: int, pods: int | None = None, limit: float = _ACT_LIMIT) -> Resumed:
        """The first sign of training in an epoch later than ``after``, with this number of pods if one is given."""

        def look() -> Resumed | None:
            epoch = self.shown.status.epoch
            if epoch <= after or epoch not in self._first_lines:
                return None
            found = Resumed(epoch, len(self.training_pods), self.shown.status.world_size, self._first_lines[epoch])
            return found if pods in (None, found.pods) else None

        count = "" if pods is None else f" with {words.count(pods, 'pod')}"
        return await self.until(look, limit=limit, what=f"training{count} in an epoch after {after}")

    async def settles(self) -> None:
        """Return when training has visibly gone on for a while."""

        def look() -> bool | None:
            file = self.rank_file(0)
            return (file is not None and file.path.read_bytes().count(b"\n") >= _SETTLED_LINES) or None

        try:
            await self.until(look, limit=_SETTLE_LIMIT, what="a few lines of progress")
        except ActFailed:
            if self.shown.status.finished:
                raise

    def _tell(self) -> None:
        file = self.rank_file(0)
        # The file may tell of an epoch before the snapshot does: its time is that of the line.
        if file is not None and file.epoch not in self._first_lines and b"\n" in file.path.read_bytes():
            self._first_lines[file.epoch] = time.monotonic()
        self._changed.set()
        self._changed = asyncio.Event()
