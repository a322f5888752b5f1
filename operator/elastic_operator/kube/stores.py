"""What the agents say in the stores of all jobs: one mirror for each job that has, or had, pods.

A mirror outlives its job as long as one of the job's pods is there: only after that can the job's keys be removed from
a store that outlives them both.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NoReturn, Self

from elastic_operator.store_mirror import StoreMirror, store_at
from torchelastic.errors import StoreError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from torchelastic.contract import SizeRecord

_log: Final = logging.getLogger(__name__)

WRITING: Final = 0.3
"""Seconds that writing a size may take: the pods don't wait for a store that hangs."""

_PATIENCE: Final = 3.0
"""Seconds for which a store that was there before may be away before anybody is told."""

_AFTER_A_DEFECT: Final = 10.0

_FORGETTING: Final = 5.0
"""Seconds that removing a run's keys may take; they vanish by themselves within a day."""


@dataclass(slots=True)
class _Followed:
    """A run whose store is followed.

    Attributes:
        key: of its job.
        mirror: what stands in its store.
        lasts: whether the store outlives the run.
        endpoint: of the store, as a person writes it.
        up: set while it is worth trying to reach them.
        task: that follows.
        away_since: when the store was first found away, a monotonic time; None where it is not known to be away.
        trouble: what is said of a store that is away; None where nobody needs to know.
    """

    key: str
    mirror: StoreMirror
    lasts: bool
    endpoint: str = ""
    up: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    away_since: float | None = None
    trouble: str | None = None


class Stores:
    """The mirrors; an async context manager, after whose block none runs.

    Args:
        wake: called with a job's key whenever something in its store has changed.
        patience: seconds for which a store that was there before may be away before anybody is told.
    """

    def __init__(self, wake: Callable[[str], None], *, patience: float = _PATIENCE) -> None:
        self._wake = wake
        self._patience = patience
        self._tasks = asyncio.TaskGroup()
        self._followed: dict[str, _Followed] = {}

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for followed in self._followed.values():
            if followed.task is not None:
                followed.task.cancel()
        self._followed.clear()
        await self._tasks.__aexit__(kind, error, trace)

    def of(self, uid: str) -> StoreMirror | None:
        """The mirror of a job's store; None where it is not followed."""
        followed = self._followed.get(uid)
        return None if followed is None else followed.mirror

    def trouble(self, uid: str) -> str | None:
        """Why a store that outlives the job has not been readable for a while; None where there is nothing to tell."""
        followed = self._followed.get(uid)
        return None if followed is None else followed.trouble

    def follow(self, uid: str, key: str, endpoint: str, *, lasts: bool, up: bool) -> StoreMirror:
        """Follow a job's store from now on, if it is not followed yet.

        Args:
            uid: of the job, and so of its run.
            key: of the job.
            endpoint: where the store is, as in ``spec.etcd.endpoint``.
            lasts: whether the store outlives the job.
            up: whether it is worth trying to reach it.
        """
        followed = self._followed.get(uid)
        if followed is None:
            followed = self._begin(uid, key, lasts=lasts)
        followed.endpoint = endpoint
        if up:
            followed.up.set()
        else:
            followed.up.clear()
        return followed.mirror

    def runs_of(self, key: str) -> tuple[str, ...]:
        """The UIDs of all jobs of this key whose store is followed: the one that is there, and those before it."""
        return tuple(uid for uid, followed in self._followed.items() if followed.key == key)

    def leave(self, uid: str) -> None:
        """Nobody takes part in a run any more: remove its keys from a store that outlives it, and follow no longer."""
        followed = self._followed.pop(uid, None)
        if followed is not None:
            self._tasks.create_task(self._leave(followed))

    async def write_size(self, uid: str, size: SizeRecord) -> None:
        """Say how many nodes there should be.

        Raises:
            StoreError: the store is away, refused, or did not answer at once.
        """
        mirror = self.of(uid)
        if mirror is None:
            raise StoreUnavailable("the store is not reached yet")
        try:
            async with asyncio.timeout(WRITING):
                await mirror.write_size(size)
        except TimeoutError:
            raise StoreUnavailable(f"the store did not answer within {WRITING} s") from None

    def _begin(self, uid: str, key: str, *, lasts: bool) -> _Followed:
        mirror = StoreMirror(
            uid, changed=lambda: self._changed(followed), away=lambda sentence: self._away(followed, sentence)
        )
        followed = self._followed[uid] = _Followed(key, mirror, lasts)
        followed.task = self._tasks.create_task(self._follow(followed))
        return followed

    @staticmethod
    async def _follow(followed: _Followed) -> NoReturn:
        """Follow a store until cancelled."""
        while True:
            try:
                await followed.mirror.run(lambda: store_at(followed.endpoint), followed.up)
            except Exception:  # noqa: BLE001 - a defect met in one job's store must not stop the others
                _log.exception("%s: an unexpected error while its store was followed", followed.key)
            await asyncio.sleep(_AFTER_A_DEFECT)

    def _changed(self, followed: _Followed) -> None:
        if followed.mirror.readable:
            if followed.trouble is not None:
                _log.info("%s: its store can be reached again", followed.key)
            followed.away_since = followed.trouble = None
        self._wake(followed.key)

    def _away(self, followed: _Followed, sentence: str) -> None:
        # A job's own etcd comes and goes with its pod; of one that was there before, somebody should know.
        now = time.monotonic()
        if followed.away_since is None:
            followed.away_since = now
        if followed.trouble is None and followed.lasts and now - followed.away_since >= self._patience:
            followed.trouble = sentence
            _log.warning("%s: its store cannot be reached: %s", followed.key, sentence)
            self._wake(followed.key)
        else:
            _log.debug("%s: its store cannot be reached: %s", followed.key, sentence)

    @staticmethod
    async def _leave(followed: _Followed) -> None:
        try:
            if followed.lasts:
                async with asyncio.timeout(_FORGETTING):
                    await followed.mirror.forget_run()
        except (StoreError, TimeoutError) as error:
            _log.info("%s: its keys stay in its store for a day: %s", followed.key, str(error) or "it does not answer")
        except Exception:  # noqa: BLE001 - a defect met where a run is left must not stop the operator
            _log.exception("%s: an unexpected error while its keys were removed from its store", followed.key)
        finally:
            if followed.task is not None:
                followed.task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([followed.task])
