"""From ``--nnodes`` and the ``--rdzv-*`` flags to the settings of the rendezvous and of the store.

The keys of ``--rdzv-conf`` are ours and those that torch's own etcd handlers know by the same meaning.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from torchelastic.contract import Env, ResumeRecord, SizeRecord, decode
from torchelastic.endpoints import parse_endpoints
from torchelastic.errors import MalformedRecord, SettingsError
from torchelastic.flags import CommandLine, Given
from torchelastic.settings import PortRange, RendezvousSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchelastic.store.api import StoreSettings

_MAX_NODES: Final = 1_000_000
_MAX_RESTARTS: Final = 1_000_000

_OURS: Final[Mapping[str, int | None]] = {"torchelastic": None, "etcd": None, "etcd-v3": 3, "etcd-v2": 2}
"""The names of our rendezvous, with the version of etcd's API where the name says one."""

_MAX_NOTICE: Final = 86_400.0
_LEAST_PORT: Final = 1024
_FEWEST_PORTS: Final = 16
"""Of these a node uses one for its link and two or three for stores; the rest is for those that it may not use again at
once, and for other nodes on the same host."""

_INSTEAD: Final = {
    "c10d": "torch's own rendezvous is not spoken here; leave the flag out, and name an etcd with --rdzv-endpoint or, "
    "for one node, nothing at all",
    "static": "the nodes agree on ranks and addresses by themselves; leave the flag out, and name an etcd with "
    "--rdzv-endpoint or, for one node, nothing at all",
}

_ALIASES: Final = {"timeout": "join_timeout", "last_call_timeout": "joining_window"}
_MEETING: Final[Mapping[str, Callable[[Given], float]]] = {
    "join_timeout": lambda given: given.seconds(),
    "joining_window": lambda given: given.seconds(zero=True),
    "lease": lambda given: given.seconds(),
    "gather": lambda given: given.seconds(zero=True),
    "early_failures": lambda given: given.integer(1, _MAX_RESTARTS),
    "early_seconds": lambda given: given.seconds(zero=True),
}
_STORE: Final = ("protocol", "cacert", "cert", "key", "tls", "username", "password")
_TLS_FILES: Final = {"cacert": "ca.crt", "cert": "tls.crt", "key": "tls.key"}
"""What a Secret for TLS calls them."""

Conf = Mapping[str, Given]


def read_size(line: CommandLine, environ: Mapping[str, str]) -> SizeRecord:
    """How many nodes there may and should be: the operator's word, else ``--nnodes``.

    Raises:
        SettingsError: it cannot be read.
    """
    if text := environ.get(Env.SIZE):
        given = Given(Env.SIZE, text)
        try:
            size = decode(text.encode(errors="surrogateescape"), SizeRecord)
        except MalformedRecord as error:
            raise given.refused(f"this is {error}") from None
        if size.min > size.max:
            raise given.refused("the minimum is above the maximum")
        return size
    if (given_nodes := line.get("nnodes")) is None:
        return SizeRecord(min=1, max=1, wanted=1)
    match = re.fullmatch(r"\s*([0-9]{1,7})(?::([0-9]{1,7}))?\s*", given_nodes.text)
    if match is None:
        raise given_nodes.refused("this is the number of nodes, or MIN:MAX, for example 2 or 1:4")
    least, most = int(match[1]), int(match[2] or match[1])
    if least < 1 or most > _MAX_NODES:
        raise given_nodes.refused(f"there must be at least 1 node, and at most {_MAX_NODES:,}")
    if least > most:
        raise given_nodes.refused(f"the minimum is above the maximum; did you mean {most}:{least}?")
    return SizeRecord(min=least, max=most, wanted=least if match[2] is None else None)


def read_conf(line: CommandLine) -> Conf:
    """The pairs of ``--rdzv-conf``, by our names for the keys.

    Raises:
        SettingsError: a key is unknown, given twice, or without a value.
    """
    conf: dict[str, Given] = {}
    if (given := line.get("rdzv-conf")) is None:
        return conf
    for pair in filter(None, (part.strip() for part in given.text.split(","))):
        written, equals, value = (part.strip() for part in pair.partition("="))
        key = _ALIASES.get(written.replace("-", "_"), written.replace("-", "_"))
        # Whatever stands there may be a password: only what is known to be a key is shown.
        if not equals or not value:
            raise given.refused(
                "it takes KEY=VALUE pairs with commas between them, and no value has a comma", secret=True
            )
        if key not in _MEETING and key not in _STORE:
            raise given.refused(_unknown_key(written), secret=True)
        if key in conf:
            raise given.refused(f"{key} is given twice", secret=True)
        conf[key] = Given(f"{given.source} {written}", value)
    return conf


def _unknown_key(written: str) -> str:
    if written == "etcd_prefix":
        return "etcd_prefix cannot be chosen; keys stand below /torchelastic/, and runs are kept apart by --rdzv-id"
    import difflib

    known = (*_MEETING, *_STORE, *_ALIASES)
    alike = difflib.get_close_matches(written, known, n=1)
    return f'there is no key "{written}"; ' + (
        f"did you mean {alike[0]}?" if alike else f"those known are {', '.join(known)}"
    )


