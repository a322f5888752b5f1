"""A coordinator without an agent: each process of the program is a node of the run, and finds the others in etcd."""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib
import logging
import math
import os
import re
import sys
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlsplit

from torchelastic.config import parsers
from torchelastic.errors import RendezvousClosedError, RendezvousError, SettingsError
from torchelastic.inprocess.coordinator import Coordinator, StopException
from torchelastic.metrics.api import profile
from torchelastic.rendezvous.api import RendezvousParameters
from torchelastic.training.agent_worlds import WORLDS, has_agent
from torchelastic.training.errors import NonRetryableException
from torchelastic.training.process_group import InterruptibleProcessGroup

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined] # not listed in its __all__

    from torchelastic.inprocess.state import State
    from torchelastic.inprocess.worker_stats import WorkerStats

__all__ = ["CoordinatorP2P"]

logger = logging.getLogger(__name__)

_PREFIX: Final = "/torchelastic/p2p"
"""The default of ``etcd_prefix``."""

_PROGRESS_INTERVAL: Final = 1000
"""Number of steps between two comparisons of the ranks' speeds."""

_BACKENDS: Final = ("gloo", "mpi", "nccl", "ucc", "xccl")
"""The backends of torch for process groups."""

_STRAGGLER: Final = 0.8
"""Fraction of the highest speed below which a rank is a straggler."""


class CoordinatorP2P(Coordinator):
    """Forms the worlds of a program whose processes find each other in an etcd.

    Under an agent (``torchelastic-run``, a pod of an ElasticJob), the worlds are those of the agent, as for
    :func:`torchelastic.elastic`; the arguments are only checked then.

    Args:
        c10d_backend: the backend of the process group, such as "gloo"; or one for each kind of device, such as
            "cpu:gloo,cuda:nccl".
        init_method: ``etcd://HOST:PORT/RUN_ID?min_workers=1&max_workers=4``. More parameters are ``timeout``,
            ``etcd_prefix``, which separates runs with the same id, and the keys of ``--rdzv-conf``.
        max_num_trainers: the number of ranks at which no rank looks for new ones.
        process_group_timeout: milliseconds after which a collective fails. A rank that does not come to the next world
            within this time after its step is left out.
        coordinator_pg_timeout: the same for the coordinator's own collectives.

    Raises:
        SettingsError: an argument is invalid; the message says what to change.
    """

    def __init__(
        self,
        c10d_backend: str,
        init_method: str,
        max_num_trainers: int,
        process_group_timeout: float = 10_000,
        coordinator_pg_timeout: float = 600_000,
    ) -> None:
        from torchelastic.rendezvous.handler import ElasticRendezvousHandler

        self._backend = _backend(c10d_backend)
        parameters = _parameters(init_method)
        least = parameters.min_nodes
        if type(max_num_trainers) is not int or max_num_trainers < least:
            raise SettingsError(
                f"max_num_trainers={max_num_trainers!r}: must be a whole number, at least min_workers ({least})."
            )
        self._max_num_trainers = max_num_trainers
        self._timeout = _milliseconds("process_group_timeout", process_group_timeout)
        self._control_timeout = _milliseconds("coordinator_pg_timeout", coordinator_pg_timeout)
        self._stopped = False
        self._steps = 0
        self._rank = self._world_size = 0
        self._store: Store
        self._group = InterruptibleProcessGroup()
        self._of_agent = _AgentRendezvous() if has_agent() else None
        if self._of_agent is not None:
            return
        try:
            self._handler = ElasticRendezvousHandler(
                parameters, arrival_timeout=self._timeout.total_seconds(), on_loss=self._group.interrupt
            )
        except SettingsError as error:  # it names the flags of torchelastic-run
            raise SettingsError(re.sub("--rdzv-(conf|endpoint)", "init_method", f"{error}")) from None

    @profile()
    def rendezvous_barrier(self) -> tuple[Store, int, int]:
        """Leave the current world, and wait for the next one."""
        self._group.destroy()
        # An optimizer and DistributedDataParallel import this, for seconds. In a new world, the other ranks would wait.
        importlib.import_module("torch._dynamo")
        if self._of_agent is not None:
            self._store, self._rank, self._world_size = self._of_agent.enter_next()
            return self._store, self._rank, self._world_size
        try:
            self._store, self._rank, self._world_size = self._handler.next_rendezvous()
        except RendezvousClosedError as closed:
            self._stopped = True
            raise StopException(f"{closed}") from None
        except RendezvousError as error:
            raise NonRetryableException(f"{error}") from None
        # For code that reads them; init_process_group() does not need them.
        os.environ.update(RANK=f"{self._rank}", WORLD_SIZE=f"{self._world_size}")
        return self._store, self._rank, self._world_size

    @profile()
    def init_process_group(self) -> None:
        """Create the default process group; and another one with gloo if the default has another backend."""
        if self._of_agent is not None:
            return  # rendezvous_barrier() has created it
        self._group.create(
            self._backend,
            self._store,
            self._rank,
            self._world_size,
            self._timeout,
            self._control_timeout,
            self._handler.has_lost_members,
        )
        self._group.gather()

    @profile()
    def should_rendezvous(self, state: State) -> bool:  # noqa: ARG002 - the interface
        """Return whether nodes wait to join, or the world has changed; always False with ``max_num_trainers`` ranks."""
        if self._of_agent is not None:
            WORLDS.note_state()
            return self.any_rank(WORLDS.is_changing)
        self._group.note_connections()  # sync() and the first step may have created more groups
        if self._world_size >= self._max_num_trainers:
            return False
        try:
            nodes = self._handler.num_nodes_waiting()
        except RendezvousError as error:
            raise NonRetryableException(f"{error}") from None
        return self.any_rank(nodes > 0)

    def any_rank(self, value: bool) -> bool:
        """Return whether a rank passes True. All ranks call this."""
        import torch
        import torch.distributed as dist

        found = torch.tensor(int(value))
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group.control_group)
        return bool(found.item())

    @profile()
    def should_stop_training(self) -> bool:
        """Return whether the run has ended."""
        return self._stopped

    @profile()
    def signal_training_done(self) -> None:
        """Report success, wait a moment for the other ranks to do so, and leave the run."""
        if self._of_agent is not None:
            self._of_agent.end()
        self._stopped = True
        if self._of_agent is not None:
            return
        self._group.destroy()  # a rank that still trains must not wait for this one
        self._handler.shutdown()

    @profile()
    def monitor_progress(self, state: State, worker_stats: WorkerStats | None) -> None:  # noqa: ARG002 - the interface
        """Compare the speeds of the ranks from time to time, and log which ranks are slow."""
        self._steps += 1
        if worker_stats is None or self._steps % _PROGRESS_INTERVAL or self._world_size == 1:
            return
        import torch
        import torch.distributed as dist

        rate = worker_stats.get_progress_rate()
        gathered = torch.zeros(self._world_size)
        gathered[self._rank] = math.nan if rate is None else rate
        dist.all_reduce(gathered, group=self._group.control_group)
        rates = {rank: rate for rank, rate in enumerate(gathered.tolist()) if not math.isnan(rate)}
        if slow := [rank for rank, rate in rates.items() if rate < _STRAGGLER * max(rates.values())]:
            logger.warning("Slow ranks: %s. The progress rates by rank are %s.", slow, rates)

    @profile()
    def report_progress(self, state: State) -> None:
        """Do nothing; the step has been counted as a metric."""

    @profile()
    def on_error(self, error: Exception) -> None:
        """Log the error."""
        if self._of_agent is not None and isinstance(error, RuntimeError):
            self._of_agent.error = error
        logger.warning("rank %d: %s: %s", self._rank, type(error).__name__, f"{error}".partition("\n")[0])

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""
        import torch.distributed as dist

        dist.barrier(group=self._group.control_group)


