"""What a node of the rendezvous tells the agent, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    import socket

    from torchelastic.contract import EpochRecord, NoticeRecord, OutcomeRecord


@dataclass(frozen=True, slots=True)
class EpochBegan:
    """A new epoch stands.

    Attributes:
        record: who trains together.
        store: the listening socket on which this node has to serve the epoch's TCPStore, where it is the one; the
            receiver owns it.
    """

    record: EpochRecord
    store: socket.socket | None = None


@dataclass(frozen=True, slots=True)
class Noticed:
    """The epoch in which this node is is about to change, or (with 0 seconds) is not after all.

    Only members are told. Whoever's workers asked for it says with ``report(epoch, saved=serial)`` that all of them
    have answered. The same notice is told once; one that comes after it has a higher serial.
    """

    record: NoticeRecord


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run has an outcome."""

    record: OutcomeRecord


@dataclass(frozen=True, slots=True)
class Isolated:
    """This node reaches neither the store nor the peers of its epoch: it must stop its workers."""


Event = EpochBegan | Noticed | RunEnded | Isolated


def close_unclaimed(queue: asyncio.Queue[Any]) -> None:
    """Close the sockets of epochs that nobody has received: no one else would, whatever else stands in the queue."""
    while not queue.empty():
        event = queue.get_nowait()
        if isinstance(event, EpochBegan) and event.store is not None:
            event.store.close()
