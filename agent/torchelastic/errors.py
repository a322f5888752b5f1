"""The errors of torchelastic, with one base class.

Each message is a sentence that states what is wrong and, if possible, what to do.
"""


class TorchElasticError(Exception):
    """The base class of torchelastic's errors."""


class SettingsError(TorchElasticError):
    """A setting is invalid or unsupported; the message names the flag or field and what to change."""


class StoreError(TorchElasticError):
    """A request to the store failed.

    Args:
        message: a sentence in this project's own words.
        detail: what the server has answered; the text of the error ends with it.

    Attributes:
        message: the message without the detail, for readers who may not see what any server answers.
        detail: the detail; empty for none.
    """

    def __init__(self, message: str = "", *, detail: str = "") -> None:
        super().__init__(f"{message}: {detail}" if detail else message)
        self.message = message
        self.detail = detail


class StoreUnavailable(StoreError):  # noqa: N818 - named for the state, as in the documentation of etcd
    """The store cannot be reached or does not answer; the same call may succeed later."""


class StoreRefused(StoreError):  # noqa: N818
    """The store refused a request permanently, for example because of wrong credentials."""


class StoreTooLarge(StoreRefused):
    """The store holds, or sends, more than any run needs."""


class LeaseLost(StoreError):  # noqa: N818
    """The lease no longer exists: the store has deleted its keys, which must be written again under a new lease."""


class NoFreePort(TorchElasticError):  # noqa: N818
    """No port on which this node may listen is free; another process may release one soon."""


class StartError(TorchElasticError):
    """A process could not be started, for example because of the machine's limits; the message has the reason."""


class MalformedRecord(TorchElasticError):  # noqa: N818
    """A record in the store does not match the protocol."""


class RendezvousError(TorchElasticError):
    """The nodes could not agree on a round."""


class RendezvousClosedError(RendezvousError):
    """The run has ended: no node can join it."""
