"""A node's part in the rendezvous: it registers, follows the leader, and leads when it is its turn.

:class:`RendezvousNode` is the agent's interface. It keeps the node's record in the store, emits every new round and the
outcome as events, and hides which node leads.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import msgspec

from torchelastic.errors import MalformedRecord, StoreError
from torchelastic.protocol import NodePhase, NodeRecord, NoticeRecord, OutcomeRecord, RoundRecord, bracketed, decode
from torchelastic.rendezvous.history import History, HistoryWriter
from torchelastic.rendezvous.leader import Leader
from torchelastic.rendezvous.leader_election import LeaderElection
from torchelastic.rendezvous.peer_connection import FINAL_PROBE_TIMEOUT, PeerServer, listen
from torchelastic.rendezvous.run_state import NodeRegistration, RunStateWatch, cancel, remove_finished_run
from torchelastic.store.backoff import RETRY_MIN
from torchelastic.store.wrappers import never_refusing

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from torchelastic.config.settings import PortRange, RendezvousSettings
    from torchelastic.protocol import SizeRecord, TimeBreakdown
    from torchelastic.store.api import Store

logger = logging.getLogger(__name__)

LEAVE_TIMEOUT: Final = 2.0
"""Seconds that a node takes at most to delete its keys; without the store, its lease does that."""

STORE_SHARE: Final = 0.75
"""The store's share of the time for :meth:`RendezvousNode.is_current`; the rest is a peer's, if the store is away."""


@dataclass(frozen=True, slots=True)
class RoundStarted:
    """A new round has begun.

    Attributes:
        record: who trains together.
        store: the listening socket on which this node has to serve the round's TCPStore; None if another node serves
            it. The receiver owns the socket.
    """

    record: RoundRecord
    store: socket.socket | None = None


@dataclass(frozen=True, slots=True)
class Noticed:
    """This node's round is about to change, or (with 0 seconds) does not change after all.

    Only members are told. When all workers that asked for notice have answered, the receiver calls
    ``report(round, saved=serial)``. A later notice has a higher serial.
    """

    record: NoticeRecord


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run has an outcome."""

    record: OutcomeRecord


@dataclass(frozen=True, slots=True)
class Partitioned:
    """This node reaches neither the store nor the peers of its round: it must stop its workers."""


Event = RoundStarted | Noticed | RunEnded | Partitioned


def close_unclaimed(queue: asyncio.Queue[Any]) -> None:
    """Close the sockets of rounds that were not received from a queue of events, which may hold other items too."""
    while not queue.empty():
        event = queue.get_nowait()
        if isinstance(event, RoundStarted) and event.store is not None:
            event.store.close()


class StorePortOffer:
    """The port on which this node offers to serve the next round's TCPStore.

    An offer is good for one round, and for one incarnation of the store: :meth:`renew` replaces it before the node
    registers again with a store that may have lost a round. The offer before that stays open, because a leader may
    have used it just before.
    """

    def __init__(self, host: str, ports: PortRange | None) -> None:
        self._host = host
        self._ports = ports
        self._listeners = [listen(host, ports)]

    @property
    def port(self) -> int:
        """The port that is offered now."""
        port: int = self._listeners[-1].getsockname()[1]
        return port

    def renew(self) -> int:
        """Offer another port; return it."""
        port = self.port
        while len(self._listeners) > (1 if self._ports is None else 0):
            self._listeners.pop(0).close()
        self._listeners.append(listen(self._host, self._ports, after=port))
        return self.port

    def take(self, round: RoundRecord, *, is_member: bool, missed_rounds: bool) -> socket.socket | None:
        """Return the listener that a round has named, if it is this node's; then offer another port.

        Another node on this host may have named the same port, and so may a round that this node missed.
        """
        ports = [f"{bracketed(self._host)}:{listener.getsockname()[1]}" for listener in self._listeners]
        named = round.store in ports
        taken = self._listeners.pop(ports.index(round.store)) if named and is_member else None
        if named or missed_rounds:
            fresh = listen(self._host, self._ports, after=int(ports[-1].rpartition(":")[2]))
            self.close()
            self._listeners = [fresh]
        return taken

    def close(self) -> None:
        """Close all listeners that were not taken."""
        for listener in self._listeners:
            listener.close()


