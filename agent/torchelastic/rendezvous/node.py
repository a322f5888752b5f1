"""A node's part in the rendezvous: be present, follow the leader, lead when it is its turn.

:class:`RendezvousNode` is what the agent talks to. It keeps the node's record in the store, gives out every new epoch
and the outcome, and hides which node leads.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from torchelastic.contract import (
    CONTRACT_VERSION,
    EpochRecord,
    NodePhase,
    NodeRecord,
    OutcomeRecord,
    RunKeys,
    bracketed,
)
from torchelastic.errors import StoreError, StoreUnavailable
from torchelastic.rendezvous.control import Control
from torchelastic.rendezvous.leader import Leadership
from torchelastic.rendezvous.link import LinkServer, listen
from torchelastic.rendezvous.session import Session
from torchelastic.rendezvous.succession import Succession
from torchelastic.store.lasting import LastingKeys
from torchelastic.store.retrying import retry_delay

if TYPE_CHECKING:
    import socket
    from types import TracebackType

    from torchelastic.settings import RendezvousSettings
    from torchelastic.store.api import Store

logger = logging.getLogger(__name__)

GOODBYE_LIMIT: Final = 2.0
"""Seconds that a node that ends takes at most to clear its keys away; where the store is away, its lease does it."""


@dataclass(frozen=True, slots=True)
class EpochBegan:
    """A new epoch stands.

    Attributes:
        record: who trains together.
        store: the listening socket on which this node has to serve the epoch's TCPStore, where it is the one; the
            receiver owns it.
    """

    record: EpochRecord
    store: socket.socket | None = None


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run has an outcome."""

    record: OutcomeRecord


@dataclass(frozen=True, slots=True)
class Isolated:
    """This node reaches neither the store nor the peers of its epoch: it must stop its workers."""


Event = EpochBegan | RunEnded | Isolated


