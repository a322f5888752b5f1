"""What the agents say in the stores of all jobs: one mirror for each job that has, or had, pods.

A mirror outlives its job as long as one of the job's pods is there: only after that can the job's keys be removed from
a store that outlives them both.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NoReturn, Self

from elastic_operator.kube.advice import with_advice
from elastic_operator.kube.etcd_secrets import Credentials
from elastic_operator.store_mirror import StoreMirror, store_at
from torchelastic.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from elastic_operator.kube.etcd_secrets import EtcdSecrets
    from torchelastic.contract import SizeRecord
    from torchelastic.store import StoreSettings

_log: Final = logging.getLogger(__name__)

WRITING: Final = 0.3
"""Seconds that writing a size may take: the pods don't wait for a store that hangs."""

_PATIENCE: Final = 3.0
"""Seconds for which a store may be away before anybody is told."""

_OWN_PATIENCE: Final = 60.0
"""The same of a store that comes and goes with the job, from when its pod serves: its node may have died a moment ago,
which the API server finds out within a minute at most."""

_RETOLD: Final = 30.0
"""Seconds after which it is told that a store is away for another reason than was told."""

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
        secret: with the credentials for it; None where none are needed.
        credentials: those that were read last.
        up: set while it is worth trying to reach them.
        task: that follows.
        away_since: when the store was first found away, a monotonic time; None where it is not known to be away.
        trouble: what is said of a store that is away; None where nobody needs to know.
        told: when that was said first, a monotonic time.
        size: the one that was to be written last.
        writing: writes it; None where nothing is being written.
        late: whether nobody waits for that any more.
    """

    key: str
    mirror: StoreMirror
    lasts: bool
    endpoint: str = ""
    secret: str | None = None
    credentials: Credentials = field(default_factory=Credentials)
    up: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    away_since: float | None = None
    trouble: str | None = None
    told: float = 0.0
    size: SizeRecord | None = None
    writing: asyncio.Task[StoreError | None] | None = None
    late: bool = False


class Stores:
    """The mirrors; an async context manager, after whose block none runs.

    Args:
        wake: called with a job's key whenever something in its store has changed.
        secrets: where the credentials for stores come from; None where there are none.
        patience: seconds for which a store that outlives the job may be away before anybody is told.
        own_patience: the same of a store that does not, while it should be there.
    """

    def __init__(
        self,
        wake: Callable[[str], None],
        *,
        secrets: EtcdSecrets | None = None,
        patience: float = _PATIENCE,
        own_patience: float = _OWN_PATIENCE,
    ) -> None:
        self._wake = wake
        self._secrets = secrets
        self._patience = patience
        self._own_patience = own_patience
        self._tasks = asyncio.TaskGroup()
        self._followed: dict[str, _Followed] = {}
        self._runs: dict[str, list[str]] = {}

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for followed in self._followed.values():
            for task in (followed.task, followed.writing):
                if task is not None:
                    task.cancel()
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

    def follow(
        self, uid: str, key: str, endpoint: str, *, lasts: bool, up: bool, secret: str | None = None
    ) -> StoreMirror:
        """Follow a job's store from now on, if it is not followed yet.

        Args:
            uid: of the job, and so of its run.
            key: of the job.
            endpoint: where the store is, as in ``spec.etcd.endpoint``.
            lasts: whether the store outlives the job.
            up: whether it is worth trying to reach it.
            secret: with the credentials for it, in the job's namespace; None where none are needed.
        """
        followed = self._followed.get(uid)
        if followed is None:
            followed = self._begin(uid, key, lasts=lasts)
        followed.endpoint = endpoint
        followed.secret = secret
        if up:
            followed.up.set()
        else:
            followed.up.clear()
            followed.away_since = followed.trouble = None
        return followed.mirror

    def runs_of(self, key: str) -> tuple[str, ...]:
        """The UIDs of all jobs of this key whose store is followed: the one that is there, and those before it."""
        return tuple(self._runs.get(key, ()))

    def leave(self, uid: str) -> None:
        """Nobody takes part in a run any more: remove its keys from a store that outlives it, and follow no longer."""
        followed = self._followed.pop(uid, None)
        if followed is not None:
            runs = self._runs[followed.key]
            runs.remove(uid)
            if not runs:
                del self._runs[followed.key]
            self._tasks.create_task(self._leave(followed))

    async def write_size(self, uid: str, size: SizeRecord) -> bool:
        """Say how many nodes there should be, if that can be done at once.

        A store that does not answer in time gets the size when it does: it is not asked again before that, and a later
        size takes the place of one that it has not taken yet. Then, or when it can be reached again, the job is woken.

        Returns:
            Whether it stands in the store now.

        Raises:
            StoreError: the store refused, or what was written may be lost; it must be tried again.
        """
        followed = self._followed.get(uid)
        if followed is None or not followed.mirror.connected:
            return False
        followed.size = size
        if followed.writing is not None:
            return False
        followed.writing = self._tasks.create_task(self._write(followed))
        done, _ = await asyncio.wait([followed.writing], timeout=WRITING)
        if not done:
            followed.late = True
            _log.info("%s: its store has not taken the wanted size within %s s", followed.key, WRITING)
            return False
        error = followed.writing.result()
        followed.writing = None
        if error is not None:
            raise error
        return True

    async def _write(self, followed: _Followed) -> StoreError | None:
        """Write the size that is wanted when the store takes it; gives back why it did not."""
        error: StoreError | None = None
        written = None
        try:
            while error is None and written is not followed.size and followed.size is not None:
                written = followed.size
                await followed.mirror.write_size(written)
        except StoreError as why:
            error = why
        except Exception as defect:  # noqa: BLE001 - a defect met in one job's store must not stop the others
            _log.exception("%s: an unexpected error while the wanted size was written to its store", followed.key)
            error = StoreError(f"an unexpected error: {defect}")
        if followed.late:  # nobody waits for this any more
            followed.late, followed.writing = False, None
            self._wake(followed.key)
        return error

    def _begin(self, uid: str, key: str, *, lasts: bool) -> _Followed:
        mirror = StoreMirror(
            uid, changed=lambda: self._changed(followed), away=lambda sentence: self._away(followed, sentence)
        )
        followed = self._followed[uid] = _Followed(key, mirror, lasts)
        self._runs.setdefault(key, []).append(uid)
        followed.task = self._tasks.create_task(self._follow(followed))
        return followed

    async def _follow(self, followed: _Followed) -> NoReturn:
        """Follow a store until cancelled."""
        try:
            while True:
                try:
                    await followed.mirror.run(lambda: self._reach(followed), followed.up)
                except Exception as defect:  # noqa: BLE001 - a defect met in one job's store must not stop the others
                    _log.exception("%s: an unexpected error while its store was followed", followed.key)
                    self._away(followed, f"an unexpected error: {defect!r}")
                await asyncio.sleep(_AFTER_A_DEFECT)
        finally:
            followed.credentials.close()

    async def _reach(self, followed: _Followed) -> StoreSettings:
        """How to reach a store; its credentials may be other ones by now."""
        settings = store_at(followed.endpoint)
        if followed.secret is None or self._secrets is None:
            return settings
        read = await self._secrets.read(followed.key.partition("/")[0], followed.secret)
        followed.credentials.close()
        followed.credentials = read
        return replace(settings, ca_cert=read.authority, cert=read.certificate, key=read.key)

    def _changed(self, followed: _Followed) -> None:
        if followed.mirror.readable:
            if followed.trouble is not None:
                _log.info("%s: its store can be reached again", followed.key)
            followed.away_since = followed.trouble = None
        self._wake(followed.key)

    def _away(self, followed: _Followed, sentence: str) -> None:
        if not followed.up.is_set():
            return  # a job's own etcd comes and goes with its pod; of one that should be there, somebody should know
        sentence = with_advice(sentence)
        now = time.monotonic()
        if followed.away_since is None:
            followed.away_since = now
        waited = now - followed.away_since >= (self._patience if followed.lasts else self._own_patience)
        if followed.trouble is not None:
            waited = sentence != followed.trouble and now - followed.told >= _RETOLD
        if waited:
            followed.trouble, followed.told = sentence, now
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
            tasks = [task for task in (followed.task, followed.writing) if task is not None]
            for task in tasks:
                task.cancel()
            if tasks:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait(tasks)
