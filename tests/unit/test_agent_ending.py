"""How an agent ends that cannot take part: what is out of its reach is told apart from what another try won't mend."""

from __future__ import annotations

import pytest

from torchelastic.agent.ending import Ending
from torchelastic.contract import ExitCode
from torchelastic.errors import (
    HistoryCompacted,
    LeaseLost,
    MalformedRecord,
    NoPortFree,
    SettingsError,
    StoreRefused,
    StoreUnavailable,
)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (StoreUnavailable("no route"), ExitCode.STORE, "StoreUnavailable"),
        (LeaseLost("gone"), ExitCode.STORE, "StoreUnavailable"),
        (HistoryCompacted("gone"), ExitCode.STORE, "StoreUnavailable"),
        (StoreRefused("the certificate cannot be trusted"), ExitCode.BROKEN, "StoreRefused"),
        (ZeroDivisionError("division by zero"), ExitCode.BROKEN, "Defect"),
        (MalformedRecord("no epoch"), ExitCode.BROKEN, "Defect"),
        (NoPortFree("all are taken"), ExitCode.NO_PORT, "NoPortFree"),
        (SettingsError("no such flag"), ExitCode.BAD_INPUT, "BadInput"),
    ],
)
def test_only_a_store_that_is_out_of_reach_or_lost_is_nobodys_fault(
    error: Exception, code: ExitCode, reason: str
) -> None:
    ending = Ending.by_error(error)
    assert (ending.code, ending.message.reason, ending.message.message) == (code, reason, str(error))


def test_a_rendezvous_that_just_ends_is_a_defect() -> None:
    ending = Ending.by_error(None)
    assert (ending.code, ending.message.message) == (ExitCode.BROKEN, "the rendezvous ended by itself")
    assert Ending.by_error(AssertionError()).message.message == "AssertionError"
