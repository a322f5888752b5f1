"""One node of a run: it keeps its record in the store, follows the leader, and leads if it is elected.

The agent opens a :class:`RendezvousNode`, reads rounds, notices and the outcome from its queue of events, and reports
the state of its workers to it. The agent does not need to know which node leads.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import logging
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self, cast

import msgspec

from torchelastic.errors import MalformedRecord, NoFreePort, StoreError
from torchelastic.protocol.codec import decode, decode_state
from torchelastic.protocol.records import (
    FailureRecord,
    Member,
    NodePhase,
    NodeRecord,
    NoticeRecord,
    OutcomeRecord,
    RoundRecord,
    StateRecord,
    bracketed,
)
from torchelastic.protocol.worker import SPARE, STARTING_RANKS, format_ranks
from torchelastic.rendezvous.history import History, HistoryWriter
from torchelastic.rendezvous.leader import Leader
from torchelastic.rendezvous.leader_election import LeaderElection
from torchelastic.rendezvous.peer_connection import FINAL_PROBE_TIMEOUT, PeerServer
from torchelastic.rendezvous.run_watch import NodeRegistration, RunWatch, cancel, remove_finished_run
from torchelastic.store.client import RETRY_MIN, NodeStore, within

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchelastic.config.settings import PortRange, RendezvousSettings
    from torchelastic.protocol.records import FailureKind
    from torchelastic.store.api import Store

logger = logging.getLogger(__name__)

LEAVE_TIMEOUT: Final = 2.0
"""Maximum time in seconds for a node to delete its key; after that, the key expires with the lease."""

BACKLOG: Final = 4096
"""Maximum number of connections that wait to be accepted; a thousand nodes may connect at once."""

STORE_SHARE: Final = 0.75
"""Fraction of the timeout of :meth:`RendezvousNode.is_current` for the store; the rest is for a peer."""


@dataclass(frozen=True, slots=True)
class RoundStarted:
    """A new round has begun.

    Attributes:
        record: the round.
        tcp_store_listener: the listening socket for the round's TCPStore, if this node serves it; otherwise None. The
            receiver owns the socket.
    """

    record: RoundRecord
    tcp_store_listener: socket.socket | None = None


@dataclass(frozen=True, slots=True)
class Partitioned:
    """This node reaches neither the store nor a member of its round, and must stop its workers."""


Event = RoundStarted | NoticeRecord | OutcomeRecord | Partitioned
"""An event of the rendezvous.

