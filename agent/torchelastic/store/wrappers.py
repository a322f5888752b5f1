"""Stores that stand for another one: one that measures its requests, and one that is never refused for good."""

from __future__ import annotations

import time
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

from torchelastic.errors import StoreError, StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
    from contextlib import AbstractContextManager

    from torchelastic.store.api import Change, Store

_CONFIRMED_WATCH: Final = "confirmed watch"


def measured(store: Store, ended: Callable[..., None]) -> Store:
    """Return a store whose requests are measured; of a watch, the time until it is confirmed.

    Requests that are cancelled are not counted.

    Args:
        store: what it stands for; closed along with this.
        ended: called after each request with the name of the method, the seconds that it took, and ``succeeded``:
            whether the store answered. That a lease has ended is an answer, a refusal is not.
    """

    @contextmanager
    def around(request: str) -> Iterator[None]:
        began = time.perf_counter()
        failure: StoreError | None = None
        try:
            yield
        except StoreError as error:
            failure = error
        if request != _CONFIRMED_WATCH:
            succeeded = not isinstance(failure, StoreUnavailable | StoreRefused)
            ended(request, time.perf_counter() - began, succeeded=succeeded)
        if failure is not None:
            raise failure

    return cast("Store", _Wrapper(store, around, store.close))


def never_refusing(store: Store) -> Store:
    """Return a store that is unavailable, instead of refusing, after the first key was put.

    Before a node has joined, a refusal (credentials, certificate, not an etcd) is reported to the user. After that,
    training must not end because of it: a proxy may answer for an etcd that restarts, a certificate may be renewed
    late, a server that has come back may not know a token yet.

    Args:
        store: what it stands for; not closed along with this.
    """
    joined = False

    @contextmanager
    def around(request: str) -> Iterator[None]:
        nonlocal joined
        try:
            yield
        except StoreRefused as error:
            if not joined:
                raise
            raise StoreUnavailable(f"{error}") from error
        joined = joined or request == "put"

    async def close() -> None:
        pass

    return cast("Store", _Wrapper(store, around, close))


class _Wrapper:
    """A store that passes every request on, within ``around(name of the method)``."""

    def __init__(
        self,
        store: Store,
        around: Callable[[str], AbstractContextManager[None]],
        close: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._around = around
        self.close = close

    def __getattr__(self, request: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._store, request)

        async def call(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - as the method has them
            with self._around(request):
                return await method(*args, **options)

        return call

    async def watch(self, prefix: str, start: int) -> AsyncGenerator[tuple[Change, ...], None]:
        async with aclosing(self._store.watch(prefix, start)) as batches:
            with self._around("watch"):
                confirmed = await anext(batches, ())
            yield confirmed
            with self._around(_CONFIRMED_WATCH):
                async for batch in batches:
                    yield batch
