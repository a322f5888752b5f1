"""torch's own agent, for a custom rendezvous handler: torch's c10d and static, or a user's.

torch's agent polls its workers and the handler, and starts each worker as a new interpreter. This module adds two
features: a handler needs only ``next_rendezvous``, and all nodes agree on the number of the round and on the number of
restarts, which the workers find in their environment.
"""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any, cast

import cloudpickle
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # not listed in its __all__
from torch.distributed.elastic import rendezvous as torch_rendezvous
from torch.distributed.elastic.agent.server.api import WorkerSpec as TorchSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from torchelastic.agent.function_call import pickle_call
from torchelastic.agent.server.api import RunResult, WorkerSpec, WorkerState, common_fields
from torchelastic.config import machine
from torchelastic.config.parse import make_specs
from torchelastic.errors import SettingsError
from torchelastic.metrics.api import forward_torch
from torchelastic.rendezvous.api import RendezvousGracefulExitError, RendezvousStateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store  # type: ignore[attr-defined] # likewise
    from torch.distributed.elastic.agent.server.api import RunResult as TorchResult
    from torch.distributed.elastic.agent.server.api import WorkerGroup

    from torchelastic.config.settings import LogSettings

# If this is not set, torch shares its c10d store with the workers, but announces the address of the store only in the
# first rendezvous: a node that joins later waits for the address forever.
_NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class TorchAgent(LocalElasticAgent):
    """torch's agent, with a round number and restart count on which all nodes agree.

    Args:
        spec: the workers, with a custom handler.
        logs: the destinations of the workers' output.
        exit_barrier_timeout: seconds for which a node whose workers have succeeded waits for the others.
        stopped: called if :meth:`stop` is called while the handler blocks, because nothing can interrupt a handler.

    Raises:
        SettingsError: the spec uses a feature that torch's agent does not have.
    """

    def __init__(
        self, spec: WorkerSpec, logs: LogSettings, exit_barrier_timeout: float, stopped: Callable[[], None]
    ) -> None:
        if spec.heartbeat_timeout is not None or spec.non_retryable_exit_codes:
            raise SettingsError(
                "WorkerSpec.heartbeat_timeout and non_retryable_exit_codes need the torchelastic rendezvous: remove "
                "them, or remove rdzv_handler."
            )
        known = common_fields(TorchSpec, spec)  # the oldest supported torch does not have all of them
        newer = {"event_log_handler", "numa_options", "virtual_local_rank"}
        for name in (newer | {"duplicate_stdout_filters", "duplicate_stderr_filters"}) - {*known}:
            if getattr(spec, name) and getattr(spec, name) != "null":
                raise SettingsError(f"WorkerSpec.{name} needs a newer torch: remove it, or update torch.")
        os.environ.setdefault(_NO_SHARED_STORE, "1")
        forward_torch()
        program = spec.entrypoint
        self._is_function = not isinstance(program, str)
        self._stopped = stopped
        self._stopping = False
        self._blocked = False
        self._round = 0
        call = {
            "fn": None,  # the same as the entry point
            "entrypoint": program if isinstance(program, str) else _call,
            "args": tuple(map(str, spec.args)) if isinstance(program, str) else (pickle_call(program, spec.args),),
        }
        super().__init__(
            TorchSpec(**known | call | {"rdzv_handler": cast("Any", _Handler(spec))}),
            logs.specs or make_specs(DefaultLogsSpecs, logs),
            log_line_prefix_template=logs.log_line_prefix_template or None,
            start_method="spawn",
            exit_barrier_timeout=exit_barrier_timeout,
        )

    def launch(self) -> RunResult:
        """Run the workers until they exit; raise an exception of the handler unchanged."""
        result: TorchResult | None = self.run()
        if result is None:  # the handler does not need this node, or stop() was called
            return RunResult(WorkerState.STOPPED)
        values = result.return_values
        return RunResult(
            WorkerState[result.state.name],
            {rank: pickle.loads(each) if self._is_function else each for rank, each in values.items()},  # noqa: S301 - of our own worker
            failures=result.failures,
        )

    def describe(self, group: WorkerGroup) -> None:
        """Fill in the round. May be called from any thread."""
        for name in {*group.__slots__} - {"spec"}:
            setattr(group, name, getattr(self._worker_group, name))

    def stop(self) -> None:
        """Leave the run; may be called from any thread."""
        self._stopping = True
        if self._blocked:
            self._stopped()

    def _check(self) -> None:
        if self._stopping:
            raise torch_rendezvous.RendezvousGracefulExitError("LocalElasticAgent.stop() was called")

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._blocked = True  # no workers run during a rendezvous
        try:
            self._check()
            super()._rendezvous(worker_group)
            self._agree(worker_group)
        finally:
            self._blocked = False
        self._check()

    def _agree(self, worker_group: WorkerGroup) -> None:
        store: Any = worker_group.store
        allowed = worker_group.spec.max_restarts
        own = f"{self._round + 1} {allowed - self._remaining_restarts}"
        store.set(f"agreed/{worker_group.group_rank}", own)
        reports = [store.get(f"agreed/{rank}").split() for rank in range(cast("int", worker_group.group_world_size))]
        self._round = max(int(round) for round, _ in reports)
        self._remaining_restarts = allowed - max(int(restarts) for _, restarts in reports)
        os.environ["TORCHELASTIC_ROUND"] = str(self._round)  # the workers inherit it

    def _monitor_workers(self, worker_group: WorkerGroup) -> TorchResult:
        self._check()
        return cast("TorchResult", super()._monitor_workers(worker_group))


