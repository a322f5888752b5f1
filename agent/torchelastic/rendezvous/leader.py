"""The leader: watches the nodes, and commits what :func:`~.policy.plan.plan` returns.

Every commit of a round or an outcome is one compare-and-swap of the run's state, on the revision from which the leader
decided. So a leader that was paused, and replaced, cannot change what its successor has committed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Final

import msgspec

from torchelastic.errors import StoreUnavailable
from torchelastic.protocol import (
    PROTOCOL_VERSION,
    NodeEnd,
    NoticeRecord,
    OutcomeRecord,
    OutcomeState,
    RoundRecord,
    RunState,
    StateRecord,
    encode,
)
from torchelastic.rendezvous.change_signal import ChangeSignal
from torchelastic.rendezvous.history_writer import HistoryWriter
from torchelastic.rendezvous.leader_election import Candidacy
from torchelastic.rendezvous.liveness import LivenessProber
from torchelastic.rendezvous.membership import Membership
from torchelastic.rendezvous.policy.plan import plan
from torchelastic.rendezvous.policy.snapshot import Decision, EndRun, FormRound, GiveNotice, GiveWay, Hold
from torchelastic.store.api import Listing
from torchelastic.store.backoff import backoff_delay
from torchelastic.store.list_and_watch import follow_forever

if TYPE_CHECKING:
    from torchelastic.rendezvous.history import History
    from torchelastic.rendezvous.leader_election import LeaderElection
    from torchelastic.rendezvous.peer_connection import PeerServer
    from torchelastic.rendezvous.policy.snapshot import Snapshot
    from torchelastic.rendezvous.run_state import RunContext, Versioned
    from torchelastic.store.api import Entry

logger = logging.getLogger(__name__)

QUICK_DECISION: Final = 1e-3
"""Seconds; a slower decision is not made again for every single change."""

PAUSE_FACTOR: Final = 2
"""After a slow decision the leader waits for this multiple of its time, so that it takes a third of a processor at
most among a thousand nodes."""

LOG_INTERVAL: Final = 1.0
"""Seconds between two log messages about what the leader waits for."""


class Leader:
    """One node's term as the leader.

    Args:
        context: the node's.
        election: knows how this node came to lead.
        server: knows which nodes are connected.
        history: what is known of the run's past.
    """

    def __init__(self, context: RunContext, election: LeaderElection, server: PeerServer, history: History) -> None:
        self._context = context
        self._node = context.node
        self._settings = context.settings
        self._run = context.run
        self._keys = context.keys
        self._election = election
        self._server = server
        self._history = history
        self._history_writer = HistoryWriter(history, context)
        self._changed = ChangeSignal()
        dead = () if election.dead_leader is None else (election.dead_leader,)
        self._membership = Membership(context.node, context.run, context.keys, context.settings.size, dead)
        self._liveness = LivenessProber(
            context.node,
            context.settings,
            self._membership,
            server,
            changed=self._changed,
            connections_work=election.connections_work,
        )
        self._took_expired_at = election.took_expired_at
        self._listed = False
        self._said = ""
        self._silent_until = 0.0

    async def run(self) -> None:
        """Lead until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._liveness.run())
            tasks.create_task(self._context.lasting.keep(at_once=self._run.round is None))
            tasks.create_task(self._watch_nodes())
            tasks.create_task(self._history_writer.run(self._changed.send))
            tasks.create_task(self._forward_changes())
            tasks.create_task(self._decide())
            tasks.create_task(self._end_patience())

    @property
    def has_read_history(self) -> bool:
        """Whether the run's history in the store is known."""
        return self._history_writer.has_read

    async def hand_over(self) -> None:
        """Write the run's history for the next leader, unless this one has not read it yet.

        Raises:
            StoreUnavailable: as the store does.
        """
        if self.has_read_history:
            await self._history_writer.write()

    def peer_connected(self, node: str) -> None:
        """Note that a node is connected, and so alive."""
        self._liveness.peer_connected(node)

    def peer_lost(self, node: str) -> None:
        """Note that a node's connection is lost."""
        self._liveness.peer_lost(node)

    async def reaches_a_peer(self, within: float) -> bool:
        """Whether one of the connected nodes answers a probe within so many seconds."""
        return await self._liveness.reaches_a_peer(within)

    # -- watching

    async def _watch_nodes(self) -> None:
        # The watch of the run's keys reports that the store is away.
        async with aclosing(follow_forever(self._context.store, self._keys.nodes, lost=lambda _: None)) as news:
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

    async def _forward_changes(self) -> None:
        """Forward changes of the run's keys, so that the leader waits for one signal; the others need not see ours."""
        seen = self._run.changed.count
        while True:
            seen = await self._run.changed.after(seen)
            self._changed.send()

    def _relist(self, listing: Listing) -> None:
        present = {entry.key for entry in listing.entries}
        for node in [node for node in self._membership.peers if self._keys.node(node) not in present]:
            self._gone(node)
        for entry in listing.entries:
            self._saw(entry)
        self._listed = True
        self._changed.send()

    def _saw(self, entry: Entry) -> None:
        node = entry.key.removeprefix(self._keys.nodes)
        answers = node == self._node or self._server.is_connected(node)
        newcomer = self._membership.saw(entry, now=self._now(), answers=answers)
        peer = self._membership.peers.get(node)
        if peer is not None and self._history.note_progress(peer.record):
            self._history_writer.notify()
        if newcomer is not None and not newcomer.answers:
            self._liveness.expect_connection(node)

    def _gone(self, node: str) -> None:
        peer = self._membership.gone(node)
        if peer is not None and (node == self._node or self._server.is_connected(node)):
            # Its lease expired. If it answers, only the store was away.
            self._membership.keep_silent(node)
            self._liveness.probe_silent(peer)

    # -- patience with a store that was away

    def _patient_until(self) -> float:
        """One lease after the store came back, or after this node took an expired lead, whichever is later."""
        times = [time for time in (self._run.back_at, self._took_expired_at) if time is not None]
        return max(times, default=-math.inf) + self._settings.lease

    async def _end_patience(self) -> None:
        """Decide again when the patience ends."""
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
            snapshot = self._snapshot() if self._is_ready() else None
            decision = Hold() if snapshot is None else plan(snapshot, self._settings)
            took = self._now() - began
            if snapshot is not None:
                self._note_run_state(snapshot)
            if isinstance(decision, Hold):
                until = min(self._log(decision.why), math.inf if decision.until is None else decision.until)
                wait = None if until == math.inf else max(until - self._now(), 0.0)
                if await self._changed.after(seen, timeout=wait) != seen and took > QUICK_DECISION:
                    await asyncio.sleep(PAUSE_FACTOR * took)
                continue
            try:
                if not await self._carry_out(decision):
                    # Another node was faster, or this node's own write is on its way back through the watch.
                    await self._changed.after(seen, timeout=self._settings.lease)
                tries = 0
            except StoreUnavailable:
                await asyncio.sleep(backoff_delay(tries))
                tries += 1

    def _is_ready(self) -> bool:
        """Whether this node leads and has read everything: deciding on half of it would lose nodes."""
        leader = self._run.leader.record
        read = self._listed and self.has_read_history
        return read and self._run.away_since is None and leader is not None and leader.node == self._node

    def _snapshot(self) -> Snapshot:
        round = self._run.accepted_round
        return self._membership.snapshot(
            now=self._now(),
            patient_until=self._patient_until(),
            remembered=round if round is not None and round.protocol == PROTOCOL_VERSION else None,
            gave_way=self._election.candidacy is Candidacy.YIELDED,
        )

    def _note_run_state(self, snapshot: Snapshot) -> None:
        """Note in the history what the leader sees first: nodes are missing, or a round has ended."""
        round = snapshot.round or snapshot.remembered  # a store that has lost the round does not end it
        if round is None or not round.members:
            enough = sum(not snapshot.is_leaving(node) for node in snapshot.peers) >= snapshot.size.target
            self._history.enter(RunState.RENDEZVOUS if enough else RunState.WAITING)
        elif snapshot.failed_since is not None:
            self._history.round_broke()

    def _end_of(self, node: str) -> NodeEnd | None:
        """Return why a member of the current round is gone; None if it is present."""
        if self._membership.is_departure_expected(node):
            return NodeEnd.LEFT
        return None if self._membership.is_present(node) else NodeEnd.DIED

    def _log(self, why: str) -> float:
        """Log why nothing happens, once in a while; return when to log it, if that is later."""
        if why == self._said:
            return math.inf
        if why and self._now() < self._silent_until:
            return self._silent_until
        self._said = why
        if why:
            self._silent_until = self._now() + LOG_INTERVAL
            logger.info("%s", why)
        return math.inf

    # -- committing

    async def _carry_out(self, decision: Decision) -> bool:
        """Carry out a decision on the snapshot just taken; return whether this node knows the result already."""
        match decision:
            case FormRound(record):
                return await self._commit_round(record, self._run.state)
            case GiveNotice(record):
                return await self._commit_notice(record)
            case EndRun(record):
                await self._commit_outcome(record, self._run.state)
            case GiveWay(why):
                logger.info("%s", why)
                await self._election.give_way()
        return False

    async def _commit_round(self, round: RoundRecord, decided_on: Versioned[StateRecord]) -> bool:
        round = self._history.with_breakdown(round, self._end_of)
        if not round.nonce:
            round = msgspec.structs.replace(round, nonce=secrets.token_hex(8))
        state = StateRecord(round)
        revision = await self._context.lasting.compare_and_swap(
            self._keys.state, encode(state), expected=decided_on.modified
        )
        if revision is None:
            return False
        logger.debug("committed round %d: %s", round.number, round.cause)
        self._run.note_state(state, revision)
        self._history_writer.notify(rewrite=True)
        return True

    async def _commit_notice(self, notice: NoticeRecord) -> bool:
        expected = self._run.notice.modified
        revision = await self._context.lasting.compare_and_swap(self._keys.notice, encode(notice), expected=expected)
        if revision is None:
            return False
        action = "notice" if notice.seconds else "withdrawn notice"
        logger.debug("%s %d of the end of round %d: %s", action, notice.serial, notice.round, notice.cause)
        self._run.note_notice(notice, revision)
        return True

    async def _commit_outcome(self, outcome: OutcomeRecord, decided_on: Versioned[StateRecord]) -> None:
        entry = await self._context.store.get(self._keys.leader)
        if entry is None or entry.modified != self._run.leader.modified:
            return  # this node was paused, and what it has decided on may be of the past
        succeeded = outcome.state is OutcomeState.SUCCEEDED
        # Written before the run is over, so that readers of the outcome find all of it; a failure delays no end.
        with suppress(StoreUnavailable):
            await self._history_writer.finish(self._history.final_breakdown(succeeded=succeeded))
        round = None if decided_on.record is None else decided_on.record.round
        state = encode(StateRecord(round, outcome))
        if await self._context.lasting.compare_and_swap(self._keys.state, state, expected=decided_on.modified) is None:
            self._history_writer.resume()
        else:
            logger.debug("committed the outcome: %s", outcome.state)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
