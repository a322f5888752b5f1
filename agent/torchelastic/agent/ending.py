"""How an agent ends: its exit code, and its last words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchelastic.contract import ExitCode, OutcomeState, TerminationMessage
from torchelastic.errors import NoPortFree, SettingsError, StoreError, StoreRefused

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
    def by_error(cls, error: BaseException | None) -> Ending:
        """The end of an agent that cannot take part; None where its rendezvous just ended.

        A store that refuses it will refuse it again, and so would a defect show again: that is told apart from a store
        that is out of reach, for which nobody pays.
        """
        match error:
            case SettingsError():
                return cls.because(ExitCode.BAD_INPUT, "BadInput", f"{error}")
            case NoPortFree():
                return cls.because(ExitCode.NO_PORT, "NoPortFree", f"{error}")
            case StoreRefused():
                return cls.because(ExitCode.BROKEN, "StoreRefused", f"{error}")
            case StoreError():
                return cls.because(ExitCode.STORE, "StoreUnavailable", f"{error}")
        said = "the rendezvous ended by itself" if error is None else str(error) or type(error).__name__
        return cls.because(ExitCode.BROKEN, "Defect", said)

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
