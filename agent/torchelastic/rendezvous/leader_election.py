"""The election of the leader.

The leader holds one key in the store under its lease. If the key is vacant, each node waits before it takes the key:

- If no node has led yet, the node does not wait.
- If the leader resigned, or a refused connection has shown that it is dead, a node with a higher rank in the round
  waits longer. A node that leaves waits longest.
- If the leader's lease expired, the store may have been unreachable, and the leader may return. A node waits for one
  more lease if it was connected to the leader, or is not a member of the round.

A node whose protocol version differs from that of the round waits longer than all others.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from typing import TYPE_CHECKING, Final

from torchelastic.errors import LeaseLost, StoreUnavailable
from torchelastic.protocol.codec import encode, other_version
from torchelastic.protocol.records import PROTOCOL_VERSION, LeaderRecord
from torchelastic.rendezvous.peer_connection import (
    FINAL_PROBE_TIMEOUT,
    PROBE_TIMEOUT,
    ProbeResult,
    hold_connection,
    probe,
)
from torchelastic.rendezvous.run_watch import cancel
from torchelastic.store.client import Backoff

if TYPE_CHECKING:
    from torchelastic.rendezvous.run_watch import NodeRegistration, RunWatch

logger = logging.getLogger(__name__)

RANK_DELAY: Final = 0.1
"""Additional seconds that a member waits for each member with a lower rank."""

MAX_RANK_DELAY: Final = 2.0
"""The longest wait by rank, in seconds."""

_VACANT: Final = LeaderRecord(node="", address="")


class Candidacy(enum.Enum):
    """The role of a node in the election."""

    ACTIVE = "active"
    """The node takes a vacant lead after its delay."""
    YIELDED = "yielded"
    """The node resigned in favor of nodes that know a later round, and does not lead again for one lease."""
    WITHDRAWN = "withdrawn"
    """The node does not take the lead."""
    STANDBY = "standby"
    """The node is leaving, and leads only if no other node does."""


class LeaderElection:
    """One node's role in the election of the leader.

    Attributes:
        candidacy: this node's role.
        connected: whether this node is connected to the leader.
        last_connected: the id of the last leader to which this node was connected; None if there was none.
        dead_leader: the id of the last leader that a refused connection has shown to be dead; None if there was none.
        took_expired_at: when this node took the lead from a leader whose lease had expired, but which may still be
            alive; None if this node did not.
    """

    def __init__(self, run: RunWatch, registration: NodeRegistration, address: str) -> None:
        self.candidacy = Candidacy.ACTIVE
        self.connected = False
        self.last_connected: str | None = None
        self.dead_leader: str | None = None
        self.took_expired_at: float | None = None
        self._run = run
        self._node = run.node
        self._lease = run.settings.lease
        self._registration = registration
        self._address = address
        self._warned_of: str | None = None
        self._yields_until = 0.0

    @property
    def is_leader(self) -> bool:
        """Whether this node leads."""
        leader = self._run.leader.record
        return leader is not None and leader.node == self._node and self.candidacy is not Candidacy.WITHDRAWN

    @property
    def expiry_probe_timeout(self) -> float:
        """Seconds to wait for an answer of a node whose lease has expired.

        If the store has renewed this node's lease all the time, the other node alone was silent. Otherwise, all leases
        may have expired because the store was paused, and a busy node may answer late.
        """
        now, own = asyncio.get_running_loop().time(), self._registration
        alone = own.renewed_since + self._lease <= now < own.renewed_at + self._lease
        return PROBE_TIMEOUT if alone else min(FINAL_PROBE_TIMEOUT, self._lease)

    async def until_replaced(self, node: str) -> None:
        """Wait until the leader ``node`` has resigned, withdrawn or been replaced; an expired lease does not count."""

        def is_replaced() -> bool:
            leader = self._run.leader.record
            withdrawn = node == self._node and self.candidacy is Candidacy.WITHDRAWN
            return withdrawn or (leader is not None and leader.node != node)

        await self._run.changed.until(is_replaced)

    # -- taking the lead

    async def campaign(self) -> None:
        """Until cancelled, take the lead each time that it is vacant, after this node's delay."""
        changed = self._run.changed
        now = asyncio.get_running_loop().time
        vacant_since: float | None = None
        while True:
            seen = changed.count
            may_lead = self._registration.lease and self.candidacy is not Candidacy.WITHDRAWN
            if not may_lead or self._run.unreachable_since is not None or not self._is_vacant():
                vacant_since = None
                await changed.after(seen)
                continue
            if vacant_since is None:
                vacant_since = now()
                if self._is_expired() and self.connected:
                    # If the leader does not answer a probe either, it will not return.
                    self.connected = await self.reaches_leader(self.expiry_probe_timeout)
                continue
            left = max(vacant_since + self._delay(), self._yields_until) - now()
            if left > 0:
                await changed.after(seen, timeout=left)
            else:
                await self._take()

    def _is_vacant(self) -> bool:
        leader = self._run.leader.record
        return leader is None or leader.node in ("", self.dead_leader)

    def _is_expired(self) -> bool:
        """Return whether the leader's lease has expired, or no node has led yet."""
        return self._run.leader.record is None

    def _delay(self) -> float:
        """Return the seconds that this node waits before it takes a vacant lead."""
        round = self._run.latest_round  # a member of a round that the store has lost can restore it
        standby = self.candidacy is Candidacy.STANDBY
        if round is not None and round.protocol != PROTOCOL_VERSION:
            return MAX_RANK_DELAY + self._lease
        expired = self._is_expired()
        last = self._run.last_leader.node if self._run.last_leader is not None else None
        if round is None or not round.members or (expired and last == self._node):
            return MAX_RANK_DELAY if standby else 0.0
        heirs = [node for node in round.nodes if node != last]
        is_heir = self._node in heirs
        longest = min(len(heirs) * RANK_DELAY, MAX_RANK_DELAY)
        delay = min(heirs.index(self._node) * RANK_DELAY, longest) if is_heir else longest
        if standby:
            delay += longest
        # If all leases expired at once, the members are about to return, and a new node must wait for them.
        return delay + self._lease if expired and (self.connected or not is_heir) else delay

    async def _take(self) -> None:
        key = self._registration.record.peer_key
        record = LeaderRecord(node=self._node, address=self._address, peer_key=key)
        round = self._run.latest_round
        is_newcomer = round is not None and self._node not in round.nodes
        may_live = self._is_expired() and (self.connected or is_newcomer)
        seen = self._run.changed.count
        try:
            revision = await self._run.store.compare_and_swap(
                self._run.keys.leader,
                encode(record),
                expected=self._run.leader.mod_revision,
                lease=self._registration.lease,
            )
        except (StoreUnavailable, LeaseLost):
            await Backoff().wait()
            return
        if revision is not None:
            self.took_expired_at = asyncio.get_running_loop().time() if may_live else None
            self._run.note(self._run.keys.leader, record, revision)
        else:  # another node was faster
            await self._run.changed.after(seen, timeout=self._lease)

    # -- resigning

    def withdraw(self) -> None:
        """Stop leading, and never lead again."""
        self._become(Candidacy.WITHDRAWN)

    async def leave(self, *, standby: bool = False) -> None:
        """Withdraw and resign; with ``standby``, lead again if no other node leads."""
        self.withdraw()
        await self._vacate()
        if standby:
            self._become(Candidacy.STANDBY)

    async def resign(self) -> None:
        """Resign in favor of nodes that know a later round; lead again after one lease if none of them leads."""
        self._become(Candidacy.YIELDED)
        self._yields_until = asyncio.get_running_loop().time() + self._lease
        await self._vacate()

    def _become(self, candidacy: Candidacy) -> None:
        self.candidacy = candidacy
        self._run.changed.send()

    async def _vacate(self) -> None:
        leader = self._run.leader
        if leader.record is not None and leader.record.node == self._node:
            # The vacant record outlives this node's lease, so that later nodes see that the leader resigned.
            key = self._run.keys.leader
            swap = self._run.run_lease.compare_and_swap(key, encode(_VACANT), expected=leader.mod_revision)
            if (revision := await swap) is not None:
                self._run.note(key, _VACANT, revision)

    # -- following

    async def stay_connected(self) -> None:
        """Hold a connection to the leader until cancelled; if the leader refuses a new one, note that it is dead."""
        changed = self._run.changed
        backoff = Backoff()
        while True:
            seen = changed.count
            leader = self._run.leader.record
            if leader is None or self._is_vacant() or leader.node == self._node:
                backoff.reset()
                await changed.after(seen)
                continue
            if leader.protocol != PROTOCOL_VERSION and leader.node != self._warned_of:
                self._warned_of = leader.node
                version = other_version(leader.protocol)
                logger.warning("%s leads, and this node cannot take part: %s", leader.node, version)
            result = await self._hold(leader)
            if result is ProbeResult.DEAD and self.last_connected == leader.node:
                if self._run.outcome is None:
                    logger.info("the leader %s is dead: it refuses a connection", leader.node)
                self.dead_leader = leader.node
                changed.send()
            elif result is not None:
                # A leader that refuses the first connection may be alive: the network may block connections.
                await backoff.wait()

    async def reaches_leader(self, within: float) -> bool:
        """Return whether this node is connected to the leader, and the leader answers within ``within`` seconds."""
        leader = self._run.last_leader
        if leader is None or not self.connected:
            return False
        about = {"run": self._run.settings.run_id, "node": self._node, "peer": leader.node, "key": leader.peer_key}
        result = await probe(leader.address, **about, timeout=within)
        return result is ProbeResult.ALIVE

    def _note_connection(self, leader: str, connected: bool) -> None:
        self.connected = connected
        self.last_connected = leader

    async def _hold(self, leader: LeaderRecord) -> ProbeResult | None:
        """Hold one connection to the leader until it is lost; return a probe's result; None for a new leader."""
        about = {"run": self._run.settings.run_id, "node": self._node, "peer": leader.node, "key": leader.peer_key}
        holding = asyncio.create_task(hold_connection(leader.address, **about, observer=self._note_connection))
        replaced = asyncio.create_task(self.until_replaced(leader.node))
        try:
            await asyncio.wait((holding, replaced), return_when=asyncio.FIRST_COMPLETED)
            return holding.result() if holding.done() else None
        finally:
            await cancel(holding, replaced)
