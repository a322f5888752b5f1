"""Records as JSON: encoding, and decoding of what another process has written."""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Final, TypeVar

import msgspec

from torchelastic.errors import MalformedRecord
from torchelastic.protocol.records import (
    PROTOCOL_VERSION,
    Count,
    Number,
    OutcomeRecord,
    RoundRecord,
    StateRecord,
    VersionedRecord,
)

MAX_RECORD_BYTES: Final = 1 << 20
"""Size limit of a record; etcd refuses requests above 1.5 MiB by default."""

Record = TypeVar("Record", bound=msgspec.Struct)


def encode(record: msgspec.Struct) -> bytes:
    """Return a record as JSON; characters that UTF-8 cannot encode (lone surrogates) become question marks."""
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(record), ensure_ascii=False).encode(errors="replace")


def decode(data: bytes, kind: type[Record]) -> Record:
    """Return the record in this JSON.

    Raises:
        MalformedRecord: the data is not such a record, or is too large.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise MalformedRecord(f"a {kind.__name__} of {len(data)} bytes is too large (at most {MAX_RECORD_BYTES})")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRecord(f"not a {kind.__name__}: {error}") from None


class LogLimit:
    """Limits the lines about unreadable records, because another process decides how many there are."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=10)

    def allows(self) -> bool:
        """Return whether another line is due: at most ten in a minute."""
        now = time.monotonic()
        if len(self._times) == self._times.maxlen and now - self._times[0] < 60:
            return False
        self._times.append(now)
        return True


class _RoundHeader(msgspec.Struct, frozen=True):
    number: Number
    protocol: Count = PROTOCOL_VERSION


class _StateHeader(msgspec.Struct, frozen=True):
    """The part of the run's state that every version can read."""

    round: _RoundHeader | None = None
    outcome: OutcomeRecord | None = None


def decode_state(data: bytes) -> StateRecord:
    """Return the run's state, even if a leader of another version wrote it.

    In that case, the returned round has the number of the leader's round and no members; its cause names both versions.

    Raises:
        MalformedRecord: the data is not a state.
    """
    header = decode(data, _StateHeader)
    if header.round is None or header.round.protocol == PROTOCOL_VERSION:
        return decode(data, StateRecord)
    cause = f"this node cannot train with the leader of the run: {other_version(header.round.protocol)}"
    round = RoundRecord(number=header.round.number, cause=cause, protocol=header.round.protocol)
    return StateRecord(round, header.outcome)


_Versioned = TypeVar("_Versioned", bound=VersionedRecord)


def decode_same_version(data: bytes, kind: type[_Versioned]) -> _Versioned:
    """Return the record in this JSON; raise MalformedRecord if it is invalid, or has another protocol version."""
    record = decode(data, kind)
    if record.protocol != PROTOCOL_VERSION:
        raise MalformedRecord(f"not a readable {kind.__name__}: {other_version(record.protocol)}")
    return record


def other_version(theirs: int) -> str:
    """Return a sentence that names the two protocol versions and the remedy."""
    return (
        f"another process uses version {theirs} of torchelastic's protocol, but this process uses version "
        f"{PROTOCOL_VERSION}; install the same release on all nodes"
    )


def shorten(text: str, limit: int) -> str:
    """Return text of at most ``limit`` characters: its beginning and its end around an ellipsis."""
    if len(text) <= limit:
        return text
    head = limit // 3
    tail = max(limit - head - 3, 0)
    return f"{text[:head]} … {text[len(text) - tail :]}"[:limit] if limit > 3 else text[:limit]
