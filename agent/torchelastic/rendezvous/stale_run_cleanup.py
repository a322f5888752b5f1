"""Removal of a finished run whose id may be reused: the next node begins a new run in its place."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from torchelastic.errors import MalformedRecord, StoreUnavailable
from torchelastic.protocol import NodeRecord, decode, decode_state
from torchelastic.store.backoff import backoff_delay

if TYPE_CHECKING:
    from torchelastic.protocol import RunKeys
    from torchelastic.rendezvous.run_state import RunContext
    from torchelastic.store.api import Entry, Store

logger = logging.getLogger(__name__)


async def remove_finished_run(context: RunContext) -> None:
    """Remove a finished run of the same id, unless ids are unique or a node of it is still present.

    A store that is away is waited for as long as peers are.

    Raises:
        StoreError: as the store does.
    """
    if context.settings.unique_run:
        return
    tries = 0
    deadline = asyncio.get_running_loop().time() + context.settings.join_timeout
    while True:
        try:
            if not await _remove(context.store, context.keys):
                return
        except StoreUnavailable as error:
            if tries == 0:
                logger.warning("%s; waiting for it", error)
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(backoff_delay(tries))
            tries += 1


async def _remove(store: Store, keys: RunKeys) -> bool:
    """Remove what is left of a finished run; return whether to look again."""
    if not _is_over(await store.get(keys.state)):
        return False  # usually; so a thousand new nodes need not list all keys
    listing = await store.list(keys.root)
    entries = {entry.key: entry for entry in listing.entries}
    state = entries.get(keys.state)
    if state is None or not _is_over(state) or any(_took_part(entry, state, keys) for entry in listing.entries):
        return False
    # The state last: while it stands, the other keys are not mistaken for those of a running run.
    for key in (keys.time_breakdown, keys.history, keys.notice, keys.leader, keys.state):
        if key in entries:
            await store.compare_and_swap(key, None, expected=entries[key].modified)
    return True


def _is_over(entry: Entry | None) -> bool:
    if entry is None:
        return False
    try:
        return decode_state(entry.value).outcome is not None
    except MalformedRecord:
        return False


def _took_part(entry: Entry, state: Entry, keys: RunKeys) -> bool:
    """Whether this is the key of a node that was present when the run ended; later nodes only learn of its end."""
    if not entry.key.startswith(keys.nodes):
        return False
    try:
        joined = decode(entry.value, NodeRecord).joined
    except MalformedRecord:
        return False
    return (joined or entry.created) < state.modified
