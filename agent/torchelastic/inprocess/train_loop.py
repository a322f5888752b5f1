"""The loop that trains through changes of the world: see :func:`train`."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

from torchelastic.inprocess.checkpoint import CheckpointUtil
from torchelastic.inprocess.coordinator import StopException
from torchelastic.inprocess.state import State
from torchelastic.inprocess.worker_stats import WorkerStats
from torchelastic.metrics.api import put_metric
from torchelastic.training.errors import NonRetryableException
from torchelastic.training.progress import step

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
    checkpoints = CheckpointUtil(coordinator)
    done = False
    is_current = False  # whether the state has been brought to that of the other ranks, or of a checkpoint
    failures = 0
    while not coordinator.should_stop_training():
        snapshot = state.capture_snapshot()
        try:
            with _measured("outer_train_loop.duration.ms"):
                _, rank, world_size = coordinator.rendezvous_barrier()
                coordinator.init_process_group()
                checkpoints.load_checkpoint(state, rank, is_current=is_current)
                with _measured("state_sync.duration.ms"):
                    state.sync(world_size, rank)
                train_step = step_of_world(state)
            with _measured("inner_train_loop.duration.ms"):
                while True:
                    snapshot = state.capture_snapshot()
                    is_current = True  # a failure rolls back to a state that the ranks have shared
                    step()
                    try:
                        result = train_step(state)
                    except StopIteration:
                        done = True
                        break
                    state, stats = _state_and_stats(result, state)
                    coordinator.monitor_progress(state, stats)
                    if coordinator.should_save_checkpoint() or state.should_save_checkpoint(rank):
                        checkpoints.save_checkpoint(state, rank)
                    failures = 0
                    if coordinator.should_rendezvous(state):
                        break
                    coordinator.report_progress(state)
            if done:
                coordinator.signal_training_done()
                return state
        except StopException as stopped:
            message = f"This process was not a rank when the run ended, so its state is not the trained one. {stopped}"
            raise NonRetryableException(message) from None
        except RuntimeError as error:
            coordinator.on_error(error)
            failures += 1
            if failures >= MAX_FAILURES:
                raise RuntimeError(f"The training has failed {failures} times without a complete step.") from error
            state.apply_snapshot(snapshot)
        except Exception as error:
            coordinator.on_error(error)
            raise
    return state


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
