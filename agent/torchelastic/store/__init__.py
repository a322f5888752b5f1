"""The key-value store of the rendezvous: get, put under a lease, compare-and-swap, watch.

Adapters: :mod:`torchelastic.store.etcd_v3` (etcd 3.4 and later, over its JSON gateway),
:mod:`torchelastic.store.etcd_v2` (servers with only the API v2, through python-etcd) and
:mod:`torchelastic.store.memory` (one process, for ``--standalone`` and for tests). :func:`connect` chooses.
"""

from torchelastic.store.api import Change, Entry, Listing, Store, StoreSettings
from torchelastic.store.client import (
    Backoff,
    NodeStore,
    RunLease,
    connect,
    connect_within,
    follow,
    follow_forever,
    within,
)
from torchelastic.store.memory import MemoryStore

__all__ = [
    "Backoff",
    "Change",
    "Entry",
    "Listing",
    "MemoryStore",
    "NodeStore",
    "RunLease",
    "Store",
    "StoreSettings",
    "connect",
    "connect_within",
    "follow",
    "follow_forever",
    "within",
]
