"""The signals that ask an agent to leave."""

from __future__ import annotations

import pytest

from torchelastic.agent.agent import SignalledFirst, Signals


async def test_no_work_starts_after_the_signal_that_cancels_it() -> None:
    started = []

    async def work(name: str) -> None:
        started.append(name)

    signals = Signals(lambda _number: None)
    await signals.unless_first(work("before the first signal"))
    signals.first.set()
    with pytest.raises(SignalledFirst):
        await signals.unless_first(work("after the first signal"))
    await signals.unless_hurried(work("a grace period"))
    signals.hurry.set()
    await signals.unless_hurried(work("a grace period after the second signal"))
    assert started == ["before the first signal", "a grace period"]
