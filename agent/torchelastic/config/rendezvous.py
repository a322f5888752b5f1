"""The settings of a node and of its store, from ``--nnodes``, ``--local-addr`` and the ``--rdzv-*`` flags."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any, Final

from torchelastic import machine
from torchelastic.config.parsing import Given
from torchelastic.config.settings import NodeSettings, RendezvousSettings
from torchelastic.errors import SettingsError
from torchelastic.protocol import Env, SizeRecord
from torchelastic.store.api import StoreSettings, parse_endpoints

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchelastic.config.flags import CommandLine

BACKENDS: Final[Mapping[str, int | None]] = {"torchelastic": None, "etcd": None, "etcd-v3": 3, "etcd-v2": 2}
"""The names of our rendezvous, and the version of etcd's API that a name selects."""

_NAME_AN_ETCD: Final = "leave the flag out, and name an etcd with --rdzv-endpoint unless there is only one node"
_INSTEAD: Final = {
    "c10d": f"this agent does not support torch's own rendezvous; {_NAME_AN_ETCD}",
    "static": f"the nodes agree on ranks and addresses by themselves; {_NAME_AN_ETCD}",
}


def read_node(line: CommandLine) -> dict[str, Any]:
    """Return the settings of the node, by the fields of :class:`NodeSettings`.

    Raises:
        SettingsError: a value is invalid, or the store or the id of a run of several nodes is missing.
    """
    size = line.values.get("size") or line.values.get("nnodes") or SizeRecord(min=1, max=1, desired=1)
    standalone = line.values.get("standalone", False)
    store = None if standalone else _read_store(line)
    if store is None and size.max > 1:
        raise SettingsError(
            f"A run of up to {size.max} nodes needs an etcd where they meet: name it with --rdzv-endpoint HOST:2379"
            f"{', and leave out --standalone, which is a run of one node' * standalone}."
        )
    rules = line.settings(RendezvousSettings) | {"size": size}
    if "run_id" not in rules and size.max > 1:
        raise SettingsError(
            "--rdzv-id is missing: nodes with the same id train together, so a run of several nodes needs one that no "
            "other run on this etcd has, for example --rdzv-id digits-7."
        )
    given = line.settings(NodeSettings)
    address = given.get("address") or ("127.0.0.1" if store is None else machine.own_address(store.endpoints))
    # Only an address that the user chose selects an interface.
    chosen = "address" in given and line.given["local-addr"].source != Env.NODE_ADDRESS
    return {
        "node_name": socket.gethostname(),
        "place": machine.host_id(),
        **given,
        "rendezvous": RendezvousSettings(**{"run_id": os.urandom(16).hex(), **rules}),
        "store": store,
        "address": address,
        "interface": machine.interface_of(address) if chosen else "",
    }


def _read_store(line: CommandLine) -> StoreSettings | None:
    """Return the settings of the store; None if no endpoint is given."""
    backend = line.given.get("rdzv-backend", Given("", "torchelastic"))
    if (name := backend.text.strip().lower().replace("_", "-")) not in BACKENDS:
        instead = "unknown rendezvous; leave the flag out to use etcd"
        raise backend.refused(_INSTEAD.get(name, instead))
    if (endpoint := line.given.get("rdzv-endpoint")) is None:
        return None
    try:
        written, endpoints = parse_endpoints(endpoint.text)
    except SettingsError as error:
        # The message shows the invalid part only, because the text may contain a password.
        raise endpoint.refused(str(error), secret=True) from None
    values = line.values
    files = values.get("tls", {}) | {key: values[key] for key in ("cacert", "cert", "key") if key in values}
    protocol = values.get("protocol") or written or ("https" if files else "http")
    if protocol != (written or protocol):
        raise line.given["protocol"].refused(f"{endpoint.source} says {written}://; leave one of the two out")
    if files and protocol == "http":
        raise SettingsError(f"{', '.join(files)} in --rdzv-conf: certificates need protocol=https.")
    for one, other in (("key", "cert"), ("username", "password"), ("password", "username")):
        if one in values and other not in {*values, *files}:
            raise line.given[one].refused(f"{one} needs {other} beside it", secret=True)
    return StoreSettings(
        endpoints=endpoints,
        protocol=protocol,
        ca_cert=files.get("cacert"),
        cert=files.get("cert"),
        key=files.get("key"),
        username=values.get("username"),
        password=values.get("password"),
        version=BACKENDS[name],
    )
