"""A node's part in the rendezvous: be present, follow the leader, lead when it is its turn.

:class:`RendezvousNode` is what the agent talks to. It keeps the node's record in the store, gives out every new epoch
and the outcome, and hides which node leads.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self

from torchelastic.contract import (
    CONTRACT_VERSION,
    EpochRecord,
    NodePhase,
    NodeRecord,
    NoticeRecord,
    RunKeys,
    bracketed,
    decode,
)
from torchelastic.errors import MalformedRecord, StoreError
from torchelastic.rendezvous.chronicle import Chronicle
from torchelastic.rendezvous.chronicler import Chronicler
from torchelastic.rendezvous.control import Control
from torchelastic.rendezvous.events import EpochBegan, Event, Isolated, Noticed, RunEnded, close_unclaimed
from torchelastic.rendezvous.finished_runs import forget_finished_run
from torchelastic.rendezvous.isolation import Isolation
from torchelastic.rendezvous.leader import Leadership
from torchelastic.rendezvous.link import LinkServer, listen
from torchelastic.rendezvous.session import Session
from torchelastic.rendezvous.succession import Succession
from torchelastic.store.lasting import LastingKeys
from torchelastic.store.steady import SteadyStore

if TYPE_CHECKING:
    from types import TracebackType

    from torchelastic.contract import SizeRecord, TimeSplit
    from torchelastic.settings import RendezvousSettings
    from torchelastic.store.api import Store

__all__ = ["EpochBegan", "Event", "Isolated", "Noticed", "RendezvousNode", "RunEnded"]

logger = logging.getLogger(__name__)

GOODBYE_LIMIT: Final = 2.0
"""Seconds that a node that ends takes at most to clear its keys away; where the store is away, its lease does it."""

STORES_SHARE: Final = 0.75
"""What the store has of the time for the question whether an epoch stands; the rest is a peer's, where it is away."""


