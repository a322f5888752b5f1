"""Time to save before a planned change of the round, and a check that a round is still current.

:func:`ask_for_notice` asks for time before a node joins or leaves or the size changes. :func:`notice` returns the
notice, and :func:`saved` answers it. Without a request, workers are ended at once. :func:`round_stands` returns, before
a checkpoint is committed, whether this worker's round is still current.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torchelastic.agent_socket import (
    AGENT,
    CHANNEL,
    LINE_LIMIT,
    connected,
    encoded,
    introduction,
    is_worker,
    received,
    run_beside,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST: Final = 1e6
"""Maximum of a request in seconds; the agent also has its own limit."""


@dataclass(frozen=True, slots=True)
class Notice:
    """An announcement that the round is about to change and its workers are about to be ended.

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

    The agent reads the round from the store; if the store cannot be reached, it answers from its last state. This is
    not a lock: the round may end right after the answer, so a commit must be harmless if it happens twice.

    Args:
        timeout: maximum number of seconds to wait for an answer.

    Returns:
        False also without an answer, because a worker without its agent must not commit anything. True if the program
        was not started by an agent.
    """
    path = os.environ.get(CHANNEL)
    if not path:
        return True
    try:
        with connected(path, timeout) as connection, connection.makefile("rb") as lines:
            # The agent answers shortly before the timeout.
            connection.sendall(encoded({**introduction(), "stands": 0.8 * min(timeout, _LONGEST)}))
            return received(lines.readline(LINE_LIMIT)).get("stands") is True
    except (OSError, ValueError):
        return False


class Notices:
    """The requests of this process and its current notice. A child of a worker has none."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant for a signal handler that answers
        self._callback: Callable[[Notice], object] | None = None
        self._signals: set[int] = set()
        self._standing: tuple[int, Notice] | None = None
        self._shown = 0
        self._answered = 0

    def ask_for_notice(self, seconds: float = 30.0, callback: Callable[[Notice], object] | None = None) -> None:
        """Ask for time to save before a planned change of the round.

        The request is valid until the worker ends; another call replaces it. The agent's ``--notice`` limits it.

        Args:
            seconds: maximum time that the change waits for this worker; 0 withdraws the request.
            callback: called with the notice in a separate thread; its return or exception answers the notice. None for
                a program that polls :func:`notice` and answers with :func:`saved`.

        Raises:
            ValueError: the seconds are negative or not finite.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must be a time of 0 or more, and not {seconds}")
        if not is_worker():
            return
        with self._lock:
            self._callback = callback
            self._signals = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        if AGENT.send({"ask": min(seconds, _LONGEST)}):
            AGENT.read(self._take, self._closed)

    def notice(self) -> Notice | None:
        """Return the notice that this worker has not answered yet, or None. The call is cheap enough to poll.

        A cancelled change also returns None.
        """
        standing = self._standing
        if standing is None or not is_worker():
            return None
        self._shown, told = standing
        return told

    def saved(self) -> None:
        """Answer the last notice that :func:`notice` returned: the round may change now."""
        if is_worker():
            self._answer(self._shown)

    def _closed(self) -> None:
        self._standing = None

    def _take(self, message: dict[str, Any]) -> None:
        number, seconds = int(message["notice"]), float(message["seconds"])
        with self._lock:
            if seconds == 0:
                self._standing = None
                return
            if number <= self._answered:
                return
            known = self._standing is not None and self._standing[0] == number
            told = Notice(str(message["reason"]), str(message["cause"]), time.monotonic() + seconds)
            self._standing = number, told
            callback = self._callback
        if callback is not None and not known:
            run_beside(self._call, callback, number, told)

    def _call(self, callback: Callable[[Notice], object], number: int, told: Notice) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._signals)  # processes that it starts inherit the mask
        try:
            callback(told)
        except Exception:  # noqa: BLE001 - anything that the program raises
            traceback.print_exc()
        finally:
            self._answer(number)

    def _answer(self, number: int) -> None:
        with self._lock:
            if self._standing is not None and self._standing[0] == number:
                self._standing = None
                self._answered = number
                AGENT.send({"saved": number})


_notices: Final = Notices()
ask_for_notice: Final = _notices.ask_for_notice
notice: Final = _notices.notice
saved: Final = _notices.saved
