"""Optional functions with which a training program communicates with its agent.

* :func:`step` and :func:`report_checkpoint` record metrics (see :mod:`torchelastic.metrics`). On rank 0 they also
  report the time of the first step and of the last checkpoint to the agent, for the time breakdown of the run. Every
  rank reports its first step, which ends a recovery.
* :func:`ask_for_notice` asks for time to save a checkpoint before a planned change of the round: before a node joins
  or leaves, or the size changes. :func:`notice` returns the notice, and :func:`saved` answers it. Without a request,
  workers are stopped at once.
* :func:`round_stands` returns whether this worker's round is still current. Call it before you commit a checkpoint.
* :func:`heartbeat` reports that the worker makes progress.
* :class:`NonRetryableException` ends the run even if restarts are left.

Reports never block the training. A checkpoint is reported at once; of several within the next second, only the last one
is reported, at the first call after that second or at exit. A report that the agent did not accept is sent again then.

Without an agent, these functions report nothing. A worker is one process: its forked and :mod:`multiprocessing`
children send nothing to the agent, but a program that it executes (for example, from a shell script) is the worker.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from torchelastic.agent_socket import (
    AGENT,
    CHANNEL,
    HEARTBEAT_FILE,
    LINE_LIMIT,
    connect,
    decode_line,
    encode_lines,
    introduction,
    is_worker,
    run_in_thread,
)
from torchelastic.metrics import put_metric

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

INTERVAL: Final = 1.0
"""Minimum number of seconds between two reports of checkpoints, and between two attempts to send one."""

_LONGEST: Final = 1e6
"""Maximum number of seconds in a request; the agent also applies its own limit."""


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        REPORTS.add("last_checkpoint_at", self._began)


def step() -> None:
    """Report the beginning of a training step; call this function for each step, on all ranks.

    The first call ends the time that counts as restoring. The time between two calls is measured as
    ``train_step.duration.ms``.
    """
    now = time.perf_counter()
    before, REPORTS.step_began = REPORTS.step_began, now
    if not before:
        REPORTS.first_step()
        return
    put_metric("train_step.duration.ms", (now - before) * 1000)
    if REPORTS.has_stepped:
        REPORTS.send()
    else:
        REPORTS.has_stepped = True
        REPORTS.add("second_step_at", time.time())


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


class Reports:
    """The reports of this process to its agent; a child of a worker sends none.

    Attributes:
        step_began: when this process last called :func:`step`, by ``time.perf_counter``; 0 before the first call.
        has_begun: whether the first training step was reported, by :func:`step` or by a step of an optimizer.
        has_stepped: whether this process has completed a step.
    """

    def __init__(self) -> None:
        self.step_began = 0.0
        self.has_begun = False
        self.has_stepped = False
        self._lock = threading.RLock()  # reentrant: a signal handler may report a checkpoint; never held while waiting
        self._unsent: dict[str, float] = {}
        self._next = -math.inf

    def first_step(self, *_: object) -> None:
        """Report the first training step; a later call has no effect. This is also a hook of torch's optimizers."""
        if not self.has_begun:
            self.has_begun = True
            self.add("first_step_at", time.time())

    def add(self, what: str, when: float) -> None:
        """Report one of the first two steps or a checkpoint to the agent; only the first step on other ranks than 0.

        Args:
            what: ``first_step_at``, ``second_step_at``, or ``last_checkpoint_at``, which replaces an unsent one.
            when: the time, in seconds since the Unix epoch.
        """
        if is_worker() and (what == "first_step_at" or os.environ.get("RANK") == "0"):
            with self._lock:
                self._unsent[what] = max(when, self._unsent.get(what, 0.0))
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
                self._next = time.perf_counter() + INTERVAL
            if not AGENT.send(unsent):
                self._unsent = unsent | self._unsent
                self._next = time.perf_counter() + INTERVAL

    def _is_due(self, at_exit: bool) -> bool:
        return bool(self._unsent) and (at_exit or time.perf_counter() >= self._next)


REPORTS: Final = Reports()
"""The reports of this process."""

atexit.register(REPORTS.send, at_exit=True)


@dataclass(frozen=True, slots=True)
class Notice:
    """An announcement that the round is about to change and that its workers will be stopped.

    Attributes:
        reason: ``node_joined``, ``node_left`` or ``resized``.
        cause: the reason as a sentence.
        deadline: the latest end of the round, on the clock of :func:`time.monotonic`.
    """

    reason: str
    cause: str
    deadline: float

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(self.deadline - time.monotonic(), 0.0)


