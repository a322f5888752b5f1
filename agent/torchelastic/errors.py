"""The errors of torchelastic, one tree under one root.

    TorchElasticError
    ├── SettingsError
    ├── StoreError
    │   ├── StoreUnavailable
    │   ├── StoreRefused
    │   ├── LeaseLost
    │   └── HistoryCompacted
    ├── NoPortFree
    ├── StartError
    ├── MalformedRecord
    └── RendezvousError
        └── RendezvousClosedError

Each message is a sentence that says what is wrong, and what to do about it if something can be done.
"""


class TorchElasticError(Exception):
    """The root of the errors that torchelastic raises by itself."""


class SettingsError(TorchElasticError):
    """What was asked for cannot be done; the message names the flag or field and what to change."""


class StoreError(TorchElasticError):
    """The store did not do what was asked."""


class StoreUnavailable(StoreError):  # noqa: N818 - named for the state, as in the documentation of etcd
    """The store cannot be reached or does not answer; the same call may succeed later."""


class StoreRefused(StoreError):  # noqa: N818
    """The store refused a request, and would refuse it again: wrong credentials, for example."""


class LeaseLost(StoreError):  # noqa: N818
    """The lease has ended: its keys are gone and must be written again under a new one."""


class HistoryCompacted(StoreError):  # noqa: N818
    """The revision to watch from has been compacted; list again and watch from there."""


class NoPortFree(TorchElasticError):  # noqa: N818
    """No port on which this node may listen is free; another process may release one soon."""


class StartError(TorchElasticError):
    """No process could be started: the machine's limits, or a broken installation; the message says which."""


class MalformedRecord(TorchElasticError):  # noqa: N818
    """A record in the store is not what the protocol says."""


class RendezvousError(TorchElasticError):
    """The nodes could not agree on who trains together."""


class RendezvousClosedError(RendezvousError):
    """The run has ended: no node can join it."""
