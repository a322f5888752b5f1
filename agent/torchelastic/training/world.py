"""The worlds of a worker that stays when the round changes: its agent tells it that a world is broken, or of the next.

A *world* is the process group of the workers of one round.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import threading
from typing import TYPE_CHECKING, Final

from torchelastic.protocol.worker import WorkerMessage, WorldMessage, is_worker
from torchelastic.training.connection import AGENT_CONNECTION
from torchelastic.training.process_group import InterruptibleProcessGroup
from torchelastic.training.progress import REPORTER

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

_AGENT_TIMEOUT: Final = 60.0
"""Seconds for the agent to say that the world is broken or changes, after a collective has failed.

If the lost rank is on another node, the agent knows it only from the next round.
"""

_TIMEOUT: Final = dt.timedelta(hours=1)
"""The time-out of collectives: the agent ends a collective whose ranks are lost, and finds ranks that hang."""


class WorldChanged(BaseException):
    """The world has changed; :func:`torchelastic.elastic` calls the program's function again.

    It is no Exception, so that an ``except Exception`` of the program does not catch it.
    """


class Worlds:
    """The worlds of this process: one after the other under an agent, if the workers' tensors are on the CPU; else one.

    Attributes:
        changed: whether the world is broken, or has a successor.
    """

    def __init__(self) -> None:
        self.changed = False
        self._group = InterruptibleProcessGroup()
        self._condition = threading.Condition()
        self._next: dict[str, str] = {}
        self._lost_agent = False
        self._stays = False
        self._formed = 0

    @contextlib.contextmanager
    def world(self) -> Iterator[None]:
        """Return a context manager for a block with the process group of the current world.

        Raises:
            RuntimeError: the group cannot be created, for example because a rank was lost meanwhile.
        """
        import torch.distributed as dist
        from torch.distributed import (  # type: ignore[attr-defined] # not listed in its __all__
            HashStore,
            PrefixStore,
            TCPStore,
        )

        if dist.is_initialized():  # by the program
            yield
            return
        try:
            if _can_stay():
                self._stays = True
                AGENT_CONNECTION.send(WorkerMessage(stays=True))
                AGENT_CONNECTION.read(WorldMessage, self._take, self._agent_lost)
                rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
                store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
                self._formed += 1
                own = PrefixStore(f"torchelastic/{self._formed}", store)
                self._group.create("gloo", own, rank, size, _TIMEOUT, _TIMEOUT, lambda: self.changed)
            elif "RANK" in os.environ:
                dist.init_process_group()
            else:
                dist.init_process_group(store=HashStore(), rank=0, world_size=1)
            yield
        finally:
            self._group.destroy()
            if dist.is_initialized():
                dist.destroy_process_group()

    def next(self) -> bool:
        """Wait for the next world after a failure or a change; return whether there is one."""
        with self._condition:
            if not self._stays:
                return False
            self._condition.wait_for(lambda: self.changed or self._lost_agent, _AGENT_TIMEOUT)
            if not self.changed:
                return False
            # If the next round has no place for this process, the agent ends it.
            self._condition.wait_for(lambda: self._next or self._lost_agent)
            if not self._next:
                return False
            os.environ.update(self._next)
            self._next, self.changed, self._formed = {}, False, 0
        REPORTER.begin_round()
        return AGENT_CONNECTION.send(WorkerMessage(left_for=int(os.environ["TORCHELASTIC_ROUND"])))

    def wait_for_change(self, seconds: float) -> bool:
        """Wait until the agent says that the world is broken or changes; return whether it has."""
        with self._condition:
            return self._stays and self._condition.wait_for(lambda: self.changed, seconds)

    def leave(self) -> bool:
        """Tell the agent that this process does not stay any longer; return whether the world has not changed."""
        with self._condition:
            if self._stays and self.changed:
                return False
            stays, self._stays = self._stays, False
        if stays:
            AGENT_CONNECTION.send(WorkerMessage(stays=False))
        return True

    def _take(self, message: WorldMessage) -> None:
        with self._condition:
            self.changed = True
            self._next = message.environment
            if not message.planned:
                self._group.interrupt()  # before the next world is formed
            self._condition.notify_all()

    def _agent_lost(self) -> None:
        with self._condition:
            self._lost_agent = True
            self._condition.notify_all()


def _can_stay() -> bool:
    import torch

    return is_worker() and "TORCHELASTIC_ROUND" in os.environ and not torch.cuda.is_available()


WORLDS: Final = Worlds()
"""The worlds of this process."""
