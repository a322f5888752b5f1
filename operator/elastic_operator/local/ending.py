"""How a run ends: the ways, the exit codes that say so, and the one place where the first reason to end is kept."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elastic_operator.errors import ElasticJobError


_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class How(enum.StrEnum):
    """The ways in which a run can end."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    BAD_INPUT = "badInput"
    DELETED = "deleted"
    INTERRUPTED = "interrupted"

    @property
    def exit_code(self) -> int:
        """What ``elasticjob run`` returns then."""
        return _EXIT_CODES[self]


_EXIT_CODES = {How.SUCCEEDED: 0, How.FAILED: 1, How.BAD_INPUT: 2, How.DELETED: 3, How.INTERRUPTED: 130}


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a run.

    Attributes:
        how: in which way.
        message: in words, why; empty where there is nothing to explain.
        error: what was wrong with the input, where that was it.
    """

    how: How
    message: str = ""
    error: ElasticJobError | None = None

    def as_json(self, time: float) -> dict[str, Any]:
        """The ``ended`` of a snapshot's ``run``."""
        return {"how": self.how.value, "exitCode": self.how.exit_code, "message": self.message, "time": time}


class RunEnd:
    """Whether, and how, a run is to end. The first ending holds.

    Attributes:
        insist: called when the user asks again for an end that has begun.
    """

    def __init__(self) -> None:
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.insist: Callable[[], None] = _do_nothing

    def begin(self, ending: Ending) -> None:
        """End the run; nothing happens where it ends already."""
        if not self._ending.done():
            self._ending.set_result(ending)

    @property
    def begun(self) -> Ending | None:
        """How the run ends; None while it goes on."""
        return self._ending.result() if self._ending.done() else None

    async def wait(self) -> Ending:
        """Return when the run is to end."""
        return await asyncio.shield(self._ending)

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Have SIGINT, SIGTERM and SIGHUP end the run in order, and insist on it the second time."""
        loop = asyncio.get_running_loop()
        # nohup has SIGHUP ignored, and a shell SIGINT in what it starts in the background.
        heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        for number in heeded:
            loop.add_signal_handler(number, self._interrupt)
        try:
            yield
        finally:
            for number in heeded:
                loop.remove_signal_handler(number)

    def _interrupt(self) -> None:
        if self.begun is None:
            self.begin(Ending(How.INTERRUPTED))
        else:
            self.insist()


def _do_nothing() -> None:
    pass
