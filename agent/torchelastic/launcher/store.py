"""The store of a launch on several hosts, in the launcher's memory; the nodes reach it through their channels.

So a launch needs no etcd, and no port of the launcher. The launch ends with the launcher in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from torchelastic.errors import LeaseLost
from torchelastic.store.api import Change, Entry, Listing
from torchelastic.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from torchelastic.launcher.channel import Channel


_METHODS: Final = frozenset(
    {"get", "list", "put", "compare_and_swap", "delete", "delete_prefix", "grant", "keep_alive", "revoke"}
)


class StoreService:
    """Answers the requests of all nodes of a launch, in a thread with an event loop; a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="torchelastic: store", daemon=True)
        self._store = MemoryStore()
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._leases: dict[int, set[int]] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._store.wipe()  # cancels the timers of the leases

    def take(self, channel: Channel, message: dict[str, Any]) -> None:
        """Handle a request of a node; may be called from any thread."""
        self._loop.call_soon_threadsafe(self._begin, channel, message)

    def lose(self, channel: Channel) -> None:
        """Expire the leases of a node whose channel is closed, so that the others need not wait for that."""
        self._loop.call_soon_threadsafe(self._lose, channel)

    def _begin(self, channel: Channel, message: dict[str, Any]) -> None:
        key = id(channel), message["id"]
        if message["method"] == "end":
            if (task := self._tasks.get(key)) is not None:
                task.cancel()
            return
        work = self._watch if message["method"] == "watch" else self._answer
        task = self._tasks[key] = self._loop.create_task(work(channel, message))
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _answer(self, channel: Channel, message: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"type": "store", "id": message["id"]}
        if message["method"] not in _METHODS:
            return
        try:
            answer["result"] = await getattr(self._store, message["method"])(*message["args"], **message["kwargs"])
        except LeaseLost as error:
            answer["lease_lost"] = f"{error}"
        if message["method"] == "grant":
            self._leases.setdefault(id(channel), set()).add(answer["result"])
        channel.send(answer)

    async def _watch(self, channel: Channel, message: dict[str, Any]) -> None:
        async with contextlib.aclosing(self._store.watch(*message["args"])) as batches:
            async for batch in batches:
                channel.send({"type": "store", "id": message["id"], "batch": batch})

    def _lose(self, channel: Channel) -> None:
        for key in [key for key in self._tasks if key[0] == id(channel)]:
            self._tasks[key].cancel()
        for lease in self._leases.pop(id(channel), ()):
            self._store.expire(lease)


class ChannelStore:
    """A :class:`~torchelastic.store.api.Store` whose data are in the launcher.

    Args:
        channel: the channel to the launcher; its reader passes the answers to :meth:`take`.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Queue[dict[str, Any]]] = {}

    def take(self, message: dict[str, Any]) -> None:
        """Handle an answer of the launcher."""
        if (answers := self._answers.get(message["id"])) is not None:
            answers.put_nowait(message)

    async def get(self, key: str) -> Entry | None:
        return msgspec.convert(await self._call("get", key), Entry | None)

    async def list(self, prefix: str) -> Listing:
        return msgspec.convert(await self._call("list", prefix), Listing)

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        return int(await self._call("put", key, value, lease=lease))

    async def compare_and_swap(self, key: str, value: bytes | None, *, expected: int, lease: int = 0) -> int | None:
        return msgspec.convert(
            await self._call("compare_and_swap", key, value, expected=expected, lease=lease), int | None
        )

    async def delete(self, key: str) -> None:
        await self._call("delete", key)

    async def delete_prefix(self, prefix: str) -> None:
        await self._call("delete_prefix", prefix)

    async def grant(self, ttl: float, *, lease: int = 0) -> int:
        return int(await self._call("grant", ttl, lease=lease))

    async def keep_alive(self, lease: int) -> None:
        await self._call("keep_alive", lease)

    async def revoke(self, lease: int) -> None:
        await self._call("revoke", lease)

    async def watch(self, prefix: str) -> AsyncGenerator[tuple[Change, ...], None]:
        with self._request("watch", (prefix,), {}) as (number, answers):
            try:
                while True:
                    yield msgspec.convert((await answers.get())["batch"], tuple[Change, ...])
            finally:
                self._channel.send({"type": "store", "id": number, "method": "end"})

    async def close(self) -> None:
        """Do nothing: the channel belongs to the node."""

    async def _call(self, method: str, *args: object, **kwargs: object) -> Any:  # noqa: ANN401 - the method's result
        with self._request(method, args, kwargs) as (_, answers):
            answer = await answers.get()
        if "lease_lost" in answer:
            raise LeaseLost(answer["lease_lost"])
        return answer["result"]

    @contextlib.contextmanager
    def _request(
        self, method: str, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Iterator[tuple[int, asyncio.Queue[dict[str, Any]]]]:
        number = next(self._ids)
        answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._answers[number] = answers
        self._channel.send({"type": "store", "id": number, "method": method, "args": args, "kwargs": kwargs})
        try:
            yield number, answers
        finally:
            del self._answers[number]
