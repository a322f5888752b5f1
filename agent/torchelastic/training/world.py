"""The worlds of a worker that stays when the round changes: its agent tells it that a world is broken, or of the next.

A *world* is the process group of the workers of one round. If some workers stay and others start, those that stay train
in a smaller world until the others are ready.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import threading
import time
from typing import TYPE_CHECKING, Final

from torchelastic.protocol.worker import (
    RANK_IN_ROUND,
    SPARE,
    STARTING_RANKS,
    WorkerMessage,
    WorldMessage,
    is_worker,
    parse_ranks,
)
from torchelastic.training.connection import AGENT_CONNECTION, run_in_thread
from torchelastic.training.errors import NonRetryableException
from torchelastic.training.process_group import InterruptibleProcessGroup, connect_to_store
from torchelastic.training.progress import REPORTER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import TCPStore  # type: ignore[attr-defined] # not listed in its __all__

_AGENT_TIMEOUT: Final = 60.0
"""Seconds for the agent to say that the world is broken or changes, after a collective has failed.

If the lost rank is on another node, the agent knows it only from the next round.
"""

_TIMEOUT: Final = dt.timedelta(hours=1)
"""The time-out of collectives: the agent ends a collective whose ranks are lost, and finds ranks that hang."""

_READY: Final = "torchelastic/ready"
_ALL_READY: Final = "torchelastic/all ready"
"""The keys in the TCPStore that count the starting ranks that are ready to train, and that the last of them sets."""

_LAST_COMMIT: Final = "last commit"
"""The key of a world's store with the number of the commit at which all ranks leave it."""

_LOSS_TIMEOUT: Final = 2.0
"""Seconds to learn at the end of the training that a rank was lost; else, the other ranks have just ended."""

_OTHERS_INTERVAL: Final = 0.5
"""Seconds between two looks for ranks that form their process group themselves."""

_READY_INTERVAL: Final = 0.01
"""Seconds between two checks whether the starting ranks are ready."""


class WorldChanged(BaseException):
    """The world has changed; :func:`torchelastic.elastic` calls the program's function again.

    It is no Exception, so that an ``except Exception`` of the program does not catch it.
    """