class RendezvousNode:
    """One node of a run; an async context manager that is registered in the store while it is open.

    Args:
        store: where the nodes meet.
        settings: the rules, and the run's id.
        node: this node's id: its name, a dot, and a text unique to this process.
        record: the node's record; the ports of its peer server and TCPStore are filled in.
        history: what it knows of the run's past; None for what the settings say.

    Raises:
        NoPortFree: no port is free of those on which it may listen.
    """

    def __init__(
        self,
        store: Store,
        settings: RendezvousSettings,
        *,
        node: str,
        record: NodeRecord,
        history: History | None = None,
    ) -> None:
        self.node = node
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        """What happened, in order; an agent puts its own events in between."""
        self.history = History(None, settings.resume.time_breakdown) if history is None else history
        """What this node knows of the run's past."""
        self._settings = settings
        self.run = RunStateWatch(node, settings, never_refusing(store))
        self._offer = StorePortOffer(record.address, settings.ports)
        try:
            self.server = PeerServer(run=settings.run_id, node=node, host=record.address, ports=settings.ports)
        except BaseException:
            self._offer.close()
            raise
        resume = settings.resume
        record = msgspec.structs.replace(
            record,
            link=self.server.port,
            store=self._offer.port,
            round=resume.round,
            restarts=resume.restarts,
            uncharged_restarts=resume.uncharged_restarts,
        )
        self.registration = NodeRegistration(self.run, record, self._offer.renew)
        address = f"{bracketed(record.address)}:{self.server.port}"
        self.election = LeaderElection(self.run, self.registration, address)
        self.leader: Leader | None = None
        self._last_number = resume.round
        self._restored = 0
        self._notice: NoticeRecord | None = None
        self._leaving = False
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            await remove_finished_run(self.run)
            await self.server.start()
        except BaseException:
            await self._close_sockets()
            raise
        self._running = asyncio.create_task(self._take_part())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._cancel()
        await self._close_sockets()
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT):
                await self._write_final_history()
                await self.election.leave()
                await self.registration.withdraw()
        except (StoreError, TimeoutError):
            logger.info("the store is away: this node's key goes when its lease ends")

    async def abort(self) -> None:
        """Stop without telling the store, as a process that is killed does: its listener closes first."""
        await self.server.close()
        await self._cancel()
        await self._close_sockets()

    async def _cancel(self) -> None:
        if self._running is not None:
            await cancel(self._running)

    async def _write_final_history(self) -> None:
        """Write where the time went, if this node led last and no node leads after it: all nodes leave at once."""
        if self.run.last_leader != self.node or self.run.outcome is not None:
            return
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(LEAVE_TIMEOUT / 2):
                # Nodes without a leader report the checkpoints of their last moments in their records.
                for entry in (await self.run.store.list(self.run.keys.nodes)).entries:
                    with suppress(MalformedRecord):
                        self.history.note_progress(decode(entry.value, NodeRecord))
                self.history.note_progress(self.registration.record)
                writer = HistoryWriter(self.history, self.run)
                await writer.read()
                self.history.end(succeeded=False)
                await writer.write()

    async def _close_sockets(self) -> None:
        await self.server.close()
        self._offer.close()
        close_unclaimed(self.events)

    # -- what the agent asks

    @property
    def failed(self) -> asyncio.Task[None]:
        """Ends, with the error, if the node cannot take part: the store refused it from the beginning."""
        if self._running is None:
            raise RuntimeError("the node is not open")
        return self._running

    @property
    def is_leader(self) -> bool:
        """Whether this node leads the run, as far as it knows."""
        return self.leader is not None and self.leader.history_writer.has_read and self.election.is_leader

    @property
    def has_leader(self) -> bool:
        """Whether a node forms the next round when it is time, as far as known; False while the store is away."""
        return self.run.away_since is None and self.election.has_leader

    @property
    def round(self) -> RoundRecord | None:
        """The last round that this node was told of."""
        return self.run.accepted_round

    @property
    def restarts(self) -> int:
        """Restarts charged to the run."""
        return (self.round or self._settings.resume).restarts

    @property
    def uncharged_restarts(self) -> int:
        """Restarts of the run without a charge."""
        return (self.round or self._settings.resume).uncharged_restarts

    @property
    def time_breakdown(self) -> TimeBreakdown:
        """Where the run's time went until now, as far as this node knows."""
        return self.history.breakdown()

    @property
    def size(self) -> SizeRecord:
        """How many nodes there should be, as far as this node knows."""
        return self.run.size or self._settings.size

    async def flush(self) -> None:
        """Wait until the store has all that this node has reported."""
        await self.registration.flush()

    async def is_current(self, round: int, *, timeout: float = 5.0) -> bool:  # noqa: ASYNC109 - bounds the waits
        """Return whether a round of which this node is a member is still the run's, read from the store now.

        If the store is away, the answer is what this node and a connected peer can know.
        """
        accepted = self.round
        if accepted is None or accepted.number != round or self.node not in accepted.nodes or self._is_over():
            return False
        try:
            async with asyncio.timeout(timeout * STORE_SHARE):
                current = await self.run.is_current(accepted)
        except (StoreError, TimeoutError):
            current = not self._has_peers() or await self._reaches_a_peer(timeout * (1 - STORE_SHARE))
        return current and self.round is accepted and not self._is_over()

    def _is_over(self) -> bool:
        return self.run.outcome is not None or self.registration.record.phase is NodePhase.PARTITIONED

    # -- what the agent reports

    def report(self, round: int, **changes: Any) -> None:  # noqa: ANN401 - any field of the record
        """Report how this node fares in a round; reports of a past round are dropped, and each round starts afresh.

        A node that leaves stays LEAVING, unless all its workers have exited with 0 before.

        Args:
            round: the round's number.
            changes: fields of the node's record: ``phase``, ``failure``, ``notice``, ``saved``, ``first_step_at``,
                ``last_checkpoint_at``.
        """
        if self._leaving and changes.get("phase") is not NodePhase.DONE:
            changes.pop("phase", None)
        if self.registration.record.round == round:
            self.registration.update(**changes)

    async def leave(self, *, timeout: float = 1.0) -> None:  # noqa: ASYNC109 - bounds the wait for an absent store
        """Announce that this node leaves, so that the next round forms without it.

        It is still told what happens until it is closed, because the next round may wait for workers that asked for
        notice, including its own.
        """
        self._leaving = True
        leader = self.leader
        self.election.withdraw()
        if self.registration.record.phase is not NodePhase.DONE:
            self.registration.update(phase=NodePhase.LEAVING)
        try:
            async with asyncio.timeout(timeout):
                writes = [self.registration.flush()]
                if leader is not None and leader.history_writer.has_read:
                    writes.append(leader.history_writer.write())  # for the next leader
                await asyncio.gather(*writes)
                # If all nodes leave at once, one has to tell the others when the last worker has saved.
                await self.election.leave(standby=self.registration.record.notice > 0)
        except (StoreError, TimeoutError):
            logger.info("the store is away: the others learn of this node's leaving by its connection")

    # -- the run

    async def _take_part(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.registration.run())
            tasks.create_task(self.run.follow())
            tasks.create_task(self._emit_events())
            tasks.create_task(self.election.campaign())
            tasks.create_task(self.election.stay_connected())
            tasks.create_task(self._lead())
            tasks.create_task(
                watch_for_partition(
                    self.run, self._trains_with_others, self._reaches_a_peer, partitioned=self._partitioned
                )
            )

    async def _emit_events(self) -> None:
        """Emit rounds, notices, and in the end the outcome."""
        changed = self.run.changed
        while True:
            seen = changed.count
            if self.run.restored != self._restored:
                self._restored = self.run.restored
                self.registration.update(store=self._offer.renew())
            round, accepted = self.run.round, self.run.accepted_round
            # An equal number with another nonce: the store had lost the round, and the leader did not know of it.
            if round is not None and (accepted is None or (round.number >= accepted.number and round != accepted)):
                self.run.accepted_round = round
                self.history.note_round(round)
                self._emit_round(round)
            self._emit_notice()
            if self.run.outcome is not None:
                self._end_run()
                self.events.put_nowait(RunEnded(self.run.outcome))
                return
            await changed.after(seen)

    def _end_run(self) -> None:
        """The run has ended: this node takes no part in the next run of this id."""
        self.election.withdraw()
        if self.round is None or self.node not in self.round.nodes:
            # It has only learned of the end; other nodes need not wait until it is gone.
            self._leaving = True
            self.registration.update(phase=NodePhase.LEAVING, round=0, restarts=0, uncharged_restarts=0)

    def _emit_round(self, round: RoundRecord) -> None:
        previous, self._last_number = self._last_number, round.number
        listener = self._offer.take(
            round, is_member=self.node in round.nodes, missed_rounds=round.number != previous + 1
        )
        self.events.put_nowait(RoundStarted(round, listener))
        record = self.registration.record
        self.registration.update(
            round=round.number,
            restarts=max(round.restarts, record.restarts),
            uncharged_restarts=max(round.uncharged_restarts, record.uncharged_restarts),
            store=self._offer.port,
            phase=NodePhase.LEAVING if self._leaving else NodePhase.READY,
            failure=None,
            notice=0.0,
            saved=0,
            first_step_at=0.0,
            last_checkpoint_at=0.0,
        )
        self._notice = None

    def _emit_notice(self) -> None:
        notice, round, before = self.run.notice.record, self.round, self._notice
        if notice is None or round is None or notice.round != round.number or self.node not in round.nodes:
            return
        if notice != before and (notice.seconds or before is not None):
            self._notice = notice
            self.events.put_nowait(Noticed(notice))

    async def _lead(self) -> None:
        """Lead whenever this node is the leader."""
        while True:
            await self.election.until_leader()
            self.server.observer = self.leader = Leader(self.run, self.election, self.server, self.history)
            leading = asyncio.create_task(self.leader.run())
            # A vacancy does not end it: if all leases expired with a store that was away, the leader's knowledge of
            # its peers keeps them from being taken for lost.
            replaced = asyncio.create_task(self.election.until_replaced(self.node))
            try:
                await asyncio.wait((leading, replaced), return_when=asyncio.FIRST_COMPLETED)
                if leading.done():
                    await leading
            finally:
                self.server.observer = self.leader = None
                await cancel(leading, replaced)

    def _partitioned(self) -> None:
        logger.warning("neither the store nor a peer can be reached: stopping the workers")
        self.report(self.registration.record.round, phase=NodePhase.PARTITIONED)
        self.events.put_nowait(Partitioned())

    def _has_peers(self) -> bool:
        return self.round is not None and self.node in self.round.nodes and len(self.round.members) > 1

    def _trains_with_others(self) -> bool:
        return self._has_peers() and self.registration.record.phase is not NodePhase.DONE

    async def _reaches_a_peer(self, within: float) -> bool:
        peers = self.election.reaches_leader if self.leader is None else self.leader.reaches_a_peer
        return await peers(within)


