"""The settings of the rendezvous handler, parsed from its parameters like the flags of ``torchelastic-run``."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchelastic import machine
from torchelastic.config.flags import CommandLine
from torchelastic.config.parsing import Given
from torchelastic.config.rendezvous import read_conf, read_rendezvous, read_size, read_store
from torchelastic.errors import SettingsError
from torchelastic.protocol import Env

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchelastic.config.settings import RendezvousSettings
    from torchelastic.rendezvous.api import RendezvousParameters
    from torchelastic.store.api import StoreSettings


@dataclass(frozen=True, slots=True)
class HandlerSettings:
    """The settings of a node in the rendezvous.

    Attributes:
        rendezvous: the rules of the rendezvous.
        store: the store; None for a run of one node, which needs no etcd.
        node_name: the name of this node.
        address: the address at which peers reach this node.
        interface: the network interface of a given address, for gloo and NCCL; otherwise empty.
        place: the topology key; nodes with the same key get neighbouring ranks.
    """

    rendezvous: RendezvousSettings
    store: StoreSettings | None
    node_name: str
    address: str
    interface: str = ""
    place: str = ""


def read_settings(parameters: RendezvousParameters, environ: Mapping[str, str]) -> HandlerSettings:
    """Return the settings of a node.

    Args:
        parameters: the parameters of the handler; torch's type has the same attributes.
        environ: has the operator's variables.

    Raises:
        SettingsError: a parameter is invalid; the message says what to change.
    """
    least, most = parameters.min_nodes, parameters.max_nodes
    flags = {
        "rdzv-backend": parameters.backend,
        "rdzv-endpoint": parameters.endpoint,
        "rdzv-id": parameters.run_id,
        "rdzv-conf": _conf(parameters.config),
        "nnodes": f"{least}" if least == most else f"{least}:{most}",
    }
    variables = {"size": Env.SIZE, "unique-run": Env.UNIQUE_RUN, "resume": Env.RESUME}
    line = CommandLine(
        {name: Given(f"--{name}", text) for name, text in flags.items() if text}
        | {name: Given(key, environ[key]) for name, key in variables.items() if environ.get(key)}
    )
    size, conf = read_size(line), read_conf(line)
    store = read_store(line, conf)
    if store is None and size.max > 1:
        raise SettingsError(
            f"A run of up to {size.max} nodes needs an etcd where they meet: name it as the rendezvous' endpoint, "
            "HOST:2379."
        )
    given = (parameters.local_addr or environ.get(Env.NODE_ADDRESS) or "").strip().removeprefix("[").removesuffix("]")
    return HandlerSettings(
        rendezvous=read_rendezvous(line, size, conf),
        store=store,
        node_name=environ.get(Env.NODE_NAME) or socket.gethostname(),
        address=given or ("127.0.0.1" if store is None else machine.own_address(store.endpoints)),
        interface=machine.interface_of(given) if parameters.local_addr else "",
        place=machine.host_id(),
    )


def _conf(config: Mapping[str, Any]) -> str:
    """Return the pairs in the format of ``--rdzv-conf``, without those that torchrun adds for its own handlers."""
    pairs = {key.replace("-", "_"): value for key, value in config.items() if key != "rank"}
    if "join_timeout" in pairs:
        pairs.pop("timeout", None)
    for key, value in pairs.items():
        if "," in str(value):
            raise SettingsError(f"The rendezvous' {key} has a comma in it, which no value may have.")
    return ",".join(f"{key}={value}" for key, value in pairs.items())