class Worlds:
    """The worlds of this process: one after the other under an agent, if the workers' tensors are on the CPU; else one.

    Attributes:
        changed: whether the world is broken, or has a successor.
        is_whole: whether the world has all ranks of the round.
    """

    def __init__(self) -> None:
        self._group = InterruptibleProcessGroup()
        self._condition = threading.Condition()
        self._lost_agent = False
        self._stays = False
        self._has_state = False
        self._begin_round()

    def _begin_round(self) -> None:
        self.changed = False
        self.is_whole = True
        self._place: tuple[int, int] | None = None  # the rank and the world size in the round
        self._formed = 0  # number of worlds with these ranks
        self._commits = 0  # in this world
        self._is_planned = True  # whether the ranks of the world still run
        self._announced = False  # whether this rank was counted as ready
        self._all_ready = False  # whether the ranks that the world lacks are ready
        self._broken = False
        self._is_formed = False  # whether there is a process group
        self._next: dict[str, str] = {}
        self._later: dict[str, str] = {}  # the next round, whose world begins when its other ranks are ready

    @contextlib.contextmanager
    def world(self) -> Iterator[None]:
        """Return a context manager for a block with the process group of the current world.

        In the block, RANK and WORLD_SIZE in the environment are those of the world.

        Raises:
            RuntimeError: the group cannot be created, for example because a rank was lost meanwhile.
        """
        import torch.distributed as dist
        from torch.distributed import HashStore  # type: ignore[attr-defined] # not listed in its __all__

        if dist.is_initialized():  # by the program
            yield
            return
        try:
            if _can_stay():
                self._stays = True
                AGENT_CONNECTION.send(WorkerMessage(stays=True))
                AGENT_CONNECTION.read(WorldMessage, self._take, self._agent_lost)
                while SPARE in os.environ:
                    if not self.next():
                        raise RuntimeError("The agent has not announced a world.")
                self._form()
            elif "RANK" in os.environ:
                dist.init_process_group()
            else:
                dist.init_process_group(store=HashStore(), rank=0, world_size=1)
            yield
        finally:
            self._is_formed = False
            self._group.destroy()
            if dist.is_initialized():
                dist.destroy_process_group()

    def _form(self) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined] # not listed in its __all__

        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = connect_to_store(*address, lambda: self.changed)
        if self._place is None:
            self._place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        rank, size = self._place
        starting = parse_ranks(os.environ.get(STARTING_RANKS, ""))
        if rank in starting:
            if not self._announced:
                self._announced = True
                if store.add(_READY, 1) == len(starting):
                    store.set(_ALL_READY, "")
        elif starting and not self._all_ready:
            if self.is_whole:
                self.is_whole = False
                run_in_thread(self._wait_for_starting, *address, self._place)
                os.environ[RANK_IN_ROUND] = f"{rank}"
            rank -= sum(each < rank for each in starting)
            size -= len(starting)
            os.environ.update(RANK=f"{rank}", WORLD_SIZE=f"{size}")
        self._formed += 1
        self._store = PrefixStore(f"torchelastic/{'all' if self.is_whole else 'staying'}/{self._formed}", store)
        self._commits = 0
        others = _OtherRanks(store)

        def is_lost() -> bool:
            others.check()
            return self.changed

        self._group.create("gloo", self._store, rank, size, _TIMEOUT, _TIMEOUT, is_lost)
        self._is_formed = True

    def _wait_for_starting(self, host: str, port: int, place: tuple[int, int]) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined] # not listed in its __all__

        with contextlib.suppress(RuntimeError):  # the TCPStore of the round has ended
            store = connect_to_store(host, port, lambda: self._place is not place)
            while not store.check([_ALL_READY]):  # wait() would print a warning when the TCPStore ends
                if self._place is not place:
                    return
                time.sleep(_READY_INTERVAL)
            with self._condition:
                if self._place is not place:
                    return
                if self._later:  # the TCPStore of the round before has ended, or is about to
                    self._store = PrefixStore("torchelastic/before", store)
                self._next = self._next or self._later
                self._all_ready = self.changed = True
                self._condition.notify_all()

    def note_state(self) -> None:
        """Tell the agent that this process has the state of the training."""
        if self._stays and not self._has_state:
            self._has_state = AGENT_CONNECTION.send(WorkerMessage(has_state=True))

    def changes_at_commit(self) -> bool:
        """Return whether the world changes now; all ranks call this at the end of each step.

        The first rank that knows of a planned change chooses the end of the next step. So all ranks leave their world
        after the same step, and none waits for another one in a step that has to be repeated.
        """
        self._commits += 1
        if not (self.changed and self._is_planned):
            return self.changed
        try:
            last = self._store.compare_set(_LAST_COMMIT, "", f"{self._commits + 1}")
        except RuntimeError:  # the TCPStore has ended
            return True
        return self._commits >= int(last)

    def explains(self, error: BaseException) -> bool:
        """Return whether an error of the program may have been raised because the world is broken."""
        import torch.distributed as dist

        return self.changed or isinstance(error, dist.DistError) or "gloo" in f"{error}"

    def next(self) -> bool:
        """Wait for the next world after a failure or a change; return whether there is one."""
        if self._stays and not self._is_joined_by_others():
            AGENT_CONNECTION.send(WorkerMessage(waits=True))
        with self._condition:
            if not self._stays:
                return False
            if self._later and not self.changed:  # a rank has left this world, although all were to stay
                self._next, self.changed = self._later, True
            timeout = None if SPARE in os.environ else _AGENT_TIMEOUT
            self._condition.wait_for(lambda: self.changed or self._lost_agent, timeout)
            if not self.changed:
                return False
            # If the next round has no place for this process, the agent ends it.
            self._condition.wait_for(lambda: self._next or self._lost_agent or self._is_joined_by_others())
            os.environ.pop(RANK_IN_ROUND, None)
            if not self._next:
                if self._place is None or not self._is_joined_by_others():
                    return False
                rank, size = self._place
                os.environ.update(RANK=f"{rank}", WORLD_SIZE=f"{size}")
                self.changed, self.is_whole, self._is_planned, self._formed = False, True, True, 0
                return True
            for name in (STARTING_RANKS, SPARE):
                os.environ.pop(name, None)
            os.environ.update(self._next)
            is_joined = self._next is self._later
            all_ready = self._all_ready and is_joined
            self._begin_round()
            self._all_ready = all_ready
        if is_joined:  # _take() has done this
            return True
        REPORTER.begin_round()
        return AGENT_CONNECTION.send(WorkerMessage(left_for=int(os.environ["TORCHELASTIC_ROUND"])))

    def _is_joined_by_others(self) -> bool:
        return self._all_ready and not self.is_whole and not self._broken

    def end(self) -> None:
        """Leave the last world together with the other ranks, and tell the agent that this process does not stay.

        Raises:
            WorldChanged: ranks of the next world need the state of this one.
            RuntimeError: the same, after a rank was lost.
        """
        import torch.distributed as dist

        if self._later or not self.is_whole:
            self._wait_for_change()
            raise WorldChanged
        try:
            dist.barrier()  # a rank that ends must not look lost to those that still train
        except RuntimeError:
            if self._wait_for_change(_LOSS_TIMEOUT):
                raise
        with self._condition:
            if self._stays and self.changed:
                raise WorldChanged
            stays, self._stays = self._stays, False
        if stays:
            AGENT_CONNECTION.send(WorkerMessage(stays=False))

    def _wait_for_change(self, seconds: float | None = None) -> bool:
        with self._condition:
            return self._stays and self._condition.wait_for(lambda: self.changed or self._lost_agent, seconds)

    def _take(self, message: WorldMessage) -> None:
        with self._condition:
            if self._continues(message):
                self._later = environment = message.environment
                address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
                run_in_thread(self._wait_for_starting, *address, self._place)
                REPORTER.begin_round()
                AGENT_CONNECTION.send(WorkerMessage(left_for=int(environment["TORCHELASTIC_ROUND"])))
                return
            self.changed = True
            self._next = message.environment
            self._broken |= not message.environment
            if not message.planned:
                self._is_planned = False
                self._group.interrupt()  # before the next world is formed
            self._condition.notify_all()

    def _continues(self, message: WorldMessage) -> bool:
        """Return whether this world continues until the starting ranks of the next round are ready, as all stay."""
        starting = parse_ranks(message.environment.get(STARTING_RANKS, ""))
        forms = self._is_formed and self.is_whole and not (self.changed or self._later)
        if not (message.planned and starting and forms) or self._place is None:
            return False
        staying = int(message.environment["WORLD_SIZE"]) - len(starting)
        return staying == self._place[1] and int(message.environment["RANK"]) not in starting

    def _agent_lost(self) -> None:
        with self._condition:
            self._lost_agent = True
            self._condition.notify_all()


class _OtherRanks:
    """Looks from time to time for ranks that form their process group themselves: those never arrive in the world."""

    def __init__(self, store: TCPStore) -> None:
        self._keys = getattr(store, "list_keys", list)  # not in older versions of torch
        self._due = time.monotonic() + _OTHERS_INTERVAL

    def check(self) -> None:
        """Raise NonRetryableException if there is such a rank."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _OTHERS_INTERVAL
        for key in self._keys():
            if key.startswith("default_pg/"):
                raise NonRetryableException(
                    f"Rank {key.rpartition('/')[2]} has called init_process_group(), and this rank uses "
                    "@torchelastic.elastic. All ranks of a job must do the same."
                )


def has_agent() -> bool:
    """Return whether this process is a worker of an agent that announces worlds."""
    return is_worker() and "TORCHELASTIC_ROUND" in os.environ


def _can_stay() -> bool:
    import torch

    return has_agent() and not torch.cuda.is_available()


WORLDS: Final = Worlds()
"""The worlds of this process."""
