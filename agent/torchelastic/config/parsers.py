"""Parsers for the values of flags and environment variables.

Each parser takes a :class:`RawValue` and returns the value, or raises a SettingsError that names the flag or variable.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from torchelastic.config.settings import PortRange, StartMethod
from torchelastic.errors import MalformedRecord, SettingsError
from torchelastic.protocol.codec import decode
from torchelastic.protocol.pod import LEAVING_SIGNALS
from torchelastic.protocol.records import SizeRecord

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping

    import msgspec

    Record = TypeVar("Record", bound=msgspec.Struct)

NAME_LIMIT: Final = 253
MAX_NODES: Final = 1_000_000
MIN_PORT: Final = 1024
MIN_PORTS: Final = 16
"""A node uses one port for its peers and two or three for TCPStores. The other ports delay the reuse of a port, or
serve other nodes on the same host."""


@dataclass(frozen=True, slots=True)
class RawValue:
    """A value before it is parsed, and its source.

    Attributes:
        source: the flag or environment variable, as the user wrote it.
        text: the value as a string.
        between: the separator between source and value in messages.
    """

    source: str
    text: str
    between: str = "="

    def error(self, why: str, *, secret: bool = False) -> SettingsError:
        """Return the error for this value; with ``secret``, the message does not contain the value."""
        shown = "" if secret else f"{self.between}{self.text}"
        return SettingsError(f"{self.source}{shown}: {why}{'' if why.endswith('?') else '.'}")


def string(raw: RawValue) -> str:
    """Return the value unchanged."""
    return raw.text


def integer(least: int, most: int, also: str = "") -> Callable[[RawValue], int]:
    """Return a parser for a whole number between two bounds, inclusive; messages also list the values of ``also``."""

    def read(raw: RawValue) -> int:
        # Longer strings exceed every bound, and int() raises another error for very long strings.
        if not raw.text.strip().isdecimal() or len(raw.text) > 20 or not least <= int(raw.text) <= most:
            raise raw.error(f"must be a whole number from {least} to {most}{also}")
        return int(raw.text)

    return read


def seconds(*, zero: bool = False) -> Callable[[RawValue], float]:
    """Return a parser for a time in seconds; ``zero`` allows 0."""

    def read(raw: RawValue) -> float:
        try:
            value = float(raw.text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            raise raw.error(f"must be a time in seconds, {'0 or more' if zero else 'above 0'}")
        return value

    return read


def switch(raw: RawValue) -> bool:
    """Parse an on/off value."""
    match raw.text.strip().lower():
        case "1" | "true" | "yes":
            return True
        case "0" | "false" | "no":
            return False
        case _:
            raise raw.error("must be 1 for on or 0 for off")


def name(limit: int = NAME_LIMIT) -> Callable[[RawValue], str]:
    """Return a parser for a name of printable characters."""

    def read(raw: RawValue) -> str:
        found = raw.text.strip()
        if not found or len(found) > limit or not found.isprintable():
            raise raw.error(f"must be a name of 1 to {limit} printable characters")
        return found

    return read


def address(raw: RawValue) -> str:
    """Parse a host name or an IP address; an IPv6 address may be in brackets."""
    found = raw.text.strip().removeprefix("[").removesuffix("]")
    pattern = r"[\w.-]+|[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(%[\w.-]+)?"
    if len(found) > NAME_LIMIT or not re.fullmatch(pattern, found):
        raise raw.error("must be a host name or an IP address, without a port")
    return found


def nodes(raw: RawValue) -> SizeRecord:
    """Parse a fixed number of nodes, or MIN:MAX."""
    match = re.fullmatch(r"\s*([0-9]{1,7})(?::([0-9]{1,7}))?\s*", raw.text)
    least, most = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if match is None or not 1 <= least <= MAX_NODES or not 1 <= most <= MAX_NODES:
        raise raw.error(f"must be a number of nodes from 1 to {MAX_NODES:,}, or MIN:MAX, for example 2 or 1:4")
    if least > most:
        raise raw.error(f"the minimum is above the maximum; did you mean {most}:{least}?")
    return SizeRecord(min=least, max=most, desired=least if least == most else None)


def exit_codes(raw: RawValue) -> frozenset[int]:
    """Parse comma-separated exit codes and ranges of exit codes."""
    found: set[int] = set()
    for part in raw.text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,3})(?:\s*-\s*([0-9]{1,3}))?\s*", part)
        first, last = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not 1 <= first <= last <= 255:
            raise raw.error(
                "must be exit codes from 1 to 255 with commas between them, or ranges of them, for example "
                "2,64-78,137; 128 + n stands for signal n"
            )
        found.update(range(first, last + 1))
    return frozenset(found)


def ports(raw: RawValue) -> PortRange:
    """Parse a range of ports to listen on."""
    match = re.fullmatch(r"\s*([0-9]{1,5})\s*-\s*([0-9]{1,5})\s*", raw.text)
    first, last = (0, 0) if match is None else (int(match[1]), int(match[2]))
    if not MIN_PORT <= first <= last - MIN_PORTS + 1 <= last <= 65535:
        raise raw.error(
            f"must be the first and the last of at least {MIN_PORTS} ports from {MIN_PORT} to 65535, for "
            "example 29400-29499"
        )
    return PortRange(first, last)


def start_method(raw: RawValue) -> StartMethod:
    """Parse a start method, by torchelastic's name or torch's name."""
    name = raw.text.strip().lower().replace("_", "-")
    name = {"forkserver": "fork-server", "fork": "fork-server", "spawn": "exec"}.get(name, name)
    if name not in set(StartMethod):
        raise raw.error("must be fork-server or exec (or torchrun's forkserver, fork or spawn)")
    return StartMethod(name)


def modules(raw: RawValue) -> tuple[str, ...]:
    """Parse comma-separated names of modules, and remove duplicates."""
    found = tuple(dict.fromkeys(filter(None, (part.strip() for part in raw.text.split(",")))))
    if not all(part.isidentifier() for module in found for part in module.split(".")):
        raise raw.error("must be names of modules with commas between them, for example numpy,PIL.Image")
    return found


def ranks(raw: RawValue) -> frozenset[int]:
    """Parse comma-separated ranks."""
    try:
        return frozenset(int(rank) for rank in raw.text.split(","))
    except ValueError:
        raise raw.error("must be ranks with commas between them, for example 0,1") from None


def signals(raw: RawValue) -> frozenset[signal.Signals]:
    """Parse comma-separated names of the signals that can ask an agent to leave."""
    known = {number.name: number for number in LEAVING_SIGNALS}
    try:
        return frozenset(known[name.strip()] for name in raw.text.split(","))
    except KeyError:
        raise raw.error(f"must be signals with commas between them, out of {', '.join(known)}") from None


def one_of(*values: str) -> Callable[[RawValue], str]:
    """Return a parser for one of these values, in any case."""

    def read(raw: RawValue) -> str:
        if (found := raw.text.lower()) not in values:
            raise raw.error(f"must be one of {', '.join(values)}")
        return found

    return read


def texts(raw: RawValue) -> tuple[str, ...]:
    """Parse comma-separated texts; a double comma stands for a comma in a text."""
    return tuple(text.replace("\0", ",") for text in raw.text.replace(",,", "\0").split(","))


def record(kind: type[Record]) -> Callable[[RawValue], Record]:
    """Return a parser for a record of the protocol in JSON."""

    def read(raw: RawValue) -> Record:
        try:
            return decode(raw.text.encode(errors="surrogateescape"), kind)
        except MalformedRecord as error:
            raise raw.error(f"this is {error}") from None

    return read


def file(raw: RawValue) -> str:
    """Parse the path of an existing file."""
    if not os.path.isfile(raw.text):  # noqa: PTH113 - pathlib raises if a path is too long
        raise raw.error("there is no such file")
    return raw.text


def text_file(raw: RawValue) -> str:
    """Return the text in a file, without spaces around it."""
    try:
        if text := Path(raw.text).read_text().strip():
            return text
    except (OSError, ValueError):
        raise raw.error("there is no readable text file") from None
    raise raw.error("the file is empty")


def tls_folder(raw: RawValue) -> Mapping[str, str]:
    """Return the files in the folder of a mounted TLS Secret; the client certificate is optional."""
    names = {"cacert": "ca.crt", "cert": "tls.crt", "key": "tls.key"}
    paths = {key: os.path.join(raw.text, name) for key, name in names.items()}  # noqa: PTH118 - as above
    found = {key: path for key, path in paths.items() if os.path.isfile(path)}  # noqa: PTH113
    if "cacert" not in found:
        raise raw.error("there is no ca.crt in this folder")
    return found
