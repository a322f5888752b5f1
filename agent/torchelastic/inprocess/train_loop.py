"""The loop that trains through changes of the world: see :func:`train`."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from torchelastic.inprocess.checkpoint import CheckpointUtil
from torchelastic.inprocess.coordinator import StopException
from torchelastic.inprocess.state import State
from torchelastic.inprocess.worker_stats import WorkerStats
from torchelastic.metrics.api import put_metric
from torchelastic.training.errors import NonRetryableException
from torchelastic.training.progress import step
from torchelastic.training.worlds import WorldChanged, call_in_worlds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchelastic.inprocess.coordinator import Coordinator

__all__ = ["MAX_FAILURES", "run_train", "train"]

logger = logging.getLogger(__name__)

MAX_FAILURES: Final = 100
"""Number of failures in a row, without a complete step between them, after which :func:`train` gives up."""

StateType = TypeVar("StateType", bound=State)


def train(coordinator: Coordinator, train_step: Callable[[StateType], Any], state: StateType) -> StateType:
    """Call ``train_step(state)`` until it raises StopIteration, in a world of ranks that may change after each step.

    When ranks join or leave, all ranks form another world, call :meth:`~torchelastic.State.sync`, and continue. If a
    step raises RuntimeError, as a collective does when a rank is lost, the state is first rolled back to its last
    snapshot.

    Args:
        coordinator: forms the worlds, for example a :class:`torchelastic.p2p.CoordinatorP2P`.
        train_step: trains for one step. It returns nothing, or the state and its
            :class:`~torchelastic.worker_stats.WorkerStats`.
        state: the state.

    Returns:
        The state after the last step.

    Raises:
        NonRetryableException: this process cannot join the run; the run has ended while this process was not a rank, so
            its state is not the trained one; or there are checkpoints, but none can be loaded.
        RuntimeError: 100 attempts in a row have failed; its cause is the last failure.
        Exception: any other exception of the program.
    """
    return _train(coordinator, lambda _: train_step, state)


def run_train(
    coordinator: Coordinator, train_step_gen: Callable[[StateType], Iterator[Any]], state: StateType
) -> StateType:
    """Train as :func:`train` does, with the steps of the generator that ``train_step_gen(state)`` returns in a world.

    The end of the generator is the end of the training. It yields what a step of :func:`train` returns.
    """

    def step_of_world(state: StateType) -> Callable[[StateType], Any]:
        steps = train_step_gen(state)
        return lambda _: next(steps)

    return _train(coordinator, step_of_world, state)


def _train(
    coordinator: Coordinator, step_of_world: Callable[[StateType], Callable[[StateType], Any]], state: StateType
) -> StateType:
    training = _Training(coordinator, step_of_world, state)
    try:
        return call_in_worlds(training, training.train)
    except _Stopped:
        return training.state
    except StopException as stopped:
        message = f"This process was not a rank when the run ended, so its state is not the trained one. {stopped}"
        raise NonRetryableException(message) from None
    except Exception as error:
        if not isinstance(error, RuntimeError):  # next() has reported it
            coordinator.on_error(error)
        raise


class _Stopped(Exception):  # noqa: N818 - no error
    """The coordinator has stopped the training."""


class _Training(Generic[StateType]):
    """A training in the worlds of a coordinator.

    Args:
        coordinator: forms the worlds.
        step_of_world: returns the function for a step in the current world.
        state: the state before the training.

    Attributes:
        state: the current state.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        step_of_world: Callable[[StateType], Callable[[StateType], Any]],
        state: StateType,
    ) -> None:
        self.state = state
        self._coordinator = coordinator
        self._step_of_world = step_of_world
        self._checkpoints = CheckpointUtil(coordinator)
        self._snapshot: object = None
        self._is_current = False  # whether the state has been brought to that of the other ranks, or of a checkpoint
        self._failures = 0
        self._is_entering = False  # whether the coordinator has yet to form the world

    @contextlib.contextmanager
    def world(self) -> Iterator[None]:
        """See :meth:`Worlds.world`."""
        self._is_entering = True
        if self._coordinator.should_stop_training():
            raise _Stopped
        self._snapshot = self.state.capture_snapshot()
        self._is_entering = False
        with _measured("outer_train_loop.duration.ms"):
            _, rank, world_size = self._coordinator.rendezvous_barrier()
            self._coordinator.init_process_group()
            self._checkpoints.load_checkpoint(self.state, rank, is_current=self._is_current)
            with _measured("state_sync.duration.ms"):
                self.state.sync(world_size, rank)
        self._rank = rank
        yield

    def train(self) -> StateType:
        """Train in the current world until the training ends, and return the state."""
        coordinator, state = self._coordinator, self.state
        train_step = self._step_of_world(state)
        with _measured("inner_train_loop.duration.ms"):
            while True:
                self._snapshot = state.capture_snapshot()
                self._is_current = True  # a failure rolls back to a state that the ranks have shared
                step()
                try:
                    result = train_step(state)
                except StopIteration:
                    return state
                state, stats = _state_and_stats(result, state)
                self.state = state
                coordinator.monitor_progress(state, stats)
                if coordinator.should_save_checkpoint() or state.should_save_checkpoint(self._rank):
                    self._checkpoints.save_checkpoint(state, self._rank)
                self._failures = 0
                if coordinator.should_rendezvous(state):
                    raise WorldChanged
                coordinator.report_progress(state)

    def next(self, error: RuntimeError | None) -> bool:
        """See :meth:`Worlds.next`: roll the state back after an error. The coordinator then finds the next world."""
        if error is None or self._is_entering:
            return error is None
        self._coordinator.on_error(error)
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise RuntimeError(f"The training has failed {self._failures} times without a complete step.") from error
        self.state.apply_snapshot(self._snapshot)
        return True

    def end(self) -> None:
        """See :meth:`Worlds.end`."""
        try:
            self._coordinator.signal_training_done()
        except WorldChanged:
            self.state.apply_snapshot(self._snapshot)  # the end of the training is repeated
            raise


def _state_and_stats(result: object, state: StateType) -> tuple[StateType, Any]:
    match result:
        case None:
            return state, None
        case (State() as changed, stats) if stats is None or isinstance(stats, WorkerStats):
            return changed, stats  # type: ignore[return-value] # the state of the same program
    raise TypeError(
        f"train_step returned {result!r:.100}: it must return None, or the state and its WorkerStats or None."
    )


@contextlib.contextmanager
def _measured(name: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        put_metric(name, (time.perf_counter() - began) * 1000)
