"""Our rendezvous for whoever calls it and waits: torchrun's own agent, or a launcher of somebody's own.

Under our agent it is event-driven, and little in this module runs. An agent that is not ours stops its workers, calls
:meth:`~ElasticRendezvousHandler.next_rendezvous` and starts new ones; so an epoch may have come and gone before all its
nodes have called. Were some to go on with it and others with the next one, the first would wait for ever. Therefore the
nodes of an epoch meet once more in its store, in which one word is written once, by compare-and-swap: that all have
come, or that somebody has seen a later epoch first. Whatever it says, it says to all.

Between an agent that stops its workers and one that learns of it lies that agent's own interval, so until all have come
the store is asked every 20 ms. All else here waits for events.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime as dt
import logging
import os
import socket
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from torchelastic.contract import FailureKind, FailureRecord, NodePhase, OutcomeState
from torchelastic.endpoints import split_endpoint
from torchelastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torchelastic.rendezvous.handler_settings import read_settings
from torchelastic.rendezvous.threaded import Ended, ThreadedNode

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # not listed in its __all__

    from torchelastic.rendezvous.handler_settings import HandlerSettings, Parameters
    from torchelastic.rendezvous.threaded import Standing

logger = logging.getLogger(__name__)

NO_LIMIT: Final = 1_000_000
"""As many failures never come."""

STORE_TIMEOUT: Final = dt.timedelta(seconds=60)
"""For which a store is waited for where nobody says otherwise; by then all nodes of the epoch have come."""

OUTCOME_PATIENCE: Final = 10.0
"""Seconds for which a node whose workers have succeeded waits until all others' have."""

_LEFT: Final = "This node has left the run."

_ARRIVED: Final = "torchelastic/arrived"
_ARRIVED_ALL: Final = "torchelastic/arrived all"
_CONFIRMED: Final = "torchelastic/confirmed"
_VERDICT: Final = "torchelastic/verdict"
_ALL: Final = b"all have come"
_LATER: Final = b"a later epoch has come"
_ASKING: Final = 0.02
_TRY: Final = dt.timedelta(seconds=3)
_LOSS: Final = 15.0
"""Seconds after which an epoch that cannot be met in, though it stands, is reported as failed."""


