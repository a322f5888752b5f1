"""Time to save before the round changes as planned, and whether a round still stands.

:func:`ask_for_notice` asks for time before a node joins or leaves, or the size changes; :func:`notice` and
:func:`saved` are the rest of it. Without it, workers are ended at once. :func:`round_stands` tells, before a checkpoint
is committed, whether this worker's round is still the current one.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torchelastic.training.agent_socket import (
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
"""Seconds that may be asked for; the agent has bounds of its own."""

_PATIENCE: Final = 5.0
"""Seconds to wait until the agent has heard a request."""


@dataclass(frozen=True, slots=True)
class Notice:
    """The round is about to change, and its workers to be ended.

    Attributes:
        reason: in one word: ``node_joined``, ``node_left`` or ``resized``.
        cause: the same in a sentence.
        deadline: when the round ends at the latest, by :func:`time.monotonic`.
    """

    reason: str
    cause: str
    deadline: float

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(self.deadline - time.monotonic(), 0.0)


def round_stands(timeout: float = 5.0) -> bool:
    """Return whether the round of this process is still the current one, to be asked before a commit.

    The agent reads it from the store; if the store cannot be reached, it answers from what it knows. This is not a
    lock: the round may end right after the answer, so a commit must be harmless if it is done twice.

    Args:
        timeout: seconds to wait for an answer at most.

    Returns:
        False also without an answer: a worker that is cut off from its agent must not commit anything. True if no agent
        has started the program.
    """
    path = os.environ.get(CHANNEL)
    if not path:
        return True
    try:
        with connected(path, timeout) as connection, connection.makefile("rb") as lines:
            # The agent is to answer a moment before the timeout.
            connection.sendall(encoded({**introduction(), "stands": 0.8 * min(timeout, _LONGEST)}))
            return received(lines.readline(LINE_LIMIT)).get("stands") is True
    except (OSError, ValueError):
        return False


class _Notices:
    """The requests of this process, and the notice that it was given."""

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.RLock()  # reentrant for a signal handler that answers
        self._callback: Callable[[Notice], object] | None = None
        self._heard = threading.Event()
        self._signals: set[int] = set()
        self._standing: tuple[int, Notice] | None = None
        self._shown = 0
        self._answered = 0

    def ask_for_notice(self, seconds: float = 30.0, callback: Callable[[Notice], object] | None = None) -> None:
        """Ask for time to save before a planned change of the round.

        The request holds until the worker ends; another call changes it. The agent's ``--notice`` bounds it. When this
        returns, the agent knows of it.

        Args:
            seconds: how long the change waits for this worker at most; 0 withdraws the request.
            callback: called with the notice in a thread of its own; when it returns or raises, this worker has
                answered. None for a program that polls :func:`notice` and answers with :func:`saved`.

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
            heard = self._heard = threading.Event()
        if AGENT.send({"ask": min(seconds, _LONGEST)}):
            AGENT.read(self._take, self._closed)
            heard.wait(_PATIENCE)

    def notice(self) -> Notice | None:
        """Return the notice that this worker has not answered yet, if there is one. Cheap enough to poll.

        None again if the change was cancelled.
        """
        standing = self._standing
        if standing is None:
            return None
        self._shown, told = standing
        return told

    def saved(self) -> None:
        """Answer the last notice from :func:`notice`: this worker lets the round change now."""
        self._answer(self._shown)

    def _closed(self) -> None:
        self._standing = None
        self._heard.set()

    def _take(self, message: dict[str, Any]) -> None:
        if "heard" in message:
            self._heard.set()
            return
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
            run_beside("torchelastic: notice", self._call, callback, number, told)

    def _call(self, callback: Callable[[Notice], object], number: int, told: Notice) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._signals)  # processes that it starts inherit the mask
        try:
            callback(told)
        finally:
            self._answer(number)

    def _answer(self, number: int) -> None:
        with self._lock:
            if self._standing is not None and self._standing[0] == number:
                self._standing = None
                self._answered = number
                AGENT.send({"saved": number})


_notices: Final = _Notices()
ask_for_notice: Final = _notices.ask_for_notice
notice: Final = _notices.notice
saved: Final = _notices.saved
