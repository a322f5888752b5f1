"""Who leads: taking the lead when it is vacant, linking to whoever has it, and giving it up.

The lead is one leased key. It falls vacant in four ways, and each has its own wait before another node takes it:

- nobody ever had it: whoever is first;
- the leader resigned: the next in rank, at once; a node that leaves itself comes after all others;
- the leader died, which its link has shown: the next in rank, at once;
- its lease ended though it answers: it was the store that was away, so the leader may come back for a lease's time.
  A newcomer, who has no link to tell by, waits as long.

A node of another version of the contract cannot train with those who lead: it comes last, and takes the lead only where
none of them is left.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from torchelastic.contract import CONTRACT_VERSION, LeaderRecord, encode, other_version
from torchelastic.errors import LeaseLost, StoreUnavailable
from torchelastic.rendezvous.link import LAST_LOOK, Verdict, hold_link, probe
from torchelastic.store.retrying import retry_delay

if TYPE_CHECKING:
    from torchelastic.contract import EpochRecord, RunKeys
    from torchelastic.rendezvous.control import Control
    from torchelastic.rendezvous.session import Session
    from torchelastic.store.api import Store
    from torchelastic.store.lasting import LastingKeys

logger = logging.getLogger(__name__)

STEP: Final = 0.1
"""Seconds by which each place in the succession waits for the one before it to take the lead."""

LONGEST_STEP: Final = 2.0
"""Seconds that the last in the succession waits."""

_VACANT: Final = LeaderRecord(node="", address="")


class Succession:
    """One node's view of who leads, and its own part in it.

    Args:
        run_id: the run's id.
        lease: seconds that a leader whose lease ended may take to come back.
        store: where the lead is taken.
        keys: the run's keys.
        lasting: writes those of them that outlive this node.
        control: the view of the keys that everybody watches.
        session: this node's presence; the lead hangs on its lease.
        address: host:port of this node's link server.
    """

    def __init__(
        self,
        *,
        run_id: str,
        lease: float,
        store: Store,
        keys: RunKeys,
        lasting: LastingKeys,
        control: Control,
        session: Session,
        address: str,
    ) -> None:
        self.epoch: EpochRecord | None = None
        """The last epoch that this node was told of."""
        self.linked = False
        """Whether this node's link to the leader stands."""
        self.dead_leader: str | None = None
        """The last leader whose death its link has shown."""
        self.gave_way = False
        """Whether this node has left the lead to nodes that know more."""
        self._run_id = run_id
        self._lease = lease
        self._store = store
        self._keys = keys
        self._lasting = lasting
        self._control = control
        self._session = session
        self._address = address
        self._node = session.node
        self.took_expired_at: float | None = None
        """When this node took a lead whose lease had ended, though its leader may live; None where it did otherwise."""
        self.has_linked = False
        """Whether this node has ever held a link: links work in this network."""
        self._last_leader: LeaderRecord | None = None
        self._linked_to: str | None = None
        self._give_way_until = 0.0
        self._out = False
        self._stands_by = False

    @property
    def leads(self) -> bool:
        """Whether this node has the lead."""
        leader = self._control.leader.record
        return leader is not None and leader.node == self._node and not self._out

    @property
    def led(self) -> bool:
        """Whether somebody leads who is not known to be gone, or this node would, if nobody else did."""
        leader = self._control.leader.record
        if leader is None or leader.node in ("", self.dead_leader):
            return self._stands_by
        return leader.node != self._node or not self._out

    async def until_leading(self) -> None:
        """Wait until this node has the lead."""
        while not self.leads:
            await self._control.changed.after(self._control.changed.count)

    async def until_leader_is_not(self, node: str) -> None:
        """Wait until somebody else leads, or this node has resigned.

        A lease that ended does not count: its leader may come back.
        """
        changed = self._control.changed
        while True:
            leader = self._control.leader.record
            if (leader is not None and leader.node != node) or (self._out and node == self._node):
                return
            await changed.after(changed.count)

    # -- taking the lead

    async def campaign(self) -> None:
        """Take the lead whenever it is vacant and this node's turn has come; until cancelled."""
        changed = self._control.changed
        now = asyncio.get_running_loop().time
        vacant_since: float | None = None
        while True:
            seen = changed.count
            if not self._vacant():
                vacant_since = None
                await changed.after(seen)
                continue
            if vacant_since is None:
                vacant_since = now()
                if self._expired() and self.linked and not await self.reaches_leader(min(LAST_LOOK, self._lease)):
                    self.linked = False  # silence and the end of the lease agree: nobody comes back
                continue
            left = max(vacant_since + self._turn(), self._give_way_until) - now()
            if left > 0:
                await changed.after(seen, timeout=left)
            else:
                await self._take()

    def _vacant(self) -> bool:
        if self._out or not self._session.lease or self._control.away_since is not None:
            return False
        leader = self._control.leader.record
        return leader is None or leader.node in ("", self.dead_leader)

    def _turn(self) -> float:
        """Seconds to leave to those who come before this node."""
        epoch = self._known_epoch()
        if epoch is not None and epoch.contract != CONTRACT_VERSION:
            return LONGEST_STEP + self._lease
        expired = self._expired()
        last = self._last_leader.node if self._last_leader is not None else None
        if epoch is None or not epoch.members or (expired and last == self._node):
            return LONGEST_STEP if self._stands_by else 0.0
        heirs = [node for node in epoch.nodes if node != last]
        heir = self._node in heirs
        last_wait = min(len(heirs) * STEP, LONGEST_STEP)
        wait = min(heirs.index(self._node) * STEP, last_wait) if heir else last_wait
        if self._stands_by:
            wait += last_wait
        # Where all leases ended at once, the members are on their way back; a newcomer must not go on without them.
        return wait + self._lease if expired and (self.linked or not heir) else wait

    def _known_epoch(self) -> EpochRecord | None:
        """The later one of the epoch in the store, also where this node was not told of it yet, and the last one told.

        Who knows more than a store that has lost something is heir by that, and can give it back.
        """
        stored, told = self._control.epoch.record, self.epoch
        return told if stored is None or (told is not None and told.number > stored.number) else stored

    def _expired(self) -> bool:
        """Whether the lead fell vacant by the end of its lease, or never was taken."""
        return self._control.leader.record is None

    async def _take(self) -> None:
        record = LeaderRecord(node=self._node, address=self._address)
        before = self._control.leader.modified
        epoch = self._known_epoch()
        newcomer = epoch is not None and self._node not in epoch.nodes
        may_live = self._expired() and (self.linked or newcomer)
        seen = self._control.changed.count
        try:
            revision = await self._store.swap(
                self._keys.leader, encode(record), expected=before, lease=self._session.lease
            )
        except (StoreUnavailable, LeaseLost):
            await asyncio.sleep(retry_delay(0))
            return
        if revision is not None:
            self.took_expired_at = asyncio.get_running_loop().time() if may_live else None
            self._control.set_leader(record, revision)
        else:  # somebody was faster; the watch will say who
            await self._control.changed.after(seen, timeout=self._lease)

    # -- giving it up

    def stop_leading(self) -> None:
        """Decide nothing any more."""
        self._out = True
        self._control.changed.send()

    async def leave(self, *, stand_by: bool = False) -> None:
        """Resign, and never lead again; with ``stand_by``, only where nobody else does, because all others leave too.

        Raises:
            StoreError: as the store does.
        """
        self.stop_leading()
        await self._resign()
        if stand_by:
            self._out, self._stands_by = False, True
            self._control.changed.send()

    async def give_way(self) -> None:
        """Resign in favour of nodes that know more; lead again only if none of them has come forward.

        Raises:
            StoreError: as the store does.
        """
        self.gave_way = True
        self._give_way_until = asyncio.get_running_loop().time() + self._lease
        await self._resign()

    async def _resign(self) -> None:
        leader = self._control.leader
        if leader.record is not None and leader.record.node == self._node:
            # Not under this node's lease: whoever comes later sees that the lead was given up, and not lost.
            revision = await self._lasting.swap(self._keys.leader, encode(_VACANT), expected=leader.modified)
            if revision is not None:
                self._control.set_leader(_VACANT, revision)

    # -- following

    async def hold_link(self) -> None:
        """Hold a link to whoever leads, until cancelled; a leader that refuses it is dead."""
        changed = self._control.changed
        tries = 0
        while True:
            seen = changed.count
            leader = self._control.leader.record
            if leader is not None and leader.node:
                self._meet(leader)
            if leader is None or leader.node in ("", self._node, self.dead_leader):
                tries = 0
                await changed.after(seen)
                continue
            verdict = await self._link_to(leader)
            if verdict is Verdict.DEAD and self._linked_to == leader.node:
                if self._control.outcome.record is None:
                    logger.info("the leader %s is dead: it refuses its link", leader.node)
                self.dead_leader = leader.node
                changed.send()
            elif verdict is not None:
                # Also where it refuses a link that never stood: the network may refuse them all, so its lease decides.
                await asyncio.sleep(retry_delay(tries))
                tries += 1

    def _meet(self, leader: LeaderRecord) -> None:
        """Remember who leads; where this node cannot train with it, say so, for its epochs go by without this node."""
        before, self._last_leader = self._last_leader, leader
        if leader.contract != CONTRACT_VERSION and (before is None or before.node != leader.node):
            logger.warning("%s leads, and this node cannot take part: %s", leader.node, other_version(leader.contract))

    async def reaches_leader(self, within: float) -> bool:
        """Whether the leader, to which this node is linked, answers within so many seconds, looked at now."""
        leader = self._last_leader
        if leader is None or not self.linked:
            return False
        verdict = await probe(leader.address, run=self._run_id, node=self._node, peer=leader.node, timeout=within)
        return verdict is Verdict.ALIVE

    def link_came(self, node: str) -> None:
        """The leader answered (called by :func:`~.link.hold_link`)."""
        self.linked = self.has_linked = True
        self._linked_to = node

    def link_broke(self, node: str) -> None:
        """The link is gone."""
        del node
        self.linked = False

    async def _link_to(self, leader: LeaderRecord) -> Verdict | None:
        """Hold one link until it breaks (then what a second look shows) or another node leads (None)."""
        holding = asyncio.create_task(
            hold_link(leader.address, run=self._run_id, node=self._node, peer=leader.node, observer=self)
        )
        moved = asyncio.create_task(self.until_leader_is_not(leader.node))
        try:
            await asyncio.wait((holding, moved), return_when=asyncio.FIRST_COMPLETED)
            return holding.result() if holding.done() else None
        finally:
            holding.cancel()
            moved.cancel()
            await asyncio.gather(holding, moved, return_exceptions=True)