class ElasticRendezvousHandler(RendezvousHandler):
    """A node of a run, for callers that block.

    A node's going never closes the run for the others, whatever is called.

    Args:
        parameters: torch's or ours.

    Attributes:
        settings: what they come to.
        bounds_early_failures: whether they say how many failures soon after the start end the run.

    Raises:
        SettingsError: they cannot be honoured; the message says what to change.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.settings: HandlerSettings = read_settings(parameters, os.environ)
        self.bounds_early_failures = any(key.replace("-", "_") == "early_failures" for key in parameters.config)
        self._backend = parameters.backend
        self._node: ThreadedNode[TCPStore] | None = None
        self._given: Standing[TCPStore] | None = None
        self._since = 0.0
        # That of the epoch before serves the workers of nodes which have not heard yet that it is over.
        self._stores: deque[TCPStore] = deque(maxlen=2)
        self._closed = False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for an epoch that this node is in and that all its nodes have come to.

        Called while the epoch before still stands, it says that the workers here have failed in that.

        Raises:
            RendezvousClosedError: the run has ended.
            RendezvousTimeoutError: too few nodes have come.
            RendezvousConnectionError: the store cannot be reached, or refuses this node.
        """
        if self._closed:
            raise RendezvousClosedError(_LEFT)
        node = self._node = self._node or self._started()
        try:
            seen = 0
            if self._given is not None:
                seen = self._given.serial
                self._report_failure(node, self._given, "its workers have failed or were stopped", FailureKind.PROGRAM)
            while True:
                standing = node.next(seen)
                seen = standing.serial
                if (store := self._meet(node, standing)) is not None:
                    return self._info(node, standing, store)
        except Ended as end:
            raise self._explained(end) from None

    def num_nodes_waiting(self) -> int:
        """How many nodes wait, or 1 where the epoch is about to change otherwise: it may also become smaller.

        Raises:
            RendezvousConnectionError: the store refuses this node for good.
        """
        node, given = self._node, self._given
        if node is None or given is None:
            return 0
        if node.outcome is not None or node.isolated:
            return 1
        try:
            if not node.news_since(given.serial, timeout=0):
                return 0
        except Ended as end:
            raise self._explained(end) from None
        now = node.standing
        return max(1, len(set(now.record.nodes).difference(given.record.nodes)) if now is not None else 1)

    def is_closed(self) -> bool:
        """Whether the run has ended, or this node has left it."""
        return self._closed or (self._node is not None and self._node.outcome is not None)

    def set_closed(self) -> None:
        """Leave the run; it goes on for the others."""
        self._end(succeeded=False)

    def shutdown(self) -> bool:
        """Leave the run; where the workers have succeeded, once those of all nodes have.

        They have if this is not called because of an exception: a launcher calls it when its agent has come to an end.
        """
        self._end(succeeded=sys.exception() is None)
        return True

    def get_backend(self) -> str:
        """The name under which it was chosen."""
        return self._backend

    def get_run_id(self) -> str:
        """The id that the nodes of the run have in common."""
        return self.settings.rendezvous.run_id

    @property
    def use_agent_store(self) -> bool:
        """Workers meet in the epoch's own store."""
        return True

    # -- coming

    def _started(self) -> ThreadedNode[TCPStore]:
        # Whoever calls this counts restarts by himself: whatever is started again, the run goes on.
        rules = dataclasses.replace(self.settings.rendezvous, max_restarts=NO_LIMIT, early_failures=NO_LIMIT)
        node = ThreadedNode(dataclasses.replace(self.settings, rendezvous=rules), _serve)
        node.start()
        atexit.register(self.set_closed)  # where an agent was ended by a signal, nothing else is called
        return node

    def _meet(self, node: ThreadedNode[TCPStore], standing: Standing[TCPStore]) -> TCPStore | None:
        """The epoch's store, once all its nodes have come; None where a later epoch came first."""
        from torch.distributed import DistError

        try:
            store = standing.server or self._connected(node, standing)
            if store is None:
                return None
            self._stores.append(store)
            if _all_come(store, node, standing):
                return store
            why = "not all nodes have come to the epoch"
        except (OSError, DistError) as error:
            why = f"the epoch's store is gone: {error}".partition("\n")[0]
        if not node.news_since(standing.serial, timeout=_LOSS):
            self._report_failure(node, standing, why, FailureKind.COMMUNICATION)
        return None

    def _connected(self, node: ThreadedNode[TCPStore], standing: Standing[TCPStore]) -> TCPStore | None:
        """The epoch's store on another node; None where a later epoch came first."""
        from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined] # not in its __all__

        host, port = split_endpoint(standing.record.store)
        deadline = time.monotonic() + _LOSS
        while True:
            # torch tries again for long, and does not hear meanwhile that there is nothing to wait for any more: it is
            # let try only where somebody listens, and not for long.
            try:
                socket.create_connection((host, port), timeout=_TRY.total_seconds()).close()
                store = TCPStore(host, port, None, is_master=False, wait_for_workers=False, timeout=_TRY)
            except (OSError, DistError):
                if node.news_since(standing.serial, timeout=_ASKING):
                    return None
                if time.monotonic() > deadline:
                    raise
            else:
                store.set_timeout(STORE_TIMEOUT)
                return store

    def _info(self, node: ThreadedNode[TCPStore], standing: Standing[TCPStore], store: TCPStore) -> RendezvousInfo:
        record = standing.record
        self._given = standing
        self._since = time.monotonic()
        os.environ["TORCHELASTIC_EPOCH"] = str(record.number)  # the workers' agent hands its environment on
        return RendezvousInfo(
            store=store,
            rank=record.nodes.index(node.node),
            world_size=len(record.members),
            bootstrap_store_info=RendezvousStoreInfo(*self.meeting_point),
        )

    @property
    def meeting_point(self) -> tuple[str, int]:
        """Host and port of the store of the last epoch that was given out."""
        return split_endpoint("" if self._given is None else self._given.record.store)

    # -- going

    def _report_failure(
        self, node: ThreadedNode[TCPStore], standing: Standing[TCPStore], message: str, kind: FailureKind
    ) -> None:
        record = standing.record
        failure = FailureRecord(
            epoch=record.number,
            rank=record.nodes.index(node.node),
            local_rank=0,
            node=node.node,
            exit_code=1,
            kind=kind,
            host=self.settings.address,
            message=message,
            uptime=round(time.monotonic() - self._since, 3),
        )
        now = node.standing
        if now is not None and now.serial == standing.serial and not node.isolated:
            node.report(record.number, failure=failure)

    def _explained(self, end: Ended) -> Exception:
        outcome = end.outcome
        if self._closed:
            return RendezvousClosedError(_LEFT)
        if outcome is None:
            return RendezvousConnectionError(str(end))
        if outcome.state is OutcomeState.SUCCEEDED:
            return RendezvousClosedError("The run has succeeded already: there is nothing left to be done.")
        if outcome.failure is None:
            return RendezvousTimeoutError(outcome.message)
        return RendezvousClosedError(f"The run has failed: {outcome.message}")

    def _end(self, *, succeeded: bool) -> None:
        node, self._node = self._node, None
        self._closed = True
        if node is None:
            return
        atexit.unregister(self.set_closed)
        if succeeded and self._given is not None:
            node.report(self._given.record.number, phase=NodePhase.DONE)
            node.until_over(self._given.serial, timeout=OUTCOME_PATIENCE)
        node.stop(leave=node.outcome is None)
        self._stores.clear()


def _serve(listener: socket.socket) -> TCPStore:
    """An epoch's store, in this process."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # not listed in its __all__

    host, port = listener.getsockname()[:2]
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return TCPStore(
        local,
        port,
        None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=STORE_TIMEOUT,
    )


def _all_come(store: TCPStore, node: ThreadedNode[TCPStore], standing: Standing[TCPStore]) -> bool:
    """Wait until all nodes of an epoch have come; False where one of them goes, or has seen a later epoch first.

    They come in two steps: whoever has died while it waited for the last one does not take the second.
    """
    nodes = len(standing.record.members)
    try:
        for step, over in ((_ARRIVED, _ARRIVED_ALL), (_CONFIRMED, _VERDICT)):
            if store.add(step, 1) == nodes:
                store.compare_set(over, "", _ALL.decode())
            while not (store.check([over]) or store.check([_VERDICT])):
                if node.news_since(standing.serial, timeout=_ASKING):
                    store.compare_set(_VERDICT, "", _LATER.decode())
        verdict: bytes = store.get(_VERDICT)
    except Ended:  # this node goes, so the others must not wait for it; but where they have met, it meets them
        verdict = store.compare_set(_VERDICT, "", _LATER.decode())
        if verdict != _ALL:
            raise
    except BaseException:
        with contextlib.suppress(RuntimeError):
            store.compare_set(_VERDICT, "", _LATER.decode())
        raise
    return verdict == _ALL