class _Handler:
    """The methods that torch's agent calls, for a handler that may have only ``next_rendezvous``."""

    use_agent_store = False

    def __init__(self, spec: WorkerSpec) -> None:
        self._handler: Any = spec.rdzv_handler
        self._local_addr = spec.local_addr

    def next_rendezvous(self) -> torch_rendezvous.RendezvousInfo:
        try:
            store, rank, size = _parts(self._handler.next_rendezvous())
        except RendezvousGracefulExitError as error:
            raise torch_rendezvous.RendezvousGracefulExitError(str(error)) from None
        # A handler may return the same store each time. All nodes take part in each rendezvous, so counts are equal.
        store = PrefixStore(f"torchelastic/{store.add(f'torchelastic/count/{rank}', 1)}", store)
        address = self._local_addr or ("127.0.0.1" if size == 1 else machine.own_address(()))
        where = torch_rendezvous.RendezvousStoreInfo.build(rank, store, address)
        return torch_rendezvous.RendezvousInfo(store, rank, size, where)

    def num_nodes_waiting(self) -> int:
        return int(getattr(self._handler, "num_nodes_waiting", int)())

    def get_run_id(self) -> str:
        return str(getattr(self._handler, "get_run_id", lambda: "none")())

    def get_backend(self) -> str:
        return str(getattr(self._handler, "get_backend", lambda: type(self._handler).__name__)())


def _parts(found: Any) -> tuple[Store, int, int]:  # noqa: ANN401 - any value that a handler returns
    parts = found
    if all(hasattr(found, name) for name in ("store", "rank", "world_size")):
        parts = (found.store, found.rank, found.world_size)
    match parts:
        case (store, int() as rank, int() as size) if 0 <= rank < size:
            return store, rank, size
    raise RendezvousStateError(
        "next_rendezvous() must return (store, rank, world size) or a RendezvousInfo, with a rank from 0 to below "
        f"the world size; it returned {found!r}."
    )


def _call(carried: bytes) -> bytes:
    """Call the function, in a worker, and return its pickled result."""
    function, arguments = pickle.loads(carried)  # noqa: S301 - written by the program that starts the worker
    return cast("bytes", cloudpickle.dumps(function(*arguments)))
