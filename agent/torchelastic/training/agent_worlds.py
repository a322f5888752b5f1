"""The worlds of a worker that stays when the round changes: its agent tells it that a world is broken, or of the next.

A *world* is the process group of the workers of one round. If some workers stay and others start, those that stay train
in a smaller world until the others are ready.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, Final

from torchelastic.protocol.worker import (
    RANK_IN_ROUND,
    SPARE,
    STARTING_RANKS,
    WorkerMessage,
    WorldMessage,
    is_worker,
    parse_ranks,
)
from torchelastic.training import nccl
from torchelastic.training.connection import AGENT_CONNECTION, run_in_thread
from torchelastic.training.error_file import record_message
from torchelastic.training.errors import NonRetryableException
from torchelastic.training.process_group import InterruptibleProcessGroup, connect_to_store
from torchelastic.training.progress import REPORTER
from torchelastic.training.worlds import WorldChanged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined] # not listed in its __all__

logger = logging.getLogger(__name__)

_AGENT_TIMEOUT: Final = 60.0
"""Seconds for the agent to say that the world is broken or changes, after a collective has failed.

If the lost rank is on another node, the agent knows it only from the next round.
"""

_TIMEOUT: Final = dt.timedelta(hours=1)
"""The time-out of collectives: the agent ends a collective whose ranks are lost, and finds ranks that hang."""

_VARIABLES: Final = ("TORCHELASTIC_ROUND", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", STARTING_RANKS)
"""The variables that describe the place of a process in a round."""

_READY: Final = "ready"
_ALL_READY: Final = "all ready"
"""The keys of the round that count the starting ranks that are ready to train, and that the last of them sets."""

_LAST_COMMIT: Final = "last commit"
"""The key of a world's store with the number of the commit at which all ranks leave it."""

_LOSS_TIMEOUT: Final = 2.0
"""Seconds to learn at the end of the training that a rank was lost; else, the other ranks have just ended."""

_OTHERS_INTERVAL: Final = 0.5
"""Seconds between two looks for ranks that form their process group themselves."""

_READY_INTERVAL: Final = 0.01
"""Seconds between two checks whether the starting ranks are ready."""

_STUCK_INTERVAL: Final = 0.1
_STUCK_CHECKS: Final = 3
"""Seconds between two checks whether a collective is stuck, and how often in a row it is found."""


class _World:
    """The ranks of a round, or those of them that stay, from the view of one of them.

    Args:
        environment: the variables of this process in the round.
        is_whole: whether the ranks that start belong to it.

    Attributes:
        round: the number of the round.
        starting: the ranks of the round that start.
        starts: whether this rank is one of them.
        rank: the rank of this process in the world.
        size: the number of ranks.
    """

    def __init__(self, environment: Mapping[str, str], *, is_whole: bool = True) -> None:
        self._environment = environment
        self.is_whole = is_whole
        self.round = int(environment["TORCHELASTIC_ROUND"])
        self.starting = parse_ranks(environment.get(STARTING_RANKS, ""))
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self.starts = rank in self.starting
        self._in_round = rank
        missing = () if is_whole else self.starting
        self.rank, self.size = rank - sum(each < rank for each in missing), size - len(missing)

    def of_staying(self) -> _World:
        """Return the world of the round in which this rank can train now."""
        return self if self.starts or not self.starting else _World(self._environment, is_whole=False)

    def of_all(self) -> _World:
        """Return the world of all ranks of the round."""
        return _World(self._environment)

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port of the round's TCPStore; a spare has none."""
        return self._environment["MASTER_ADDR"], int(self._environment["MASTER_PORT"])

    @property
    def prefix(self) -> str:
        """The first part of the round's keys in its TCPStore."""
        return f"torchelastic/{self.round}"

    def enter(self) -> None:
        """Set the variables of this process."""
        for name in (RANK_IN_ROUND, STARTING_RANKS, SPARE):
            os.environ.pop(name, None)
        os.environ.update(self._environment)
        if not self.is_whole:
            os.environ.update(RANK=f"{self.rank}", WORLD_SIZE=f"{self.size}")
            os.environ[RANK_IN_ROUND] = f"{self._in_round}"


