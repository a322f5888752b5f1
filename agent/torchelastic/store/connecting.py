"""Reaching a store that may not be there yet: where nodes and etcd start at once, etcd may be the later one."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from torchelastic.errors import StoreUnavailable
from torchelastic.store.adapters import connect
from torchelastic.store.retrying import retry_delay

if TYPE_CHECKING:
    from torchelastic.store.api import Store, StoreSettings

logger = logging.getLogger(__name__)


async def connect_within(settings: StoreSettings, seconds: float) -> Store:
    """A store on the servers that the settings name, waiting for them if need be.

    Args:
        settings: how to reach them.
        seconds: how long to wait for the first answer.

    Raises:
        StoreUnavailable: none has come.
        StoreRefused: one came, and no other will do.
    """
    deadline = time.monotonic() + seconds
    tries = 0
    while True:
        try:
            return await connect(settings)
        except StoreUnavailable as error:
            if tries == 0:
                logger.warning("%s; trying again for %g s", error, seconds)
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(retry_delay(tries))
        tries += 1
