"""The exit code and reason of an agent that cannot join its run."""

from __future__ import annotations

import pytest

from torchelastic.agent.failures import ExitStatus
from torchelastic.errors import LeaseLost, NoFreePort, SettingsError, StoreRefused, StoreUnavailable
from torchelastic.protocol.pod import ExitCode


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (StoreUnavailable("no route"), ExitCode.STORE_UNAVAILABLE, "StoreUnavailable"),
        (LeaseLost("gone"), ExitCode.STORE_UNAVAILABLE, "StoreUnavailable"),
        (StoreRefused("the certificate cannot be trusted"), ExitCode.AGENT_ERROR, "StoreRefused"),
        (ZeroDivisionError("division by zero"), ExitCode.AGENT_ERROR, "Defect"),
        (NoFreePort("all are taken"), ExitCode.NO_PORT, "NoPortFree"),
        (SettingsError("no such flag"), ExitCode.BAD_INPUT, "BadInput"),
        (None, ExitCode.AGENT_ERROR, "Defect"),
    ],
)
def test_an_error_has_an_exit_code_and_a_reason(error: Exception | None, code: ExitCode, reason: str) -> None:
    status = ExitStatus.of_error(error)
    message = "the rendezvous ended unexpectedly" if error is None else str(error)
    assert (status.code, status.message.reason, status.message.message) == (code, reason, message)
