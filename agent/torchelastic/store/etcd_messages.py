"""The part of etcd's v3 messages that the store uses, as its JSON gateway writes them.

The gateway gives 64-bit numbers as strings, bytes as base64, and omits zeros: hence a default for every field, and a
decoder that takes numbers in strings. Other fields are ignored.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

Reply = TypeVar("Reply")


class Header(msgspec.Struct, frozen=True):
    """The first field of every answer: the cluster's id and the store's revision."""

    cluster_id: int = 0
    revision: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    """A key with its value; of a deleted key only the name and the revision of the deletion."""

    key: bytes = b""
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0


class Answer(msgspec.Struct, frozen=True):
    """The answer to a put or a deletion."""

    header: Header = Header()


class RangeAnswer(msgspec.Struct, frozen=True):
    """The answer to a read."""

    header: Header = Header()
    kvs: tuple[KeyValue, ...] = ()


class TxnAnswer(msgspec.Struct, frozen=True):
    """The answer to a transaction: whether the comparison held."""

    header: Header = Header()
    succeeded: bool = False


class LeaseAnswer(msgspec.Struct, frozen=True):
    """The answer about a lease; a TTL of 0 means that there is none."""

    id: int = msgspec.field(name="ID", default=0)
    ttl: int = msgspec.field(name="TTL", default=0)


class AuthAnswer(msgspec.Struct, frozen=True):
    """The answer to name and password."""

    token: str = ""


class Event(msgspec.Struct, frozen=True):
    """One change of one key."""

    kv: KeyValue = KeyValue()
    type: str = "PUT"


class WatchAnswer(msgspec.Struct, frozen=True):
    """One message of a watch."""

    header: Header = Header()
    created: bool = False
    canceled: bool = False
    cancel_reason: str = ""
    compact_revision: int = 0
    events: tuple[Event, ...] = ()


class Fault(msgspec.Struct, frozen=True):
    """An error within a stream; etcd 3.6 renamed ``grpc_code`` to ``code``."""

    message: str = ""
    code: int = 0
    grpc_code: int = 0

    @property
    def status(self) -> int:
        """The status code of gRPC."""
        return self.code or self.grpc_code


class Streamed(msgspec.Struct, Generic[Reply], frozen=True):
    """One line of a stream."""

    result: Reply | None = None
    error: Fault | None = None


class Failure(msgspec.Struct, frozen=True):
    """The body of an answer whose status is not 200."""

    message: str = ""
    code: int = 0
    error: str | Fault | None = None

    def told(self) -> tuple[int, str]:
        """Return gRPC's status code and the message."""
        if isinstance(self.error, Fault):
            return self.error.status, self.error.message
        return self.code, self.message or self.error or ""


class Version(msgspec.Struct, frozen=True):
    """The answer of /version."""

    etcdserver: str


for _reply in (Answer, RangeAnswer, TxnAnswer, LeaseAnswer, Streamed[LeaseAnswer], Streamed[WatchAnswer]):
    msgspec.json.Decoder(_reply)  # learns the type now, instead of at the first answer


def encode(message: dict[str, Any]) -> bytes:
    """Return the message as JSON, its bytes as base64."""
    return msgspec.json.encode(message)


def decode(body: bytes, reply: type[Reply]) -> Reply:
    """Return the message in the body; raise msgspec.DecodeError if it is of another kind."""
    return msgspec.json.decode(body, type=reply, strict=False)