A notice means that the current round is about to change, and that this node is a member. When all workers that asked
for notice have answered, the receiver calls ``report(round, answered_notice=number)``.
"""


def worker_environments(
    round: RoundRecord, node: str, *, role: str, run_id: str, max_restarts: int
) -> list[dict[str, str]]:
    """Return the documented environment variables of each worker on a member of the round, by local rank.

    Ranks are computed from the record, not exchanged.
    """
    group_rank = round.nodes.index(node)
    first = round.first_rank(node)
    of_role = round.with_role_of(node)
    first_of_role = sum(member.workers for member in of_role[: of_role.index(round.members[group_rank])])
    workers = round.members[group_rank].workers
    host, _, port = round.tcp_store.rpartition(":")
    shared = {
        "GROUP_RANK": str(group_rank),
        "GROUP_WORLD_SIZE": str(len(round.members)),
        "LOCAL_WORLD_SIZE": str(workers),
        "WORLD_SIZE": str(round.world_size),
        "ROLE_NAME": role,
        "ROLE_WORLD_SIZE": str(sum(member.workers for member in of_role)),
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_ROUND": str(round.number),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RESTART_COUNT": str(round.restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        # The TCPStore of the round runs in its own process, so that it outlives each worker.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if round.starting:
        shared[STARTING_RANKS] = format_ranks(round.starting)
    return [
        shared | {"LOCAL_RANK": str(local), "RANK": str(first + local), "ROLE_RANK": str(first_of_role + local)}
        for local in range(workers)
    ]


def spare_environments(
    round: RoundRecord, workers: int, *, role: str, run_id: str, max_restarts: int
) -> list[dict[str, str]]:
    """Return the environment variables of each worker on a spare node, by local rank.

    The ranks follow those of the round. Without MASTER_ADDR, a program that calls ``init_process_group()`` itself fails
    before it disturbs the members. One worker has the address of the round's TCPStore, for copies of the state.
    """
    spare = Member("", "", workers)
    with_spare = msgspec.structs.replace(round, members=(*round.members, spare), roles=(), starting=())
    own = worker_environments(with_spare, "", role=role, run_id=run_id, max_restarts=max_restarts)
    for local_rank, environment in enumerate(own):
        del environment["MASTER_ADDR"], environment["MASTER_PORT"]
        environment.update(WORLD_SIZE=str(round.world_size), GROUP_WORLD_SIZE=str(len(round.members)))
        environment[SPARE] = round.tcp_store if local_rank == 0 else ""
    return own


def failure_of_node(round: RoundRecord, node: str, *, message: str, kind: FailureKind, began: float) -> FailureRecord:
    """Return a failure of a node, attributed to its first rank; `began` is the round's start on the monotonic clock."""
    return FailureRecord(
        round=round.number,
        rank=round.first_rank(node),
        local_rank=0,
        node=node,
        exit_code=1,
        kind=kind,
        host=round.members[round.nodes.index(node)].address,
        message=message,
        uptime=builtins.round(time.monotonic() - began, 3),
    )


class TCPStorePort:
    """The port on which this node offers to serve the TCPStore of the next round.

    A port serves one round. An offer remains until a round uses it. If this node has missed a round that may have used
    it, or if the run's store may have lost such a round, :meth:`renew` offers another port. Unless a port range limits
    the ports, the previous port stays open, because a leader may have chosen it just before.
    """

    def __init__(self, host: str, ports: PortRange | None) -> None:
        self._host = host
        self._ports = ports
        self._listeners = [listen(host, ports)]
        self._round = 0

    @property
    def listener(self) -> socket.socket:
        """The bound socket with the offered port."""
        return self._listeners[-1]

    @property
    def port(self) -> int:
        """The offered port."""
        port: int = self.listener.getsockname()[1]
        return port

    def renew(self) -> int:
        """Offer another port; return it."""
        port = self.port
        while len(self._listeners) > (1 if self._ports is None else 0):
            self._listeners.pop(0).close()
        self._listeners.append(listen(self._host, self._ports, after=port))
        return self.port

    def take(self, round: RoundRecord, *, is_member: bool) -> socket.socket | None:
        """Return the listener of a round's TCPStore, and offer another port; None if this node does not serve it."""
        ports = [f"{bracketed(self._host)}:{listener.getsockname()[1]}" for listener in self._listeners]
        missed, self._round = round.number != self._round + 1, round.number
        if not is_member or round.tcp_store not in ports:
            if missed:  # a round that this node has not received may have used the port
                self.renew()
            return None
        fresh = listen(self._host, self._ports, after=self.port)
        taken = self._listeners.pop(ports.index(round.tcp_store))
        self.close()
        self._listeners = [fresh]
        return taken

    def close(self) -> None:
        """Close the listeners that no round uses."""
        for listener in self._listeners:
            listener.close()