class AgentWorlds:
    """The worlds of this process: one after the other under an agent, if the process can stay; else one.

    A process can stay if there is no GPU, or if its environment chooses that it stays with NCCL.

    A world has a successor when the agent has announced a round, or when ranks of this round start. All ranks of the
    world enter the successor when it is ready: at once, or when the starting ranks are.

    Attributes:
        allows_nccl: whether the program calls :meth:`check` and observes `is_state_lost`, so it may stay with NCCL.
        stand_by: called in a thread on a spare node, with the address of the round's TCPStore.
        uses_nccl: whether this process stays and uses NCCL.
        is_state_lost: whether the state of this process may be wrong, because NCCL's collectives were aborted.
    """

    def __init__(self) -> None:
        self.allows_nccl = False
        self.stand_by: Callable[[str], object] = lambda _: None
        self.uses_nccl = False
        self.is_state_lost = False
        self._group = InterruptibleProcessGroup()
        self._condition = threading.Condition()
        self._lost_agent = False
        self._stays = False
        self._has_state = False
        self._current: _World | None = None
        self._is_formed = False  # whether the current world has its process group
        self._is_broken = False  # whether a rank of the current world is lost
        self._is_ending = False  # whether the ranks leave the current world after the same step
        self._next: _World | None = None  # the world after the current one, if it is known
        self._round = 0  # the last one that this process has begun
        self._entries = 0  # how often this process has formed the current world
        self._commits = 0  # in the current world
        self._all_leave = False  # whether all ranks leave the current world in this commit, with NCCL
        self._store: Store  # in which the ranks of the current world agree on their last commit

    @contextlib.contextmanager
    def world(self) -> Iterator[None]:
        """See :meth:`Worlds.world`. In the block, RANK and WORLD_SIZE in the environment are those of the world."""
        import torch.distributed as dist
        from torch.distributed import HashStore  # type: ignore[attr-defined] # not listed in its __all__

        if dist.is_initialized():
            if self._stays:
                raise RuntimeError("The process group of the world before could not be destroyed.")
            yield  # the group is the program's own
            return
        try:
            self.uses_nccl = self.allows_nccl and nccl.is_chosen() and _has_gpu()
            if has_agent() and (self.uses_nccl or not _has_gpu()):
                self._stays = True
                AGENT_CONNECTION.send(WorkerMessage(stays=True))
                AGENT_CONNECTION.read(WorldMessage, self._take, self._agent_lost)
                while (address := os.environ.get(SPARE)) is not None:
                    if address:
                        with contextlib.suppress(RuntimeError):  # no thread can be started
                            run_in_thread(self.stand_by, address)
                    if not self.next(None):
                        raise RuntimeError("The agent has not announced a world.")
                self._form()
            elif "RANK" in os.environ:
                dist.init_process_group()
            else:
                dist.init_process_group(store=HashStore(), rank=0, world_size=1)
            yield
        finally:
            self._is_formed = False
            if self.uses_nccl:
                nccl.abort(nccl.communicators())
                with contextlib.suppress(RuntimeError):
                    nccl.wait()  # until nothing writes to the state any more
            self._group.destroy()
            if not self._stays:
                self._group.close()
            if dist.is_initialized():
                dist.destroy_process_group()

    def _form(self) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined] # not listed in its __all__

        with self._condition:
            if self._current is None:
                self._round = int(os.environ["TORCHELASTIC_ROUND"])
                own = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
                self._current = _World(own).of_staying()
                self._current.enter()
            world = self._current
        store = connect_to_store(*world.address, lambda: self.is_changing)
        with self._condition:
            if not world.is_whole and self._next is None and not self.is_changing:
                self._wait_in_thread(world.of_all(), store)
        ready = PrefixStore(world.prefix, store)
        if world.starts and self._entries == 0 and ready.add(_READY, 1) == len(world.starting):
            ready.set(_ALL_READY, "")
        self._entries += 1
        self._store = PrefixStore(f"{world.prefix}/{'all' if world.is_whole else 'staying'}/{self._entries}", store)
        self._commits = 0
        others = _OtherRanks(store)

        def is_lost() -> bool:
            others.check()
            return self.is_changing

        if self.uses_nccl:
            nccl.prepare()
        backend = nccl.BACKEND if self.uses_nccl else "gloo"
        self._group.create(backend, self._store, world.rank, world.size, _TIMEOUT, _TIMEOUT, is_lost)
        self._is_formed = True

    def _wait_in_thread(self, world: _World, store: TCPStore | None = None) -> None:
        """Let a world follow the current one when its starting ranks are ready, according to the store of its round."""
        self._next = world
        run_in_thread(self._wait_for_starting, world, store)

    def _wait_for_starting(self, world: _World, store: TCPStore | None) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined] # not listed in its __all__

        with contextlib.suppress(RuntimeError):  # the TCPStore of the round has ended
            store = store or connect_to_store(*world.address, lambda: self._next is not world)
            ready = PrefixStore(world.prefix, store)
            is_ready = False
            while not is_ready:
                time.sleep(_READY_INTERVAL)  # the ranks that stay form their group first, on the same CPUs
                if self._next is not world:
                    return
                is_ready = ready.check([_ALL_READY])  # wait() would print a warning when the TCPStore ends
            with self._condition:
                if self._next is not world or self._current is None:
                    return
                if world.round != self._current.round:  # the TCPStore of the round before has ended, or is about to
                    self._store = PrefixStore("torchelastic/before", store)
                self._is_ending = True
                self._condition.notify_all()

    def gather(self, *values: int) -> list[tuple[int, ...]] | None:
        """Return the values that each rank of the world passes, in the order of the ranks; None without an agent.

        All ranks call this before the first collective of each world.

        Raises:
            RuntimeError: a rank is lost; or the store of the world is.
        """
        return self._group.gather(*values) if self._is_formed else None

    @property
    def is_changing(self) -> bool:
        """Whether the ranks leave the current world."""
        return self._is_broken or self._is_ending

    def check(self) -> None:
        """Raise an exception if the numbers that a rank has got from others in this step may be wrong.

        With NCCL, all ranks call this together, at the end of each step, and before the state is saved at the end.

        Raises:
            WorldChanged: a rank is lost.
            RuntimeError: the same; or the GPU has failed.
        """
        if not (self.uses_nccl and self._is_formed):
            return
        import torch
        import torch.distributed as dist

        nccl.wait()
        if self._is_broken:  # the collectives of this rank may have been aborted
            raise WorldChanged
        is_ending = torch.tensor([int(self._is_ending)])
        dist.all_reduce(is_ending, dist.ReduceOp.MAX, self._group.control_group)
        if self._is_broken:
            raise WorldChanged
        self._all_leave = bool(is_ending)

    def note_state(self) -> None:
        """Tell the agent that this process has the state of the training."""
        with self._condition:
            self.is_state_lost = self.is_state_lost and self._is_broken
        if self._stays and not self._has_state:
            self._has_state = AGENT_CONNECTION.send(WorkerMessage(has_state=True))

    def changes_at_commit(self) -> bool:
        """Return whether the world changes now; all ranks call this at the end of each step.

        The first rank that knows of a planned change chooses the end of the next step. So all ranks leave their world
        after the same step, unless a rank learns of the change more than a step later, and has to repeat a step.
        """
        self._commits += 1
        if self._is_broken or self.uses_nccl:
            return self._is_broken or self._all_leave
        if not self._is_ending:
            return False
        try:
            last = self._store.compare_set(_LAST_COMMIT, "", f"{self._commits + 1}")
        except RuntimeError:  # the TCPStore has ended
            return True
        return self._commits >= int(last)

    def next(self, error: RuntimeError | None) -> bool:
        """See :meth:`Worlds.next`."""
        if not self._stays or not (error is None or self._explains(error)):
            return False
        if error is not None and self.uses_nccl:
            self.is_state_lost = True
        if not (self._is_ending and self._is_joined_by_others()):
            AGENT_CONNECTION.send(WorkerMessage(waits=True))
        if error is not None:
            traceback.clear_frames(error.__traceback__)  # as for WorldChanged
        with self._condition:
            if not self.is_changing and self._next is not None and not self._is_joined_by_others():
                # A rank has left this world, although all were to stay until others are ready.
                self._next, self._is_ending = self._next.of_staying(), True
            timeout = None if SPARE in os.environ else _AGENT_TIMEOUT
            is_known = self._condition.wait_for(lambda: self.is_changing or self._lost_agent, timeout)
            if is_known:  # if the next round has no place for this process, the agent ends it
                self._condition.wait_for(lambda: (self.is_changing and self._next) or self._lost_agent)
            if not self.is_changing or self._next is None:
                return False
            world = self._current = self._next
            self._next, self._is_ending, self._is_broken, self._entries = None, False, False, 0
            world.enter()
        return self._leave_for(world)

    def _leave_for(self, world: _World) -> bool:
        """Tell the agent that this process has left its world for one of this round, and no longer waits."""
        if world.round != self._round:
            self._round = world.round
            REPORTER.begin_round()
        return AGENT_CONNECTION.send(WorkerMessage(left_for=world.round))

    def _is_joined_by_others(self) -> bool:
        """Return whether the next world has the same round: only the starting ranks are new in it."""
        return self._next is not None and self._current is not None and self._next.round == self._current.round

    def _explains(self, error: BaseException) -> bool:
        """Return whether an error of the program may have been raised because the world is broken."""
        import torch.distributed as dist

        if self.uses_nccl and nccl.is_fatal(error):
            return False
        return self.is_changing or isinstance(error, dist.DistError) or "gloo" in f"{error}"

    def end(self) -> None:
        """See :meth:`Worlds.end`. The agent then knows that this process does not stay."""
        import torch.distributed as dist

        is_whole = self._current is None or self._current.is_whole
        if not is_whole or (self._next is not None and not self.is_changing):  # ranks start
            self._wait_for_change()
            raise WorldChanged
        try:
            if self.uses_nccl:
                self.check()
            else:
                dist.barrier()  # a rank that ends must not look lost to those that still train
        except RuntimeError:
            if self._wait_for_change(_LOSS_TIMEOUT):
                raise
        with self._condition:
            if self._stays and (self._all_leave if self.uses_nccl else self.is_changing):
                raise WorldChanged
            stays, self._stays = self._stays, False
        if stays:
            AGENT_CONNECTION.send(WorkerMessage(stays=False))

    def _wait_for_change(self, seconds: float | None = None) -> bool:
        with self._condition:
            return self._stays and self._condition.wait_for(lambda: self.is_changing or self._lost_agent, seconds)

    def _take(self, message: WorldMessage) -> None:
        broken: list[Any] = []
        with self._condition:
            world = _World(message.environment) if message.environment else None
            if world is not None and message.planned and self._continues_until(world):
                self._wait_in_thread(world)
                self._leave_for(world)
                return
            self._next = None if world is None else world.of_staying()
            if message.planned:
                self._is_ending = True
            else:
                was_broken, self._is_broken = self._is_broken, True
                self._group.interrupt()  # before the next world is formed
                if self.uses_nccl:
                    self.is_state_lost = True
                    broken = nccl.communicators()
                if not was_broken and self._current is not None:
                    with contextlib.suppress(RuntimeError):  # without this thread, --rejoin-timeout ends the process
                        run_in_thread(self._end_if_stuck, self._current)
            self._condition.notify_all()
        if broken:
            with contextlib.suppress(RuntimeError):  # without a thread, --rejoin-timeout ends the process
                run_in_thread(nccl.abort, broken)

    def _end_if_stuck(self, world: _World) -> None:
        """End this process if a collective of its broken world never ends: another process takes its place."""
        checks = 0
        while checks < _STUCK_CHECKS:
            time.sleep(_STUCK_INTERVAL)
            if self._current is not world or not self._is_formed:
                return
            checks = checks + 1 if self._group.is_stuck else 0
        message = "A collective did not end after its world was broken, so this process has ended itself."
        logger.warning(message)
        record_message(message)
        os._exit(1)

    def _continues_until(self, world: _World) -> bool:
        """Return whether the current world continues until the starting ranks of the next one are ready: all stay."""
        current, stays = self._current, world.starting and not world.starts
        if current is None or self.uses_nccl or not (stays and self._is_formed and current.is_whole):
            return False
        return world.size - len(world.starting) == current.size and not self.is_changing and self._next is None

    def _agent_lost(self) -> None:
        with self._condition:
            self._lost_agent = True
            self._condition.notify_all()


class _OtherRanks:
    """Looks from time to time for ranks that form their process group themselves: those never arrive in the world."""

    def __init__(self, store: TCPStore) -> None:
        self._keys = getattr(store, "list_keys", list)  # since torch 2.10
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


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


WORLDS: Final = AgentWorlds()
"""The worlds of this process."""
