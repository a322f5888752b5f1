"""A leader that was paused cannot change what its successor has committed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.nodes import PATIENCE, Clients, Meeting, all_with
from tests.support.views import failure
from torchelastic.protocol import (
    LeaderRecord,
    Member,
    NodePhase,
    RoundRecord,
    RunKeys,
    StateRecord,
    decode_state,
    encode,
)
from torchelastic.rendezvous.node import RoundStarted
from torchelastic.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.support.nodes import TestNode
    from torchelastic.store import Change, Store

KEYS = RunKeys.of("run")
SUCCESSOR = LeaderRecord(node="b.9", address="127.0.0.1:1")
REQUESTS = 12
"""More requests than a leader sends from a failure to the end of the run."""


class PausedStore:
    """A store client that pauses before one of its requests until it is resumed."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._left: int | None = None
        self._running = asyncio.Event()
        self._running.set()
        self.paused = asyncio.Event()

    def pause_before(self, request: int) -> None:
        self._left = request

    def resume(self) -> None:
        self._left = None
        self._running.set()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        async def request(*args: Any, **options: Any) -> Any:
            if self._left is not None:
                self._left -= 1
                if self._left < 0 and not self.paused.is_set():
                    self.paused.set()
                    self._running.clear()
            await self._running.wait()
            return await method(*args, **options)

        return request

    async def watch(self, prefix: str) -> AsyncGenerator[tuple[Change, ...], None]:
        async for batch in self._store.watch(prefix):
            await self._running.wait()
            yield batch

    async def close(self) -> None:
        await self._store.close()


async def state_of(store: Store) -> StateRecord:
    entry = await store.get(KEYS.state)
    return StateRecord() if entry is None else decode_state(entry.value)


async def take_over(data: MemoryStore, before: RoundRecord) -> bool:
    """Commit the next round as the paused leader's successor; return whether the run was not over."""
    leader, state = await data.get(KEYS.leader), await data.get(KEYS.state)
    assert leader is not None
    assert state is not None
    await data.put(KEYS.leader, encode(SUCCESSOR))
    if decode_state(state.value) != StateRecord(before):
        return False
    member = Member("b.9", "127.0.0.1", 1)
    after = RoundRecord(before.number + 1, "successor", (member,), "127.0.0.1:1", restarts=1)
    return await data.compare_and_swap(KEYS.state, encode(StateRecord(after)), expected=state.modified) is not None


def fail(node: TestNode, number: int, *, final: bool) -> None:
    node.inner.report(number, failure=failure(node.name, number=number, final=final))


def succeed(node: TestNode, number: int) -> None:
    node.inner.report(number, phase=NodePhase.DONE)


@pytest.mark.parametrize("what", ["it fails", "a worker fails", "it succeeds"])
async def test_a_paused_leader_changes_nothing_after_its_successor(what: str) -> None:
    was_paused = []
    for request in range(REQUESTS):
        data = MemoryStore()
        store = PausedStore(data.another())

        async def connect(store: PausedStore = store) -> Store:
            return store

        async with Meeting(connect, "run", lease=600.0, unique_run=True) as meeting:
            a = await meeting.node("a", wanted=1)
            first = await all_with(a)
            await a.inner.registration.flush()
            store.pause_before(request)
            if what == "it succeeds":
                succeed(a, first.number)
            else:
                fail(a, first.number, final=what == "it fails")
            next_event = asyncio.create_task(a.inner.events.get())
            paused = asyncio.create_task(store.paused.wait())
            async with asyncio.timeout(PATIENCE):
                await asyncio.wait((next_event, paused), return_when=asyncio.FIRST_COMPLETED)
            if took_over := store.paused.is_set() and await take_over(data, first):
                was_paused.append(request)
                committed = await state_of(data)
            store.resume()
            async with asyncio.timeout(PATIENCE):
                event = await next_event
            if isinstance(event, RoundStarted) and event.store is not None:
                event.store.close()
            if took_over:
                assert event.record == committed.round  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
                assert await state_of(data) == committed
            paused.cancel()
    assert len(was_paused) >= 2


async def test_a_paused_leader_does_not_end_a_run_that_has_another_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clients = Clients()
    data = clients.data
    async with Meeting(clients.connect, "run", lease=0.3, join_timeout=0.3, last_call_timeout=0.3) as meeting:
        a = await meeting.node("a", low=2, wanted=2)
        await a.inner.election.until_leader()
        monkeypatch.setattr(a.inner.run, "apply", lambda _change: None)
        await data.put(KEYS.leader, encode(SUCCESSOR))
        await asyncio.sleep(0.6)  # longer than the join timeout
        assert (await state_of(data)).outcome is None
