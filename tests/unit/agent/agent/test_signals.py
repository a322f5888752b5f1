"""The signals that ask an agent to leave."""

from __future__ import annotations

import signal

import pytest

from torchelastic.agent.agent import SignalReceived, Signals


@pytest.mark.parametrize("second", [signal.SIGHUP, signal.SIGTERM])
def test_closing_the_terminal_sends_two_sighups_and_the_grace_period_stays(second: signal.Signals) -> None:
    signals = Signals(lambda _number: None)
    signals.handle(signal.SIGHUP)
    signals.handle(second)
    assert signals.number is signal.SIGHUP
    assert signals.second.is_set() is (second is not signal.SIGHUP)


async def test_no_work_starts_after_the_signal_that_cancels_it() -> None:
    started = []

    async def work(name: str) -> None:
        started.append(name)

    signals = Signals(lambda _number: None)
    await signals.run_until_first_signal(work("before the first signal"))
    signals.first.set()
    with pytest.raises(SignalReceived):
        await signals.run_until_first_signal(work("after the first signal"))
    await signals.run_until_second_signal(work("a grace period"))
    signals.second.set()
    await signals.run_until_second_signal(work("a grace period after the second signal"))
    assert started == ["before the first signal", "a grace period"]
