"""Nodes that have met through a handler that is not ours, and what they tell each other in the store that it gave out.

Each writes a line about itself, the first one makes the epoch's record from all lines, and all others read that: O(N)
operations for N nodes. It is JSON, read into typed structures, as in our own store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from torchelastic.contract import EpochReason, EpochRecord, Member, bracketed, decode, encode
from torchelastic.rendezvous.api import RendezvousInfo, RendezvousStateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store  # type: ignore[attr-defined] # not listed in its __all__

_KEYS: Final = "torchelastic/agents"


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a node tells of itself.

    Attributes:
        node: its id.
        address: where its peers reach it.
        workers: how many it runs.
        epoch: the number of the last epoch that it knows.
        restarts: failures of workers that it knows of.
        cause: which one of them has made it meet the others again.
    """

    node: str
    address: str
    workers: int
    epoch: int = 0
    restarts: int = 0
    cause: str = ""


class Gathering:
    """The nodes of one meeting. All that it does may block.

    Args:
        met: what the handler has returned.

    Attributes:
        rank: of this node.
        size: how many nodes there are.

    Raises:
        RendezvousStateError: that makes no sense.
    """

    def __init__(self, met: object) -> None:
        self._store, self.rank, self.size = _parts(met)
        # A handler may give out the same store each time. Then each node counts its meetings in it, and as all of them
        # take part in each, they come to the same number.
        self._prefix = f"{_KEYS}/{self._store.add(f'{_KEYS}/meetings/{self.rank}', 1)}"

    def agree(self, line: Line, store_address: str) -> EpochRecord:
        """The epoch that this meeting has come to.

        Args:
            line: what this node tells of itself.
            store_address: host:port of the store for the epoch's workers, where this node is the first one.
        """
        if self.rank > 0:
            self._store.set(f"{self._prefix}/line/{self.rank}", encode(line).decode())
            record = decode(self._store.get(f"{self._prefix}/epoch"), EpochRecord)
            if len(record.members) != self.size or record.nodes[self.rank] != line.node:
                raise RendezvousStateError("What stands in the handler's store is of another meeting than this one.")
            return record
        others = [decode(self._store.get(f"{self._prefix}/line/{rank}"), Line) for rank in range(1, self.size)]
        record = _record([line, *others], store_address)
        self._store.set(f"{self._prefix}/epoch", encode(record).decode())
        return record

    def count(self, what: str, more: int = 0) -> int:
        """How many nodes have said this; with ``more``, this one says it, too."""
        total: int = self._store.add(f"{self._prefix}/{what}", more)
        return total


def _parts(met: object) -> tuple[Store, int, int]:
    parts: tuple[Any, ...]
    if isinstance(met, RendezvousInfo) or all(hasattr(met, name) for name in ("store", "rank", "world_size")):
        info: Any = met
        parts = (info.store, info.rank, info.world_size)
    else:
        parts = met if isinstance(met, tuple) else (met,)
    match parts:
        case (store, int() as rank, int() as size) if 0 <= rank < size:
            return store, rank, size
    raise RendezvousStateError(
        "next_rendezvous() has to return (store, rank, world size) or a RendezvousInfo, with a rank from 0 to below "
        f"the world size; it has returned {met!r}."
    )


def _record(lines: Sequence[Line], store_address: str) -> EpochRecord:
    causes = [line.cause for line in lines if line.cause]
    return EpochRecord(
        number=max(line.epoch for line in lines) + 1,
        members=tuple(Member(line.node, line.address, line.workers) for line in lines),
        store=store_address,
        restarts=max(line.restarts for line in lines),
        reason=EpochReason.WORKER_FAILED if causes else EpochReason.NODE_JOINED,
        cause=causes[0] if causes else "1 node is there" if len(lines) == 1 else f"{len(lines)} nodes have met",
    )


def store_address(host: str, port: int) -> str:
    """The two as they stand in a record."""
    return f"{bracketed(host)}:{port}"
