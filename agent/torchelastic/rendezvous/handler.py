"""The rendezvous handler for blocking callers: torchrun's own agent, or a custom launcher.

Such an agent stops its workers, calls :meth:`~ElasticRendezvousHandler.next_rendezvous` and starts new workers, so a
round may be over before all its nodes have called. Therefore the nodes of a round also meet in its TCPStore, in which
a compare-and-swap writes one verdict: all nodes have arrived, or a node has received a later round.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import os
import socket
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from torchelastic.config.flags import OPERATOR_VARIABLES, CommandLine, from_variables, read_conf
from torchelastic.config.parsing import Given
from torchelastic.config.rendezvous import read_node
from torchelastic.config.settings import NodeSettings
from torchelastic.protocol import FailureKind, FailureRecord, NodePhase, OutcomeState
from torchelastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torchelastic.rendezvous.node_thread import Ended, NodeThread
from torchelastic.store.api import split_endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import TCPStore  # type: ignore[attr-defined] # not listed in its __all__

    from torchelastic.rendezvous.api import RendezvousParameters
    from torchelastic.rendezvous.node_thread import NodeStatus

NO_LIMIT: Final = 1_000_000
"""A limit that no run reaches."""

OUTCOME_TIMEOUT: Final = 10.0
"""Seconds that a node whose workers have succeeded waits for the workers of the other nodes."""

_LEFT: Final = "This node has left the run."
_STORE_TIMEOUT: Final = dt.timedelta(seconds=60)
_CONNECT_TIMEOUT: Final = dt.timedelta(seconds=3)
_POLL_INTERVAL: Final = 0.02
_LOST_AFTER: Final = 15.0
"""Seconds after which a round in which the nodes cannot meet is reported as failed."""

# Keys of a round's store, and the verdicts.
_ARRIVED, _ARRIVED_ALL = "torchelastic/arrived", "torchelastic/arrived all"
_CONFIRMED, _VERDICT = "torchelastic/confirmed", "torchelastic/verdict"
_ALL, _LATER = "all have come", "a later round has come"


class ElasticRendezvousHandler(RendezvousHandler):
    """A node of a run, for blocking callers. A node that leaves never closes the run for other nodes.

    Args:
        parameters: the rendezvous parameters, of torch's type or ours.

    Attributes:
        settings: the settings from the parameters.

    Raises:
        SettingsError: a parameter is invalid; the message says what to change.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.settings = read_settings(parameters, os.environ)
        self._backend = parameters.backend
        self._node: NodeThread | None = None
        self._given: NodeStatus | None = None
        self._since = 0.0
        # The previous store serves workers of nodes that have not received the new round yet.
        self._stores: deque[TCPStore] = deque(maxlen=2)
        self._closed = False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a round that has this node as a member and at which all its nodes have arrived.

        A call while the last round is current reports a failure of its workers on this node.

        Raises:
            RendezvousClosedError: the run has ended.
            RendezvousTimeoutError: too few nodes have arrived.
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
                status = node.next(seen)
                seen = status.serial
                if (store := self._meet(node, status)) is not None:
                    return self._info(node, status, store)
        except Ended as end:
            raise self._explained(end) from None

    def num_nodes_waiting(self) -> int:
        """Return the number of waiting nodes, or 1 if the round is about to change for another reason.

        Raises:
            RendezvousConnectionError: the store refuses this node permanently.
        """
        if self._node is None or self._given is None:
            return 0
        status = self._node.status
        if status.outcome is not None or status.partitioned:
            return 1
        try:
            if not self._node.is_over(self._given.serial):
                return 0
        except Ended as end:
            raise self._explained(end) from None
        return max(1, len(set(status.record.nodes).difference(self._given.record.nodes)))

    def is_closed(self) -> bool:
        """Return whether the run has ended, or this node has left it."""
        return self._closed or (self._node is not None and self._node.status.outcome is not None)

    def set_closed(self) -> None:
        """Leave the run; the other nodes continue."""
        self._end(succeeded=False)

    def shutdown(self) -> bool:
        """Leave the run; if the workers have succeeded, first wait for the workers of all nodes.

        The workers have succeeded unless an exception is being handled: a launcher calls this when its agent ends.
        """
        self._end(succeeded=sys.exception() is None)
        return True

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return self._backend

    def get_run_id(self) -> str:
        """Return the id of the run."""
        return self.settings.rendezvous.run_id

    @property
    def use_agent_store(self) -> bool:
        """Workers meet in the round's own store."""
        return True

    # -- joining

    def _started(self) -> NodeThread:
        node = NodeThread(self.settings, _serve)
        node.start()
        atexit.register(self.set_closed)  # the only call if a signal ends the agent
        return node

    def _meet(self, node: NodeThread, status: NodeStatus) -> TCPStore | None:
        """Return the round's store after all its nodes have arrived; None if a later round starts first."""
        from torch.distributed import DistError

        try:
            store: TCPStore | None = status.server or self._connected(node, status)
            if store is None:
                return None
            self._stores.append(store)
            if _all_arrived(store, node, status):
                return store
            why = "not all nodes have come to the round"
        except (OSError, DistError) as error:
            why = f"the round's store is gone: {error}".partition("\n")[0]
        if not node.is_over(status.serial, timeout=_LOST_AFTER):
            self._report_failure(node, status, why, FailureKind.COMMUNICATION)
        return None

    def _connected(self, node: NodeThread, status: NodeStatus) -> TCPStore | None:
        """Return the round's store on another node; None if a later round starts first."""
        from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined] # not in its __all__

        host, port = split_endpoint(status.record.store)
        deadline = time.monotonic() + _LOST_AFTER
        while True:
            # torch would retry for a long time without noticing a later round, so connect only if the port is open.
            try:
                socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT.total_seconds()).close()
                store = TCPStore(host, port, None, is_master=False, wait_for_workers=False, timeout=_CONNECT_TIMEOUT)
            except (OSError, DistError):
                if node.is_over(status.serial, timeout=_POLL_INTERVAL):
                    return None
                if time.monotonic() > deadline:
                    raise
            else:
                store.set_timeout(_STORE_TIMEOUT)
                return store

    def _info(self, node: NodeThread, status: NodeStatus, store: TCPStore) -> RendezvousInfo:
        self._given = status
        self._since = time.monotonic()
        os.environ["TORCHELASTIC_ROUND"] = str(status.record.number)  # workers inherit it from the agent
        return RendezvousInfo(
            store=store,
            rank=status.record.nodes.index(node.node),
            world_size=len(status.record.members),
            bootstrap_store_info=RendezvousStoreInfo(*split_endpoint(status.record.store)),
        )

    # -- leaving

    def _report_failure(self, node: NodeThread, status: NodeStatus, message: str, kind: FailureKind) -> None:
        if node.status.serial != status.serial or node.status.partitioned:
            return
        failure = FailureRecord(
            round=status.record.number,
            rank=status.record.nodes.index(node.node),
            local_rank=0,
            node=node.node,
            exit_code=1,
            kind=kind,
            host=self.settings.address,
            message=message,
            uptime=round(time.monotonic() - self._since, 3),
        )
        node.report(status.record.number, failure=failure)

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
            with contextlib.suppress(Ended):
                node.is_over(self._given.serial, timeout=OUTCOME_TIMEOUT)
        node.stop(leave=node.status.outcome is None)
        self._stores.clear()


