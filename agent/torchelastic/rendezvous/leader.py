"""What the leading node does: it watches the others, and commits what :func:`~.decide.decide` says."""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

from torchelastic.contract import CONTRACT_VERSION, EpochRecord, NodePhase, NodeRecord, bracketed, decode, encode
from torchelastic.errors import MalformedRecord, StoreUnavailable
from torchelastic.rendezvous.decide import Decision, EndRun, FormEpoch, GiveWay, Hold, Peer, View, decide
from torchelastic.rendezvous.link import Verdict, probe
from torchelastic.store.api import Listing
from torchelastic.store.following import follow_for_good
from torchelastic.store.retrying import retry_delay

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from torchelastic.contract import RunKeys, SizeRecord
    from torchelastic.rendezvous.control import Control
    from torchelastic.settings import RendezvousSettings
    from torchelastic.store.api import Entry, Store
    from torchelastic.store.lasting import LastingKeys

logger = logging.getLogger(__name__)

MEMBER_PATIENCE = 0.1
"""Seconds after which a new leader looks at a member of the standing epoch that has not linked to it."""

LINK_PATIENCE = 1.0
"""Seconds after which a node that has not linked counts as alive by its key alone: a network may forbid links."""

SILENT_RECHECK = 1.0
"""Seconds between looks at a member whose key is gone but which answers."""


class Links(Protocol):
    """Who holds a link to this node."""

    def holds(self, node: str) -> bool:
        """Whether the node does."""


