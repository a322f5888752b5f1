"""What the leading node does: it watches the others, and commits what :func:`~.decide.decide` says."""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Final

from torchelastic.contract import NodeEnd, OutcomeState, RunState, encode
from torchelastic.errors import StoreUnavailable
from torchelastic.rendezvous.chronicler import Chronicler
from torchelastic.rendezvous.decide import decide
from torchelastic.rendezvous.looks import Looks
from torchelastic.rendezvous.pulse import Pulse
from torchelastic.rendezvous.roster import Roster
from torchelastic.rendezvous.view import Decision, EndRun, FormEpoch, GiveNotice, GiveWay, Hold
from torchelastic.store.api import Listing
from torchelastic.store.following import follow_for_good
from torchelastic.store.retrying import retry_delay

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from torchelastic.contract import EpochRecord, RunKeys
    from torchelastic.rendezvous.chronicle import Chronicle
    from torchelastic.rendezvous.control import Control
    from torchelastic.rendezvous.looks import Links
    from torchelastic.rendezvous.view import View
    from torchelastic.settings import RendezvousSettings
    from torchelastic.store.api import Entry, Store
    from torchelastic.store.lasting import LastingKeys

logger = logging.getLogger(__name__)

SHORT: Final = 1e-3
"""Seconds that a decision takes at most for every piece of news to have one of its own."""

SHARE: Final = 3
"""A decision that took longer waits, after the next news, for twice its own time, in which more may come: among a
thousand nodes the leader is kept from spending more than a third of its time on looking at all of them again."""

