"""How workers are started: forked from the fork server, or executed where the program asks for that or is not Python.

Forking is the rule. A forked worker whose environment differs from the fork server's in what counts while an
interpreter starts and torch is imported executes its program after all (:mod:`torchelastic.agent.worker_main`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import types
from pathlib import Path
from typing import TYPE_CHECKING

from torchelastic.agent import error_file, exec_child
from torchelastic.agent.fork_server import ForkServer
from torchelastic.agent.forked_child import WORKER
from torchelastic.agent.memory_kills import MemoryKills
from torchelastic.agent.process_table import TREE_MARK
from torchelastic.agent.processes import python_code, spawn
from torchelastic.agent.title import MARK_ROOM
from torchelastic.agent.worker_group import Worker
from torchelastic.errors import StartError
from torchelastic.settings import ProgramKind, StartMethod
from torchelastic.worker import METRICS_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchelastic.agent.processes import Child, Reaper
    from torchelastic.agent.worker_group import WorkerStart
    from torchelastic.agent.worker_logs import WorkerOutput
    from torchelastic.settings import Program

logger = logging.getLogger(__name__)


class Launcher:
    """What starts workers of one program.

    Args:
        program: the program.
        reaper: gets to know all processes that are started.
        mark: the mark in the environment of all that belongs to the workers.
        local_world_size: how many workers there will be.
        environment: what all workers have in theirs beside the agent's own.

    Attributes:
        fork_server: from which they are forked; not started yet.
        memory_kills: counts processes that were killed for memory.
    """

    def __init__(
        self,
        program: Program,
        reaper: Reaper,
        *,
        mark: str,
        local_world_size: int,
        environment: Mapping[str, str] = types.MappingProxyType({}),
    ) -> None:
        self._program = program
        self._of_all = environment
        self._reaper = reaper
        self._mark = mark
        self._local_world_size = local_world_size
        self._always_executed = program.kind is ProgramKind.COMMAND or program.start_method is StartMethod.EXEC
        self.memory_kills = MemoryKills()
        if self._always_executed and program.preload:
            logger.warning("--preload has no effect: each worker is a new process, which imports all by itself.")
            program = dataclasses.replace(program, preload=())
        self.fork_server = ForkServer(
            reaper,
            self._base() | {TREE_MARK: mark + MARK_ROOM},
            program,
            memory_kills=self.memory_kills,
            spare=1 if self._always_executed else 1 + local_world_size,  # one for the epoch's store
        )

    async def start(self, epoch: int, starts: Sequence[WorkerStart], outputs: Sequence[WorkerOutput]) -> list[Worker]:
        """Start workers.

        Args:
            epoch: the number of their epoch.
            starts: the workers.
            outputs: where the output of each goes.

        Raises:
            StartError: the machine does not allow it.
        """
        kills = self.memory_kills.count()
        environments = [self._environment(epoch, start, output) for start, output in zip(starts, outputs, strict=True)]
        if self._always_executed:
            children = self._execute_all(environments, outputs)
        else:
            children = await self._fork_all(environments, outputs)
        now = asyncio.get_running_loop().time()
        return [
            Worker(
                start=start,
                child=child,
                mark=environment[TREE_MARK],
                output=output,
                started=now,
                memory_kills=kills,
            )
            for start, child, environment, output in zip(starts, children, environments, outputs, strict=True)
        ]

    def _base(self) -> dict[str, str]:
        """The environment that is the same for all workers."""
        base = {**os.environ, **self._of_all}
        base.pop(METRICS_FILE, None)  # of a worker that this agent is part of; each of ours has its own or none
        if self._local_world_size > 1:
            base.setdefault("OMP_NUM_THREADS", "1")
        return base

    def _environment(self, epoch: int, start: WorkerStart, output: WorkerOutput) -> dict[str, str]:
        return {
            **self._base(),
            **start.env,
            error_file.VARIABLE: str(output.error_file),
            TREE_MARK: f"{self._mark}.{epoch}.{start.rank}",
        }

    async def _fork_all(
        self, environments: Sequence[Mapping[str, str]], outputs: Sequence[WorkerOutput]
    ) -> list[Child]:
        program = {"kind": self._program.kind.value, "argv": self._program.argv}
        forked = await self.fork_server.fork(len(environments))
        for process, environment, output in zip(forked, environments, outputs, strict=True):
            with process.link:
                process.begin(WORKER, {**program, "environment": environment}, output.descriptors)
        return [process.child for process in forked]

    def _execute_all(self, environments: Sequence[Mapping[str, str]], outputs: Sequence[WorkerOutput]) -> list[Child]:
        children: list[Child] = []
        try:
            for environment, output in zip(environments, outputs, strict=True):
                children.append(self._execute(environment, output))
        except OSError as error:
            for child in children:
                child.signal(signal.SIGKILL)
            raise StartError(f"no process can be started: {error.strerror}") from None
        return children

    def _execute(self, environment: Mapping[str, str], output: WorkerOutput) -> Child:
        argv: Sequence[str] = self._program.argv
        if self._program.kind is not ProgramKind.COMMAND:
            argv, environment = exec_child.python_program(self._program.kind.value, argv, environment)
        out, err = output.descriptors
        with Path(os.devnull).open("rb") as nothing:
            pid = spawn(
                [*python_code("torchelastic.agent.exec_child", minimal=True), str(os.getpid()), *argv],
                environment,
                {0: nothing.fileno(), 1: out, 2: err},
            )
        return self._reaper.adopt(pid)
