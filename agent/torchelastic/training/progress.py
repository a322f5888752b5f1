"""How far training is: :func:`step` and :func:`checkpoint`.

Both measure (see :mod:`torchelastic.metrics`). On rank 0 they also tell the agent since when the program trains, and up
to when its training is saved, for the time breakdown of the run.

Training never waits: messages are sent without blocking, and one that cannot be sent goes along with a later call. A
checkpoint is reported at once; of several within a second the last one is, by a thread, when the second is over.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import signal
import socket
import threading
import time
from _thread import start_new_thread
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from torchelastic.metrics import put_metric
from torchelastic.training.agent_socket import CHANNEL, connected, introduction, is_worker

if TYPE_CHECKING:
    from types import TracebackType

INTERVAL: Final = 1.0
"""Minimal seconds between two reports of checkpoints, and between two attempts to reach the agent."""


class _Future(Protocol):
    """What :mod:`concurrent.futures` and :mod:`asyncio` hand to a callback."""

    def cancelled(self) -> bool:
        """Whether it was cancelled."""

    def exception(self) -> BaseException | None:
        """What it failed with."""


class Checkpoint:
    """A checkpoint that is being written; it holds the training before its beginning.

    As a context manager it begins with the block, and is written when the block ends without an exception. One that is
    written in the background begins when the object is made, and is written when :meth:`done` is called, in any thread.
    """

    __slots__ = ("_began", "_clock", "_written")

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._began, self._clock = time.time(), time.perf_counter()
        self._written = False

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.done()

    def done(self, future: _Future | None = None) -> None:
        """Report that the checkpoint is written; a second call changes nothing.

        Args:
            future: the future that has written it, as in ``future.add_done_callback(writing.done)``; one that was
                cancelled or has failed is not reported.
        """
        if self._written or (future is not None and (future.cancelled() or future.exception() is not None)):
            return
        self._written = True
        put_metric("checkpoint.write_latency_ms", (time.perf_counter() - self._clock) * 1000)
        _here.tell("kept", self._began)


def step() -> None:
    """Report the beginning of a training step; to be called for each step, on all ranks.

    The first call ends the time that counts as restoring. The time between two calls is measured as
    ``train_step.duration.ms``.
    """
    now = time.perf_counter()
    before, _here.step_began = _here.step_began, now
    if before:
        put_metric("train_step.duration.ms", (now - before) * 1000)
    else:
        _here.tell("stepped", time.time())
    if now >= _here.due:
        _here.pay()


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


class _Here:
    """The reports of this process to its agent.

    Attributes:
        step_began: when it last called :func:`step`, by ``time.perf_counter``; 0 before the first call.
        due: from when on a step sends the reports that could not be sent yet.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.step_began = 0.0
        self.due = math.inf
        self._lock = threading.RLock()  # reentrant for a signal handler that saves; never held while waiting
        self._owed: dict[str, float] = {}
        self._connection: socket.socket | None = None
        self._turn = -math.inf
        self._paying = False
        self._awaiting_turn = False

    def after_fork(self) -> None:
        """Start again in a child, without the parent's connection."""
        connection = self._connection
        self._begin()
        if connection is not None:
            connection.close()

    def tell(self, what: str, when: float) -> None:
        """Report to the agent, now or soon.

        Args:
            what: ``stepped``, which is reported once, or ``kept``, of which the last one counts.
            when: in seconds since the Unix epoch.
        """
        if not is_worker() or os.environ.get("RANK") != "0":
            return
        with self._lock:
            self._owed[what] = max(when, self._owed.get(what, 0.0))
            early = what == "kept" and time.perf_counter() < self._turn
            self.due = self._turn
        if early:
            self._await_turn()
        else:
            self.pay()

    def pay(self) -> None:
        """Send the reports that are due, unless the agent cannot take them now."""
        with self._lock:
            if self._paying:  # this is a signal handler within another call, which sends its report
                return
            self._paying = True
            try:
                while self._owed:
                    owed, self._owed = self._owed, {}
                    sent = self._sent(owed)
                    if "kept" in owed or not sent:
                        self._turn = time.perf_counter() + INTERVAL
                    if not sent:
                        self._owed = owed | self._owed
                        break
            finally:
                self._paying = False
            self.due = self._turn if self._owed else math.inf

    def close(self) -> None:
        """Send what is left, at the end of the program."""
        self.pay()
        with self._lock:
            self._hang_up()

    def _sent(self, message: dict[str, Any]) -> bool:
        try:
            lines = [message]
            if self._connection is None:
                self._connection = connected(os.environ.get(CHANNEL, ""), 0.0)
                lines = [introduction(), message]
            text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
            # So few bytes are sent completely or not at all.
            taken = self._connection.send(text, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:  # the agent is gone or stopped, or does not read
            taken = 0
        if not taken:
            self._hang_up()
        return bool(taken)

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _await_turn(self) -> None:
        with self._lock:
            if self._awaiting_turn:
                return
            self._awaiting_turn = True
        # Signals go to the program's own threads.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            # Not with threading, whose locks could block a signal handler that saves.
            start_new_thread(self._pay_in_turn, ())
        except (
            RuntimeError
        ):  # there may be no more of them, or the program ends; it is told with the next step, or then
            self._awaiting_turn = False
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _pay_in_turn(self) -> None:
        time.sleep(max(self._turn - time.perf_counter(), 0.0))
        self._awaiting_turn = False
        self.pay()


_here: Final = _Here()
os.register_at_fork(after_in_child=_here.after_fork)
atexit.register(_here.close)
