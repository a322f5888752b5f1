"""The small store that the rendezvous stands on: get, put under a lease, compare-and-swap, watch from a revision.

Adapters: :mod:`torchelastic.store.etcd_v3` (etcd 3.4 and later, over its JSON gateway),
:mod:`torchelastic.store.etcd_v2` (servers that have the API v2 only, through python-etcd) and
:mod:`torchelastic.store.memory` (one process, for ``--standalone`` and for tests). :func:`connect` chooses.
:mod:`torchelastic.store.run_lease` writes keys that outlive their writer;
:mod:`torchelastic.store.list_and_watch` reads all keys below a prefix and then every change of them.

The adapters are imported when they are first asked for: an agent starts its fork server before it spends its own time
on an HTTP client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from torchelastic.store.api import Change, Entry, Listing, Store, StoreSettings
from torchelastic.store.list_and_watch import follow

if TYPE_CHECKING:
    from torchelastic.store.connection import connect
    from torchelastic.store.memory import MemoryStore

__all__ = ["Change", "Entry", "Listing", "MemoryStore", "Store", "StoreSettings", "connect", "follow"]

_LAZY = {"connect": "torchelastic.store.connection", "MemoryStore": "torchelastic.store.memory"}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
