"""Real agents with workers that execute commands of the test.

Each worker connects to the test, reports its environment, and executes the source texts that it receives. A test
can therefore make rank 1 fail at a certain moment and wait for the effect, without sleeping or polling a file.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from contextlib import suppress
from dataclasses import dataclass
from textwrap import dedent
from typing import TYPE_CHECKING, Any, Self

from tests.support.agents import TIMEOUT, AgentProcess
from tests.support.etcd import until_keys
from torchelastic.protocol.codec import decode, decode_state
from torchelastic.protocol.keys import RunKeys
from torchelastic.protocol.records import NodeRecord, OutcomeRecord, RoundRecord
from torchelastic.store.client import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tests.support.etcd import EtcdServer
    from torchelastic.store.api import Entry, Store

WORKER_SOURCE = """
import json, os, socket, sys

link = socket.socket(socket.AF_UNIX)
link.connect("\\0" + sys.argv[1])
commands = link.makefile("r", encoding="utf-8")

def send(value):
    link.sendall(json.dumps(value).encode() + b"\\n")

send({"pid": os.getpid(), "env": dict(os.environ)})
for line in commands:
    answer = None
    exec(compile(json.loads(line), "order.py", "exec"))
    send(answer)
"""
"""The program of the workers: it sends the value of ``answer`` after each command, and exits when the test ends."""

TRAINING = """
import threading, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rounds = 0
def train():
    global rounds
    while True:
        dist.all_reduce(torch.ones(1))
        rounds += 1
        time.sleep(0.005)
threading.Thread(target=train, daemon=True).start()
"""
"""A command: train together in the background, and count the steps."""


@dataclass(frozen=True)
class ControlledWorker:
    """One worker.

    Attributes:
        pid: the process id of the worker in its PID namespace.
        env: the environment of the worker.
    """

    pid: int
    env: Mapping[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def round(self) -> int:
        return int(self.env["TORCHELASTIC_ROUND"])

    @property
    def rank(self) -> int:
        return int(self.env["RANK"])

    @property
    def world(self) -> int:
        return int(self.env["WORLD_SIZE"])

    @property
    def node(self) -> str:
        """The name of the worker's agent."""
        return self.env["OF_NODE"]

    def send(self, source: str) -> None:
        """Send a source text to execute, without waiting for the answer."""
        self.writer.write(json.dumps(dedent(source)).encode() + b"\n")

    async def execute(self, source: str) -> Any:
        """Execute a source text in the worker, and return the value of its variable ``answer``."""
        self.send(source)
        async with asyncio.timeout(TIMEOUT):
            line = await self.reader.readline()
        assert line, f"rank {self.rank} of round {self.round} exited"
        return json.loads(line)

    async def wait_ended(self) -> None:
        """Wait until the worker and all processes that it has forked have exited."""
        with suppress(ConnectionError):
            async with asyncio.timeout(TIMEOUT):
                while await self.reader.read(1 << 16):
                    pass


class ControlledRun:
    """Agents of one run on a real etcd, and their workers.

    Args:
        folder: the folder of the program.
        etcd: the etcd of the run; None for agents that run alone.
    """

    def __init__(self, folder: Path, etcd: EtcdServer | None) -> None:
        self.run_id = f"run-{uuid.uuid4()}"
        self.keys = RunKeys(self.run_id)
        self.program = folder / "worker.py"
        self.program.write_text(WORKER_SOURCE)
        self._etcd = etcd
        self._name = uuid.uuid4().hex
        self._workers: list[ControlledWorker] = []
        self._agents: list[AgentProcess] = []
        self._connected = asyncio.Condition()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._accept, f"\0{self._name}", limit=1 << 20)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for worker in self._workers:
            worker.writer.transport.abort()
        await self._server.wait_closed()

    def agent(
        self, name: str, *flags: str, env: Mapping[str, str] | None = None, within: Sequence[str] = ()
    ) -> AgentProcess:
        """Return an agent of the run, which is an async context manager; of a repeated flag, the last one counts."""
        rendezvous = (
            [] if self._etcd is None else [f"--rdzv-endpoint={self._etcd.endpoint}", f"--rdzv-id={self.run_id}"]
        )
        line = [*rendezvous, "--local-addr=127.0.0.1", f"--node-name={name}", *flags, self.program, self._name]
        agent = AgentProcess(*line, env={**(env or {}), "OF_NODE": name}, within=within)
        self._agents.append(agent)
        return agent

    async def round(self, number: int, *, world: int) -> list[ControlledWorker]:
        """Wait until all workers of a round have connected, and return them in rank order."""
        connecting = asyncio.ensure_future(self._all_connected(number, world))
        ending = asyncio.gather(*(agent.process.wait() for agent in self._agents))
        try:
            await asyncio.wait((connecting, ending), timeout=TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                said = "\n\n".join(agent.output for agent in self._agents)
                connected = [(worker.round, worker.rank) for worker in self._workers]
                raise AssertionError(f"round {number} has not started; connected workers: {connected}\n{said}")
        finally:
            connecting.cancel()
            ending.cancel()
            await asyncio.gather(connecting, ending, return_exceptions=True)
        workers = self.workers(number)
        assert [(worker.rank, worker.world) for worker in workers] == [(rank, world) for rank in range(world)]
        return workers

    async def _all_connected(self, number: int, world: int) -> None:
        async with self._connected:
            while len(self.workers(number)) < world:
                await self._connected.wait()

    def workers(self, number: int) -> list[ControlledWorker]:
        """Return the workers of a round that have connected so far, in rank order."""
        return sorted((worker for worker in self._workers if worker.round == number), key=lambda worker: worker.rank)

    @property
    def rounds(self) -> set[int]:
        """The numbers of all rounds with a connected worker."""
        return {worker.round for worker in self._workers}

    async def store(self) -> Store:
        """Return a client of the store that is not a node of the run."""
        assert self._etcd is not None
        return await connect(self._etcd.settings)

    async def until(self, condition: Callable[[Mapping[str, Entry]], object]) -> Mapping[str, Entry]:
        """Follow the run's keys in the store until they meet a condition, and return the keys."""
        assert self._etcd is not None
        return await until_keys(self._etcd.settings, self.keys.root, condition)

    def nodes(self, state: Mapping[str, Entry]) -> list[NodeRecord]:
        """Return the records of the nodes among the run's keys that can start workers."""
        nodes = [decode(entry.value, NodeRecord) for key, entry in state.items() if key.startswith(self.keys.nodes)]
        return [node for node in nodes if not node.starting]

    async def committed_round(self, number: int) -> RoundRecord:
        """Wait until the store has the round of this number, and return the round."""

        def round_in(keys: Mapping[str, Entry]) -> RoundRecord | None:
            round = decode_state(keys[self.keys.state].value).round if self.keys.state in keys else None
            return round if round is not None and round.number == number else None

        round = round_in(await self.until(round_in))
        assert round is not None
        return round

    async def outcome(self) -> OutcomeRecord:
        """Wait for the end of the run, and return its outcome."""

        def ended(state: Mapping[str, Entry]) -> OutcomeRecord | None:
            return decode_state(state[self.keys.state].value).outcome if self.keys.state in state else None

        outcome = ended(await self.until(ended))
        assert outcome is not None
        return outcome

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if line := await reader.readline():
            report = json.loads(line)
            async with self._connected:
                self._workers.append(ControlledWorker(report["pid"], report["env"], reader, writer))
                self._connected.notify_all()
