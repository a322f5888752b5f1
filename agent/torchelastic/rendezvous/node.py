"""A node's part in the rendezvous: be present, follow the leader, lead when it is its turn.

:class:`RendezvousNode` is what the agent talks to. It keeps the node's record in the store, gives out every new epoch
and the outcome, and hides which node leads.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from torchelastic.contract import (
    EpochRecord,
    LeaderRecord,
    NodePhase,
    NodeRecord,
    OutcomeRecord,
    RunKeys,
    encode,
)
from torchelastic.errors import LeaseLost, StoreError, StoreUnavailable
from torchelastic.rendezvous.control import Control
from torchelastic.rendezvous.leader import Leadership
from torchelastic.rendezvous.link import LinkServer, Verdict, hold_link, listen, probe
from torchelastic.rendezvous.session import Session, retry_delay

if TYPE_CHECKING:
    import socket
    from types import TracebackType

    from torchelastic.settings import RendezvousSettings
    from torchelastic.store.api import Store

logger = logging.getLogger(__name__)

CAMPAIGN_STEP: Final = 0.1
"""Seconds by which each place in the succession waits for the one before it to take the lead."""

GOODBYE_LIMIT: Final = 2.0
"""Seconds that a node that ends takes at most to clear its keys away; where the store is away, its lease does it."""

CAMPAIGN_LIMIT: Final = 2.0
"""Seconds that the last in the succession waits."""


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
        )
        self._leadership: Leadership | None = None
        self._epoch: EpochRecord | None = None
        self._ended = False
        self._linked = False
        self._dead_leader: str | None = None
        self._last_leader: str | None = None
        self._leaving = False
        self._defer_until: float | None = None
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
                with suppress(LeaseLost):
                    await self._resign()
                await self._session.withdraw()
        except (StoreError, TimeoutError):
            logger.info("the store is away: this node's key goes when its lease ends")

    @property
    def failed(self) -> asyncio.Task[None]:
        """Ends, with the error, when the node cannot go on: the store refuses it for good."""
        if self._running is None:
            raise RuntimeError("the node is not open")
        return self._running

    def update(self, **changes: Any) -> None:  # noqa: ANN401 - any field of the record
        """Change what this node says of itself: its phase, a failure, its metrics port."""
        self._session.update(**changes)

    async def leave(self, *, timeout: float = 1.0) -> None:  # noqa: ASYNC109 - bounds the wait for an absent store
        """Say that this node goes, so that the others go on at once; it takes part in nothing from here on.

        Args:
            timeout: seconds to wait for the store to take it.
        """
        self._leaving = True
        self._control.changed.send()
        self._session.update(phase=NodePhase.LEAVING)
        if await self._session.flush(timeout=timeout):
            try:
                async with asyncio.timeout(timeout):
                    await self._resign()
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
            tasks.create_task(self._campaign())
            tasks.create_task(self._lead())
            tasks.create_task(self._hold_link())
            tasks.create_task(self._notice_isolation())

    async def _tell_events(self) -> None:
        """Give out epochs and the outcome as they come to stand."""
        changed = self._control.changed
        while True:
            seen = changed.count
            epoch = self._control.epoch.record
            if epoch is not None and (self._epoch is None or epoch.number > self._epoch.number):
                self._epoch = epoch
                self._tell_epoch(epoch)
            outcome = self._control.outcome.record
            if outcome is not None and not self._ended:
                self._ended = True
                self.events.put_nowait(RunEnded(outcome))
            await changed.after(seen)

    def _tell_epoch(self, epoch: EpochRecord) -> None:
        port = self._offer.getsockname()[1]
        host = self._session.record.address
        mine = epoch.store in (f"{host}:{port}", f"[{host}]:{port}")
        store = None
        if mine:
            store, self._offer = self._offer, listen(host)
        phase = NodePhase.LEAVING if self._leaving else NodePhase.READY
        self._session.update(
            epoch=epoch.number,
            restarts=max(epoch.restarts, self._session.record.restarts),
            store=self._offer.getsockname()[1],
            phase=phase,
            failure=None,
        )
        self.events.put_nowait(EpochBegan(epoch, store))

    # -- leading

    async def _campaign(self) -> None:
        """Take the lead when nobody has it: in the order of ranks, so that the oldest node does."""
        changed = self._control.changed
        while True:
            seen = changed.count
            if self._vacant():
                await changed.after(seen, timeout=self._turn())
                if changed.count == seen:
                    await self._take_lead()
                continue
            await changed.after(seen)

    def _vacant(self) -> bool:
        if self._leaving or not self._session.lease or self._control.away_since is not None:
            return False
        leader = self._control.leader.record
        return leader is None or leader.node in ("", self._dead_leader)

    def _turn(self) -> float:
        """Seconds to leave to those who come before this node in the succession."""
        if self._defer_until is not None:
            return max(self._defer_until - asyncio.get_running_loop().time(), 0.0)
        if self._epoch is None or not self._epoch.members:
            return 0.0
        heirs = [node for node in self._epoch.nodes if node != self._last_leader]
        place = heirs.index(self.node) if self.node in heirs else len(heirs)
        wait = min(place * CAMPAIGN_STEP, CAMPAIGN_LIMIT)
        if self._control.leader.record is None and (self._linked or self._last_leader == self.node):
            # The leader's lease ended, but it lives: it comes back for its key as soon as it reaches the store.
            return 0.0 if self._last_leader == self.node else wait + self._settings.lease
        return wait

    async def _take_lead(self) -> None:
        record = LeaderRecord(node=self.node, address=f"{_bracketed(self._session.record.address)}:{self._server.port}")
        expected = self._control.leader.modified
        try:
            revision = await self._store.swap(
                self.keys.leader, encode(record), expected=expected, lease=self._session.lease
            )
        except (StoreUnavailable, LeaseLost):
            await asyncio.sleep(retry_delay(0))
            return
        if revision is not None:
            self._control.set_leader(record, revision)
        else:
            await self._control.changed.after(self._control.changed.count, timeout=1.0)

    async def _lead(self) -> None:
        """Lead for as long as the store says so."""
        changed = self._control.changed
        while True:
            await self._until_leading()
            logger.debug("%s leads", self.node)
            dead = frozenset({self._dead_leader} if self._dead_leader is not None else ())
            self._leadership = Leadership(
                node=self.node,
                store=self._store,
                keys=self.keys,
                settings=self._settings,
                control=self._control,
                links=self._server,
                remembered=lambda: self._epoch,
                abdicate=self._abdicate,
                deferred=self._defer_until is not None,
                dead=dead,
            )
            leading = asyncio.create_task(self._leadership.run())
            # A vacancy does not end it: when all leases ended with a store that was away, what the leader knows of
            # its peers is what keeps them from being taken for lost.
            resigned = asyncio.create_task(self._until_leader_is_not(self.node))
            try:
                await asyncio.wait((leading, resigned), return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._leadership = None
                resigned.cancel()
                leading.cancel()
                results = await asyncio.gather(leading, resigned, return_exceptions=True)
            if isinstance(results[0], Exception):
                raise results[0]
            changed.send()

    async def _until_leading(self) -> None:
        changed = self._control.changed
        while True:
            seen = changed.count
            leader = self._control.leader.record
            if leader is not None and leader.node == self.node and not self._leaving:
                return
            await changed.after(seen)

    async def _abdicate(self) -> None:
        self._defer_until = asyncio.get_running_loop().time() + self._settings.lease
        await self._resign()

    async def _resign(self) -> None:
        leader = self._control.leader
        if leader.record is not None and leader.record.node == self.node:
            resigned = encode(LeaderRecord(node="", address=""))
            await self._store.swap(self.keys.leader, resigned, expected=leader.modified, lease=self._session.lease)

    # -- following

    async def _hold_link(self) -> None:
        """Hold a link to whoever leads; when it breaks and the leader refuses another, the lead is vacant at once."""
        changed = self._control.changed
        observer = _LinkToLeader(self)
        tries = 0
        while True:
            seen = changed.count
            leader = self._control.leader.record
            if leader is not None and leader.node:
                self._last_leader = leader.node
            if leader is None or leader.node in ("", self.node, self._dead_leader):
                await changed.after(seen)
                continue
            holding = asyncio.create_task(
                hold_link(
                    leader.address, run=self._settings.run_id, node=self.node, peer=leader.node, observer=observer
                )
            )
            moved = asyncio.create_task(self._until_leader_is_not(leader.node))
            try:
                await asyncio.wait((holding, moved), return_when=asyncio.FIRST_COMPLETED)
            finally:
                holding.cancel()
                moved.cancel()
                verdict, _ = await asyncio.gather(holding, moved, return_exceptions=True)
            if verdict is Verdict.DEAD:
                logger.info("the leader %s is dead: it refuses its link", leader.node)
                self._dead_leader = leader.node
                changed.send()
            elif isinstance(verdict, Verdict):
                await asyncio.sleep(retry_delay(tries))
                tries += 1
                continue
            tries = 0

    async def _until_leader_is_not(self, node: str) -> None:
        """Return when somebody else leads; a vacancy alone does not end the link to a leader that may come back."""
        changed = self._control.changed
        while True:
            seen = changed.count
            leader = self._control.leader.record
            if (leader is not None and leader.node != node) or (self._leaving and node == self.node):
                return
            await changed.after(seen)

    async def _notice_isolation(self) -> None:
        """Tell when neither the store nor the epoch's peers have been reached for a lease's time."""
        changed = self._control.changed
        while True:
            seen = changed.count
            away = self._control.away_since
            if away is None or self._epoch is None or not self._has_peers():
                await changed.after(seen)
                continue
            left = away + self._settings.lease - asyncio.get_running_loop().time()
            if left > 0:
                await changed.after(seen, timeout=left)
            elif await self._reaches_a_peer():
                await changed.after(seen, timeout=self._settings.lease)
            else:
                logger.warning("neither the store nor a peer can be reached: stopping the workers")
                self._session.update(phase=NodePhase.CUT_OFF)
                self.events.put_nowait(Isolated())
                while self._control.away_since is not None:
                    await changed.after(changed.count)

    def _has_peers(self) -> bool:
        return self._epoch is not None and self.node in self._epoch.nodes and len(self._epoch.members) > 1

    async def _reaches_a_peer(self) -> bool:
        if self._linked:
            leader = self._control.leader.record
            if leader is None:
                return True
            verdict = await probe(leader.address, run=self._settings.run_id, node=self.node, peer=leader.node)
            return verdict is Verdict.ALIVE
        peers = self._epoch.nodes if self._epoch is not None else ()
        return any(self._server.holds(node) for node in peers)


class _LinkToLeader:
    """Notes whether this node's own link to the leader stands."""

    def __init__(self, node: RendezvousNode) -> None:
        self._node = node

    def link_came(self, node: str) -> None:
        """The leader answered."""
        del node
        self._node._linked = True  # noqa: SLF001 - this class is a part of that one

    def link_broke(self, node: str) -> None:
        """The link is gone."""
        del node
        self._node._linked = False  # noqa: SLF001


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