class RendezvousNode:
    """One node of a run; an async context manager that is present in the store while it is open.

    Args:
        store: where the nodes meet.
        settings: the rules, and the run's id.
        node: this node's id: its name, a dot, and something unique for this life of it.
        record: what it says of itself; addresses of its link and store are filled in.
        chronicle: what it knows of the run's past; None for what the settings say of it.

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
        chronicle: Chronicle | None = None,
    ) -> None:
        self.node = node
        self.keys = RunKeys.of(settings.run_id)
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        """What happened, in order."""
        self.chronicle = Chronicle(None, settings.resume.split) if chronicle is None else chronicle
        """What is known here of the run's past."""
        self._store = store = SteadyStore(store)
        self._settings = settings
        self._lasting = LastingKeys(store, settings.run_id, ttl=settings.run_lease)
        self._control = Control(store, self.keys)
        self._offer = listen(record.address, settings.ports)
        try:
            self._server = LinkServer(
                run=settings.run_id, node=node, host=record.address, observer=self, ports=settings.ports
            )
        except BaseException:
            self._offer.close()
            raise
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
                place=record.place,
                epoch=settings.resume.epoch,
                restarts=settings.resume.restarts,
                free=settings.resume.free,
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
        self._told = settings.resume.epoch
        self._noticed: NoticeRecord | None = None
        self._leaving = False
        self._running: asyncio.Task[None] | None = None

    # -- what the agent does

    async def __aenter__(self) -> Self:
        try:
            await forget_finished_run(self._store, self.keys, self._settings)
            await self._server.__aenter__()
        except BaseException:
            await self._close_sockets()
            raise
        self._running = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._close_sockets()
        close_unclaimed(self.events)
        try:
            async with asyncio.timeout(GOODBYE_LIMIT):
                await self._say_last_word()
                await self._succession.leave()
                await self._session.withdraw()
        except (StoreError, TimeoutError):
            logger.info("the store is away: this node's key goes when its lease ends")

    async def _say_last_word(self) -> None:
        """Write where the time went, where this node led last and nobody leads after it: all nodes leave at once."""
        if self._control.led_last != self.node or self._control.outcome.record is not None:
            return
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(GOODBYE_LIMIT / 2):
                # What was saved on the way out is told by nodes that nobody leads any more.
                for entry in (await self._store.list(self.keys.nodes)).entries:
                    with suppress(MalformedRecord):
                        self.chronicle.hear(decode(entry.value, NodeRecord))
                self.chronicle.hear(self._session.record)
                chronicler = Chronicler(self.chronicle, self._store, self.keys, self._lasting)
                await chronicler.read()  # of one that left just before, this node had perhaps not heard all
                await chronicler.finish(self.chronicle.last_word(succeeded=False))

    async def _close_sockets(self) -> None:
        await self._server.close()
        self._offer.close()

    @property
    def failed(self) -> asyncio.Task[None]:
        """Ends, with the error, when the node cannot take part: the store has refused it from the beginning."""
        if self._running is None:
            raise RuntimeError("the node is not open")
        return self._running

    @property
    def leads(self) -> bool:
        """Whether this node leads the run, as far as can be known."""
        leadership = self._leadership
        return leadership is not None and leadership.knows_the_past and self._succession.leads

    @property
    def epoch(self) -> EpochRecord | None:
        """The last epoch that this node was told of."""
        return self._succession.epoch

    @property
    def restarts(self) -> int:
        """Restarts charged to the run, as far as this node knows."""
        return self._settings.resume.restarts if self.epoch is None else self.epoch.restarts

    @property
    def free(self) -> int:
        """Restarts of the run that were charged to nobody, as far as this node knows."""
        return self._settings.resume.free if self.epoch is None else self.epoch.free

    @property
    def split(self) -> TimeSplit:
        """Where the run's time went, up to now, as far as this node knows."""
        return self.chronicle.split()

    @property
    def size(self) -> SizeRecord:
        """How many nodes there should be, as far as this node knows."""
        return self._control.size.record or self._settings.size

    @property
    def led(self) -> bool:
        """Whether somebody forms the next epoch when it is time, as far as can be known; not where the store is away.

        Where all nodes leave at once, and their workers have asked for a notice, one of them goes on to lead.
        """
        return self._control.away_since is None and self._succession.led

    def report(self, epoch: int, **changes: Any) -> None:  # noqa: ANN401 - any field of the record
        """Say how this node fares in an epoch; what is said of a past one is dropped, and each epoch begins anew.

        A node that leaves says so until the end. But when all its workers have ended with 0 before, it is done, and
        its going is of no matter to anybody.

        Args:
            epoch: which epoch.
            changes: fields of the node's record: ``phase``, ``failure``, ``notice`` (the seconds that its workers ask
                for before a planned change), ``saved`` (the serial of the last notice that all of them have answered),
                ``stepped`` and ``kept`` (how far the program is, by its own word).
        """
        if self._leaving and changes.get("phase") is not NodePhase.DONE:
            changes.pop("phase", None)
        if self._session.record.epoch == epoch:
            self._session.update(**changes)

    async def leave(self, *, timeout: float = 1.0) -> None:  # noqa: ASYNC109 - bounds the wait for an absent store
        """Say that this node goes, so that the next epoch forms without it.

        Its key stays, and it goes on being told what happens, until it is closed: it may be that the next epoch waits
        for workers that asked for a notice, its own included.

        Args:
            timeout: seconds to wait for the store to take it.
        """
        self._leaving = True
        leadership = self._leadership
        self._succession.stop_leading()
        if self._session.record.phase is not NodePhase.DONE:
            self._session.update(phase=NodePhase.LEAVING)
        try:
            async with asyncio.timeout(timeout):
                led = () if leadership is None else (leadership.hand_over(),)
                await asyncio.gather(self._session.flush(), *led)
                # Where all leave at once, one of them has to tell the others when the last worker has saved.
                await self._succession.leave(stand_by=self._session.record.notice > 0)
        except (StoreError, TimeoutError):
            logger.info("the store is away: the others learn of this node's leaving by its link")

    async def stands(self, epoch: int, *, timeout: float = 5.0) -> bool:  # noqa: ASYNC109 - bounds the waits
        """Whether an epoch in which this node is is still the run's, as of now: read from the store.

        Where the store is away, it is as far as this node and the peer that it is linked to can know. The answer is of
        the past when it arrives; an epoch that has ended stays so.

        Args:
            epoch: the epoch's number.
            timeout: seconds to wait for an answer.
        """
        told = self._succession.epoch
        if told is None or told.number != epoch or self.node not in told.nodes or self._over():
            return False
        try:
            async with asyncio.timeout(timeout * STORES_SHARE):
                stands = await self._control.still_has(told)
        except (StoreError, TimeoutError):
            stands = not self._has_peers() or await self._reaches_a_peer(timeout * (1 - STORES_SHARE))
        return stands and self._succession.epoch is told and not self._over()

    def _over(self) -> bool:
        """Whether the run has ended, or this node has stopped its workers because it reached nobody."""
        return self._control.outcome.record is not None or self._session.record.phase is NodePhase.CUT_OFF

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

    async def _run(self) -> None:
        isolation = Isolation(
            self._store,
            self.keys,
            self._control,
            self._settings.lease,
            matters=self._trains_with_others,
            reaches_a_peer=self._reaches_a_peer,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._session.run())
            tasks.create_task(self._control.follow())
            tasks.create_task(self._tell_events())
            tasks.create_task(self._succession.campaign())
            tasks.create_task(self._succession.hold_link())
            tasks.create_task(self._lead())
            tasks.create_task(isolation.watch(self._cut_off))

    async def _tell_events(self) -> None:
        """Give out epochs, notices and in the end the outcome as they come to stand."""
        changed = self._control.changed
        while not self._ended:
            seen = changed.count
            epoch, before = self._control.epoch.record, self._succession.epoch
            # The same number with other members: a store that had lost it, and a leader that did not know of it.
            if epoch is not None and (before is None or (epoch.number >= before.number and epoch != before)):
                self._succession.epoch = epoch
                self.chronicle.epoch(epoch)
                self._tell_epoch(epoch)
            self._tell_notice()
            outcome = self._control.outcome.record
            if outcome is not None:
                self._ended = True
                self._stand_aside()
                self.events.put_nowait(RunEnded(outcome))
            await changed.after(seen)

    def _stand_aside(self) -> None:
        """The run has ended: the next run of this id is none of this node's business."""
        self._succession.stop_leading()
        epoch = self._succession.epoch
        if epoch is None or self.node not in epoch.nodes:
            # It has only learned of it, so nobody waits until it is gone.
            self._leaving = True
            self._session.update(phase=NodePhase.LEAVING, epoch=0, restarts=0, free=0)

    def _tell_epoch(self, epoch: EpochRecord) -> None:
        port = self._offer.getsockname()[1]
        host = self._session.record.address
        store = None
        before, self._told = self._told, epoch.number
        named = epoch.store == f"{bracketed(host)}:{port}"
        if named and self.node in epoch.nodes:
            store, self._offer = self._offer, listen(host, self._settings.ports, after=port)
        elif named or epoch.number != before + 1:
            # It was another node's on this host, or an epoch that went by unseen may have named the port that this node
            # offered: it is not offered again.
            self._offer.close()
            self._offer = listen(host, self._settings.ports, after=port)
        self.events.put_nowait(EpochBegan(epoch, store))
        phase = NodePhase.LEAVING if self._leaving else NodePhase.READY
        self._session.update(
            epoch=epoch.number,
            restarts=max(epoch.restarts, self._session.record.restarts),
            free=max(epoch.free, self._session.record.free),
            store=self._offer.getsockname()[1],
            phase=phase,
            failure=None,
            notice=0.0,
            saved=0,
            stepped=0.0,
            kept=0.0,
        )
        self._noticed = None

    def _tell_notice(self) -> None:
        notice, epoch, before = self._control.notice.record, self._succession.epoch, self._noticed
        if notice is None or epoch is None or notice.epoch != epoch.number or self.node not in epoch.nodes:
            return
        if notice != before and (notice.seconds or before is not None):
            self._noticed = notice
            self.events.put_nowait(Noticed(notice))

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
                chronicle=self.chronicle,
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

    def _cut_off(self) -> None:
        """Neither the store nor the epoch's peers are reached."""
        logger.warning("neither the store nor a peer can be reached: stopping the workers")
        self.report(self._session.record.epoch, phase=NodePhase.CUT_OFF)
        self.events.put_nowait(Isolated())

    def _remembered(self) -> EpochRecord | None:
        """The last epoch that this node was told of, where it can answer for it."""
        epoch = self._succession.epoch
        return epoch if epoch is not None and epoch.contract == CONTRACT_VERSION else None

    def _has_peers(self) -> bool:
        epoch = self._succession.epoch
        return epoch is not None and self.node in epoch.nodes and len(epoch.members) > 1

    def _trains_with_others(self) -> bool:
        """Whether workers of this node are to be stopped where it is cut off; those that have ended are not."""
        return self._has_peers() and self._session.record.phase is not NodePhase.DONE

    async def _reaches_a_peer(self, within: float) -> bool:
        if self._leadership is not None:
            return await self._leadership.reaches_a_peer(within)
        return await self._succession.reaches_leader(within)
