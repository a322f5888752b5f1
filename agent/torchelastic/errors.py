"""The errors of torchelastic, one tree under one root.

    TorchElasticError
    ├── SettingsError            what the user asked for cannot be: the message says what to change
    ├── StoreError               the store (etcd) did not do what was asked
    │   ├── StoreUnavailable     not reachable, or not answering: try again later
    │   ├── StoreRefused         answered with a refusal that trying again does not mend (credentials, version)
    │   ├── LeaseLost            the lease has ended; what hung on it is gone
    │   └── HistoryCompacted     the revision to watch from is no longer kept: list again
    ├── NoPortFree               none of the ports that may be used is free: others may be done with them soon
    ├── StartError               no process could be started: the machine's limits, or a broken installation
    ├── MalformedRecord          something in the store is not what the contract says
    └── RendezvousError          the nodes could not agree
        └── RendezvousClosedError  the run has ended

Each message is a sentence for a person, and says what to do where something can be done.
"""


class TorchElasticError(Exception):
    """The root of the errors that torchelastic raises by itself."""


class SettingsError(TorchElasticError):
    """What was asked for cannot be; the message names the flag or field and what to change."""


class StoreError(TorchElasticError):
    """The store did not do what was asked of it."""


class StoreUnavailable(StoreError):  # noqa: N818 - named for the state, as in the documentation of etcd
    """The store cannot be reached or does not answer; the same call may succeed later."""


class StoreRefused(StoreError):  # noqa: N818
    """The store answered with a refusal that trying again does not mend."""


class LeaseLost(StoreError):  # noqa: N818
    """The lease has ended: the keys that hung on it are gone and must be put again under a new one."""


class HistoryCompacted(StoreError):  # noqa: N818
    """The revision to watch from is no longer kept; list again and watch from there."""


class NoPortFree(TorchElasticError):  # noqa: N818
    """None of the ports on which this node may listen is free; others on its host may be done with them soon."""


class StartError(TorchElasticError):
    """No process could be started: the machine's limits, or a broken installation; the message says which."""


class MalformedRecord(TorchElasticError):  # noqa: N818
    """A record in the store is not what the contract says."""


class RendezvousError(TorchElasticError):
    """The nodes could not agree on who trains together."""


class RendezvousClosedError(RendezvousError):
    """The run has ended: nobody can join it any more."""