def read_settings(parameters: RendezvousParameters, environ: Mapping[str, str]) -> NodeSettings:
    """Return the settings of a node, parsed from its parameters like the flags of ``torchelastic-run``.

    Args:
        parameters: the parameters of the handler; torch's type has the same attributes.
        environ: has the operator's variables.

    Raises:
        SettingsError: a parameter is invalid; the message says what to change.
    """
    flags = {
        "rdzv-backend": parameters.backend,
        "rdzv-endpoint": parameters.endpoint,
        "rdzv-id": parameters.run_id,
        "nnodes": f"{parameters.min_nodes}:{parameters.max_nodes}",
        "local-addr": parameters.local_addr,
        # The caller counts restarts itself.
        "max-restarts": f"{NO_LIMIT}",
        "crash_loop_limit": f"{NO_LIMIT}",
    }
    # torchrun adds the rank for its own handlers.
    conf = read_conf("--rdzv-conf", [pair for pair in parameters.config.items() if pair[0] != "rank"])
    given = {name: Given(f"--{name}", text, between=" ") for name, text in flags.items() if text}
    line = CommandLine({**from_variables(environ, OPERATOR_VARIABLES), **given, **conf})
    return NodeSettings(**read_node(line))


def _serve(listener: socket.socket) -> TCPStore:
    """Serve a round's store in this process."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # not listed in its __all__

    host, port = listener.getsockname()[:2]
    return TCPStore(
        {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host),  # noqa: S104 - compared, not bound
        port,
        None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=_STORE_TIMEOUT,
    )


def _all_arrived(store: TCPStore, node: NodeThread, status: NodeStatus) -> bool:
    """Wait until all nodes of a round have arrived; return False if a node leaves or receives a later round first.

    Nodes arrive in two steps: a node that dies while it waits for the last node does not take the second step.
    """

    def veto() -> bytes:
        verdict: bytes = store.compare_set(_VERDICT, "", _LATER)
        return verdict

    nodes = len(status.record.members)
    try:
        for step, over in ((_ARRIVED, _ARRIVED_ALL), (_CONFIRMED, _VERDICT)):
            if store.add(step, 1) == nodes:
                store.compare_set(over, "", _ALL)
            while not (store.check([over]) or store.check([_VERDICT])):
                if node.is_over(status.serial, timeout=_POLL_INTERVAL):
                    veto()
        verdict: bytes = store.get(_VERDICT)
    except Ended:  # this node leaves, so the others must not wait for it, unless all have arrived already
        verdict = veto()
        if verdict.decode() != _ALL:
            raise
    except BaseException:
        with contextlib.suppress(RuntimeError):
            veto()
        raise
    return verdict.decode() == _ALL
