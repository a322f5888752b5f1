"""The leader: watches the nodes, and commits the decisions of :func:`~.policy.plan.plan`.

The leader commits a round or an outcome by a compare-and-swap of the run's state. The expected revision is the one on
which the leader decided, so a leader that was paused and replaced cannot overwrite its successor's commits.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from torchelastic.errors import StoreUnavailable
from torchelastic.protocol.codec import encode
from torchelastic.protocol.records import (
    PROTOCOL_VERSION,
    DepartureReason,
    NoticeRecord,
    OutcomeRecord,
    OutcomeState,
    RoundRecord,
    RunState,
    StateRecord,
    bracketed,
)
from torchelastic.rendezvous.history import HistoryWriter
from torchelastic.rendezvous.leader_election import Candidacy
from torchelastic.rendezvous.peer_connection import PROBE_TIMEOUT, ProbeResult, probe
from torchelastic.rendezvous.policy.membership import Membership
from torchelastic.rendezvous.policy.plan import Decision, Hold, plan
from torchelastic.rendezvous.run_watch import cancel
from torchelastic.store.api import Listing
from torchelastic.store.client import Backoff, follow_forever

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from torchelastic.rendezvous.history import History
    from torchelastic.rendezvous.leader_election import LeaderElection
    from torchelastic.rendezvous.peer_connection import PeerServer
    from torchelastic.rendezvous.policy.membership import Peer
    from torchelastic.rendezvous.run_watch import RunWatch, Versioned
    from torchelastic.store.api import Entry

logger = logging.getLogger(__name__)

MEMBER_CONNECT_TIMEOUT: Final = 0.1
"""Seconds after which a new leader probes a member of the current round that has not connected to it."""

CONNECT_TIMEOUT: Final = 1.0
"""Seconds between probes of a node that has not connected. After the last probe, the node counts as alive because it
has a key: the network may block connections."""

CONNECTIONS_PER_SECOND: Final = 1000
"""Connections that a new leader is assumed to accept per second: with more nodes, it probes members later."""

EXPIRED_RECHECK: Final = 1.0
"""Seconds between probes of a member that has no key but answers."""

QUICK_DECISION: Final = 1e-3
"""Maximum duration of a quick decision in seconds; after a slower one, the leader waits before it decides again."""

PAUSE_FACTOR: Final = 2
"""The wait of the leader after a slow decision, as a multiple of the duration of the decision."""

LOG_INTERVAL: Final = 1.0
"""Minimum number of seconds between two log messages about what the leader waits for."""


class Leader:
    """Leads the run while :meth:`run` runs.

    Attributes:
        membership: the run and its nodes.
        history_writer: reads and writes the history of the run.
    """

    def __init__(self, run: RunWatch, election: LeaderElection, server: PeerServer, history: History) -> None:
        self.history_writer = HistoryWriter(history, run)
        self.membership = Membership(run.settings.size, changed_at=self._now())
        if election.dead_leader is not None:
            self.membership.dead.add(election.dead_leader)
        self._run = run
        self._election = election
        self._server = server
        self._history = history
        self._took_expired_at = election.took_expired_at
        self._connections_work = election.last_connected is not None  # whether the network allows connections
        self._tasks: asyncio.TaskGroup | None = None
        self._listed = 0
        self._logged = ""
        self._log_pause_until = 0.0

    async def run(self) -> None:
        """Lead until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._run.run_lease.keep())
            tasks.create_task(self._watch_nodes())
            tasks.create_task(self.history_writer.run())
            tasks.create_task(self._decide())

    # -- watching

    async def _watch_nodes(self) -> None:
        """Follow the nodes' keys, starting with a new listing each time that the run's keys are listed.

        The run's keys are listed again when the store is back, perhaps without its data. An older listing of the nodes
        may then offer ports that the nodes have closed.
        """
        while True:
            listings = self._run.listings
            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(self._follow_nodes(listings))
                await self._run.changed.until(lambda: self._run.listings != listings)  # noqa: B023 - awaited here
                following.cancel()

    async def _follow_nodes(self, listings: int) -> None:
        nodes = self._run.keys.nodes
        # RunWatch logs that the store is unreachable.
        async with aclosing(follow_forever(self._run.store, nodes, lost=lambda _: None)) as news:
            async for batch in news:
                if isinstance(batch, Listing):
                    present = {entry.key.removeprefix(nodes) for entry in batch.entries}
                    for node in [node for node in self.membership.peers if node not in present]:
                        self._note_deleted_key(node)
                    for entry in batch.entries:
                        self._note_key(entry)
                    self._listed = listings
                else:
                    for change in batch:
                        if change.entry is not None:
                            self._note_key(change.entry)
                        else:
                            self._note_deleted_key(change.key.removeprefix(nodes))
                if batch:
                    self._run.changed.send()

    def _note_key(self, entry: Entry) -> None:
        node = entry.key.removeprefix(self._run.keys.nodes)
        answers = node == self._run.node or self._server.is_connected(node)
        self.membership.note_run(self._run, now=self._now())
        newcomer = self.membership.note_key(node, entry, answers=answers)
        peer = self.membership.peers.get(node)
        if peer is not None and self._history.note_progress(peer.record):
            self.history_writer.notify()
        if peer is not None and (steps := self._history.note_first_steps(peer.record)):
            logger.warning(
                "round %d: the ranks began at different steps, from %d to %d, so they do not train the same model: let "
                "all ranks load the same checkpoint, as torchelastic.Checkpointer does",
                *(peer.record.round, *steps),
            )
            self.history_writer.notify()
        if newcomer is not None and not newcomer.answers:
            self._start(self._until_connected(node))

    def _note_deleted_key(self, node: str) -> None:
        peer = self.membership.note_deleted_key(node)
        if peer is not None and (node == self._run.node or self._server.is_connected(node)):
            # The node's lease expired; if the node answers, only the store was unreachable.
            self.membership.expired[node] = peer
            self._start(self._while_expired(peer))

    # -- probes: a refused connection means dead, an answer means alive; without an answer, the node's key decides

    def note_connection(self, node: str, connected: bool) -> None:
        """Note that a connected node is alive; probe a lost one until it is connected or dead, or its key is gone."""
        if connected:
            self._connections_work = True
            self._note_alive(node)
        elif (peer := self.membership.peers.get(node)) is not None:
            self._start(self._after_loss(peer))

    async def reaches_a_peer(self, within: float) -> bool:
        """Return whether a connected node answers a probe within ``within`` seconds."""
        known = {**self.membership.expired, **self.membership.peers}
        connected = [peer for peer in known.values() if self._server.is_connected(peer.id)]
        probes = [asyncio.create_task(self._probe(peer, within)) for peer in connected]
        try:
            for each in asyncio.as_completed(probes):
                if await each is ProbeResult.ALIVE:
                    return True
            return False
        finally:
            await cancel(*probes)

    def _start(self, probing: Coroutine[Any, Any, None]) -> None:
        if self._tasks is None:
            probing.close()  # this node does not lead yet
        else:
            self._tasks.create_task(probing)

    async def _until_connected(self, node: str) -> None:
        """Probe a new node until it connects; a node that neither connects nor refuses counts as alive."""
        for timeout in self._timeouts(node):
            await asyncio.sleep(timeout)
            peer = self.membership.peers.get(node)
            if peer is None or peer.answers:
                return
            # A refusal means death only if connections are known to work in this network.
            refused = self._connections_work and await self._probe(peer) is ProbeResult.DEAD
            if refused and not self._server.is_connected(node):
                logger.info("%s is dead: it refuses a connection", node)
                self._note_dead(node)
                return
        self._note_alive(node)

    def _timeouts(self, node: str) -> tuple[float, ...]:
        """Return the seconds to wait for a node's connection before each probe."""
        if node not in self.membership.ranks:
            return (CONNECT_TIMEOUT, CONNECT_TIMEOUT)
        first = MEMBER_CONNECT_TIMEOUT + len(self.membership.peers) / CONNECTIONS_PER_SECOND
        if self._run.node in self.membership.ranks:
            return (first, CONNECT_TIMEOUT)
        # This leader is not a member, so all members may be dead; the key of a dead member remains for one lease.
        return (first, *(CONNECT_TIMEOUT,) * math.ceil(self._run.settings.lease / CONNECT_TIMEOUT))

    async def _after_loss(self, peer: Peer) -> None:
        backoff = Backoff()
        while peer.id in self.membership.peers and not self._server.is_connected(peer.id):
            if await self._probe(peer) is ProbeResult.DEAD:
                if not self.membership.is_departure_expected(peer.id):
                    logger.info("%s is dead: its connection was lost and it refuses a new one", peer.id)
                self._note_dead(peer.id)
                return
            await backoff.wait()

    async def _while_expired(self, peer: Peer) -> None:
        """Probe a node without a key until it has a key again or does not answer."""
        while peer.id in self.membership.expired:
            within = self._election.expiry_probe_timeout
            if peer.id != self._run.node and await self._probe(peer, within) is not ProbeResult.ALIVE:
                self.membership.expired.pop(peer.id, None)
                self._run.changed.send()
                return
            await asyncio.sleep(EXPIRED_RECHECK)

    def _note_alive(self, node: str) -> None:
        if self.membership.note_alive(node):
            self._run.changed.send()

    def _note_dead(self, node: str) -> None:
        self.membership.dead.add(node)
        self._run.changed.send()

    async def _probe(self, peer: Peer, within: float = PROBE_TIMEOUT) -> ProbeResult:
        record, run = peer.record, self._run
        address, about = f"{bracketed(record.address)}:{record.peer_port}", {"peer": peer.id, "key": record.peer_key}
        return await probe(address, run=run.settings.run_id, node=run.node, **about, timeout=within)

    # -- deciding

    async def _decide(self) -> None:
        backoff = Backoff()
        while True:
            seen = self._run.changed.count
            began = self._now()
            decision = self._plan() if self._is_ready() else Hold()
            took = self._now() - began
            if isinstance(decision, Hold):
                # The decision may change when the leader stops waiting for awaited members.
                times = (decision.until, self._log(decision.why), self._wait_until())
                wait = min((time - self._now() for time in times if time is not None and time > began), default=None)
                changed = await self._run.changed.after(seen, timeout=None if wait is None else max(wait, 0.0)) != seen
                if changed and took > QUICK_DECISION:
                    await asyncio.sleep(PAUSE_FACTOR * took)
                continue
            try:
                if not await self._execute(decision):
                    # Another node was faster, or the watch has not returned this node's own write yet.
                    await self._run.changed.after(seen, timeout=self._run.settings.lease)
                backoff.reset()
            except StoreUnavailable:
                await backoff.wait()

    def _is_ready(self) -> bool:
        """Return whether this node leads and has read everything: a decision on partial data would lose nodes."""
        leader = self._run.leader.record
        read = self._listed == self._run.listings and self.history_writer.has_read
        return read and self._run.unreachable_since is None and leader is not None and leader.node == self._run.node

    def _wait_until(self) -> float:
        """Return the time one lease after the store came back or this node took an expired lead, whichever is later."""
        times = [time for time in (self._run.reachable_since, self._took_expired_at) if time is not None]
        return max(times, default=-math.inf) + self._run.settings.lease

    def _plan(self) -> Decision:
        known = self._run.accepted_round
        self.membership.update(
            self._run,
            now=self._now(),
            wait_until=self._wait_until(),
            remembered=known if known is not None and known.protocol == PROTOCOL_VERSION else None,
            resigned=self._election.candidacy is Candidacy.YIELDED,
        )
        self._note_run_state()
        return plan(self.membership, self._run.settings)

    def _note_run_state(self) -> None:
        """Note in the history whether nodes are missing, or the workers of the round have failed."""
        membership = self.membership
        round = membership.round or membership.remembered  # a store that has lost the round does not end it
        if membership.outcome is not None:
            return
        if round is None or not round.members:
            records = [peer.record for peer in membership.peers.values() if not membership.is_leaving(peer.id)]
            enough = sum(not record.starting for record in records) >= membership.size.target
            self._history.enter(RunState.RENDEZVOUS if enough else RunState.WAITING)
        elif membership.failed_since is not None:
            self._history.round_ended()

    def _end_of(self, node: str) -> DepartureReason | None:
        """Return why a member of the current round is gone; None if it is present."""
        if self.membership.is_departure_expected(node):
            return DepartureReason.LEFT
        return None if self.membership.is_present(node) else DepartureReason.DIED

    def _log(self, why: str) -> float | None:
        """Log why the leader waits, at most once in each interval; return when to log it, if not now."""
        if why == self._logged:
            return None
        if why and self._now() < self._log_pause_until:
            return self._log_pause_until
        self._logged = why
        if why:
            self._log_pause_until = self._now() + LOG_INTERVAL
            logger.info("%s", why)
        return None

    # -- committing

    async def _execute(self, decision: Decision) -> bool:
        """Execute a decision; return whether a record was committed."""
        keys, run = self._run.keys, self._run
        match decision:
            case RoundRecord() as round:
                round = self._history.with_breakdown(round, self._end_of)
                if not round.nonce:
                    round = msgspec.structs.replace(round, nonce=secrets.token_hex(8))
                committed = await self._commit(keys.state, StateRecord(round), run.state.mod_revision)
                if committed:
                    self.history_writer.notify(rewrite=True)
                return committed
            case NoticeRecord() as notice:
                return await self._commit(keys.notice, notice, run.notice.mod_revision)
            case OutcomeRecord() as outcome:
                return await self._commit_outcome(outcome, run.state)
            case _:
                logger.info("the store has lost a round; yielding the lead to a node that can restore it")
                await self._election.resign()
                return False

    async def _commit_outcome(self, outcome: OutcomeRecord, decided_on: Versioned[StateRecord]) -> bool:
        entry = await self._run.store.get(self._run.keys.leader)
        if entry is None or entry.mod_revision != self._run.leader.mod_revision:
            return False  # this node was paused, and may have decided on an old state
        self._history.end(succeeded=outcome.state is OutcomeState.SUCCEEDED)
        # Write the history first, for readers of the outcome; if that fails, the run ends anyway.
        with suppress(StoreUnavailable):
            await self.history_writer.write()
        state = StateRecord(None if decided_on.record is None else decided_on.record.round, outcome)
        return await self._commit(self._run.keys.state, state, decided_on.mod_revision)

    async def _commit(self, key: str, record: msgspec.Struct, expected: int) -> bool:
        """Write a record if the key still has the expected revision; return whether it was written."""
        revision = await self._run.run_lease.compare_and_swap(key, encode(record), expected=expected)
        if revision is not None:
            logger.debug("committed %s", key)
            self._run.note(key, record, revision)
        return revision is not None

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
