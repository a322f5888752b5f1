"""The rendezvous handler for launchers that wait synchronously for a round: torchrun's agent, or a custom launcher.

Such a launcher stops its workers, calls :meth:`~ElasticRendezvousHandler.next_rendezvous` and starts new workers, so a
round may be over before all its nodes have called. Therefore the nodes of a round also synchronize in its TCPStore. A
compare-and-swap writes one result to the TCPStore: all nodes have arrived, or a node has received a later round.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import datetime as dt
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from torchelastic.config.flags import OPERATOR_VARIABLES, CommandLine, from_variables, read_conf
from torchelastic.config.parse import read_node
from torchelastic.config.parsers import RawValue
from torchelastic.config.settings import NodeSettings
from torchelastic.protocol.records import (
    FailureKind,
    NodePhase,
    NodeRecord,
    OutcomeRecord,
    OutcomeState,
    RoundReason,
    RoundRecord,
)
from torchelastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torchelastic.rendezvous.node import Partitioned, RendezvousNode, RoundStarted, failure_of_node
from torchelastic.rendezvous.run_watch import cancel
from torchelastic.store.api import split_endpoint
from torchelastic.store.client import connect_within

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import TCPStore  # type: ignore[attr-defined] # not listed in its __all__

    from torchelastic.rendezvous.api import RendezvousParameters

logger = logging.getLogger(__name__)

UNLIMITED: Final = 1_000_000
"""A limit that no run reaches."""

OUTCOME_TIMEOUT: Final = 10.0
"""Seconds that a node whose workers have succeeded waits for the workers of the other nodes."""

_LEFT: Final = "This node has left the run."
_STOP_TIMEOUT: Final = 5.0
"""Seconds to wait until the thread ends."""
_TCP_STORE_TIMEOUT: Final = dt.timedelta(seconds=60)
_CONNECT_TIMEOUT: Final = dt.timedelta(seconds=3)
_POLL_INTERVAL: Final = 0.02
_MIN_POLL_INTERVAL: Final = 0.001
_BARRIER_TIMEOUT: Final = 15.0
"""Seconds after which a node that cannot meet the others of its round reports a failure."""

# Keys of a round's TCPStore, and the results of the barrier.
_ARRIVED, _ALL_ARRIVED = "torchelastic/arrived", "torchelastic/all arrived"
_CONFIRMED, _BARRIER_RESULT = "torchelastic/confirmed", "torchelastic/barrier result"
_ALL, _LATER = "all have come", "a later round has come"


@dataclass(frozen=True, slots=True)
class _Status:
    """The status of a node.

    Attributes:
        rounds: the number of rounds that the node has received; unlike a round's number, it never repeats.
        record: the last round.
        tcp_store_server: the server of the round's TCPStore, if this node serves it.
        partitioned: whether the node reaches neither store nor peers, and must not train before the next round.
        outcome: the outcome of the run.
        error: why the node cannot continue.
    """

    rounds: int = 0
    record: RoundRecord = field(default_factory=lambda: RoundRecord(number=0))
    tcp_store_server: TCPStore | None = None
    partitioned: bool = False
    outcome: OutcomeRecord | None = None
    error: BaseException | None = None


class ElasticRendezvousHandler(RendezvousHandler):
    """A node of a run, whose launcher waits for rounds. A node that leaves never closes the run for other nodes.

    A thread takes part in the run and publishes the status of the node, for which the callers wait.

    Args:
        parameters: the rendezvous parameters, of torch's type or torchelastic's.
        arrival_timeout: seconds after which this node leaves a new round if :meth:`next_rendezvous` has not been called
            again, because the others wait for it. The next call joins the run again. None for no limit.
        on_loss: called in the thread of the rendezvous when the world of the round that :meth:`next_rendezvous` has
            returned cannot continue: a member is gone or has failed, or this node is partitioned.

    Attributes:
        settings: the settings from the parameters.

    Raises:
        SettingsError: a parameter is invalid; the message says what to change.
    """

    def __init__(
        self,
        parameters: RendezvousParameters,
        *,
        arrival_timeout: float | None = None,
        on_loss: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = _settings_of(parameters)
        self._backend = parameters.backend
        self._arrival_timeout = arrival_timeout
        self._on_loss = on_loss
        self._status = _Status()
        self._changed = threading.Condition()
        self._returned: _Status | None = None
        self._since = 0.0
        # The previous TCPStore serves workers of nodes that have not received the new round yet.
        self._tcp_stores: deque[TCPStore] = deque(maxlen=2)
        self._closed = False
        self._leaves = False
        self._is_waiting = False
        self._is_late = False
        self._thread: threading.Thread | None = None
        self._node_id: str
        self._loop: asyncio.AbstractEventLoop
        self._participation: asyncio.Task[None]
        self._node: RendezvousNode

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a round with this node as a member, and until all nodes of the round have arrived.

        If the last round is still current, the call reports that its workers on this node have failed.

        Raises:
            RendezvousClosedError: the run has ended.
            RendezvousTimeoutError: too few nodes have arrived.
            RendezvousConnectionError: the store cannot be reached, or refuses this node.
        """
        if self._closed:
            raise RendezvousClosedError(_LEFT)
        if self._is_late and self._thread is not None:
            self._thread.join(_STOP_TIMEOUT)
            self._thread = None
        if self._thread is None:
            self._start()
        self._is_waiting = True
        try:
            return self._next_round()
        finally:
            self._is_waiting = False

    def _next_round(self) -> RendezvousInfo:
        seen = 0
        if self._returned is not None:
            seen = self._returned.rounds
            self._report_failure(self._returned, "its workers have failed or were stopped", FailureKind.PROGRAM)
        while True:
            status = self._wait_for_round_after(seen)
            seen = status.rounds
            if self._node_id in status.record.nodes and (tcp_store := self._barrier(status)) is not None:
                return self._info(status, tcp_store)

    def num_nodes_waiting(self) -> int:
        """Return the number of waiting nodes, or 1 if the round is about to change for another reason.

        Raises:
            RendezvousConnectionError: the store refuses this node permanently.
        """
        status, returned = self._status, self._returned
        if self._closed or returned is None:
            return 0
        if self._is_late or status.outcome is not None or status.partitioned:
            return 1
        if not self._is_over(returned):
            return 0
        return max(1, len(set(status.record.nodes).difference(returned.record.nodes)))

    def has_lost_members(self) -> bool:
        """Return whether a member of the round that :meth:`next_rendezvous` has returned is gone or has failed."""
        status, returned = self._status, self._returned
        return returned is not None and status.rounds > returned.rounds and _ends(returned.record, status.record)

    def is_closed(self) -> bool:
        """Return whether the run has ended, or this node has left it."""
        return self._closed or self._status.outcome is not None

    def set_closed(self) -> None:
        """Leave the run; the other nodes continue."""
        self._end(succeeded=False)

    def shutdown(self) -> bool:
        """Leave the run; if the workers have succeeded, first wait for the workers of all nodes.

        Unless the caller handles an exception, the workers have succeeded: a launcher calls this when its agent ends.
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
        """Always True: workers use the round's own TCPStore."""
        return True

    # -- joining

    def _wait_for_round_after(self, rounds: int, *, timeout: float | None = None) -> _Status:
        """Wait for a round after this number, or for the timeout; return the last status; raise if the run is over."""

        def is_later() -> bool:
            status = self._status
            if status.outcome is not None or status.error is not None:
                raise self._why_ended(status)
            return status.rounds > rounds

        with self._changed:
            self._changed.wait_for(is_later, timeout)
            return self._status

    def _is_over(self, status: _Status, *, timeout: float = 0.0) -> bool:
        """Return whether a later round has started, or starts within the timeout; raise if there is no next round."""
        return self._wait_for_round_after(status.rounds, timeout=timeout).rounds > status.rounds

    def _why_ended(self, status: _Status) -> RendezvousError:
        outcome = status.outcome
        if self._closed:
            return RendezvousClosedError(_LEFT)
        if outcome is None:
            return RendezvousConnectionError(f"{status.error}")
        if outcome.state is OutcomeState.SUCCEEDED:
            return RendezvousClosedError("The run has already succeeded: there is nothing left to do.")
        if outcome.failure is None:
            return RendezvousTimeoutError(outcome.message)
        return RendezvousClosedError(f"The run has failed: {outcome.message}")

    def _barrier(self, status: _Status) -> TCPStore | None:
        """Return the round's TCPStore after all its nodes have arrived; None if a later round starts first."""
        from torch.distributed import DistError

        try:
            tcp_store = status.tcp_store_server or self._connected(status)
            if tcp_store is None:
                return None
            self._tcp_stores.append(tcp_store)
            if self._all_arrived(tcp_store, status):
                return tcp_store
            why = "not all nodes have arrived at the round"
        except (OSError, DistError) as error:
            why = f"the round's TCPStore cannot be reached: {error}".partition("\n")[0]
        if not self._is_over(status, timeout=_BARRIER_TIMEOUT):
            self._report_failure(status, why, FailureKind.COMMUNICATION)
        return None

    def _connected(self, status: _Status) -> TCPStore | None:
        """Return the round's TCPStore on another node; None if a later round starts first."""
        from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined] # not in its __all__

        host, port = split_endpoint(status.record.tcp_store)
        deadline = time.monotonic() + _BARRIER_TIMEOUT
        while True:
            # torch would retry for a long time without noticing a later round, so connect only if the port is open.
            try:
                socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT.total_seconds()).close()
                tcp_store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_CONNECT_TIMEOUT)
            except (OSError, DistError):
                if self._is_over(status, timeout=_POLL_INTERVAL):
                    return None
                if time.monotonic() > deadline:
                    raise
            else:
                tcp_store.set_timeout(_TCP_STORE_TIMEOUT)
                return tcp_store

    def _all_arrived(self, tcp_store: TCPStore, status: _Status) -> bool:
        """Wait until all nodes of a round have arrived; return False if a node leaves or receives a later round first.

        Nodes arrive in two steps: a node that exits while it waits for the last node does not take the second step.
        """

        def veto() -> bytes:
            result: bytes = tcp_store.compare_set(_BARRIER_RESULT, "", _LATER)
            return result

        nodes = len(status.record.members)
        try:
            for step, over in ((_ARRIVED, _ALL_ARRIVED), (_CONFIRMED, _BARRIER_RESULT)):
                if tcp_store.add(step, 1) == nodes:
                    tcp_store.compare_set(over, "", _ALL)
                interval = _MIN_POLL_INTERVAL  # the last node usually arrives soon
                while not (tcp_store.check([over]) or tcp_store.check([_BARRIER_RESULT])):
                    if self._is_over(status, timeout=interval):
                        veto()
                    interval = min(2 * interval, _POLL_INTERVAL)
            result: bytes = tcp_store.get(_BARRIER_RESULT)
        except RendezvousError:  # this node leaves, so the others must not wait for it unless all have arrived
            result = veto()
            if result.decode() != _ALL:
                raise
        except BaseException:
            with contextlib.suppress(RuntimeError):
                veto()
            raise
        return result.decode() == _ALL

    def _info(self, status: _Status, tcp_store: TCPStore) -> RendezvousInfo:
        from torch.distributed.elastic.rendezvous import RendezvousStoreInfo

        self._returned = status
        self._since = time.monotonic()
        os.environ["TORCHELASTIC_ROUND"] = str(status.record.number)  # workers inherit it from the agent
        return RendezvousInfo(
            store=tcp_store,
            rank=status.record.nodes.index(self._node_id),
            world_size=len(status.record.members),
            bootstrap_store_info=RendezvousStoreInfo(*split_endpoint(status.record.tcp_store)),
        )

    # -- leaving

    def _report_failure(self, status: _Status, message: str, kind: FailureKind) -> None:
        if self._status.rounds != status.rounds or self._status.partitioned:
            return
        failure = failure_of_node(status.record, self._node_id, message=message, kind=kind, began=self._since)
        self._call(lambda: self._node.report(status.record.number, failure=failure))

    def _end(self, *, succeeded: bool) -> None:
        thread, self._thread = self._thread, None
        self._closed = True
        if thread is None:
            return
        atexit.unregister(self.set_closed)
        if succeeded and (returned := self._returned) is not None:
            self._call(lambda: self._node.report(returned.record.number, phase=NodePhase.DONE))
            with contextlib.suppress(RendezvousError):
                self._is_over(returned, timeout=OUTCOME_TIMEOUT)
        self._leaves = self._status.outcome is None
        self._call(self._participation.cancel)
        thread.join(_STOP_TIMEOUT)
        self._tcp_stores.clear()

    # -- the thread

    def _start(self) -> None:
        self._node_id = f"{self.settings.node_name}.{secrets.token_hex(4)}"
        self._status = _Status(rounds=self._status.rounds)
        self._returned = None
        self._is_late = self._leaves = False
        self._loop = asyncio.new_event_loop()
        self._participation = self._loop.create_task(self._participate())
        thread = threading.Thread(target=self._run, name="torchelastic: rendezvous", daemon=True)
        thread.start()
        self._thread = thread
        atexit.register(self.set_closed)  # leaves the run if a signal ends the agent

    def _call(self, function: Callable[[], object]) -> None:
        """Call a function in the thread, unless the thread has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        error: BaseException = RendezvousClosedError(_LEFT)
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(asyncio.wait_for(self._participation, None))
        except BaseException as raised:  # noqa: BLE001 - raised in the threads that wait
            error = raised
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self._update(error=error)

    def _update(self, **changes: Any) -> None:  # noqa: ANN401 - any field of the status
        with self._changed:
            self._status = dataclasses.replace(self._status, **changes)
            self._changed.notify_all()

    async def _participate(self) -> None:
        settings = self.settings
        async with contextlib.AsyncExitStack() as stack:
            store = await connect_within(settings.rendezvous.join_timeout, settings.store)
            stack.push_async_callback(store.close)
            self._node = node = RendezvousNode(
                store,
                settings.rendezvous,
                node=self._node_id,
                record=NodeRecord(
                    name=settings.node_name,
                    address=settings.address,
                    workers=1,  # torch's agent does not report how many workers it has
                    size=settings.rendezvous.size,
                    topology_key=settings.topology_key,
                ),
            )
            await stack.enter_async_context(node)
            following = asyncio.create_task(self._follow(node))
            try:
                await asyncio.wait((following, node.failed), return_when=asyncio.FIRST_COMPLETED)
                await (following if following.done() else node.failed)
            finally:
                await cancel(following)
                if self._leaves:
                    await node.leave()

    async def _follow(self, node: RendezvousNode) -> None:
        while True:
            match await node.events.get():
                case RoundStarted(record, listener):
                    logger.info("round %d: %s", record.number, record.cause)
                    if (returned := self._returned) is not None and _ends(returned.record, record):
                        self._on_loss()
                    tcp_store_server = None
                    if listener is not None:
                        with listener:  # closes it if this task is cancelled before the thread starts
                            tcp_store_server = await asyncio.to_thread(_serve, listener)
                    rounds = self._status.rounds + 1
                    self._update(rounds=rounds, record=record, tcp_store_server=tcp_store_server, partitioned=False)
                    if record.members:
                        node.history.workers_started()  # approximately now
                    if self._arrival_timeout is not None and not self._is_waiting:
                        asyncio.get_running_loop().call_later(
                            self._arrival_timeout, self._leave_if_late, self._returned
                        )
                case Partitioned():
                    self._on_loss()
                    self._update(partitioned=True)
                case OutcomeRecord() as outcome:
                    if outcome.state is not OutcomeState.SUCCEEDED:
                        self._on_loss()
                    self._update(outcome=outcome)

    def _leave_if_late(self, returned: _Status | None) -> None:
        """Leave the run if the caller is still in the round that was returned before."""
        if self._returned is returned and not self._is_waiting:
            logger.warning("this node leaves: the other nodes have waited for it for %g s.", self._arrival_timeout)
            self._is_late = self._leaves = True
            self._participation.cancel()


def _ends(round: RoundRecord, later: RoundRecord) -> bool:
    """Return whether a later round ends the collectives of this one, because a member is gone or has failed."""
    return later.reason is RoundReason.WORKER_FAILED or not set(round.nodes).issubset(later.nodes)


def _settings_of(parameters: RendezvousParameters) -> NodeSettings:
    """Parse the parameters like the flags of ``torchelastic-run``."""
    flags = {
        "rdzv-backend": parameters.backend,
        "rdzv-endpoint": parameters.endpoint,
        "rdzv-id": parameters.run_id,
        "nnodes": f"{parameters.min_nodes}:{parameters.max_nodes}",
        "local-addr": parameters.local_addr,
        # The caller counts restarts itself.
        "max-restarts": f"{UNLIMITED}",
        "crash_loop_limit": f"{UNLIMITED}",
    }
    # torchrun adds the rank for its own handlers.
    conf = read_conf("--rdzv-conf", [pair for pair in parameters.config.items() if pair[0] != "rank"])
    raw = {name: RawValue(f"--{name}", text, between=" ") for name, text in flags.items() if text}
    own = from_variables(os.environ, OPERATOR_VARIABLES)
    if parameters.endpoint != os.environ.get("PET_RDZV_ENDPOINT"):
        own.pop("certificates", None)  # they belong to the etcd of the job
    line = CommandLine({**own, **raw, **conf})
    return NodeSettings(**read_node(line))


def _serve(listener: socket.socket) -> TCPStore:
    """Serve a round's TCPStore in this process."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # not listed in its __all__

    host, port = listener.getsockname()[:2]
    return TCPStore(
        {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host),  # noqa: S104 - compared, not bound
        port,
        None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=_TCP_STORE_TIMEOUT,
    )
