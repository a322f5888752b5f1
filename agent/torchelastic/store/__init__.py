"""The key-value store of the rendezvous: get, put under a lease, compare-and-swap, watch.

Adapters: :mod:`torchelastic.store.etcd_v3` (etcd 3.4 and later, over its JSON gateway),
:mod:`torchelastic.store.etcd_v2` (servers that have only the API v2, through python-etcd) and
:mod:`torchelastic.store.memory` (one process, for ``--standalone`` and for tests).
:func:`torchelastic.store.client.connect` chooses the adapter.
"""
