"""The part of etcd's v3 messages that the store uses, as its JSON gateway writes them.

The gateway gives 64-bit numbers as strings, bytes as base64, and leaves out whatever is zero: hence a default for every
field, and a decoder that takes numbers in strings. What is not named here is ignored, so a later etcd may add to it.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

Reply = TypeVar("Reply")


class Header(msgspec.Struct, frozen=True):
    """What every answer begins with: the store's revision."""

    revision: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    """A key with its value; of a deleted key only the name, and the revision of the deletion."""

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
    """The answer about a lease; a TTL of 0 says that there is none."""

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
    """An error within a stream; etcd 3.6 and later say ``code`` for what was ``grpc_code``."""

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
        """The gRPC status code, and the sentence that came with it."""
        if isinstance(self.error, Fault):
            return self.error.status, self.error.message
        return self.code, self.message or self.error or ""


class Version(msgspec.Struct, frozen=True):
    """What /version says."""

    etcdserver: str


for _reply in (Answer, RangeAnswer, TxnAnswer, LeaseAnswer, Streamed[LeaseAnswer], Streamed[WatchAnswer]):
    msgspec.json.Decoder(_reply)  # learns the type, which it would else do when the first one comes


def encode(message: dict[str, Any]) -> bytes:
    """The message as JSON, its bytes as base64."""
    return msgspec.json.encode(message)


def decode(body: bytes, reply: type[Reply]) -> Reply:
    """The message in the body.

    Raises:
        msgspec.DecodeError: it is not such a message.
    """
    return msgspec.json.decode(body, type=reply, strict=False)
