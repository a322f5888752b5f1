"""The signals that ask an agent to leave."""

from __future__ import annotations

import pytest

from torchelastic.agent.agent import SignalledFirst, Signals


async def test_nothing_begins_after_the_signal_that_ends_it() -> None:
    begun = []

    async def work(name: str) -> None:
        begun.append(name)

    signals = Signals(lambda _number: None)
    await signals.unless_first(work("before the first signal"))
    signals.first.set()
    with pytest.raises(SignalledFirst):
        await signals.unless_first(work("after the first signal"))
    await signals.unless_hurried(work("a grace period"))
    signals.hurry.set()
    await signals.unless_hurried(work("a grace period after the second signal"))
    assert begun == ["before the first signal", "a grace period"]
