"""How keys and values of the store stand in an etcd v2, which has paths of folders and text.

A key's parts become the parts of a path, and its last one gets a ``~`` at its end: in v2 a path is a value or a folder
and cannot be both, as ``n`` and ``n/1`` are. What a path cannot hold as it is, or would mean something there (a leading
underscore hides, a dot is the folder itself), is written as ``~`` and two hexadecimal digits for each byte.

A value has a few words in front of it::

    5f2a9c01d3e4 1f t {"e":7,…}
    │            │  └ t: the rest is the value; b: it is its base64, for bytes that are no UTF-8
    │            └ the lease that it hangs on
    └ the stamp: made anew by every write, so that two values are the same write only if it is the same

The stamp is needed because v2 changes a key's index also when only its time to live is renewed.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from dataclasses import dataclass
from typing import Final

_UNSAFE: Final = re.compile(rb"^[._]|[^A-Za-z0-9._-]")
_ESCAPED: Final = re.compile(rb"~([0-9a-f]{2})")
_OURS: Final = re.compile(r"(?:[A-Za-z0-9._-]|~[0-9a-f]{2})+|~-")
_EMPTY: Final = "~-"
_LEAF: Final = "~"

_STORED: Final = re.compile(r"(?P<stamp>[0-9a-f]{12}) (?P<lease>[0-9a-f]{1,16}) (?P<kind>[tb]) ")


@dataclass(frozen=True, slots=True)
class Stored:
    """A value as it stands in etcd.

    Attributes:
        value: the bytes of the store's caller.
        lease: the id of the lease that it was written under; 0 for none.
        stamp: of the write; empty where somebody else than this adapter wrote it.
    """

    value: bytes
    lease: int = 0
    stamp: str = ""

    @classmethod
    def new(cls, value: bytes, lease: int) -> Stored:
        """A value that is about to be written."""
        return cls(value, lease, secrets.token_hex(6))

    @classmethod
    def read(cls, text: str) -> Stored:
        """What stands in etcd; a text that is not this adapter's is a value as it is."""
        words = _STORED.match(text)
        rest = text[words.end() :] if words else text
        if words is None:
            return cls(rest.encode("utf-8", "surrogatepass"))
        value = rest.encode("utf-8", "surrogatepass")
        if words["kind"] == "b":
            try:
                value = base64.b64decode(value, validate=True)
            except binascii.Error:
                return cls(text.encode("utf-8", "surrogatepass"))
        return cls(value, int(words["lease"], 16), words["stamp"])

    @property
    def text(self) -> str:
        """As it is to stand in etcd."""
        try:
            kind, rest = "t", self.value.decode()
        except UnicodeDecodeError:
            kind, rest = "b", base64.b64encode(self.value).decode()
        return f"{self.stamp} {self.lease:x} {kind} {rest}"


def path_of(key: str) -> str:
    """The path under which the value of a key stands.

    Raises:
        ValueError: the key does not begin with a slash.
    """
    folder, _, name = key.rpartition("/")
    return f"{_path(folder)}/{_escaped(name)}{_LEAF}"


def folder_of(prefix: str) -> str:
    """The path of the folder below which all keys with this prefix stand; "/" for all that there are."""
    return _path(prefix.rpartition("/")[0]) or "/"


def key_of(path: str) -> str | None:
    """The key whose value stands under a path; None where the path is none of this adapter's."""
    if not path.endswith(_LEAF):
        return None
    parts = path[: -len(_LEAF)].split("/")[1:]
    return "".join(f"/{_plain(part)}" for part in parts) if all(map(_OURS.fullmatch, parts)) else None


def folders_above(path: str) -> list[str]:
    """The folders that a path is in, from the nearest on, without the one that is above all."""
    parts = path.split("/")[1:]
    return ["".join(f"/{part}" for part in parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def _path(folder: str) -> str:
    first, *parts = folder.split("/")
    if first:
        raise ValueError(f"keys in an etcd v2 begin with a slash, and this one does not: {folder!r}")
    return "".join(f"/{_escaped(part)}" for part in parts)


def _escaped(part: str) -> str:
    return _UNSAFE.sub(lambda match: b"~%02x" % match[0][0], part.encode("utf-8", "surrogateescape")).decode() or _EMPTY


def _plain(part: str) -> str:
    if part == _EMPTY:
        return ""
    return _ESCAPED.sub(lambda match: bytes([int(match[1], 16)]), part.encode()).decode("utf-8", "surrogateescape")
