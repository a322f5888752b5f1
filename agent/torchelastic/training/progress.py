"""Training progress: :func:`step` and :func:`checkpoint`.

Both record metrics (see :mod:`torchelastic.metrics`). On rank 0 they also report the time of the first step and of the
last checkpoint to the agent, for the time breakdown of the run.

Messages are sent without blocking the training. A checkpoint is reported at once; of several within a second, the last
one is reported later, like a message that the agent did not accept: at the next call after the second, or at the exit.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Self

from torchelastic.agent_socket import AGENT, is_worker
from torchelastic.metrics import put_metric

if TYPE_CHECKING:
    from types import TracebackType

INTERVAL: Final = 1.0
"""Minimum number of seconds between two reports of checkpoints, and between two attempts to send one."""


class Checkpoint:
    """A checkpoint that is being written; it contains the training up to its start.

    As a context manager, it starts with the block and is written when the block ends without an exception. A checkpoint
    that is written in the background starts when the object is created, and is written when :meth:`done` is called, in
    any thread.
    """

    def __init__(self) -> None:
        self._began, self._clock, self._written = time.time(), time.perf_counter(), False

    def __enter__(self) -> Self:
        self._began, self._clock, self._written = time.time(), time.perf_counter(), False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.done()

    def done(self, future: Any = None) -> None:  # noqa: ANN401 - of concurrent.futures, asyncio or torch
        """Report that the checkpoint is written; a second call changes nothing.

        Args:
            future: the future that has written it, as in ``future.add_done_callback(writing.done)``; one that was
                cancelled or has failed is not reported.
        """
        if self._written or (future is not None and (future.cancelled() or future.exception() is not None)):
            return
        self._written = True
        put_metric("checkpoint.write_latency_ms", (time.perf_counter() - self._clock) * 1000)
        REPORTS.tell("kept", self._began)


def step() -> None:
    """Report the beginning of a training step; to be called for each step, on all ranks.

    The first call ends the time that counts as restoring. The time between two calls is measured as
    ``train_step.duration.ms``.
    """
    now = time.perf_counter()
    before, REPORTS.step_began = REPORTS.step_began, now
    if before:
        put_metric("train_step.duration.ms", (now - before) * 1000)
        REPORTS.send()
    else:
        REPORTS.tell("stepped", time.time())


def checkpoint() -> Checkpoint:
    """Return the context manager of a block that writes a checkpoint of the training before the block.

    ::

        with torchelastic.checkpoint():
            torch.save(state, path)

    If the block ends without an exception, its time is measured as ``checkpoint.write_latency_ms``. If several ranks
    write, that of rank 0 is reported; its block is to end when all have written. To write in the background::

        writing = torchelastic.checkpoint()
        torch.distributed.checkpoint.async_save(state, checkpoint_id=path).add_done_callback(writing.done)
    """
    return Checkpoint()


class Reports:
    """The reports of this process to its agent; a child of a worker sends none.

    Attributes:
        step_began: when it last called :func:`step`, by ``time.perf_counter``; 0 before the first call.
    """

    def __init__(self) -> None:
        self.step_began = 0.0
        self._lock = threading.RLock()  # reentrant for a signal handler that saves; never held while waiting
        self._unsent: dict[str, float] = {}
        self._next = -math.inf

    def tell(self, what: str, when: float) -> None:
        """Report to the agent.

        Args:
            what: ``stepped``, which is reported once, or ``kept``, of which the last one counts.
            when: in seconds since the Unix epoch.
        """
        if is_worker() and os.environ.get("RANK") == "0":
            with self._lock:
                self._unsent[what] = max(when, self._unsent.get(what, 0.0))
            self.send()

    def send(self, *, at_exit: bool = False) -> None:
        """Send the unsent reports, unless the interval is not over."""
        if not self._unsent or (time.perf_counter() < self._next and not at_exit) or not is_worker():
            return
        with self._lock:
            unsent, self._unsent = self._unsent, {}
            if not (sent := AGENT.send(unsent)):
                self._unsent = unsent | self._unsent
            if "kept" in unsent or not sent:
                self._next = time.perf_counter() + INTERVAL


REPORTS: Final = Reports()
"""The reports of this process."""

atexit.register(REPORTS.send, at_exit=True)