BREATH: Final = 1.0
"""Seconds between two sentences of a leader on what it waits for, while nodes come one after the other."""


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
        chronicle: what is known of the run's past.
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
        chronicle: Chronicle,
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
        self._chronicle = chronicle
        self._chronicler = Chronicler(chronicle, store, keys, lasting)
        self._remembered = remembered
        self._changed = Pulse()
        self._roster = Roster(node, control, keys, settings.size, dead)
        self._looks = Looks(node, settings, self._roster, links, changed=self._changed, links_work=has_linked)
        self._took_expired_at = took_expired_at
        self._give_way = give_way
        self._gave_way = gave_way
        self._listed = False
        self._said = ""
        self._say_from = 0.0

    async def run(self) -> None:
        """Lead, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._looks.run())
            tasks.create_task(self._lasting.keep(at_once=self._control.epoch.record is None))
            tasks.create_task(self._watch_nodes())
            tasks.create_task(self._chronicler.run(lambda: self._control.away_since is not None, self._changed.send))
            tasks.create_task(self._hear_of_the_run())
            tasks.create_task(self._decide())
            tasks.create_task(self._end_patience())

    @property
    def knows_the_past(self) -> bool:
        """Whether what the leader before has written is known."""
        return self._chronicler.has_read

    async def hand_over(self) -> None:
        """Write what is known of the run's past, before another node leads; nothing, where not all of it was read.

        Raises:
            StoreUnavailable: as the store does.
        """
        if self.knows_the_past:
            await self._chronicler.write()

    def link_came(self, node: str) -> None:
        """A node holds a link: it is alive, whatever was thought of it."""
        self._looks.link_came(node)

    def link_broke(self, node: str) -> None:
        """A node's link broke: look again before it counts as dead."""
        self._looks.link_broke(node)

    async def reaches_a_peer(self, within: float) -> bool:
        """Whether one of those that hold a link answers within so many seconds, looked at now."""
        return await self._looks.find_one_alive(within)

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

    async def _hear_of_the_run(self) -> None:
        """Pass on what happens to the run's keys, so that there is one thing to wait for.

        The other way round, all that a node does would be woken by each of a thousand others.
        """
        changed = self._control.changed
        seen = changed.count
        while True:
            seen = await changed.after(seen)
            self._changed.send()

    def _relist(self, listing: Listing) -> None:
        present = {entry.key for entry in listing.entries}
        for node in [node for node in self._roster.peers if self._keys.node(node) not in present]:
            self._gone(node)
        for entry in listing.entries:
            self._saw(entry)
        self._listed = True
        self._changed.send()

    def _saw(self, entry: Entry) -> None:
        node = entry.key.removeprefix(self._keys.nodes)
        answers = node == self._node or self._links.holds(node)
        newcomer = self._roster.saw(entry, now=self._now(), answers=answers)
        self._hear_of_progress(node)
        if newcomer is not None and not newcomer.answers:
            self._looks.expect_link(node)

    def _hear_of_progress(self, node: str) -> None:
        """Take in what the program has told on this node; that of rank 0 tells something."""
        peer = self._roster.peers.get(node)
        if peer is not None and self._chronicle.hear(peer.record):
            self._chronicler.note()

    def _gone(self, node: str) -> None:
        peer = self._roster.gone(node)
        if peer is not None and (node == self._node or self._links.holds(node)):
            # Its lease ended. If it answers, then only the store was away; else silence and lease agree.
            self._roster.keep_silent(node)
            self._looks.look_at_silent(peer)

    # -- patience with a store that was away

    def _patient_until(self) -> float:
        """A lease's time after the store came back, or this node took a lead that had expired, whichever was later."""
        times = [time for time in (self._control.back_at, self._took_expired_at) if time is not None]
        return max(times, default=-math.inf) + self._settings.lease

    async def _end_patience(self) -> None:
        """See to it that it is decided anew when the patience ends."""
        ended = -math.inf
        while True:
            seen, until = self._changed.count, self._patient_until()
            if until == ended:
                await self._changed.after(seen)
            elif self._now() < until:
                await asyncio.sleep(until - self._now())
            else:
                ended = until
                self._changed.send()

    # -- deciding

    async def _decide(self) -> None:
        tries = 0
        while True:
            seen = self._changed.count
            began = self._now()
            view = self._view() if self._ready() else None
            decision = Hold() if view is None else decide(view, self._settings)
            took = self._now() - began
            if view is not None:
                self._tell_state(view)
            if isinstance(decision, Hold):
                until = min(self._say(decision.why), math.inf if decision.until is None else decision.until)
                wait = None if until == math.inf else max(until - self._now(), 0.0)
                if await self._changed.after(seen, timeout=wait) != seen and took > SHORT:
                    await asyncio.sleep((SHARE - 1) * took)
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
        read = self._listed and self._chronicler.has_read
        return read and self._control.away_since is None and leader is not None and leader.node == self._node

    def _tell_state(self, view: View) -> None:
        """Tell the chronicle what can be seen here first: whether pods are missing, and that an epoch has ended."""
        if view.epoch is None or not view.epoch.members:
            enough = sum(not view.leaves(node) for node in view.peers) >= view.size.target
            self._chronicle.enter(RunState.RENDEZVOUS if enough else RunState.WAITING)
        elif view.failed_since is not None:
            self._chronicle.broke()

    def _end_of(self, node: str) -> NodeEnd | None:
        """What became of a node of the epoch that stands; None where it is there."""
        if self._roster.said_goodbye(node):
            return NodeEnd.LEFT
        return None if self._roster.is_there(node) else NodeEnd.DIED

    def _say(self, why: str) -> float:
        """Say why nothing happens, at once and then once in a while; returns when to say it, where that is later."""
        if why == self._said:
            return math.inf
        if why and self._now() < self._say_from:
            return self._say_from
        self._said = why
        if why:
            self._say_from = self._now() + BREATH
            logger.info("%s", why)
        return math.inf

    async def _carry_out(self, decision: Decision) -> None:
        seen = self._changed.count
        if isinstance(decision, FormEpoch):
            record = decision.record
            expected = self._control.epoch.modified
            revision = None
            if expected or await self._is_fresh():
                record = self._chronicle.settle(record, self._end_of)
                revision = await self._lasting.swap(self._keys.epoch, encode(record), expected=expected)
            if revision is not None:
                logger.debug("committed epoch %d: %s", record.number, record.cause)
                self._control.set_epoch(record, revision)
                self._chronicler.note(anew=True)
                return
        elif isinstance(decision, GiveNotice):
            notice = decision.record
            expected = self._control.notice.modified
            revision = await self._lasting.swap(self._keys.notice, encode(notice), expected=expected)
            if revision is not None:
                taken_back = "taken back: " if not notice.seconds else ""
                logger.debug(
                    "notice %d of the end of epoch %d: %s%s", notice.serial, notice.epoch, taken_back, notice.cause
                )
                self._control.set_notice(notice, revision)
                return
        elif isinstance(decision, EndRun):
            expected = self._control.outcome.modified
            if await self._is_fresh():
                outcome = encode(decision.record)
                # Before the run is over: whoever looks then finds all of it.
                succeeded = decision.record.state is OutcomeState.SUCCEEDED
                with suppress(StoreUnavailable):  # what is for people holds up nobody's end
                    await self._chronicler.finish(self._chronicle.last_word(succeeded=succeeded))
                if await self._lasting.swap(self._keys.outcome, outcome, expected=expected) is not None:
                    logger.debug("committed the outcome: %s", decision.record.state)
        elif isinstance(decision, GiveWay) and await self._is_fresh():
            logger.info("%s", decision.why)
            await self._give_way()
        # Somebody else was faster, or this node's own write is on its way back through the watch.
        await self._changed.after(seen, timeout=self._settings.lease)

    async def _is_fresh(self) -> bool:
        """Whether this node still leads the epoch on which it has just decided, read from the store.

        An epoch is committed in the place of the one that its leader knew, and so by no leader of the past. The first
        one has nothing before it, nor has an outcome: a leader that stood still for a while must not begin anew, or
        end, what others have gone on with. Nor is the lead given up over an epoch that has only not been heard of yet.
        """
        listing = await self._store.list(self._keys.control)
        stands = {entry.key: entry.modified for entry in listing.entries}
        own = {self._keys.leader: self._control.leader.modified, self._keys.epoch: self._control.epoch.modified}
        return all(stands.get(key, 0) == modified for key, modified in own.items())

    def _view(self) -> View:
        return self._roster.view(
            now=self._now(),
            patient_until=self._patient_until(),
            remembered=self._remembered(),
            gave_way=self._gave_way,
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
