"""The keys of a run in the store.

The keys are below ``/torchelastic/<run id>/``:

=============== ============================ =====================================================
key             written by                   record
=============== ============================ =====================================================
``c/leader``    the leader (leased)          :class:`LeaderRecord`: the leader and its address
``c/state``     the leader, compare-and-swap :class:`StateRecord`: the current round, the outcome
``c/notice``    the leader                   :class:`NoticeRecord`: the round is about to change
``c/size``      the operator                 :class:`SizeRecord`: the desired number of nodes
``n/<node id>`` each node (leased)           :class:`NodeRecord`: the node itself
``t/breakdown`` the leader                   :class:`TimeBreakdown`: the run's time by state
``t/history``   the leader                   :class:`HistoryRecord`: the rounds of the run
=============== ============================ =====================================================

Every node watches ``c/``; only the leader watches ``n/``. So a change of membership costs O(N) messages. No node
watches ``t/``; a new leader reads it once.

A node's record is attached to the node's lease. The leader's record is attached to the leader's lease until the leader
resigns. All other records are attached to the run's lease (:func:`run_lease`), which the leader and the operator renew,
so the keys of an abandoned run expire after a day. The records under ``c/`` and ``n/`` contain the writer's protocol
version, except the outcome. The number and the version of a round, and the outcome, have the same keys and meaning in
all versions, so that an agent of another version can stop with a clear message.
"""

from __future__ import annotations

import hashlib
from typing import Final

KEY_ROOT: Final = "/torchelastic"

RUN_LEASE_TTL: Final = 86_400.0
"""Seconds after which the keys of an abandoned run expire."""

RUN_LEASE_RENEWALS: Final = 24
"""Number of renewals of the run's lease within its TTL: one per hour."""


class RunKeys:
    """The keys of one run, as in the table above; slashes in the run's id are escaped.

    Attributes:
        root: the prefix of all keys, which ends in a slash.
        control: the prefix that every node watches.
        nodes: the prefix that the leader watches.
    """

    def __init__(self, run_id: str) -> None:
        self.root = root = f"{KEY_ROOT}/{run_id.replace('%', '%25').replace('/', '%2F')}/"
        self.control = f"{root}c/"
        self.leader = f"{root}c/leader"
        self.state = f"{root}c/state"
        self.notice = f"{root}c/notice"
        self.size = f"{root}c/size"
        self.nodes = f"{root}n/"
        self.time_breakdown = f"{root}t/breakdown"
        self.history = f"{root}t/history"

    def node(self, node_id: str) -> str:
        """Return the key of one node."""
        return f"{self.nodes}{node_id}"


def run_lease(run_id: str) -> int:
    """Return the id of the run's lease: at most 63 bits, derived from the run's id, so that every node knows it."""
    name = f"{RunKeys(run_id).root}lease".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1 or 1
