"""What a finished run has left behind, where its id may be used again: the next node begins a new run in its place."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from torchelastic.contract import NodeRecord, decode
from torchelastic.errors import MalformedRecord, StoreUnavailable
from torchelastic.store.retrying import retry_delay

if TYPE_CHECKING:
    from torchelastic.contract import RunKeys
    from torchelastic.settings import RendezvousSettings
    from torchelastic.store.api import Entry, Store

logger = logging.getLogger(__name__)


async def forget_finished_run(store: Store, keys: RunKeys, settings: RendezvousSettings) -> None:
    """Clear away a finished run of the same id, if it is no unique one and no node of it lives any more.

    A store that is away is waited for, as long as for peers.

    Args:
        store: where.
        keys: the run's keys.
        settings: the rules.

    Raises:
        StoreError: as the store does.
    """
    if settings.unique_run:
        return
    tries = 0
    deadline = asyncio.get_running_loop().time() + settings.join_timeout
    while True:
        try:
            if not await _clear(store, keys):
                return
        except StoreUnavailable as error:
            if tries == 0:
                logger.warning("%s; waiting for it", error)
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(retry_delay(tries))
            tries += 1


async def _clear(store: Store, keys: RunKeys) -> bool:
    """Remove what is left of a finished run, unless somebody was faster; whether there was anything."""
    if await store.get(keys.outcome) is None:
        return False  # as a rule; a thousand nodes that begin need not read each other's keys for it
    listing = await store.list(keys.root)
    entries = {entry.key: entry for entry in listing.entries}
    outcome = entries.get(keys.outcome)
    if outcome is None or any(_was_there(entry, outcome, keys) for entry in listing.entries):
        return False
    # The outcome last: as long as it stands, nobody mistakes what is left for a living run.
    for key in (keys.split, keys.history, keys.epoch, keys.notice, keys.leader, keys.outcome):
        if key in entries:
            await store.swap(key, None, expected=entries[key].modified)
    return True


def _was_there(entry: Entry, outcome: Entry, keys: RunKeys) -> bool:
    """Whether this is the key of a node that was there when a run ended; whoever came later only learns of it."""
    if not entry.key.startswith(keys.nodes):
        return False
    try:
        joined = decode(entry.value, NodeRecord).joined
    except MalformedRecord:
        return False
    return (joined or entry.created) < outcome.modified