class RendezvousNode:
    """One node of a run; an async context manager that is present in the store while it is open.

    Args:
        store: where the nodes meet.
        settings: the rules, and the run's id.
        node: this node's id: its name, a dot, and something unique for this life of it.
        record: what it says of itself; addresses of its link and store are filled in.
    """

    def __init__(self, store: Store, settings: RendezvousSettings, *, node: str, record: NodeRecord) -> None:
        self.node = node
        self.keys = RunKeys.of(settings.run_id)
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        """What happened, in order."""
        self._store = store
        self._settings = settings
        self._lasting = LastingKeys(store, settings.run_id, ttl=settings.run_lease)
        self._control = Control(store, self.keys)
        self._server = LinkServer(run=settings.run_id, node=node, host=record.address, observer=self)
        self._offer = listen(record.address)
        self._session = Session(
            store,
            self.keys,
            node,
            NodeRecord(
                name=record.name,
                address=record.address,
                workers=record.workers,
                size=record.size,
                link=self._server.port,
                store=self._offer.getsockname()[1],
                metrics=record.metrics,
            ),
            settings.lease,
            self._control.changed,
        )
        self._succession = Succession(
            run_id=settings.run_id,
            lease=settings.lease,
            store=store,
            keys=self.keys,
            lasting=self._lasting,
            control=self._control,
            session=self._session,
            address=f"{bracketed(record.address)}:{self._server.port}",
        )
        self._leadership: Leadership | None = None
        self._ended = False
        self._told = 0
        self._leaving = False
        self._tasks = AsyncExitStack()
        self._running: asyncio.Task[None] | None = None

    # -- what the agent does

    async def __aenter__(self) -> Self:
        await self._enter_run()
        await self._tasks.enter_async_context(self._server)
        self._running = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._tasks.aclose()
        self._offer.close()
        while not self.events.empty():  # what nobody has received is nobody else's to close
            event = self.events.get_nowait()
            if isinstance(event, EpochBegan) and event.store is not None:
                event.store.close()
        try:
            async with asyncio.timeout(GOODBYE_LIMIT):
                await self._succession.leave()
                await self._session.withdraw()
        except (StoreError, TimeoutError):
            logger.info("the store is away: this node's key goes when its lease ends")

    @property
    def failed(self) -> asyncio.Task[None]:
        """Ends, with the error, when the node cannot go on: the store refuses it for good."""
        if self._running is None:
            raise RuntimeError("the node is not open")
        return self._running

    def report(self, epoch: int, **changes: Any) -> None:  # noqa: ANN401 - any field of the record
        """Say how this node fares in an epoch: its phase, a failure. What is said of a past epoch is dropped."""
        if self._session.record.epoch == epoch and not self._leaving:
            self._session.update(**changes)

    async def leave(self, *, timeout: float = 1.0) -> None:  # noqa: ASYNC109 - bounds the wait for an absent store
        """Say that this node goes, so that the others go on at once; it takes part in nothing from here on.

        Args:
            timeout: seconds to wait for the store to take it.
        """
        self._leaving = True
        self._succession.stop_leading()
        self._session.update(phase=NodePhase.LEAVING)
        try:
            async with asyncio.timeout(timeout):
                await self._session.flush()
                await self._succession.leave()
        except (StoreError, TimeoutError):
            logger.info("the store is away: the others learn of this node's leaving by its link")

    # -- links, as the server tells them

    def link_came(self, node: str) -> None:
        """A node holds a link to this one, or this one to its leader."""
        if self._leadership is not None:
            self._leadership.link_came(node)

    def link_broke(self, node: str) -> None:
        """A link broke."""
        if self._leadership is not None:
            self._leadership.link_broke(node)

    # -- the run

    async def _enter_run(self) -> None:
        """Clear away what a finished run of the same id left behind, where the id may be used again."""
        tries = 0
        deadline = asyncio.get_running_loop().time() + self._settings.join_timeout
        while not self._settings.unique_run:
            try:
                listing = await self._store.list(self.keys.root)
                entries = {entry.key: entry for entry in listing.entries}
                outcome = entries.get(self.keys.outcome)
                if outcome is None or any(key.startswith(self.keys.nodes) for key in entries):
                    return
                # The epoch first: as long as the outcome stands, nobody mistakes what is left for a living run.
                for key in (self.keys.epoch, self.keys.leader, self.keys.outcome):
                    if key in entries:
                        await self._store.swap(key, None, expected=entries[key].modified)
            except StoreUnavailable as error:
                if tries == 0:
                    logger.warning("%s; waiting for it", error)
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(retry_delay(tries))
                tries += 1

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._session.run())
            tasks.create_task(self._control.follow())
            tasks.create_task(self._tell_events())
            tasks.create_task(self._succession.campaign())
            tasks.create_task(self._succession.hold_link())
            tasks.create_task(self._lead())
            tasks.create_task(self._notice_isolation())

    async def _tell_events(self) -> None:
        """Give out epochs and the outcome as they come to stand."""
        changed = self._control.changed
        while True:
            seen = changed.count
            epoch, before = self._control.epoch.record, self._succession.epoch
            # The same number with other members: a store that had lost it, and a leader that did not know of it.
            if epoch is not None and (before is None or (epoch.number >= before.number and epoch != before)):
                self._succession.epoch = epoch
                self._tell_epoch(epoch)
            outcome = self._control.outcome.record
            if outcome is not None and not self._ended:
                self._ended = True
                self.events.put_nowait(RunEnded(outcome))
            await changed.after(seen)

    def _tell_epoch(self, epoch: EpochRecord) -> None:
        port = self._offer.getsockname()[1]
        host = self._session.record.address
        store = None
        before, self._told = self._told, epoch.number
        if epoch.store == f"{bracketed(host)}:{port}":
            store, self._offer = self._offer, listen(host)
        elif epoch.number != before + 1:
            # An epoch went by unseen, and may have named the port that this node offered: it is not offered again.
            self._offer.close()
            self._offer = listen(host)
        phase = NodePhase.LEAVING if self._leaving else NodePhase.READY
        self._session.update(
            epoch=epoch.number,
            restarts=max(epoch.restarts, self._session.record.restarts),
            store=self._offer.getsockname()[1],
            phase=phase,
            failure=None,
        )
        self.events.put_nowait(EpochBegan(epoch, store))

    async def _lead(self) -> None:
        """Lead for as long as the store says so."""
        while True:
            await self._succession.until_leading()
            dead = self._succession.dead_leader
            self._leadership = Leadership(
                node=self.node,
                store=self._store,
                keys=self.keys,
                lasting=self._lasting,
                settings=self._settings,
                control=self._control,
                links=self._server,
                remembered=self._remembered,
                give_way=self._succession.give_way,
                gave_way=self._succession.gave_way,
                has_linked=self._succession.has_linked,
                took_expired_at=self._succession.took_expired_at,
                dead=frozenset(() if dead is None else (dead,)),
            )
            leading = asyncio.create_task(self._leadership.run())
            # A vacancy does not end it: when all leases ended with a store that was away, what the leader knows of
            # its peers is what keeps them from being taken for lost.
            over = asyncio.create_task(self._succession.until_leader_is_not(self.node))
            try:
                await asyncio.wait((leading, over), return_when=asyncio.FIRST_COMPLETED)
                if leading.done():
                    await leading
            finally:
                self._leadership = None
                leading.cancel()
                over.cancel()
                await asyncio.gather(leading, over, return_exceptions=True)

    async def _notice_isolation(self) -> None:
        """Tell when neither the store nor the epoch's peers have been reached for a lease's time."""
        changed = self._control.changed
        while True:
            seen = changed.count
            away = self._control.away_since
            if away is None or not self._has_peers():
                await changed.after(seen)
                continue
            left = away + self._settings.lease - asyncio.get_running_loop().time()
            if left > 0:
                await changed.after(seen, timeout=left)
            elif await self._reaches_a_peer():
                await changed.after(seen, timeout=self._settings.lease)
            elif self._control.away_since is not None and self._session.record.phase is not NodePhase.DONE:
                logger.warning("neither the store nor a peer can be reached: stopping the workers")
                self.report(self._session.record.epoch, phase=NodePhase.CUT_OFF)
                self.events.put_nowait(Isolated())
                while self._control.away_since is not None:
                    await changed.after(changed.count)

    def _remembered(self) -> EpochRecord | None:
        """The last epoch that this node was told of, where it can answer for it."""
        epoch = self._succession.epoch
        return epoch if epoch is not None and epoch.contract == CONTRACT_VERSION else None

    def _has_peers(self) -> bool:
        epoch = self._succession.epoch
        return epoch is not None and self.node in epoch.nodes and len(epoch.members) > 1

    async def _reaches_a_peer(self) -> bool:
        if self._leadership is not None:
            return await self._leadership.reaches_a_peer()
        return await self._succession.reaches_leader()