async def watch_for_partition(
    run: RunStateWatch,
    has_workers: Callable[[], bool],
    reaches_a_peer: Callable[[float], Awaitable[bool]],
    *,
    partitioned: Callable[[], None],
) -> NoReturn:
    """Call ``partitioned`` each time that this node is partitioned; until cancelled.

    Losing the store alone stops nothing, nor does losing the peers alone. A node that has been without the store for
    one lease, and then finds neither the store nor a peer, must assume that the others have gone on without it.

    Args:
        run: the run.
        has_workers: whether this node trains with others now.
        reaches_a_peer: whether a peer answers within so many seconds.
        partitioned: is called.
    """
    changed, lease = run.changed, run.settings.lease
    while True:
        seen = changed.count
        if (away := run.away_since) is None or not has_workers():
            await changed.after(seen)
            continue
        left = away + lease - asyncio.get_running_loop().time()
        if left > 0:
            await changed.after(seen, timeout=left)
        elif await _reaches_any(run, reaches_a_peer, min(FINAL_PROBE_TIMEOUT, lease)):
            await changed.after(seen, timeout=lease)
        elif run.away_since is not None and has_workers():
            partitioned()
            await changed.until(lambda: run.away_since is None)


async def _reaches_any(run: RunStateWatch, reaches_a_peer: Callable[[float], Awaitable[bool]], within: float) -> bool:
    """Return whether a peer or the store answers in time; a broken connection may need a second attempt."""

    async def find_a_peer() -> None:
        while not await reaches_a_peer(within):  # noqa: ASYNC110 - each turn is a probe
            await asyncio.sleep(RETRY_MIN)

    async def find_the_store() -> None:
        while True:
            await asyncio.sleep(RETRY_MIN)  # usually a peer has answered by then
            with suppress(StoreError):
                await run.store.get(run.keys.leader)
                return

    probes = [asyncio.create_task(probe) for probe in (find_a_peer(), find_the_store())]
    try:
        found, _ = await asyncio.wait(probes, timeout=within, return_when=asyncio.FIRST_COMPLETED)
        return bool(found)
    finally:
        await cancel(*probes)
