"""What a handler of ours is asked for: from torch's parameters, and what the operator says, to our own settings.

The values are read like the flags of ``torchelastic-run``, with the same words where one cannot be honoured.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from torchelastic import machine
from torchelastic.contract import Env
from torchelastic.errors import SettingsError
from torchelastic.flags import CommandLine, Given
from torchelastic.rendezvous_arguments import read_backend, read_conf, read_rendezvous, read_size, read_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchelastic.settings import RendezvousSettings
    from torchelastic.store.api import StoreSettings

_NOT_FOR_US: Final = ("rank",)
"""What torchrun adds for its own static rendezvous."""


class Parameters(Protocol):
    """What torch's RendezvousParameters and ours have in common."""

    backend: str
    endpoint: str
    run_id: str
    min_nodes: int
    max_nodes: int
    local_addr: str | None
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class HandlerSettings:
    """How and where a node meets its peers.

    Attributes:
        rendezvous: the rules.
        store: where; None for a run of one node that needs no etcd.
        node_name: how this node is called.
        address: where its peers reach it.
        interface: the network interface of an address that was given, for gloo and NCCL; else empty.
        place: nodes with the same one are neighbours.
    """

    rendezvous: RendezvousSettings
    store: StoreSettings | None
    node_name: str
    address: str
    interface: str = ""
    place: str = ""


def read_settings(parameters: Parameters, environ: Mapping[str, str]) -> HandlerSettings:
    """What was asked for.

    Args:
        parameters: the handler's.
        environ: the operator's variables are read from here.

    Raises:
        SettingsError: it cannot be honoured; the message says what to change.
    """
    line = CommandLine({key: Given(f"--{key}", text) for key, text in _flags(parameters) if text}, ())
    size, conf = read_size(line, environ), read_conf(line)
    version = read_backend(line)
    endpoint = line.get("rdzv-endpoint")
    if endpoint is None and size.max > 1:
        raise SettingsError(
            f"A run of up to {size.max} nodes needs an etcd where they meet: name it as the rendezvous' endpoint, "
            "HOST:2379."
        )
    store = None if endpoint is None else read_store(endpoint, conf, version=version)
    given = (parameters.local_addr or environ.get(Env.NODE_ADDRESS) or "").strip().removeprefix("[").removesuffix("]")
    return HandlerSettings(
        rendezvous=read_rendezvous(line, environ, size=size, conf=conf),
        store=store,
        node_name=environ.get(Env.NODE_NAME) or socket.gethostname(),
        address=given or ("127.0.0.1" if store is None else machine.own_address(store.endpoints)),
        interface=machine.interface_of(given) if parameters.local_addr else "",
        place=machine.host_id(),
    )


def _flags(parameters: Parameters) -> list[tuple[str, str]]:
    """The parameters as ``torchelastic-run`` would be given them."""
    least, most = parameters.min_nodes, parameters.max_nodes
    return [
        ("rdzv-backend", parameters.backend),
        ("rdzv-endpoint", parameters.endpoint),
        ("rdzv-id", parameters.run_id),
        ("rdzv-conf", _conf(parameters.config)),
        ("nnodes", f"{least}" if least == most else f"{least}:{most}"),
    ]


def _conf(config: Mapping[str, Any]) -> str:
    """The pairs as ``--rdzv-conf`` has them; of two words for the same, ours: launchers add torch's by themselves."""
    pairs = {key.replace("-", "_"): value for key, value in config.items() if key not in _NOT_FOR_US}
    if "join_timeout" in pairs:
        pairs.pop("timeout", None)
    for key, value in pairs.items():
        if "," in str(value):
            raise SettingsError(f"The rendezvous' {key} has a comma in it, which no value may have.")
    return ",".join(f"{key}={value}" for key, value in pairs.items())