class RendezvousNode:
    """One node of a run: an async context manager that takes part in the rendezvous while it is open.

    Args:
        store: the run's store.
        settings: the rules of the rendezvous, and the run's id.
        node: this node's id: its name, a dot, and a string that is unique to this process.
        record: the node's record; the constructor fills in the ports, and the counts from which the run resumes.
        history: the history of the run; None to start one now.
        answered: a function called after each request to the store; see :class:`~torchelastic.store.client.NodeStore`.

    Attributes:
        events: the queue of rounds, notices and the outcome, in order; an agent adds its own events.
        history: the history of the run, as far as this node knows it.
        run: the state of the run in the store.
        registration: this node's record in the store.
        server: the server that accepts the connections of peers.
        election: this node's role in the election of the leader.
        leader: the object that leads the run while this node is elected; otherwise None.
        failed: a task that exists while the node is open, and fails with the error if the node cannot take part because
            the store refuses it.

    Raises:
        NoFreePort: no port of the allowed range is free.
    """

    def __init__(
        self,
        store: Store,
        settings: RendezvousSettings,
        *,
        node: str,
        record: NodeRecord,
        history: History | None = None,
        answered: Callable[..., None] | None = None,
    ) -> None:
        self.node = node
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self.history = History(None, settings.resume.time_breakdown) if history is None else history
        self._settings = settings
        self.run = RunWatch(node, settings, cast("Store", NodeStore(store, answered)))
        self._tcp_store_port = TCPStorePort(record.address, settings.ports)
        try:
            listener = listen(record.address, settings.ports)
        except BaseException:
            self._tcp_store_port.close()
            raise
        key = secrets.token_hex(16)
        self.server = PeerServer(run=settings.run_id, node=node, key=key, listener=listener)
        resume = settings.resume
        record = msgspec.structs.replace(
            record,
            peer_port=self.server.port,
            peer_key=key,
            tcp_store_port=self._tcp_store_port.port,
            round=resume.round,
            restarts=resume.restarts,
            uncharged_restarts=resume.uncharged_restarts,
        )
        self.registration = NodeRegistration(self.run, record, self._tcp_store_port.renew)
        address = f"{bracketed(record.address)}:{self.server.port}"
        self.election = LeaderElection(self.run, self.registration, address)
        self.leader: Leader | None = None
        self.failed: asyncio.Task[None]
        self._notice: NoticeRecord | None = None
        self._leaving = False

    async def __aenter__(self) -> Self:
        try:
            if not self._settings.unique_run:
                await within(self._settings.join_timeout, lambda: remove_finished_run(self.run))
            self.server.start()
        except BaseException:
            await self._close_sockets()
            raise
        self.failed = asyncio.create_task(self._participate())
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel(self.failed)
        await self._close_sockets()
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT):
                await self._write_final_history()
                await self.election.leave()
                await self.registration.withdraw()
        except (StoreError, TimeoutError):
            logger.info("the store is unreachable: this node's key will expire with its lease")

    async def _write_final_history(self) -> None:
        """Write the history if all nodes leave at once: this node led last, and no other node took the lead."""
        last = self.run.last_leader
        if last is None or last.node != self.node or self.run.outcome is not None:
            return
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(LEAVE_TIMEOUT / 2):
                # Without a leader, the latest checkpoints are only in the nodes' records.
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
        self._tcp_store_port.close()
        while not self.events.empty():
            event = self.events.get_nowait()
            if isinstance(event, RoundStarted) and event.tcp_store_listener is not None:
                event.tcp_store_listener.close()  # the agent has not received it

    # -- state

    @property
    def is_leader(self) -> bool:
        """Whether this node leads, and has read the history of the run."""
        return self.leader is not None and self.leader.history_writer.has_read and self.election.is_leader

    @property
    def round(self) -> RoundRecord | None:
        """The last round that this node has received."""
        return self.run.accepted_round

    async def is_current(self, round: int, *, timeout: float = 5.0) -> bool:  # noqa: ASYNC109 - bounds the waits
        """Return whether this node is a member of a round that is still current, according to the store.

        If the store is unreachable, the round is current if a connected peer answers, or this node is the only member.
        """
        accepted = self.round
        if accepted is None or accepted.number != round or self.node not in accepted.nodes or self._is_over():
            return False
        try:
            async with asyncio.timeout(timeout * STORE_SHARE):
                entry = await self.run.store.get(self.run.keys.state)
            state = StateRecord() if entry is None else decode_state(entry.value)
            # A store without the round, or with an earlier one, has lost data that the leader is about to restore.
            stored = state.round or accepted
            current = state.outcome is None and (stored.number < round or stored == accepted)
        except MalformedRecord:
            current = False
        except (StoreError, TimeoutError):
            current = not self._has_peers() or await self._reaches_a_peer(timeout * (1 - STORE_SHARE))
        return current and self.round is accepted and not self._is_over()

    def _is_over(self) -> bool:
        return self.run.outcome is not None or self.registration.record.phase is NodePhase.PARTITIONED

    # -- reports

    def report(self, round: int, **changes: Any) -> None:  # noqa: ANN401 - any field of the record
        """Change this node's record for a round; reports for a past round are ignored, and a new round resets them.

        The phase of a node that leaves stays LEAVING, unless all its workers have exited with 0.
        """
        if self._leaving and changes.get("phase") is not NodePhase.DONE:
            changes.pop("phase", None)
        if self.registration.record.round == round:
            self.registration.update(**changes)

    async def leave(self, *, timeout: float = 1.0) -> None:  # noqa: ASYNC109 - bounds the wait for the store
        """Announce that this node leaves, so that the next round forms without it.

        Until it is closed, this node still receives events: the next round may wait for workers that asked for notice,
        including this node's.
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
                # If all nodes leave at once, one of them has to lead until the last worker has answered the notice.
                await self.election.leave(standby=self.registration.record.notice > 0)
        except (StoreError, TimeoutError):
            logger.info("the store is unreachable: the other nodes will notice when this node's connection closes")

    # -- the run

    @property
    def tcp_store_listener(self) -> socket.socket:
        """The bound socket of the TCPStore that this node offers to serve in the next round."""
        return self._tcp_store_port.listener

    async def _participate(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.registration.run())
            tasks.create_task(self.run.follow())
            tasks.create_task(self._emit_events())
            tasks.create_task(self.election.campaign())
            tasks.create_task(self.election.stay_connected())
            tasks.create_task(self._lead())
            tasks.create_task(self._watch_for_partition())

    async def _emit_events(self) -> None:
        """Emit rounds and notices, and finally the outcome."""
        changed = self.run.changed
        while True:
            seen = changed.count
            if self.run.data_lost:
                self.run.data_lost = False
                self.registration.update(tcp_store_port=self._tcp_store_port.renew())
            round, accepted = self.run.round, self.run.accepted_round
            # Another round with the same number: the store lost the accepted one, and the leader did not know it.
            if round is not None and (accepted is None or (round.number >= accepted.number and round != accepted)):
                self.run.accepted_round = round
                self.history.note_round(round)
                self._emit_round(round)
            self._emit_notice()
            if self.run.outcome is not None:
                self.election.withdraw()
                self.events.put_nowait(self.run.outcome)
                return
            await changed.after(seen)

    def _emit_round(self, round: RoundRecord) -> None:
        listener = self._tcp_store_port.take(round, is_member=self.node in round.nodes)
        self.events.put_nowait(RoundStarted(round, listener))
        record = self.registration.record
        self.registration.update(
            round=round.number,
            restarts=max(round.restarts, record.restarts),
            uncharged_restarts=max(round.uncharged_restarts, record.uncharged_restarts),
            tcp_store_port=self._tcp_store_port.port,
            phase=NodePhase.LEAVING if self._leaving else NodePhase.READY,
            failure=None,
            notice=0.0,
            answered_notice=0,
            first_step_at=0.0,
            has_stepped=False,
            last_checkpoint_at=0.0,
            staying=(),
            has_state=False,
            first_steps=(),
        )
        self._notice = None

    def _emit_notice(self) -> None:
        notice, round, before = self.run.notice.record, self.round, self._notice
        if notice is None or round is None or notice.round != round.number or self.node not in round.nodes:
            return
        if notice != before and (notice.seconds or before is not None):
            self._notice = notice
            self.events.put_nowait(notice)

    async def _lead(self) -> None:
        """Lead each time that this node is elected."""
        while True:
            await self.run.changed.until(lambda: self.election.is_leader)
            self.leader = Leader(self.run, self.election, self.server, self.history)
            self.server.observer = self.leader.note_connection
            leading = asyncio.create_task(self.leader.run())
            # An expired lease does not end the leadership. If all leases expire because the store is unreachable, the
            # leader still knows which peers are alive.
            replaced = asyncio.create_task(self.election.until_replaced(self.node))
            try:
                await asyncio.wait((leading, replaced), return_when=asyncio.FIRST_COMPLETED)
                if leading.done():
                    await leading
            finally:
                self.server.observer, self.leader = lambda *_: None, None
                await cancel(leading, replaced)

    def _has_peers(self) -> bool:
        return self.round is not None and self.node in self.round.nodes and len(self.round.members) > 1

    async def _reaches_a_peer(self, within: float) -> bool:
        peers = self.election.reaches_leader if self.leader is None else self.leader.reaches_a_peer
        return await peers(within)

    # -- partitions

    async def _watch_for_partition(self) -> None:
        """Emit :class:`Partitioned` each time that this node is partitioned.

        A node is partitioned if it has not reached the store for one lease, and then reaches neither the store nor a
        peer. The other nodes may have formed a round without it.
        """
        run, changed, lease = self.run, self.run.changed, self._settings.lease
        while True:
            seen = changed.count
            if (away := run.unreachable_since) is None or not self._trains_with_others():
                await changed.after(seen)
                continue
            left = away + lease - asyncio.get_running_loop().time()
            if left > 0:
                await changed.after(seen, timeout=left)
            elif await self._reaches_any(min(FINAL_PROBE_TIMEOUT, lease)):
                await changed.after(seen, timeout=lease)
            elif run.unreachable_since is not None and self._trains_with_others():
                logger.warning("neither the store nor a peer can be reached: stopping the workers")
                self.report(self.registration.record.round, phase=NodePhase.PARTITIONED)
                self.events.put_nowait(Partitioned())
                await changed.until(lambda: run.unreachable_since is None)

    def _trains_with_others(self) -> bool:
        return self._has_peers() and self.registration.record.phase is not NodePhase.DONE

    async def _reaches_any(self, within: float) -> bool:
        """Return whether a peer answers one of repeated probes in time, or the store is back."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self.run.unreachable_since is not None and not await self._reaches_a_peer(within):
                    await self.run.changed.after(self.run.changed.count, timeout=RETRY_MIN)
                return True
        return False


def listen(host: str, ports: PortRange | None = None, *, after: int = 0) -> socket.socket:
    """Return a listening socket on a free port of this address, or of all addresses if the address is not local.

    Peers may reach a pod at the address of a gateway. The search begins after the port ``after``, which is not used.

    Raises:
        OSError: no socket can be created.
        NoFreePort: none of these ports is free.
    """
    try:
        info = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return _listening(info[0], info[4], ports, after)
    except OSError:
        return _listening(socket.AF_INET, ("", 0), ports, after)


def _listening(
    family: int, address: tuple[str | int, ...] | tuple[int, bytes], ports: PortRange | None, after: int
) -> socket.socket:
    for port in (0,) if ports is None else ports.after(after):
        try:
            listener = socket.create_server((address[0], port, *address[2:]), family=family, backlog=BACKLOG)
            listener.setblocking(False)
            return listener
        except OSError as error:
            if ports is None or error.errno != errno.EADDRINUSE:
                raise
    raise NoFreePort(
        f"No port of --port-range {ports} is free on this node: set a wider range, or find the processes that use "
        "them (ss -tlnp); each agent on a host needs up to 5 of them at a time."
    )
