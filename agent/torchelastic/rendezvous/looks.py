"""The leader's second looks: whoever does not link, or whose link or lease is gone, is looked at before it is judged.

A refused connection is a death, an answer is life, and silence is neither: then the node's key in the store decides.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

from torchelastic.contract import bracketed
from torchelastic.rendezvous.link import LAST_LOOK, SECOND_LOOK, Verdict, probe
from torchelastic.store.retrying import retry_delay

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from torchelastic.rendezvous.pulse import Pulse
    from torchelastic.rendezvous.roster import Roster
    from torchelastic.rendezvous.view import Peer
    from torchelastic.settings import RendezvousSettings

logger = logging.getLogger(__name__)

MEMBER_PATIENCE: Final = 0.1
"""Seconds after which a new leader looks at a member of the standing epoch that has not linked to it."""

LINK_PATIENCE: Final = 1.0
"""Seconds after which a node that has not linked counts as alive by its key alone: a network may forbid links."""

LINKS_PER_SECOND: Final = 1000
"""So many nodes can link to a new leader; one of so many members is looked at that much later."""

SILENT_RECHECK: Final = 1.0
"""Seconds between looks at a member whose key is gone but which answers."""


class Links(Protocol):
    """Who holds a link to this node."""

    def holds(self, node: str) -> bool:
        """Whether the node does."""


class Looks:
    """Looks at nodes for as long as :meth:`run` runs, and notes in the roster what it finds.

    Args:
        node: the leader's own id.
        settings: the rules.
        roster: what the leader knows.
        links: who holds a link to it.
        changed: is sent after each find.
        links_work: whether links are known to work in this network, which may refuse them all.
    """

    def __init__(
        self,
        node: str,
        settings: RendezvousSettings,
        roster: Roster,
        links: Links,
        *,
        changed: Pulse,
        links_work: bool,
    ) -> None:
        self._node = node
        self._settings = settings
        self._roster = roster
        self._links = links
        self._changed = changed
        self._links_work = links_work
        self._linked_once: set[str] = set()
        self._silent: dict[str, Peer] = {}
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> NoReturn:
        """Look wherever there is something to look at, until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            while True:
                await asyncio.Event().wait()

    def link_came(self, node: str) -> None:
        """A node holds a link: it is alive, whatever was thought of it."""
        self._links_work = True
        self._linked_once.add(node)
        if self._roster.answers(node):
            self._changed.send()

    def link_broke(self, node: str) -> None:
        """A node's link broke: it is looked at until it holds one again, is dead, or its key is gone."""
        peer = self._roster.peers.get(node)
        if peer is not None:
            self._begin(self._after_break(peer))

    def expect_link(self, node: str) -> None:
        """A node has come, which links to the leader at once if it can; where it can't, its key has to do.

        A refusal says that it is dead only where links are known to work.
        """
        self._begin(self._until_linked(node))

    def look_at_silent(self, peer: Peer) -> None:
        """A node whose key is gone holds its link: it is looked at for as long as it counts as silent."""
        self._silent[peer.id] = peer
        self._begin(self._while_silent(peer))

    async def find_one_alive(self, within: float) -> bool:
        """Whether one of those that hold a link answers within so many seconds, looked at now."""
        # Those, too, whose keys are gone: an etcd that has come back empty says nothing against them.
        known = {**self._silent, **self._roster.peers}
        linked = [peer for peer in known.values() if self._links.holds(peer.id)]
        looks = [asyncio.create_task(self._probe(peer, within)) for peer in linked]
        try:
            for look in asyncio.as_completed(looks):
                if await look is Verdict.ALIVE:
                    return True
            return False
        finally:
            for each in looks:
                each.cancel()
            await asyncio.gather(*looks, return_exceptions=True)

    def _begin(self, look: Coroutine[Any, Any, None]) -> None:
        if self._tasks is None:
            look.close()  # nothing is known yet that it could be about
        else:
            self._tasks.create_task(look)

    async def _until_linked(self, node: str) -> None:
        for patience in self._patience_with(node):
            await asyncio.sleep(patience)
            peer = self._roster.peers.get(node)
            if peer is None or peer.answers or node in self._linked_once:
                return
            if self._links_work and await self._probe(peer) is Verdict.DEAD and not self._links.holds(node):
                logger.info("%s is dead: it refuses a link", node)
                self._died(node)
                return
        if self._roster.answers(node):
            self._changed.send()

    def _patience_with(self, node: str) -> tuple[float, ...]:
        """Seconds to wait for a node's link, before each look at the node."""
        roster, now = self._roster, asyncio.get_running_loop().time()
        if not roster.is_member(node, now=now):
            return (LINK_PATIENCE, LINK_PATIENCE)
        first = MEMBER_PATIENCE + len(roster.peers) / LINKS_PER_SECOND
        if roster.is_member(self._node, now=now):
            return (first, LINK_PATIENCE)
        # A newcomer leads, so none of the members may be left; the key of one that died stands for a lease's time.
        return (first, *(LINK_PATIENCE,) * math.ceil(self._settings.lease / LINK_PATIENCE))

    async def _after_break(self, peer: Peer) -> None:
        tries = 0
        while peer.id in self._roster.peers and not self._links.holds(peer.id):
            if await self._probe(peer) is Verdict.DEAD:
                if not self._roster.said_goodbye(peer.id):
                    logger.info("%s is dead: its link broke and it refuses a new one", peer.id)
                self._died(peer.id)
                return
            await asyncio.sleep(retry_delay(tries))
            tries += 1

    async def _while_silent(self, peer: Peer) -> None:
        within = min(LAST_LOOK, self._settings.lease)
        while self._roster.is_silent(peer.id):
            if peer.id != self._node and await self._probe(peer, within) is not Verdict.ALIVE:
                self._roster.end_silence(peer.id)
                self._changed.send()
                break
            await asyncio.sleep(SILENT_RECHECK)
        self._silent.pop(peer.id, None)

    def _died(self, node: str) -> None:
        self._roster.died(node)
        self._changed.send()

    async def _probe(self, peer: Peer, within: float = SECOND_LOOK) -> Verdict:
        address = f"{bracketed(peer.record.address)}:{peer.record.link}"
        return await probe(address, run=self._settings.run_id, node=self._node, peer=peer.id, timeout=within)
