"""Reading all keys below a prefix and then every change of them, without a gap.

The watch is made first, from now on, and the listing read after it. In the other order, a change between the two makes
etcd treat the watch as one that has to catch up, which delays its changes by up to 100 ms.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from torchelastic.errors import HistoryCompacted, StoreUnavailable
from torchelastic.store.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from torchelastic.store.api import Change, Listing, Store


async def follow(store: Store, prefix: str) -> AsyncGenerator[Listing | tuple[Change, ...], None]:
    """Yield the keys below the prefix, then their changes in batches; an empty batch means "still connected".

    Raises:
        StoreError: as :meth:`~torchelastic.store.api.Store.watch` and ``list`` do; follow again after it.
    """
    read = -1
    async with aclosing(store.watch(prefix, 0)) as batches:
        async for batch in batches:
            if read < 0:
                listing = await store.list(prefix)
                read = listing.revision
                yield listing
            news = tuple(change for change in batch if change.revision > read)
            if news or not batch:
                yield news


async def follow_forever(
    store: Store, prefix: str, *, lost: Callable[[StoreUnavailable], None]
) -> AsyncGenerator[Listing | tuple[Change, ...], None]:
    """Follow a prefix, and begin again with a listing when the store is back or has compacted its history.

    Args:
        store: the store.
        prefix: the prefix.
        lost: called each time that the store cannot be reached.

    Raises:
        StoreRefused: trying again does not help.
    """
    backoff = Backoff()
    while True:
        try:
            async with aclosing(follow(store, prefix)) as news:
                async for each in news:
                    backoff.reset()
                    yield each
        except HistoryCompacted:
            continue
        except StoreUnavailable as error:
            lost(error)
            await backoff.wait()
