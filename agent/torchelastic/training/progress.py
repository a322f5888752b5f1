"""Reports of a worker's progress: its steps, checkpoints and heartbeats."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
from typing import Any, Final, Self

from torchelastic.metrics import put_metric
from torchelastic.protocol.worker import HEARTBEAT_FILE, WorkerMessage, is_worker
from torchelastic.training.connection import AGENT_CONNECTION

MIN_REPORT_INTERVAL: Final = 1.0
"""Minimum number of seconds between two reports of checkpoints, and between two attempts to send one."""

_HEARTBEAT_INTERVAL: Final = 0.005
"""Minimum number of seconds between two heartbeats; the others in between are dropped."""


class CheckpointReport:
    """A checkpoint that is being written; it contains the state of the training at the beginning of the write.

    In a ``with`` statement, the write begins with the block, and is complete when the block ends without an exception.
    In the background, the write begins when the object is created, and is complete when a thread calls :meth:`done`.
    """

    def __init__(self) -> None:
        self._began, self._clock, self._written = time.time(), time.perf_counter(), False

    def __enter__(self) -> Self:
        self._began, self._clock, self._written = time.time(), time.perf_counter(), False
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.done()

    def done(self, future: Any = None) -> None:  # noqa: ANN401 - of concurrent.futures, asyncio or torch
        """Report that the checkpoint is written; a second call has no effect.

        Args:
            future: the future of the write, as in ``future.add_done_callback(writing.done)``. If it was canceled or
                failed, nothing is reported.
        """
        if self._written or (future is not None and (future.cancelled() or future.exception() is not None)):
            return
        self._written = True
        put_metric("checkpoint.write_latency_ms", (time.perf_counter() - self._clock) * 1000)
        REPORTER.add(last_checkpoint_at=self._began)


def step(number: int | None = None) -> None:
    """Report the beginning of a training step; call this function for each step, on all ranks.

    The first call ends the time that counts as restoring. The time between two calls is measured as
    ``train_step.duration.ms``.

    Args:
        number: the number of steps that are complete. From the first one of each round, the agent notices ranks that
            begin the round at different steps.

    Raises:
        ValueError: the number is negative.
    """
    if number is not None and number < 0:
        raise ValueError(f"The number of complete steps must be 0 or more, not {number}.")
    now = time.perf_counter()
    before, REPORTER.step_began = REPORTER.step_began, now
    if not before:
        REPORTER.first_step(number=number)
        return
    put_metric("train_step.duration.ms", (now - before) * 1000)
    if REPORTER.has_stepped:
        REPORTER.send()
    else:
        REPORTER.has_stepped = True
        REPORTER.add(second_step_at=time.time())


def report_checkpoint() -> CheckpointReport:
    """Return a context manager for a block that writes a checkpoint of the training up to the block.

    ::

        with torchelastic.report_checkpoint():
            torch.save(state, path)

    If the block ends without an exception, its duration is measured as ``checkpoint.write_latency_ms``. If several
    ranks write, the block of rank 0 is reported; it must end after all ranks have written. To write in the background::

        writing = torchelastic.report_checkpoint()
        torch.distributed.checkpoint.async_save(state, checkpoint_id=path).add_done_callback(writing.done)
    """
    return CheckpointReport()


class ProgressReporter:
    """Sends the reports of this process to its agent; a child of a worker sends none.

    Attributes:
        step_began: when this process last called :func:`step`, by ``time.perf_counter``; 0 before the first call.
        first_step_reported: whether the first training step was reported, by :func:`step` or by a step of an optimizer.
        has_stepped: whether this process has completed a step.
    """

    def __init__(self) -> None:
        self.step_began = 0.0
        self.first_step_reported = False
        self.has_stepped = False
        self._lock = threading.RLock()  # reentrant: a signal handler may report a checkpoint; never held while waiting
        self._unsent: dict[str, Any] = {}  # fields of a message
        self._next = -math.inf
        self._next_heartbeat = -math.inf

    def begin_round(self) -> None:
        """Forget the steps of the previous round; this process continues in the next one."""
        self.step_began, self.first_step_reported, self.has_stepped = 0.0, False, False

    def first_step(self, *_: object, number: int | None = None) -> None:
        """Report the first training step; a later call has no effect. This is also a hook of torch's optimizers."""
        if not self.first_step_reported:
            self.first_step_reported = True
            self.add(first_step_at=time.time(), **({} if number is None else {"step": number}))

    def add(self, **fields: float) -> None:
        """Report one of the first two steps or a checkpoint to the agent; only the first step on other ranks than 0.

        Args:
            fields: of a :class:`WorkerMessage`: ``first_step_at`` and ``step``, ``second_step_at``, or
                ``last_checkpoint_at``, which replaces an unsent one.
        """
        if is_worker() and ("first_step_at" in fields or os.environ.get("RANK") == "0"):
            with self._lock:
                for name, value in fields.items():
                    self._unsent[name] = max(value, self._unsent.get(name, 0))
            self.send()

    def send(self, *, at_exit: bool = False) -> None:
        """Send the unsent reports if the interval is over or the process exits."""
        if not self._is_due(at_exit) or not is_worker():
            return
        with self._lock:
            if not self._is_due(at_exit):  # another thread has sent them
                return
            unsent, self._unsent = self._unsent, {}
            if "last_checkpoint_at" in unsent:  # set before the message is sent: a signal handler may report meanwhile
                self._next = time.perf_counter() + MIN_REPORT_INTERVAL
            if not AGENT_CONNECTION.send(WorkerMessage(**unsent)):
                self._unsent = unsent | self._unsent
                self._next = time.perf_counter() + MIN_REPORT_INTERVAL

    def heartbeat(self) -> None:
        """Report that this process makes progress, unless it has just done so."""
        if (now := time.monotonic()) < self._next_heartbeat:
            return
        self._next_heartbeat = now + _HEARTBEAT_INTERVAL
        path = os.environ.get(HEARTBEAT_FILE)
        if path and is_worker():
            with contextlib.suppress(OSError):
                os.utime(path)

    def _is_due(self, at_exit: bool) -> bool:
        return bool(self._unsent) and (at_exit or time.perf_counter() >= self._next)


REPORTER: Final = ProgressReporter()
"""Sends the reports of this process."""

atexit.register(REPORTER.send, at_exit=True)


def heartbeat() -> None:
    """Report that this worker makes progress. The call is cheap enough for every step.

    If ``--heartbeat-timeout`` is set, a worker without a heartbeat for that time counts as hung. The agent kills it
    and reports a failure with the worker's stack. A program that is not written in Python touches the file named by
    ``TORCHELASTIC_HEARTBEAT_FILE`` instead; the variable is set if ``--heartbeat-timeout`` is set.
    """
    REPORTER.heartbeat()
