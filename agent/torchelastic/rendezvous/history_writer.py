"""Writing the run's history into the store, for the next leader and for people.

No round waits for it, except that a new leader reads what its predecessor has written before it decides anything.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from torchelastic.errors import MalformedRecord, StoreUnavailable
from torchelastic.protocol import HistoryRecord, Record, TimeBreakdown, decode, encode
from torchelastic.rendezvous.change_signal import ChangeSignal
from torchelastic.store.backoff import backoff_delay

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchelastic.rendezvous.history import History
    from torchelastic.rendezvous.run_state import RunContext
    from torchelastic.store.api import Entry

logger = logging.getLogger(__name__)

WRITE_INTERVAL: Final = 10.0
"""Seconds between writes without news: the uncertainty if all nodes die."""

MIN_INTERVAL: Final = 1.0
"""The shortest time between two writes, in seconds."""

READ_ATTEMPTS: Final = 5
"""Read attempts on a store that answers other requests, before leading without history."""

MAX_HISTORY_BYTES: Final = 512 << 10
"""Limit of the encoded rounds; etcd refuses requests above 1.5 MiB."""


class HistoryWriter:
    """Reads and writes the run's history while one node leads.

    Args:
        history: the history.
        context: the node's.
    """

    def __init__(self, history: History, context: RunContext) -> None:
        self._history = history
        self._context = context
        self._news = ChangeSignal()
        self._writing = asyncio.Lock()
        self._written: bytes | None = None
        self._final: TimeBreakdown | None = None
        self.has_read = False
        """Whether the previous leader's history is known, as far as possible."""

    def notify(self, *, rewrite: bool = False) -> None:
        """Announce news; with ``rewrite``, write the rounds even if unchanged: the store may have lost them."""
        if rewrite:
            self._written = None
        self._news.send()

    async def run(self, has_read: Callable[[], None]) -> None:
        """Read the history, call ``has_read``, then write news until cancelled."""
        tries = refused = 0
        while not self.has_read:
            try:
                await self.read()
            except StoreUnavailable as error:
                await asyncio.sleep(backoff_delay(tries))
                tries += 1
                refused = refused + 1 if self._context.run.away_since is None else 0
                if refused == READ_ATTEMPTS:
                    logger.warning("cannot read the run's history; continuing without it: %s", error)
                    self.has_read = True
        has_read()
        tries = 0
        while True:
            seen = self._news.count
            try:
                await self.write()
            except StoreUnavailable:
                await asyncio.sleep(backoff_delay(tries))
                tries += 1
                continue
            tries = 0
            await asyncio.sleep(MIN_INTERVAL)
            await self._news.after(seen, timeout=WRITE_INTERVAL)

    async def read(self) -> None:
        """Adopt the previous leader's history.

        Raises:
            StoreUnavailable: as the store does.
        """
        store, keys = self._context.store, self._context.keys
        breakdown, history = await asyncio.gather(store.get(keys.time_breakdown), store.get(keys.history))
        if (known := _record(breakdown, TimeBreakdown)) is not None:
            self._history.adopt(known)
        if (past := _record(history, HistoryRecord)) is not None:
            self._history.adopt_rounds(past)
        self.has_read = True

    async def write(self) -> None:
        """Write the time breakdown, and the rounds if they have changed.

        Raises:
            StoreUnavailable: as the store does.
        """
        async with self._writing:
            breakdown = self._final or self._history.breakdown()
            history = encode_history(self._history.record())
            writes = [self._context.lasting.put(self._context.keys.time_breakdown, encode(breakdown))]
            if history != self._written:
                writes.append(self._context.lasting.put(self._context.keys.history, history))
            await asyncio.gather(*writes)
            self._written = history

    async def finish(self, final: TimeBreakdown) -> None:
        """Write the final breakdown; later writes keep it until :meth:`resume`.

        Raises:
            StoreUnavailable: as the store does.
        """
        self._final = final
        await self.write()

    def resume(self) -> None:
        """Go on after all: the outcome could not be committed."""
        self._final = None
        self._news.send()


def _record(entry: Entry | None, kind: type[Record]) -> Record | None:
    if entry is None:
        return None
    try:
        return decode(entry.value, kind)
    except MalformedRecord as error:
        logger.warning("replacing an unreadable record of the run's history: %s", error)
        return None


def encode_history(history: HistoryRecord) -> bytes:
    """Return the rounds as JSON; if they are too large, without some in the middle."""
    encoded = encode(history)
    while len(encoded) > MAX_HISTORY_BYTES:
        first = len(history.rounds) // 2
        left_out = max(len(history.rounds) // 10, 1)
        history = HistoryRecord(
            created=history.created,
            rounds=history.rounds[:first] + history.rounds[first + left_out :],
            omitted=history.omitted + left_out,
        )
        encoded = encode(history)
    return encoded
