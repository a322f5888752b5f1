"""The leader's probes: a node that does not connect, or loses its connection or lease, is probed before it is judged.

A refused connection means dead, an answer alive, and silence neither: then the node's key in the store decides.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Any, Final, NoReturn

from torchelastic.protocol import bracketed
from torchelastic.rendezvous.peer_connection import FINAL_PROBE_TIMEOUT, PROBE_TIMEOUT, Verdict, probe
from torchelastic.store.backoff import backoff_delay

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from torchelastic.config.settings import RendezvousSettings
    from torchelastic.rendezvous.change_signal import ChangeSignal
    from torchelastic.rendezvous.membership import Membership
    from torchelastic.rendezvous.peer_connection import PeerServer
    from torchelastic.rendezvous.policy.snapshot import Peer

logger = logging.getLogger(__name__)

MEMBER_CONNECT_TIMEOUT: Final = 0.1
"""Seconds after which a new leader probes a member of the current round that has not connected to it."""

CONNECT_TIMEOUT: Final = 1.0
"""Seconds after which a node that has not connected counts as alive by its key: a network may forbid connections."""

CONNECTIONS_PER_SECOND: Final = 1000
"""Connections that a new leader accepts in a second; of many members, one is probed correspondingly later."""

SILENT_RECHECK: Final = 1.0
"""Seconds between probes of a member whose key is gone but which answers."""


class LivenessProber:
    """Probes nodes while :meth:`run` runs, and notes the results in the membership.

    Args:
        node: the leader's own id.
        settings: the rules.
        membership: what the leader knows of the nodes.
        server: knows which nodes are connected to it.
        changed: is sent after each result.
        connections_work: whether this network is known not to forbid connections.
    """

    def __init__(
        self,
        node: str,
        settings: RendezvousSettings,
        membership: Membership,
        server: PeerServer,
        *,
        changed: ChangeSignal,
        connections_work: bool,
    ) -> None:
        self._node = node
        self._settings = settings
        self._membership = membership
        self._server = server
        self._changed = changed
        self._connections_work = connections_work
        self._connected_once: set[str] = set()
        self._silent: dict[str, Peer] = {}
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> NoReturn:
        """Run probes until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            while True:
                await asyncio.Event().wait()

    def peer_connected(self, node: str) -> None:
        """Note that a node is connected, and so alive."""
        self._connections_work = True
        self._connected_once.add(node)
        self._answers(node)

    def peer_lost(self, node: str) -> None:
        """Probe a node that lost its connection until it is connected again, dead, or its key is gone."""
        peer = self._membership.peers.get(node)
        if peer is not None:
            self._start(self._after_loss(peer))

    def expect_connection(self, node: str) -> None:
        """Wait for a new node to connect; if it does not, its key decides."""
        self._start(self._until_connected(node))

    def probe_silent(self, peer: Peer) -> None:
        """Probe a connected node whose key is gone, as long as it counts as silent."""
        self._silent[peer.id] = peer
        self._start(self._while_silent(peer))

    async def reaches_a_peer(self, within: float) -> bool:
        """Whether one of the connected nodes answers a probe within so many seconds."""
        known = {**self._silent, **self._membership.peers}
        connected = [peer for peer in known.values() if self._server.is_connected(peer.id)]
        probes = [asyncio.create_task(self._probe(peer, within)) for peer in connected]
        try:
            for each in asyncio.as_completed(probes):
                if await each is Verdict.ALIVE:
                    return True
            return False
        finally:
            for task in probes:
                task.cancel()
            await asyncio.gather(*probes, return_exceptions=True)

    def _start(self, probing: Coroutine[Any, Any, None]) -> None:
        if self._tasks is None:
            probing.close()
        else:
            self._tasks.create_task(probing)

    async def _until_connected(self, node: str) -> None:
        for timeout in self._timeouts(node):
            await asyncio.sleep(timeout)
            peer = self._membership.peers.get(node)
            if peer is None or peer.answers or node in self._connected_once:
                return
            # A refusal means death only if connections are known to work in this network.
            refused = self._connections_work and await self._probe(peer) is Verdict.DEAD
            if refused and not self._server.is_connected(node):
                logger.info("%s is dead: it refuses a connection", node)
                self._died(node)
                return
        self._answers(node)

    def _timeouts(self, node: str) -> tuple[float, ...]:
        """Seconds to wait for a node's connection, before each probe of it."""
        membership, now = self._membership, asyncio.get_running_loop().time()
        if not membership.is_member(node, now=now):
            return (CONNECT_TIMEOUT, CONNECT_TIMEOUT)
        first = MEMBER_CONNECT_TIMEOUT + len(membership.peers) / CONNECTIONS_PER_SECOND
        if membership.is_member(self._node, now=now):
            return (first, CONNECT_TIMEOUT)
        # A newcomer leads, so no member may be left; a dead member's key remains for one lease.
        return (first, *(CONNECT_TIMEOUT,) * math.ceil(self._settings.lease / CONNECT_TIMEOUT))

    async def _after_loss(self, peer: Peer) -> None:
        tries = 0
        while peer.id in self._membership.peers and not self._server.is_connected(peer.id):
            if await self._probe(peer) is Verdict.DEAD:
                if not self._membership.is_departure_expected(peer.id):
                    logger.info("%s is dead: its connection was lost and it refuses a new one", peer.id)
                self._died(peer.id)
                return
            await asyncio.sleep(backoff_delay(tries))
            tries += 1

    async def _while_silent(self, peer: Peer) -> None:
        within = min(FINAL_PROBE_TIMEOUT, self._settings.lease)
        while self._membership.is_silent(peer.id):
            if peer.id != self._node and await self._probe(peer, within) is not Verdict.ALIVE:
                self._membership.end_silence(peer.id)
                self._changed.send()
                break
            await asyncio.sleep(SILENT_RECHECK)
        self._silent.pop(peer.id, None)

    def _answers(self, node: str) -> None:
        if self._membership.answers(node):
            self._changed.send()

    def _died(self, node: str) -> None:
        self._membership.died(node)
        self._changed.send()

    async def _probe(self, peer: Peer, within: float = PROBE_TIMEOUT) -> Verdict:
        address = f"{bracketed(peer.record.address)}:{peer.record.link}"
        return await probe(address, run=self._settings.run_id, node=self._node, peer=peer.id, timeout=within)
