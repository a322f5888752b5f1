"""The exit code and reason of an agent that cannot take part."""

from __future__ import annotations

import pytest

from torchelastic.agent.exit_status import ExitStatus
from torchelastic.errors import (
    LeaseLost,
    NoPortFree,
    SettingsError,
    StoreRefused,
    StoreUnavailable,
)
from torchelastic.protocol import ExitCode


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (StoreUnavailable("no route"), ExitCode.STORE, "StoreUnavailable"),
        (LeaseLost("gone"), ExitCode.STORE, "StoreUnavailable"),
        (StoreRefused("the certificate cannot be trusted"), ExitCode.BROKEN, "StoreRefused"),
        (ZeroDivisionError("division by zero"), ExitCode.BROKEN, "Defect"),
        (NoPortFree("all are taken"), ExitCode.NO_PORT, "NoPortFree"),
        (SettingsError("no such flag"), ExitCode.BAD_INPUT, "BadInput"),
    ],
)
def test_an_error_has_its_exit_code_and_reason(error: Exception, code: ExitCode, reason: str) -> None:
    status = ExitStatus.by_error(error)
    assert (status.code, status.message.reason, status.message.message) == (code, reason, str(error))


def test_a_rendezvous_that_just_ends_is_a_defect() -> None:
    status = ExitStatus.by_error(None)
    assert (status.code, status.message.message) == (ExitCode.BROKEN, "the rendezvous ended by itself")
