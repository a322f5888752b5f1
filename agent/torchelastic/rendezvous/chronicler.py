"""The leader's writing of the chronicle into the store, for the next leader and for people.

None of it is waited for where nodes agree on an epoch, but that a new leader reads what its predecessor has written
before it decides anything: that goes on side by side with the listing of the nodes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from torchelastic.contract import HistoryRecord, Record, TimeSplit, decode, encode
from torchelastic.errors import MalformedRecord, StoreUnavailable
from torchelastic.rendezvous.pulse import Pulse
from torchelastic.store.retrying import retry_delay

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchelastic.contract import RunKeys
    from torchelastic.rendezvous.chronicle import Chronicle
    from torchelastic.store.api import Entry, Store
    from torchelastic.store.lasting import LastingKeys

logger = logging.getLogger(__name__)

INTERVAL: Final = 10.0
"""Seconds after which it is written though nothing has happened: as much is not known exactly where all nodes die."""

REST: Final = 1.0
"""Seconds between two writes at least."""

_TRIES: Final = 5
"""So often is it read by a leader of a store that is there before it leads without."""

HISTORY_BYTES: Final = 512 << 10
"""The epochs take no more in the store, whatever is told of failures; etcd refuses requests above 1.5 MiB."""


class Chronicler:
    """Keeps the run's chronicle in the store, for as long as one node leads.

    Args:
        chronicle: what is written.
        store: where.
        keys: the run's keys.
        lasting: writes those that outlive this node.
    """

    def __init__(self, chronicle: Chronicle, store: Store, keys: RunKeys, lasting: LastingKeys) -> None:
        self._chronicle = chronicle
        self._store = store
        self._keys = keys
        self._lasting = lasting
        self._news = Pulse()
        self._writing = asyncio.Lock()
        self._history: bytes | None = None
        self._last_word: TimeSplit | None = None
        self.has_read = False
        """Whether what the leader before has written is known, as far as it can be."""

    def note(self, *, anew: bool = False) -> None:
        """Something has happened that is worth being written.

        Args:
            anew: the epochs too, though they may be the same: the store may have lost them.
        """
        if anew:
            self._history = None
        self._news.send()

    async def run(self, is_away: Callable[[], bool], has_read: Callable[[], None]) -> None:
        """Read what there is, then write what happens; until cancelled.

        Args:
            is_away: whether the store is known to be away.
            has_read: called once it is read.
        """
        tries = refused = 0
        while not self.has_read:
            try:
                await self.read()
            except StoreUnavailable as error:
                await asyncio.sleep(retry_delay(tries))
                tries += 1
                refused = 0 if is_away() else refused + 1
                if refused == _TRIES:  # it answers whoever asks for anything else
                    logger.warning("what is known of the run's past cannot be read: %s", error)
                    self.has_read = True
        has_read()
        tries = 0
        while True:
            seen = self._news.count
            try:
                await self.write()
            except StoreUnavailable:  # said already by whoever watches the run's keys
                await asyncio.sleep(retry_delay(tries))
                tries += 1
                continue
            tries = 0
            await asyncio.sleep(REST)
            await self._news.after(seen, timeout=INTERVAL)

    async def read(self) -> None:
        """Take over what the leader before has written.

        Raises:
            StoreUnavailable: as the store does.
        """
        split, history = await asyncio.gather(self._store.get(self._keys.split), self._store.get(self._keys.history))
        if (known := _record(split, TimeSplit)) is not None:
            self._chronicle.adopt(known)
        if (past := _record(history, HistoryRecord)) is not None:
            self._chronicle.adopt_history(past)
        self.has_read = True

    async def write(self) -> None:
        """Write where the time went, and the epochs where there are new ones.

        Raises:
            StoreUnavailable: as the store does.
        """
        async with self._writing:
            split = self._last_word or self._chronicle.split()
            history = encode_history(self._chronicle.history())
            writes = [self._lasting.put(self._keys.split, encode(split))]
            if history != self._history:
                writes.append(self._lasting.put(self._keys.history, history))
            await asyncio.gather(*writes)
            self._history = history

    async def finish(self, last_word: TimeSplit) -> None:
        """Write the last word on the run; from then on no other one is written.

        Raises:
            StoreUnavailable: as the store does.
        """
        self._last_word = last_word
        await self.write()


def _record(entry: Entry | None, kind: type[Record]) -> Record | None:
    """What stands there; None where there is nothing that can be read."""
    if entry is None:
        return None
    try:
        return decode(entry.value, kind)
    except MalformedRecord as error:
        logger.warning("what was written of the run's past cannot be read, and is written anew: %s", error)
        return None


def encode_history(history: HistoryRecord) -> bytes:
    """The epochs as they stand in the store: where their texts are too long, fewer of them, without some in the middle.

    Args:
        history: the epochs.
    """
    encoded = encode(history)
    while len(encoded) > HISTORY_BYTES:
        first = len(history.epochs) // 2
        left_out = max(len(history.epochs) // 10, 1)
        history = HistoryRecord(
            created=history.created,
            epochs=history.epochs[:first] + history.epochs[first + left_out :],
            omitted=history.omitted + left_out,
        )
        encoded = encode(history)
    return encoded
