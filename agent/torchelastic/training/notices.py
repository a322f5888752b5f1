"""Changes of a worker's round: notice before a planned change, and whether the round is still current."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from torchelastic.protocol.worker import (
    LINE_LIMIT,
    WORKER_SOCKET,
    NoticeMessage,
    RoundAnswer,
    WorkerMessage,
    encode_lines,
    is_worker,
)
from torchelastic.training.connection import AGENT_CONNECTION, connect, hello, run_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST: Final = 1e6
"""Maximum number of seconds in a request; the agent also applies its own limit."""

_RETRY_INTERVAL: Final = 1.0
"""Seconds between two attempts to send a request."""


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


def is_round_current(timeout: float = 5.0) -> bool:
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
    path = os.environ.get(WORKER_SOCKET)
    if not path:
        return True
    try:
        with connect(path, timeout) as connection, connection.makefile("rb") as lines:
            # The agent answers shortly before the timeout.
            connection.sendall(encode_lines(hello(float(0.8 * min(timeout, _LONGEST)))))
            return msgspec.json.decode(lines.readline(LINE_LIMIT), type=RoundAnswer).is_current
    except (OSError, ValueError):
        return False


class Notices:
    """The requests of this process and its current notice. A child of a worker has none."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may answer
        self._callback: Callable[[Notice], object] | None = None
        self._signals: set[int] = set()
        self._request: WorkerMessage | None = None
        self._pending: tuple[int, Notice] | None = None
        self._shown = 0
        self._answered = 0

    def ask_for_notice(self, seconds: float = 30.0, callback: Callable[[Notice], object] | None = None) -> None:
        """Ask for time to save a checkpoint before a planned change of the round.

        The request is valid until the worker exits; another call replaces it. If the agent cannot receive it now, a
        thread sends it later. The agent's ``--notice`` limits the time.

        Args:
            seconds: maximum time that the change waits for this worker; 0 withdraws the request.
            callback: called with the notice in a separate thread; the notice is answered when the callback returns or
                raises an exception. None for a program that polls :func:`notice`, and answers with
                :func:`answer_notice`.

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
            self._request = request = WorkerMessage(requested_notice=float(min(seconds, _LONGEST)))
        if not self._is_sent(request):  # the agent is busy, or is stopped
            run_in_thread(self._send_later, request)

    def notice(self) -> Notice | None:
        """Return the notice that this worker has not answered yet, or None. The call is cheap enough to poll.

        If the change was canceled, the result is also None.
        """
        pending = self._pending
        if pending is None or not is_worker():
            return None
        self._shown, notice = pending
        return notice

    def answer_notice(self) -> None:
        """Answer the last notice that :func:`notice` returned; the round may then change at once."""
        if is_worker():
            self._answer(self._shown)

    def _is_sent(self, request: WorkerMessage) -> bool:
        """Send a request, unless a later call has replaced it; return False to try again."""
        with self._lock:
            if self._request is not request:
                return True
            if not AGENT_CONNECTION.send(request):
                return False
            AGENT_CONNECTION.read(NoticeMessage, self._take, self._closed)
            return True

    def _send_later(self, request: WorkerMessage) -> None:
        while not self._is_sent(request):
            time.sleep(_RETRY_INTERVAL)

    def _closed(self) -> None:
        self._pending = None

    def _take(self, message: NoticeMessage) -> None:
        number = message.number
        with self._lock:
            if message.seconds == 0:
                self._pending = None
                return
            if number <= self._answered:
                return
            known = self._pending is not None and self._pending[0] == number
            notice = Notice(message.reason, message.cause, time.monotonic() + message.seconds)
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
                AGENT_CONNECTION.send(WorkerMessage(answered_notice=number))


_notices: Final = Notices()
ask_for_notice: Final = _notices.ask_for_notice
notice: Final = _notices.notice
answer_notice: Final = _notices.answer_notice
