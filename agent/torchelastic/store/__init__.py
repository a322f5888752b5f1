"""The small store that the rendezvous stands on: get, put under a lease, compare-and-swap, watch from a revision.

Adapters: :mod:`torchelastic.store.etcd_v3` (etcd 3.4 and later, over its JSON gateway) and
:mod:`torchelastic.store.memory` (one process, for ``--standalone`` and for tests). :func:`connect` chooses.
"""

from torchelastic.store.api import Change, Entry, Listing, Store, StoreSettings
from torchelastic.store.connect import connect
from torchelastic.store.follow import follow
from torchelastic.store.memory import MemoryStore

__all__ = ["Change", "Entry", "Listing", "MemoryStore", "Store", "StoreSettings", "connect", "follow"]
