"""The ways in which a run ends, their exit codes, and the one place where the first of them is kept."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from elastic_operator.errors import ElasticJobError

_Result = TypeVar("_Result")

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndReason(enum.StrEnum):
    """Why a run ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    BAD_INPUT = "badInput"
    DELETED = "deleted"
    INTERRUPTED = "interrupted"


EXIT_CODES: Final = {
    EndReason.SUCCEEDED: 0,
    EndReason.FAILED: 1,
    EndReason.BAD_INPUT: 2,
    EndReason.DELETED: 3,
    EndReason.INTERRUPTED: 130,
}


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a run.

    Attributes:
        reason: why.
        message: an explanation; empty if there is none.
        error: what was wrong with the input, if that is the reason.
    """

    reason: EndReason
    message: str = ""
    error: ElasticJobError | None = None


class RunEnd:
    """Whether and why a run is to end. The first ending holds.

    Attributes:
        force: called when the user interrupts a run that is ending already.
    """

    def __init__(self) -> None:
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.force: Callable[[], object] = lambda: None

    def begin(self, ending: Ending) -> None:
        """End the run, unless it ends already."""
        if not self._ending.done():
            self._ending.set_result(ending)

    async def wait(self) -> Ending:
        """Return when the run is to end."""
        return await asyncio.shield(self._ending)

    async def unless_begun(self, work: Coroutine[None, None, _Result]) -> _Result | Ending:
        """Return the result of the work, or how the run ends if that comes first."""
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait((working, self._ending), return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else self._ending.result()
        finally:
            working.cancel()
            await asyncio.wait((working,))

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Let SIGINT, SIGTERM and SIGHUP end the run in order; a second signal forces the end."""
        loop = asyncio.get_running_loop()
        # nohup ignores SIGHUP, and a shell ignores SIGINT for what it starts in the background.
        handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        for number in handled:
            loop.add_signal_handler(number, self._interrupt)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _interrupt(self) -> None:
        if self._ending.done():
            self.force()
        else:
            self.begin(Ending(EndReason.INTERRUPTED))
