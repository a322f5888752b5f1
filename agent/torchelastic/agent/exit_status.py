"""How an agent ends: its exit code and its termination message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchelastic.errors import NoPortFree, SettingsError, StartError, StoreError, StoreRefused
from torchelastic.protocol import ExitCode, OutcomeState, TerminationMessage

if TYPE_CHECKING:
    from torchelastic.protocol import OutcomeRecord


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """An exit code, and the termination message with its reason."""

    code: ExitCode
    message: TerminationMessage

    @classmethod
    def because(cls, code: ExitCode, reason: str, message: str, *, round: int = 0) -> ExitStatus:
        """An end that no worker has caused."""
        return cls(code, TerminationMessage(reason=reason, message=message, round=round))

    @classmethod
    def by_error(cls, error: BaseException | None) -> ExitStatus:
        """Return the end of an agent that cannot take part; None if its rendezvous just ended.

        A store out of reach is told apart from one that refuses, because only the latter would refuse again.
        """
        match error:
            case SettingsError() | StartError():
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
    def with_the_run(cls, outcome: OutcomeRecord) -> ExitStatus:
        """Return the end of an agent at the end of its run."""
        if outcome.state is OutcomeState.SUCCEEDED:
            return cls.because(ExitCode.SUCCEEDED, "Succeeded", "", round=outcome.round)
        reason = "WorkerFailed" if outcome.failure is not None else "TooFewNodes"
        return cls(
            ExitCode.FAILED,
            TerminationMessage(reason=reason, message=outcome.message, round=outcome.round, failure=outcome.failure),
        )