class _AgentRendezvous:
    """Enters the worlds of an agent's worker, one after the other.

    Attributes:
        error: the last error of a step or of the change to another world.
    """

    def __init__(self) -> None:
        self.error: RuntimeError | None = None
        self._world = contextlib.ExitStack()
        self._is_first = True

    def enter_next(self) -> tuple[Store, int, int]:
        """Leave the current world; return the store of the next one, this process's rank, and the number of ranks.

        Raises:
            RendezvousError: the agent announces no other world, so the agent has to start this process again.
        """
        import torch.distributed as dist

        self._world.close()
        error, self.error = self.error, None
        if not self._is_first and not WORLDS.next(error):
            raise RendezvousError("the agent announces no other world") from error
        self._is_first = False
        self._world.enter_context(WORLDS.world())
        WORLDS.gather()
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name for it
        return store, dist.get_rank(), dist.get_world_size()

    def end(self) -> None:
        """Leave the last world; raise what :meth:`Worlds.end` raises."""
        WORLDS.end()
        self._world.close()


def _backend(name: object) -> str:
    """Return the name of a backend as torch writes it, without importing torch."""
    registered = getattr(sys.modules.get("torch.distributed"), "Backend", None)
    known = "|".join({*_BACKENDS, *getattr(registered, "backend_list", ())} - {"undefined"})
    found = name.lower() if isinstance(name, str) else ""
    if not re.fullmatch(rf"({known})|\w+:({known})(,\w+:({known}))*", found):
        raise SettingsError(
            f"c10d_backend={name!r}: must be {', '.join(_BACKENDS)}, a backend that the program has registered with "
            "torch, or backends by device, such as cpu:gloo,cuda:nccl."
        )
    return found


def _milliseconds(name: str, value: float) -> dt.timedelta:
    try:
        time = dt.timedelta(milliseconds=value)
    except (TypeError, ValueError, OverflowError):
        time = dt.timedelta()
    if isinstance(value, bool) or time <= dt.timedelta():
        raise SettingsError(f"{name}={value!r}: must be a number of milliseconds above 0.")
    return time


def _parameters(init_method: str) -> RendezvousParameters:
    """Parse the URL of an etcd and a run. Messages do not repeat it, because it may contain a password."""
    expected = "init_method must be etcd://HOST:PORT/RUN_ID?min_workers=MIN&max_workers=MAX"
    if not isinstance(init_method, str):
        raise SettingsError(f"{expected}, not of the type {type(init_method).__name__}.")
    try:
        url = urlsplit(init_method)
    except ValueError as error:
        raise SettingsError(f"{expected}: {error}.") from None
    run_id = url.path.strip("/")
    query = dict(parse_qsl(url.query, keep_blank_values=True))
    if url.scheme != "etcd" or not url.netloc or not run_id:
        raise SettingsError(f"{expected}.")
    if "@" in url.netloc:
        raise SettingsError("init_method: write username=… and password=… after the question mark, not in the address.")
    number = parsers.integer(1, parsers.MAX_NODES)
    least, most = (
        number(parsers.RawValue(f"init_method {name}", query.pop(name, ""))) for name in ("min_workers", "max_workers")
    )
    if least > most:
        raise SettingsError(f"init_method: min_workers={least} is above max_workers={most}.")
    prefix = query.pop("etcd_prefix", _PREFIX).strip("/").replace("/", "-")
    parameters = RendezvousParameters("torchelastic", url.netloc, f"{prefix}-{run_id}", least, most)
    parameters.config.update(query)
    return parameters
