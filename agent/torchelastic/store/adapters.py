"""Choosing the adapter that fits the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.store.etcd_v3 import EtcdV3Store

if TYPE_CHECKING:
    from torchelastic.store.api import Store, StoreSettings


async def connect(settings: StoreSettings) -> Store:
    """A store on the servers that the settings name, once one of them has answered.

    Raises:
        StoreUnavailable: none answers.
        StoreRefused: one answers, but it is no etcd of version 3.4 or later, or refuses the credentials.
    """
    store = EtcdV3Store(settings)
    try:
        await store.check()
    except BaseException:
        await store.close()
        raise
    return store
