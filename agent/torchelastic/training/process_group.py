"""The process group of a world whose ranks may be lost while other ranks wait for them in a collective."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined] # not listed in its __all__

_ARRIVED: Final = "torchelastic/arrived"
"""The first part of the keys that count the ranks that have arrived at a point, and that the last one sets."""

_POLL_INTERVAL: Final = 0.001

_CONNECT_TIMEOUT: Final = dt.timedelta(seconds=4)
_CONNECT_TIMEOUT_OF_RANK: Final = dt.timedelta(seconds=0.1)
"""The time in which ranks that have all arrived must be connected: this, and this for each rank."""

_CONNECT_ATTEMPT: Final = dt.timedelta(seconds=1)
_OPERATION_TIMEOUT: Final = dt.timedelta(minutes=5)  # torch's default
_CONNECT_ATTEMPTS: Final = 300

_GLOO_THREAD: Final = b"pt_gloo_runloop"
_TIMEOUT_OF_FUTEX: Final = 4
"""The position of the pointer to the time-out in the file "syscall" of proc(5), for futex(2)."""


def connect_to_store(host: str, port: int, is_lost: Callable[[], bool]) -> TCPStore:
    """Return a connection to a TCPStore.

    Raises:
        RuntimeError: the TCPStore cannot be reached for five minutes, or `is_lost` says that it is lost.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # not listed in its __all__

    for attempt in range(_CONNECT_ATTEMPTS):
        try:
            store = TCPStore(host, port, timeout=_CONNECT_ATTEMPT)
        except RuntimeError:
            if is_lost() or attempt == _CONNECT_ATTEMPTS - 1:
                raise
        else:
            store.set_timeout(_OPERATION_TIMEOUT)
            return store
    raise AssertionError


