"""Reading all keys below a prefix and then every change of them, without a gap and without a delay.

The watch is made first, from now on, and the listing read after it. The other way round, a change between the two makes
etcd take the watch for one that has to catch up, and it serves those ten times a second only: up to 100 ms lost at
each start.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from torchelastic.errors import HistoryCompacted, StoreUnavailable
from torchelastic.store.retrying import retry_delay

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from torchelastic.store.api import Change, Listing, Store


async def follow(store: Store, prefix: str) -> AsyncGenerator[Listing | tuple[Change, ...], None]:
    """First what stands below the prefix, then the changes of it, in batches; an empty batch says "still connected".

    Args:
        store: where.
        prefix: below which.

    Raises:
        StoreError: as :meth:`~torchelastic.store.api.Store.watch` and ``list`` do; follow anew after it.
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


async def follow_for_good(
    store: Store, prefix: str, *, lost: Callable[[StoreUnavailable], None]
) -> AsyncGenerator[Listing | tuple[Change, ...], None]:
    """The same without an end: begun anew, with a listing, whenever the store is back or has forgotten its history.

    Args:
        store: where.
        prefix: below which.
        lost: is told each time that the store is not reached.

    Raises:
        StoreRefused: trying again is no use.
    """
    tries = 0
    while True:
        try:
            async with aclosing(follow(store, prefix)) as news:
                async for each in news:
                    tries = 0
                    yield each
        except HistoryCompacted:
            continue
        except StoreUnavailable as error:
            lost(error)
            await asyncio.sleep(retry_delay(tries))
            tries += 1