def round_stands(timeout: float = 5.0) -> bool:
    """Return whether the round of this process is still current. Call it before a commit.

    The agent reads the round from the store. If the store cannot be reached, the agent trusts the last round that
    it received if another node of that round answers, or no other exists. The answer is not a lock: the round may end
    right after it, so a commit must be harmless if it happens twice.

    Args:
        timeout: maximum number of seconds to wait for an answer.

    Returns:
        True if the round is current, or if no agent started the program. False if the round has ended or the agent does
        not answer: a worker without its agent must not commit anything.
    """
    path = os.environ.get(CHANNEL)
    if not path:
        return True
    try:
        with connect(path, timeout) as connection, connection.makefile("rb") as lines:
            # The agent answers shortly before the timeout.
            connection.sendall(encode_lines({**introduction(), "check_timeout": 0.8 * min(timeout, _LONGEST)}))
            return decode_line(lines.readline(LINE_LIMIT)).get("is_current") is True
    except (OSError, ValueError):
        return False


class Notices:
    """The requests of this process and its current notice. A child of a worker has none."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may answer
        self._callback: Callable[[Notice], object] | None = None
        self._signals: set[int] = set()
        self._pending: tuple[int, Notice] | None = None
        self._shown = 0
        self._answered = 0

    def ask_for_notice(self, seconds: float = 30.0, callback: Callable[[Notice], object] | None = None) -> None:
        """Ask for time to save a checkpoint before a planned change of the round.

        The request is valid until the worker exits; another call replaces it. The agent's ``--notice`` limits the time.

        Args:
            seconds: maximum time that the change waits for this worker; 0 withdraws the request.
            callback: called with the notice in a separate thread; the notice is answered when the callback returns or
                raises an exception. None for a program that polls :func:`notice` and answers with :func:`saved`.

        Raises:
            ValueError: the seconds are negative or not finite.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must be 0 or more, and finite, not {seconds}")
        if not is_worker():
            return
        with self._lock:
            self._callback = callback
            self._signals = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        if AGENT.send({"requested_notice": min(seconds, _LONGEST)}):
            AGENT.read(self._take, self._closed)

    def notice(self) -> Notice | None:
        """Return the notice that this worker has not answered yet, or None. The call is cheap enough to poll.

        If the change was canceled, the result is also None.
        """
        pending = self._pending
        if pending is None or not is_worker():
            return None
        self._shown, notice = pending
        return notice

    def saved(self) -> None:
        """Answer the last notice that :func:`notice` returned; the round may then change at once."""
        if is_worker():
            self._answer(self._shown)

    def _closed(self) -> None:
        self._pending = None

    def _take(self, message: dict[str, Any]) -> None:
        number, seconds = int(message["notice"]), float(message["seconds"])
        with self._lock:
            if seconds == 0:
                self._pending = None
                return
            if number <= self._answered:
                return
            known = self._pending is not None and self._pending[0] == number
            notice = Notice(str(message["reason"]), str(message["cause"]), time.monotonic() + seconds)
            self._pending = number, notice
            callback = self._callback
        if callback is not None and not known:
            run_in_thread(self._call, callback, number, notice)

    def _call(self, callback: Callable[[Notice], object], number: int, notice: Notice) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._signals)  # processes that the callback starts inherit the mask
        try:
            callback(notice)
        except Exception:  # noqa: BLE001 - the program's own exception
            traceback.print_exc()
        finally:
            self._answer(number)

    def _answer(self, number: int) -> None:
        with self._lock:
            if self._pending is not None and self._pending[0] == number:
                self._pending = None
                self._answered = number
                AGENT.send({"saved": number})


_notices: Final = Notices()
ask_for_notice: Final = _notices.ask_for_notice
notice: Final = _notices.notice
saved: Final = _notices.saved


def heartbeat() -> None:
    """Report that this worker makes progress. The call is cheap enough for every step.

    If ``--heartbeat-timeout`` is set, a worker without a heartbeat for that time counts as hung. The agent kills it
    and reports a failure with the worker's stack. A program that is not written in Python touches the file named by
    ``TORCHELASTIC_HEARTBEAT_FILE`` instead; the variable is set if ``--heartbeat-timeout`` is set.
    """
    path = os.environ.get(HEARTBEAT_FILE)
    if path and is_worker():
        with contextlib.suppress(OSError):
            os.utime(path)


class NonRetryableException(Exception):  # noqa: N818 - the established name
    """Raised by a program to end the run: the run fails with this exception and is not restarted.

    A program's own exceptions may derive from this class. Only the exception that ends the worker counts.
    """

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Install the hook that reports this exception to the agent if it ends the program."""
        _install_hook()
        return super().__new__(cls, *args, **kwargs)


def _install_hook() -> None:
    before = sys.excepthook
    if hasattr(before, "reports_to_agent") or not os.environ.get(CHANNEL):
        return

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, NonRetryableException):
            from torchelastic.agent.failures import record_exception

            record_exception(error)
        before(kind, error, trace)

    report.reports_to_agent = True  # type: ignore[attr-defined]
    sys.excepthook = report