class InterruptibleProcessGroup:
    """Torch's default process group, which another thread can interrupt.

    If a rank is lost, gloo raises an error only on the ranks that exchange data with it; the others wait for the
    time-out. :meth:`interrupt` ends the receiving half of gloo's connections, and every collective on this rank raises
    RuntimeError.

    If gloo reads that a peer is ready for data, and then cannot write to the connection, the collective is stuck until
    the time-out. This is rare because the connections stay open for writing until all ranks have left the group; but
    the connections of a rank that was killed do not.

    Attributes:
        control_group: a group with the backend "gloo" and the same ranks; None for the default group.
    """

    def __init__(self) -> None:
        self.control_group: Any = None
        self._lock = threading.Lock()
        self._before: frozenset[int] | None = None
        self._own: frozenset[int] | None = None
        self._threads_before: frozenset[Path] = frozenset()  # those of gloo that serve other groups
        self._former: list[int] = []  # descriptors of the connections of the group that was destroyed last
        self._store: Store
        self._rank = self._world_size = 0
        self._is_lost: Callable[[], bool] = lambda: False
        self._meetings = 0  # in the store of the current group

    def create(
        self,
        backend: str,
        store: Store,
        rank: int,
        world_size: int,
        timeout: dt.timedelta,
        control_timeout: dt.timedelta,
        is_lost: Callable[[], bool],
    ) -> None:
        """Create the default group; and the control group, if the backend is not gloo.

        All ranks call :meth:`gather` next, which returns when they all have created their groups: a rank that would be
        lost earlier could leave other ranks without a connection that :meth:`interrupt` can shut down.

        Raises:
            RuntimeError: the group cannot be created, for example because `is_lost` says that a rank is lost.
        """
        import torch.distributed as dist

        self._excepthook = sys.excepthook
        self._own = None
        self._threads_before = frozenset(_gloo_threads())
        self._before = frozenset(_sockets())
        if is_lost():  # before interrupt() could have an effect
            raise RuntimeError("a rank was lost before the process group was created")
        self._store, self._rank, self._world_size, self._is_lost = store, rank, world_size, is_lost
        self._meetings = 0
        # Gloo would wait for a rank that never arrives until the time-out, and interrupt() could not end that.
        self._meet()
        # Gloo would wait for a rank that is lost now until the time-out, and interrupt() could not end that.
        connect_timeout = min(_CONNECT_TIMEOUT + _CONNECT_TIMEOUT_OF_RANK * world_size, timeout)
        first_timeout = connect_timeout if backend == "gloo" else timeout
        # A call that has failed would leave a number in the keys of the next one, which other ranks do not have.
        dist.distributed_c10d._world.group_count = 0  # noqa: SLF001
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=first_timeout)
        if backend == "gloo":
            set_timeout = getattr(dist, "set_timeout", None)  # not in older versions of torch
            (set_timeout or dist.distributed_c10d._set_pg_timeout)(timeout)  # noqa: SLF001 - the older name
        self.control_group = None if backend == "gloo" else dist.new_group(backend="gloo", timeout=control_timeout)

    def gather(self, *values: int) -> list[tuple[int, ...]]:
        """Return the values that each rank passes, in the order of the ranks.

        The ranks exchange them in the store, which takes less time than gloo's first collective.

        Raises:
            RuntimeError: a rank is lost; or the store is.
        """
        self._store.set(f"{_ARRIVED}/{self._meetings}/{self._rank}", " ".join(map(str, values)))
        meeting = self._meet()
        self.close()
        found = self._store.multi_get([f"{_ARRIVED}/{meeting}/{rank}" for rank in range(self._world_size)])
        return [tuple(map(int, each.split())) for each in found]

    def _meet(self) -> int:
        """Wait until all ranks have called this method as often as this rank; return the number of earlier calls."""
        meeting, self._meetings = self._meetings, self._meetings + 1
        arrived = f"{_ARRIVED}/{meeting}"
        if self._store.add(arrived, 1) == self._world_size:
            self._store.set(f"{arrived}/all", "")
        while not self._store.check([f"{arrived}/all"]):
            if self._is_lost():
                raise RuntimeError("a rank was lost before all ranks had arrived")
            time.sleep(_POLL_INTERVAL)
        return meeting

    def note_connections(self) -> None:
        """Note that connections which the process opens later do not belong to gloo. Only the first call counts."""
        if self._own is None and self._before is not None:
            self._own = frozenset(_sockets()) - self._before

    def interrupt(self) -> None:
        """Make current and later collectives of this rank raise RuntimeError; another thread may call this."""
        with self._lock:
            for connection in self._connections():
                with contextlib.suppress(OSError):  # the peer has disconnected
                    connection.shutdown(socket.SHUT_RD)

    @property
    def is_stuck(self) -> bool:
        """Whether a collective of this rank waits, but has no connection left on which data could arrive."""
        waits = any(map(_waits_for_data, {*_gloo_threads()} - self._threads_before))
        return waits and self._before is not None and next(self._connections(), None) is None

    def destroy(self) -> None:
        """Destroy the group, if there is one. Ranks that wait for this one in a collective get an error at once."""
        distributed = sys.modules.get("torch.distributed")
        if self._before is None or distributed is None or not distributed.is_initialized():
            return
        self.interrupt()
        kept: list[int] = []
        with self._lock:
            with contextlib.suppress(OSError):  # too many open files
                kept.extend(os.dup(connection.fileno()) for connection in self._connections())
            self._before = None
        distributed.destroy_process_group()
        self.close()
        self._former = kept
        for descriptor in kept:
            connection = socket.socket(fileno=descriptor)
            with contextlib.suppress(OSError):  # the peer has disconnected
                connection.shutdown(socket.SHUT_WR)
            connection.detach()
        self.control_group = None
        sys.excepthook = self._excepthook  # init_process_group() adds a rank to tracebacks, each time another one

    def close(self) -> None:
        """Close the connections of the group that was destroyed last: all ranks have left it."""
        while self._former:
            os.close(self._former.pop())

    def _connections(self) -> Iterator[socket.socket]:
        """Yield a duplicate of the socket of each of gloo's connections."""
        if (before := self._before) is None:
            return
        for inode, descriptor in _sockets().items():
            if inode in before or (self._own is not None and inode not in self._own):
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if os.fstat(connection.fileno()).st_ino == inode and _may_be_of_gloo(connection):
                    yield connection


def _gloo_threads() -> Iterator[Path]:
    """Yield the folder in /proc of each thread in which gloo runs collectives."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            if (thread / "comm").read_bytes().strip() == _GLOO_THREAD:
                yield thread


def _waits_for_data(thread: Path) -> bool:
    """Return whether a thread of gloo waits with a time-out. A thread that waits for the next collective has none."""
    try:
        call = (thread / "syscall").read_text().split()  # one word if the thread runs
    except OSError:  # the thread has ended, or the system does not tell
        return False
    return len(call) > _TIMEOUT_OF_FUTEX and int(call[_TIMEOUT_OF_FUTEX], 16) != 0


def _sockets() -> dict[int, int]:
    """Return the descriptors of this process's sockets by their inodes."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - pathlib takes several times as long, and ranks wait
        with contextlib.suppress(OSError):  # closed meanwhile
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":")  # noqa: PTH115 - likewise
            if kind == "socket":
                found[int(inode.strip("[]"))] = int(name)
    return found


def _may_be_of_gloo(connection: socket.socket) -> bool:
    """Return whether a socket may be one of gloo's connections.

    Gloo sets SO_REUSEADDR and TCP_NODELAY on its connections; Python's clients do not, but servers of asyncio do. The
    listener of gloo is not one of them, because gloo aborts the process if it is shut down.

    Raises:
        OSError: it is not of TCP, or not connected.
    """
    connection.getpeername()
    reuses = connection.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
    return bool(reuses and connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