def read_rendezvous(
    line: CommandLine, environ: Mapping[str, str], *, size: SizeRecord, conf: Conf
) -> RendezvousSettings:
    """How the nodes meet.

    Raises:
        SettingsError: a value cannot be honoured, or the run needs an id and has none.
    """
    run_id = line.get("rdzv-id")
    if run_id is None and size.max > 1:
        raise SettingsError(
            "--rdzv-id is missing: nodes with the same id train together, so a run of several nodes needs one that no "
            "other run on this etcd has, for example --rdzv-id digits-7."
        )
    unique = environ.get(Env.UNIQUE_RUN)
    restarts = line.get("max-restarts")
    numbers: dict[str, Any] = {key: read(conf[key]) for key, read in _MEETING.items() if key in conf}
    if restarts is not None:
        numbers["max_restarts"] = restarts.integer(0, _MAX_RESTARTS)
    if (notice := line.get("notice")) is not None:
        numbers["notice"] = notice.seconds(zero=True, most=_MAX_NOTICE)
    return RendezvousSettings(
        run_id=os.urandom(16).hex() if run_id is None else run_id.text,
        size=size,
        ports=_ports(line),
        resume=_resume(environ),
        unique_run=bool(unique) and Given(Env.UNIQUE_RUN, str(unique)).switch(),
        **numbers,
    )


def _ports(line: CommandLine) -> PortRange | None:
    if (given := line.get("port-range")) is None:
        return None
    match = re.fullmatch(r"\s*([0-9]{1,5})\s*-\s*([0-9]{1,5})\s*", given.text)
    if match is None:
        raise given.refused("these are the first and the last port, for example 29400-29499")
    first, last = int(match[1]), int(match[2])
    if not _LEAST_PORT <= first <= 65535 or not _LEAST_PORT <= last <= 65535:
        raise given.refused(f"ports for this go from {_LEAST_PORT} to 65535")
    if first > last:
        raise given.refused(f"the first port is above the last; did you mean {last}-{first}?")
    if last - first + 1 < _FEWEST_PORTS:
        raise given.refused(f"at least {_FEWEST_PORTS} ports are needed, for example {first}-{first + 99}")
    return PortRange(first, last)


def _resume(environ: Mapping[str, str]) -> ResumeRecord:
    """What is known of the run from before it was suspended."""
    if not (text := environ.get(Env.RESUME)):
        return ResumeRecord()
    try:
        return decode(text.encode(errors="surrogateescape"), ResumeRecord)
    except MalformedRecord as error:
        raise Given(Env.RESUME, text).refused(f"this is {error}") from None


def read_backend(line: CommandLine) -> int | None:
    """The version of etcd's API that is asked for; None where it is to be found out.

    Raises:
        SettingsError: the rendezvous asked for is not ours; the message says what to use instead.
    """
    given = line.get("rdzv-backend")
    if given is None:
        return None
    if (name := given.text.strip().lower().replace("_", "-")) in _OURS:
        return _OURS[name]
    raise given.refused(_INSTEAD.get(name, "there is no such rendezvous here; leave the flag out to get ours, on etcd"))


def read_store(endpoint: Given, conf: Conf, *, version: int | None = None) -> StoreSettings:
    """Where the store is and how to reach it.

    Args:
        endpoint: the servers.
        conf: what is said of them in ``--rdzv-conf``.
        version: of etcd's API, where one is asked for.

    Raises:
        SettingsError: the address, the protocol, a file or the credentials cannot be used.
    """
    try:
        written, endpoints = parse_endpoints(endpoint.text)
    except SettingsError as error:
        # What is wrong is in the message; the whole may hold a password that does not belong there.
        raise endpoint.refused(str(error), secret=True) from None
    files = {key: _file(conf[key]) for key in _TLS_FILES if key in conf}
    if "tls" in conf:
        files = {**_files_in(conf["tls"]), **files}
    asked = conf.get("protocol")
    protocol = written or ("https" if files else "http")
    if asked is not None:
        protocol = asked.text.lower()
        if protocol not in {"http", "https"}:
            raise asked.refused("etcd is reached over http or https")
        if written not in {None, protocol}:
            raise asked.refused(f"{endpoint.source} says {written}://; leave one of the two out")
    if files and protocol == "http":
        raise next(conf[key] for key in (*_TLS_FILES, "tls") if key in conf).refused(
            "certificates are of use with protocol=https only"
        )
    for one, other in (("key", "cert"), ("username", "password"), ("password", "username")):
        if one in conf and other not in {*conf, *files}:
            raise conf[one].refused(f"{one} needs {other} beside it", secret=True)
    # The store's package brings an HTTP client with it, which a run without a store never needs.
    from torchelastic.store.api import StoreSettings

    return StoreSettings(
        endpoints=endpoints,
        protocol=protocol,
        ca_cert=files.get("cacert"),
        cert=files.get("cert"),
        key=files.get("key"),
        username=conf["username"].text if "username" in conf else None,
        password=conf["password"].text if "password" in conf else None,
        version=version,
    )


def _files_in(folder: Given) -> dict[str, str]:
    """The files of a folder for TLS; a client need not always say who it is."""
    found = {key: os.path.join(folder.text, name) for key, name in _TLS_FILES.items()}  # noqa: PTH118 - as in _file
    there = {key: path for key, path in found.items() if os.path.isfile(path)}  # noqa: PTH113
    if "cacert" not in there:
        raise folder.refused(f"there is no {_TLS_FILES['cacert']} in this folder")
    return there


def _file(given: Given) -> str:
    if not os.path.isfile(given.text):  # noqa: PTH113 - pathlib raises where a path is too long
        raise given.refused("there is no such file")
    return given.text
