"""Parsers for the values of flags and environment variables.

Each parser takes a :class:`Given` and returns the value, or raises a SettingsError that names the flag or variable.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from torchelastic.config.settings import PortRange, StartMethod
from torchelastic.errors import MalformedRecord, SettingsError
from torchelastic.protocol import SizeRecord, decode

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

    Record = TypeVar("Record", bound=msgspec.Struct)

NAME_LIMIT: Final = 253
MAX_NODES: Final = 1_000_000
LEAST_PORT: Final = 1024
FEWEST_PORTS: Final = 16
"""A node uses one port for its peers and two or three for stores. The other ports delay the reuse of a port, or serve
other nodes on the same host."""


@dataclass(frozen=True, slots=True)
class Given:
    """The text of a value and its source.

    Attributes:
        source: the flag or environment variable, as the user wrote it.
        text: the text of the value.
        between: the separator between source and text in messages.
    """

    source: str
    text: str
    between: str = "="

    def refused(self, why: str, *, secret: bool = False) -> SettingsError:
        """Return the error for this value; with ``secret``, the message does not contain the value."""
        shown = "" if secret else f"{self.between}{self.text}"
        return SettingsError(f"{self.source}{shown}: {why}{'' if why.endswith('?') else '.'}")


def text(given: Given) -> str:
    """Return the text unchanged."""
    return given.text


def path(given: Given) -> Path:
    """Parse the path of a file."""
    return Path(given.text)


def integer(least: int, most: int) -> Callable[[Given], int]:
    """Return a parser for a whole number between two bounds, inclusive."""

    def read(given: Given) -> int:
        # Longer texts exceed every bound, and int() raises another error for very long texts.
        if not given.text.strip().isdecimal() or len(given.text) > 20 or not least <= int(given.text) <= most:
            raise given.refused(f"this is a whole number from {least} to {most}")
        return int(given.text)

    return read


def seconds(*, zero: bool = False, most: float = math.inf) -> Callable[[Given], float]:
    """Return a parser for a time in seconds, at most ``most``; 0 is allowed with ``zero``."""

    def read(given: Given) -> float:
        try:
            value = float(given.text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            raise given.refused(f"this is a time in seconds, {'0 or more' if zero else 'above 0'}")
        if value > most:
            raise given.refused(f"this is a time of at most {most:,.0f} seconds")
        return value

    return read


def switch(given: Given) -> bool:
    """Parse an on/off value."""
    match given.text.strip().lower():
        case "1" | "true" | "yes":
            return True
        case "0" | "false" | "no":
            return False
        case _:
            raise given.refused("this is 1 for on or 0 for off")


def name(limit: int = NAME_LIMIT) -> Callable[[Given], str]:
    """Return a parser for a name of printable characters."""

    def read(given: Given) -> str:
        found = given.text.strip()
        if not found or len(found) > limit or not found.isprintable():
            raise given.refused(f"this is a name of 1 to {limit} printable characters")
        return found

    return read


def address(given: Given) -> str:
    """Parse a host name or an IP address; an IPv6 address may be in brackets."""
    found = given.text.strip().removeprefix("[").removesuffix("]")
    pattern = r"[\w.-]+|[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(%[\w.-]+)?"
    if len(found) > NAME_LIMIT or not re.fullmatch(pattern, found):
        raise given.refused("this is a host name or an IP address, without a port")
    return found


def nodes(given: Given) -> SizeRecord:
    """Parse a fixed number of nodes, or MIN:MAX."""
    match = re.fullmatch(r"\s*([0-9]{1,7})(?::([0-9]{1,7}))?\s*", given.text)
    if match is None:
        raise given.refused("this is the number of nodes, or MIN:MAX, for example 2 or 1:4")
    least, most = int(match[1]), int(match[2] or match[1])
    if least < 1 or most > MAX_NODES:
        raise given.refused(f"there must be at least 1 node, and at most {MAX_NODES:,}")
    if least > most:
        raise given.refused(f"the minimum is above the maximum; did you mean {most}:{least}?")
    return SizeRecord(min=least, max=most, desired=least if match[2] is None else None)


def exit_codes(given: Given) -> frozenset[int]:
    """Parse comma-separated exit codes and ranges of exit codes."""
    found: set[int] = set()
    for part in given.text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,3})(?:\s*-\s*([0-9]{1,3}))?\s*", part)
        first, last = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not 1 <= first <= last <= 255:
            raise given.refused(
                "these are exit codes from 1 to 255 with commas between them, or ranges of them, for example "
                "2,64-78,137, where 128 + n is signal n"
            )
        found.update(range(first, last + 1))
    return frozenset(found)


def ports(given: Given) -> PortRange:
    """Parse a range of ports to listen on."""
    match = re.fullmatch(r"\s*([0-9]{1,5})\s*-\s*([0-9]{1,5})\s*", given.text)
    if match is None:
        raise given.refused("these are the first and the last port, for example 29400-29499")
    first, last = int(match[1]), int(match[2])
    if not LEAST_PORT <= first <= 65535 or not LEAST_PORT <= last <= 65535:
        raise given.refused(f"ports for this go from {LEAST_PORT} to 65535")
    if first > last:
        raise given.refused(f"the first port is above the last; did you mean {last}-{first}?")
    if last - first + 1 < FEWEST_PORTS:
        raise given.refused(f"at least {FEWEST_PORTS} ports are needed, for example {first}-{first + 99}")
    return PortRange(first, last)


def start_method(given: Given) -> StartMethod:
    """Parse a start method, by our names or torch's names."""
    method = StartMethod.named(given.text)
    if method is None:
        raise given.refused("this is fork-server or exec (or torchrun's forkserver, fork or spawn)")
    return method


def modules(given: Given) -> tuple[str, ...]:
    """Parse comma-separated names of modules, and remove duplicates."""
    found = tuple(dict.fromkeys(filter(None, (part.strip() for part in given.text.split(",")))))
    if not all(part.isidentifier() for module in found for part in module.split(".")):
        raise given.refused("these are names of modules with commas between them, for example numpy,PIL.Image")
    return found


def record(kind: type[Record]) -> Callable[[Given], Record]:
    """Return a parser for a record of the protocol in JSON."""

    def read(given: Given) -> Record:
        try:
            return decode(given.text.encode(errors="surrogateescape"), kind)
        except MalformedRecord as error:
            raise given.refused(f"this is {error}") from None

    return read


def job(given: Given) -> tuple[str, str]:
    """Parse the namespace and name of a job, with a slash between them; the namespace may be empty."""
    namespace, _, own = given.text.rpartition("/")
    return namespace, own


def created(given: Given) -> float | None:
    """Parse a time in seconds since 1970; return None for 0."""
    return seconds(zero=True)(given) or None
