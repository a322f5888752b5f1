"""How far training is, by the program's own word: :func:`step` and :func:`checkpoint`.

Both measure (see :mod:`torchelastic.metrics`), and tell the agent what nobody but the program can know: from when on it
trains, and up to when what it has trained is kept. The agent accounts for the time of the run with it. Only the worker
of rank 0 is asked for that, so the others only measure.

Training never waits for any of it. What is told goes into a socket that is never waited for; where it cannot, it goes
along with a later call. A checkpoint is told of at once, but when others follow within a second, only the last of those
is, once the second is over: that takes a thread, which then ends. There is none otherwise.

As with the rest of :mod:`torchelastic.worker`, what a worker forks, or has :mod:`multiprocessing` start, tells nothing.
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
from torchelastic.worker import CHANNEL, connected, introduction, is_worker

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Checkpoint", "checkpoint", "step"]

INTERVAL: Final = 1.0
"""Seconds between two words on checkpoints at least, and between two tries to reach the agent."""


class _Future(Protocol):
    """What :mod:`concurrent.futures` and :mod:`asyncio` hand to a callback."""

    def cancelled(self) -> bool:
        """Whether it was called off."""

    def exception(self) -> BaseException | None:
        """What it has failed with."""


class Checkpoint:
    """A checkpoint that is being written: what was trained before it began is in it.

    A context manager: it begins with the block, and is written when that ends without an exception. One that is written
    in the background begins where the object is made, and is written when :meth:`done` is called, in any thread.
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
        """The checkpoint is written, and would be found; said once, a second time changes nothing.

        Args:
            future: the future that has written it, as ``future.add_done_callback(writing.done)`` hands it in; nothing
                is said of one that was cancelled or has failed.
        """
        if self._written or (future is not None and (future.cancelled() or future.exception() is not None)):
            return
        self._written = True
        put_metric("checkpoint.write_latency_ms", (time.perf_counter() - self._clock) * 1000)
        _here.tell("kept", self._began)


def step() -> None:
    """A step of training begins; to be called at the beginning of each, on all ranks.

    The first call says that all is there that training needs: what was before it was restoring. The time between two
    calls is measured as ``train_step.duration.ms``, with all that the program does between them.
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
    """A block in which a checkpoint is written, after which what was trained before the block is not lost any more.

    ::

        with torchelastic.checkpoint():
            torch.save(state, path)

    Where it ends without an exception, its time is measured as ``checkpoint.write_latency_ms``. Where several ranks
    write, the word of rank 0 counts; its block is to end when all have written. To write in the background::

        writing = torchelastic.checkpoint()
        torch.distributed.checkpoint.async_save(state, checkpoint_id=path).add_done_callback(writing.done)
    """
    return Checkpoint()


class _Here:
    """What this process tells its agent.

    Attributes:
        step_began: when it last called :func:`step`, by the clock that measures; 0 where it has not.
        due: from when on a step looks after what could not be told yet, by that clock.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.step_began = 0.0
        self.due = math.inf
        self._lock = threading.RLock()  # entered anew by a signal handler that saves; nothing is waited for under it
        self._owed: dict[str, float] = {}
        self._connection: socket.socket | None = None
        self._turn = -math.inf
        self._paying = False
        self._awaiting_turn = False

    def after_fork(self) -> None:
        """Begin anew in a child, which is no worker but for those of the fork server."""
        connection = self._connection
        self._begin()
        if connection is not None:
            connection.close()

    def tell(self, what: str, when: float) -> None:
        """Tell the agent, now or soon.

        Args:
            what: ``stepped``, which is told once, or ``kept``, of which the last word counts.
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
        """Tell what is owed, unless the agent cannot take it now."""
        with self._lock:
            if self._paying:  # a signal handler has come between: what it says is seen after it
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
        """The program is about to end."""
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
            # So few bytes are taken as a whole, or not at all.
            taken = self._connection.send(text, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:  # the agent is gone, or stopped, or listens to this worker no more
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
        # The program's signals are its own: none is to be taken by a thread that it does not know of.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            # Not by threading, whose locks a signal handler that saves could wait for in vain.
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
