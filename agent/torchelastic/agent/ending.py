"""How an agent ends: its exit code, and its last words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchelastic.contract import ExitCode, OutcomeState, TerminationMessage

if TYPE_CHECKING:
    from torchelastic.contract import OutcomeRecord


@dataclass(frozen=True, slots=True)
class Ending:
    """How an agent ended.

    Attributes:
        code: its exit code.
        message: its last words.
    """

    code: ExitCode
    message: TerminationMessage

    @classmethod
    def because(cls, code: ExitCode, reason: str, message: str, *, epoch: int = 0) -> Ending:
        """An ending that no worker is to blame for."""
        return cls(code, TerminationMessage(reason=reason, message=message, epoch=epoch))

    @classmethod
    def with_the_run(cls, outcome: OutcomeRecord) -> Ending:
        """The end of an agent whose run has ended."""
        if outcome.state is OutcomeState.SUCCEEDED:
            return cls.because(ExitCode.SUCCEEDED, "Succeeded", "", epoch=outcome.epoch)
        reason = "WorkerFailed" if outcome.failure is not None else "TooFewNodes"
        return cls(
            ExitCode.FAILED,
            TerminationMessage(reason=reason, message=outcome.message, epoch=outcome.epoch, failure=outcome.failure),
        )