class Leadership:
    """One node's time as the leader.

    Args:
        node: this node's id.
        store: where.
        keys: the run's keys.
        lasting: writes those of them that outlive this node; kept for as long as it leads.
        settings: the rules.
        control: the view of the keys that everybody watches.
        links: who holds a link.
        remembered: gives the last epoch that this node has seen.
        give_way: leaves the lead to others.
        gave_way: whether this node has done that before.
        has_linked: whether this node has held a link to a leader before it: links work in this network.
        took_expired_at: when this node took the lead, if the lease of the leader before had ended: others' leases may
            have ended with it, and their keys be on their way back.
        dead: nodes that are known to be dead from the start: the leader before.
    """

    def __init__(
        self,
        *,
        node: str,
        store: Store,
        keys: RunKeys,
        lasting: LastingKeys,
        settings: RendezvousSettings,
        control: Control,
        links: Links,
        remembered: Callable[[], EpochRecord | None],
        give_way: Callable[[], Awaitable[None]],
        gave_way: bool,
        has_linked: bool = False,
        took_expired_at: float | None = None,
        dead: frozenset[str] = frozenset(),
    ) -> None:
        self._node = node
        self._store = store
        self._keys = keys
        self._lasting = lasting
        self._settings = settings
        self._control = control
        self._links = links
        self._remembered = remembered
        self._changed = control.changed
        self._peers: dict[str, Peer] = {}
        self._linked_once: set[str] = set()
        self._has_linked = has_linked
        self._took_expired_at = took_expired_at
        self._give_way = give_way
        self._gave_way = gave_way
        self._dead = set(dead)
        self._silent: set[str] = set()
        self._left: set[str] = set()
        self._done: set[str] = set()
        self._listed = False
        self._epoch_seen = (0, 0.0)
        self._failed_since: float | None = None
        self._looks: asyncio.TaskGroup | None = None
        self._said = ""

    async def run(self) -> None:
        """Lead, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._looks = tasks
            tasks.create_task(self._lasting.keep(at_once=self._control.epoch.record is None))
            tasks.create_task(self._watch_nodes())
            tasks.create_task(self._decide())
            tasks.create_task(self._end_patience())

    def link_came(self, node: str) -> None:
        """A node holds a link: it is alive, whatever was thought of it."""
        self._linked_once.add(node)
        self._dead.discard(node)
        peer = self._peers.get(node)
        if peer is not None and not peer.answers:
            self._peers[node] = _with(peer, answers=True)
        self._changed.send()

    def link_broke(self, node: str) -> None:
        """A node's link broke: look again before it counts as dead."""
        peer = self._peers.get(node)
        if peer is not None and self._looks is not None:
            self._looks.create_task(self._look_after_break(peer))

    async def reaches_a_peer(self) -> bool:
        """Whether one of those that hold a link answers, looked at now."""
        linked = [peer for peer in self._peers.values() if self._links.holds(peer.id)]
        verdicts = await asyncio.gather(*(self._probe(peer) for peer in linked))
        return Verdict.ALIVE in verdicts

    # -- watching

    async def _watch_nodes(self) -> None:
        # That the store is away is said by whoever watches the run's keys.
        async with aclosing(follow_for_good(self._store, self._keys.nodes, lost=lambda _: None)) as news:
            async for batch in news:
                if isinstance(batch, Listing):
                    self._relist(batch)
                    continue
                for change in batch:
                    if change.entry is not None:
                        self._saw(change.entry)
                    else:
                        self._gone(change.key.removeprefix(self._keys.nodes))
                if batch:
                    self._changed.send()

    def _relist(self, listing: Listing) -> None:
        present = {entry.key for entry in listing.entries}
        for node in [node for node in self._peers if self._keys.node(node) not in present]:
            self._gone(node)
        for entry in listing.entries:
            self._saw(entry)
        self._listed = True
        self._changed.send()

    def _saw(self, entry: Entry) -> None:
        node = entry.key.removeprefix(self._keys.nodes)
        try:
            record = decode(entry.value, NodeRecord)
        except MalformedRecord as error:
            logger.warning("ignoring the node %s: %s", node, error)
            self._gone(node)
            return
        before = self._peers.get(node)
        number = self._number()
        failed = record.failure is not None and record.failure.epoch == number
        if record.phase is NodePhase.DONE and record.epoch == number:
            self._done.add(node)
        self._silent.discard(node)
        known = before is not None and before.failed_at and before.record.failure == record.failure
        self._peers[node] = Peer(
            id=node,
            record=record,
            joined=record.joined or entry.created,
            arrived=before.arrived if before is not None else self._now(),
            answers=before.answers if before is not None else self._answers(node),
            failed_at=before.failed_at if known and before is not None else entry.modified if failed else 0,
        )
        if failed and self._failed_since is None:
            self._failed_since = self._now()
        if before is None and not self._peers[node].answers and self._looks is not None:
            self._looks.create_task(self._wait_for_link(node))

    def _gone(self, node: str) -> None:
        peer = self._peers.pop(node, None)
        if peer is None or node in self._dead or peer.record.phase is NodePhase.LEAVING:
            self._left.add(node)
            return
        if self._looks is not None and (node == self._node or self._links.holds(node)):
            # Its lease ended. If it answers, then only the store was away; else silence and lease agree.
            self._silent.add(node)
            self._looks.create_task(self._look_at_silent(peer))

    def _answers(self, node: str) -> bool:
        return node == self._node or self._links.holds(node)

    # -- looking again

    async def _wait_for_link(self, node: str) -> None:
        """A node links to the leader at once; where it can't, its key has to do.

        A refusal says that it is dead only where links are known to work: a network may refuse them all.
        """
        for patience in self._patience_with(node):
            await asyncio.sleep(patience)
            peer = self._peers.get(node)
            if peer is None or peer.answers or node in self._linked_once:
                return
            if self._links_work() and await self._probe(peer) is Verdict.DEAD and not self._links.holds(node):
                logger.info("%s is dead: it refuses a link", node)
                self._dead.add(node)
                self._changed.send()
                return
        if (peer := self._peers.get(node)) is not None:
            self._peers[node] = _with(peer, answers=True)
            self._changed.send()

    def _patience_with(self, node: str) -> tuple[float, ...]:
        """Seconds to wait for a node's link, before each look at the node."""
        epoch = self._control.epoch.record
        if epoch is None or node not in epoch.nodes:
            return (LINK_PATIENCE, LINK_PATIENCE)
        if self._node in epoch.nodes:
            return (MEMBER_PATIENCE, LINK_PATIENCE)
        # A newcomer leads, so none of the members may be left; the key of one that died stands for a lease's time.
        return (MEMBER_PATIENCE, *(LINK_PATIENCE,) * math.ceil(self._settings.lease / LINK_PATIENCE))

    async def _look_after_break(self, peer: Peer) -> None:
        """Look until the node holds a link again, is dead, or its key is gone."""
        tries = 0
        while peer.id in self._peers and not self._links.holds(peer.id):
            if await self._probe(peer) is Verdict.DEAD:
                ending = self._control.outcome.record is not None or peer.id in self._done
                if not ending and self._peers.get(peer.id, peer).record.phase is not NodePhase.LEAVING:
                    logger.info("%s is dead: its link broke and it refuses a new one", peer.id)
                self._dead.add(peer.id)
                self._changed.send()
                return
            await asyncio.sleep(retry_delay(tries))
            tries += 1

    async def _look_at_silent(self, peer: Peer) -> None:
        while peer.id in self._silent:
            if peer.id != self._node and await self._probe(peer) is not Verdict.ALIVE:
                self._silent.discard(peer.id)
                self._changed.send()
                return
            await asyncio.sleep(SILENT_RECHECK)

    def _links_work(self) -> bool:
        return self._has_linked or bool(self._linked_once)

    async def _probe(self, peer: Peer) -> Verdict:
        address = f"{bracketed(peer.record.address)}:{peer.record.link}"
        return await probe(address, run=self._settings.run_id, node=self._node, peer=peer.id)

    def _returning(self) -> frozenset[str]:
        """Members whose keys may be on their way back, because the store itself was away a moment ago."""
        epoch = self._control.epoch.record
        if epoch is None or self._patience_left() <= 0:
            return frozenset()
        members = frozenset(epoch.nodes)
        if self._node not in members and not members & self._peers.keys():
            return frozenset()  # a newcomer has waited for them before it took the lead, and none has come
        return members - self._peers.keys() - self._left

    def _patience_left(self) -> float:
        since = self._patient_since()
        return 0.0 if since is None else since + self._settings.lease - self._now()

    def _patient_since(self) -> float | None:
        """When the store came back, or this node took a lead that had expired, whichever was later."""
        return max((time for time in (self._control.back_at, self._took_expired_at) if time is not None), default=None)

    async def _end_patience(self) -> None:
        seen = None
        while True:
            count = self._changed.count
            if self._patient_since() == seen:
                await self._changed.after(count)
            elif self._patience_left() > 0:
                await asyncio.sleep(self._patience_left())
            else:
                seen = self._patient_since()
                self._changed.send()

    # -- deciding

    async def _decide(self) -> None:
        tries = 0
        while True:
            seen = self._changed.count
            decision = decide(self._view(), self._settings) if self._ready() else Hold()
            if isinstance(decision, Hold):
                self._say(decision)
                wait = None if decision.until is None else max(decision.until - self._now(), 0.0)
                await self._changed.after(seen, timeout=wait)
                continue
            try:
                await self._carry_out(decision)
                tries = 0
            except StoreUnavailable:
                await asyncio.sleep(retry_delay(tries))
                tries += 1

    def _ready(self) -> bool:
        """Whether this node leads and has read enough to decide: deciding on half a view would lose nodes."""
        leader = self._control.leader.record
        return self._listed and self._control.away_since is None and leader is not None and leader.node == self._node

    def _say(self, decision: Hold) -> None:
        if decision.why != self._said:
            self._said = decision.why
            if decision.why:
                logger.info("%s", decision.why)

    async def _carry_out(self, decision: Decision) -> None:
        seen = self._changed.count
        if isinstance(decision, FormEpoch):
            record = decision.record
            expected = self._control.epoch.modified
            revision = await self._lasting.swap(self._keys.epoch, encode(record), expected=expected)
            if revision is not None:
                logger.debug("committed epoch %d: %s", record.number, record.cause)
                self._control.set_epoch(record, revision)
                return
        elif isinstance(decision, EndRun):
            expected = self._control.outcome.modified
            if await self._lasting.swap(self._keys.outcome, encode(decision.record), expected=expected) is not None:
                logger.debug("committed the outcome: %s", decision.record.state)
        elif isinstance(decision, GiveWay):
            logger.info("%s", decision.why)
            await self._give_way()
        # Somebody else was faster, or this node's own write is on its way back through the watch.
        await self._changed.after(seen, timeout=self._settings.lease)

    def _view(self) -> View:
        now = self._now()
        number = self._number()
        if self._epoch_seen[0] != number:
            self._epoch_seen = (number, now)
            self._failed_since = None
            self._done = {
                node
                for node, peer in self._peers.items()
                if peer.record.phase is NodePhase.DONE and peer.record.epoch == number
            }
            for node, peer in self._peers.items():
                if peer.record.failure is not None and peer.record.failure.epoch == number:
                    self._failed_since = now
                else:
                    self._peers[node] = _with(peer, failed_at=0)
        return View(
            now=now,
            peers=dict(self._peers),
            size=self._size(),
            epoch=self._control.epoch.record,
            remembered=self._remembered(),
            outcome=self._control.outcome.record,
            silent=self._returning() | self._silent,
            dead=frozenset(self._dead),
            done=frozenset(self._done),
            changed_at=self._epoch_seen[1],
            failed_since=self._failed_since,
            gave_way=self._gave_way,
        )

    def _number(self) -> int:
        record = self._control.epoch.record
        return record.number if record is not None else 0

    def _size(self) -> SizeRecord:
        """The size of the highest generation: in the store, or brought along by a node."""
        sizes = [peer.record.size for peer in self._peers.values() if peer.record.contract == CONTRACT_VERSION]
        if self._control.size.record is not None:
            sizes.append(self._control.size.record)
        return max(sizes, key=lambda size: size.generation, default=self._settings.size)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _with(peer: Peer, *, answers: bool | None = None, failed_at: int | None = None) -> Peer:
    return Peer(
        id=peer.id,
        record=peer.record,
        joined=peer.joined,
        arrived=peer.arrived,
        answers=peer.answers if answers is None else answers,
        failed_at=peer.failed_at if failed_at is None else failed_at,
    )
