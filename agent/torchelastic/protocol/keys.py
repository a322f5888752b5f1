"""The keys of a run in the store."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

KEY_ROOT: Final = "/torchelastic"

RUN_LEASE_TTL: Final = 86_400.0
"""Seconds after which the keys of an abandoned run expire."""

RUN_LEASE_RENEWALS: Final = 24
"""Renewals of the run's lease within its TTL: one an hour."""


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys of one run.

    Attributes:
        root: the prefix of all of them, ending in a slash.
    """

    root: str

    @classmethod
    def of(cls, run_id: str, key_root: str = KEY_ROOT) -> RunKeys:
        """Return the keys of the run with this id; slashes in the id are escaped."""
        return cls(f"{key_root}/{run_id.replace('%', '%25').replace('/', '%2F')}/")

    @property
    def control(self) -> str:
        """The prefix that every node watches."""
        return f"{self.root}c/"

    @property
    def leader(self) -> str:
        """The key of the :class:`LeaderRecord`."""
        return f"{self.root}c/leader"

    @property
    def state(self) -> str:
        """The key of the :class:`StateRecord`: the current round, and the outcome."""
        return f"{self.root}c/state"

    @property
    def notice(self) -> str:
        """The key of the :class:`NoticeRecord`."""
        return f"{self.root}c/notice"

    @property
    def size(self) -> str:
        """The key of the :class:`SizeRecord`."""
        return f"{self.root}c/size"

    @property
    def nodes(self) -> str:
        """The prefix that the leader watches."""
        return f"{self.root}n/"

    def node(self, node_id: str) -> str:
        """Return the key of one node."""
        return f"{self.nodes}{node_id}"

    @property
    def time_breakdown(self) -> str:
        """The key of the :class:`TimeBreakdown`."""
        return f"{self.root}t/breakdown"

    @property
    def history(self) -> str:
        """The key of the :class:`HistoryRecord`."""
        return f"{self.root}t/history"


def run_lease(run_id: str) -> int:
    """Return the id of the run's lease, a positive number of at most 63 bits that every node derives from the run's id.

    A collision with another lease is as unlikely as one among etcd's own ids.
    """
    name = f"{RunKeys.of(run_id).root}lease".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1 or 1
