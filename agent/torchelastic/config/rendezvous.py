"""The settings of the rendezvous and of the store, from ``--nnodes`` and the ``--rdzv-*`` flags.

``--rdzv-conf`` also accepts the keys of torch's etcd handlers that have the same meaning.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from torchelastic.config.parsing import Given, integer, seconds
from torchelastic.config.settings import RendezvousSettings
from torchelastic.errors import SettingsError
from torchelastic.protocol import SizeRecord
from torchelastic.store.api import StoreSettings
from torchelastic.store.endpoints import parse_endpoints

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchelastic.config.flags import CommandLine

BACKENDS: Final[Mapping[str, int | None]] = {"torchelastic": None, "etcd": None, "etcd-v3": 3, "etcd-v2": 2}
"""The names of our rendezvous, and the version of etcd's API that a name selects."""

_NAME_AN_ETCD: Final = "leave the flag out, and name an etcd with --rdzv-endpoint or, for one node, nothing at all"
_INSTEAD: Final = {
    "c10d": f"torch's own rendezvous is not spoken here; {_NAME_AN_ETCD}",
    "static": f"the nodes agree on ranks and addresses by themselves; {_NAME_AN_ETCD}",
}
KEY_ALIASES: Final = {"timeout": "join_timeout"}
SETTINGS_KEYS: Final[Mapping[str, Callable[[Given], float]]] = {
    "join_timeout": seconds(),
    "last_call_timeout": seconds(zero=True),
    "lease": seconds(),
    "join_debounce": seconds(zero=True),
    "crash_loop_limit": integer(1, 1_000_000),
    "crash_loop_seconds": seconds(zero=True),
}
"""Keys of ``--rdzv-conf`` that are fields of RendezvousSettings."""

STORE_KEYS: Final = ("protocol", "cacert", "cert", "key", "tls", "username", "password")
_TLS_FILES: Final = {"cacert": "ca.crt", "cert": "tls.crt", "key": "tls.key"}
"""The keys of the files in a TLS Secret."""

Conf = Mapping[str, Given]


def read_size(line: CommandLine) -> SizeRecord:
    """Return the number of nodes, from the operator or from ``--nnodes``."""
    size: SizeRecord = line.values.get("size") or line.values.get("nnodes") or SizeRecord(min=1, max=1, desired=1)
    return size


def read_conf(line: CommandLine) -> Conf:
    """Return the values of ``--rdzv-conf`` by our names of the keys.

    Raises:
        SettingsError: a key is unknown, given twice, or without a value.
    """
    conf: dict[str, Given] = {}
    if (given := line.given.get("rdzv-conf")) is None:
        return conf
    for pair in filter(None, (part.strip() for part in given.text.split(","))):
        written, equals, value = (part.strip() for part in pair.partition("="))
        key = KEY_ALIASES.get(written.replace("-", "_"), written.replace("-", "_"))
        # Any part may be a password, so the message shows only known keys.
        if not equals or not value:
            raise given.refused(
                "it takes KEY=VALUE pairs with commas between them, and no value has a comma", secret=True
            )
        if key not in SETTINGS_KEYS and key not in STORE_KEYS:
            raise given.refused(_unknown_key(written), secret=True)
        if key in conf:
            raise given.refused(f"{key} is given twice", secret=True)
        conf[key] = Given(f"{given.source} {written}", value)
    return conf


def _unknown_key(written: str) -> str:
    if written == "etcd_prefix":
        return "etcd_prefix cannot be chosen; keys stand below /torchelastic/, and runs are kept apart by --rdzv-id"
    import difflib

    known = (*SETTINGS_KEYS, *STORE_KEYS, *KEY_ALIASES)
    alike = difflib.get_close_matches(written, known, n=1)
    return f'there is no key "{written}"; ' + (
        f"did you mean {alike[0]}?" if alike else f"those known are {', '.join(known)}"
    )


def read_rendezvous(line: CommandLine, size: SizeRecord, conf: Conf) -> RendezvousSettings:
    """Return the settings of the rendezvous.

    Raises:
        SettingsError: a value is invalid, or the id of a run of several nodes is missing.
    """
    settings = line.settings(RendezvousSettings)
    if "run_id" not in settings and size.max > 1:
        raise SettingsError(
            "--rdzv-id is missing: nodes with the same id train together, so a run of several nodes needs one that no "
            "other run on this etcd has, for example --rdzv-id digits-7."
        )
    numbers = {key: read(conf[key]) for key, read in SETTINGS_KEYS.items() if key in conf}
    return RendezvousSettings(**{"run_id": os.urandom(16).hex(), **settings, **numbers, "size": size})


def read_store(line: CommandLine, conf: Conf) -> StoreSettings | None:
    """Return the settings of the store; None if no endpoint is given.

    Raises:
        SettingsError: the backend is unknown, or an address, a file or the credentials are invalid.
    """
    backend = line.given.get("rdzv-backend", Given("", "torchelastic"))
    if (name := backend.text.strip().lower().replace("_", "-")) not in BACKENDS:
        instead = "there is no such rendezvous here; leave the flag out to get ours, on etcd"
        raise backend.refused(_INSTEAD.get(name, instead))
    if (endpoint := line.given.get("rdzv-endpoint")) is None:
        return None
    try:
        written, endpoints = parse_endpoints(endpoint.text)
    except SettingsError as error:
        # The message shows the invalid part only, because the text may contain a password.
        raise endpoint.refused(str(error), secret=True) from None
    files = {key: _file(conf[key]) for key in _TLS_FILES if key in conf}
    if "tls" in conf:
        files = {**_files_in(conf["tls"]), **files}
    protocol = _protocol(endpoint, written, conf, files)
    for one, other in (("key", "cert"), ("username", "password"), ("password", "username")):
        if one in conf and other not in {*conf, *files}:
            raise conf[one].refused(f"{one} needs {other} beside it", secret=True)
    username, password = (conf[key].text if key in conf else None for key in ("username", "password"))
    return StoreSettings(
        endpoints=endpoints,
        protocol=protocol,
        ca_cert=files.get("cacert"),
        cert=files.get("cert"),
        key=files.get("key"),
        username=username,
        password=password,
        version=BACKENDS[name],
    )


def _protocol(endpoint: Given, written: str | None, conf: Conf, files: Mapping[str, str]) -> str:
    protocol = written or ("https" if files else "http")
    if (asked := conf.get("protocol")) is not None:
        protocol = asked.text.lower()
        if protocol not in {"http", "https"}:
            raise asked.refused("etcd is reached over http or https")
        if written not in {None, protocol}:
            raise asked.refused(f"{endpoint.source} says {written}://; leave one of the two out")
    if files and protocol == "http":
        given = next(conf[key] for key in (*_TLS_FILES, "tls") if key in conf)
        raise given.refused("certificates are of use with protocol=https only")
    return protocol


def _files_in(folder: Given) -> dict[str, str]:
    """Return the TLS files of a folder; a client certificate is optional."""
    found = {key: os.path.join(folder.text, name) for key, name in _TLS_FILES.items()}  # noqa: PTH118 - as in _file
    there = {key: path for key, path in found.items() if os.path.isfile(path)}  # noqa: PTH113
    if "cacert" not in there:
        raise folder.refused(f"there is no {_TLS_FILES['cacert']} in this folder")
    return there


def _file(given: Given) -> str:
    if not os.path.isfile(given.text):  # noqa: PTH113 - pathlib raises if a path is too long
        raise given.refused("there is no such file")
    return given.text
