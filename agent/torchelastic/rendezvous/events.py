"""What a node of the rendezvous tells the agent, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    import socket

    from torchelastic.protocol import NoticeRecord, OutcomeRecord, RoundRecord


@dataclass(frozen=True, slots=True)
class RoundStarted:
    """A new round stands.

    Attributes:
        record: who trains together.
        store: the listening socket on which this node has to serve the round's TCPStore, where it is the one; the
            receiver owns it.
    """

    record: RoundRecord
    store: socket.socket | None = None


@dataclass(frozen=True, slots=True)
class Noticed:
    """The round in which this node is is about to change, or (with 0 seconds) is not after all.

    Only members are told. Whoever's workers asked for it says with ``report(round, saved=serial)`` that all of them
    have answered. The same notice is told once; one that comes after it has a higher serial.
    """

    record: NoticeRecord


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run has an outcome."""

    record: OutcomeRecord


@dataclass(frozen=True, slots=True)
class Partitioned:
    """This node reaches neither the store nor the peers of its round: it must stop its workers."""


Event = RoundStarted | Noticed | RunEnded | Partitioned


def close_unclaimed(queue: asyncio.Queue[Any]) -> None:
    """Close the sockets of rounds that nobody has received: no one else would, whatever else stands in the queue."""
    while not queue.empty():
        event = queue.get_nowait()
        if isinstance(event, RoundStarted) and event.store is not None:
            event.store.close()
