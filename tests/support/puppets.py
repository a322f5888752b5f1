"""Real agents whose workers do what the test says.

Each worker connects to the test, reports its environment, and runs the source that it receives. So a test can make
rank 1 fail at a certain moment and wait for the effect, without sleeping or polling a file.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from contextlib import aclosing, suppress
from dataclasses import dataclass
from textwrap import dedent
from typing import TYPE_CHECKING, Any, Self

from tests.support.agents import PATIENCE, AgentProcess
from torchelastic.protocol import OutcomeRecord, RunKeys, decode_state
from torchelastic.store import Listing, connect, follow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tests.support.etcd import EtcdServer
    from torchelastic.store import Entry, Store

PUPPET = """
import json, os, socket, sys

link = socket.socket(socket.AF_UNIX)
link.connect("\\0" + sys.argv[1])
orders = link.makefile("r", encoding="utf-8")

def tell(fact):
    link.sendall(json.dumps(fact).encode() + b"\\n")

tell({"pid": os.getpid(), "env": dict(os.environ)})
for line in orders:
    answer = None
    exec(compile(json.loads(line), "order.py", "exec"))
    tell(answer)
"""
"""The program: it returns what an order leaves in ``answer``, and ends with the test."""

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
"""An order: train together in the background, and count."""


@dataclass(frozen=True)
class Puppet:
    """One worker.

    Attributes:
        pid: its process id, as it sees it itself.
        env: its environment.
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
        """The name of its agent."""
        return self.env["OF_NODE"]

    def tell(self, source: str) -> None:
        """Have it run a source text, without waiting."""
        self.writer.write(json.dumps(dedent(source)).encode() + b"\n")

    async def does(self, source: str) -> Any:
        """Have it run a source text; returns what this leaves in ``answer``."""
        self.tell(source)
        async with asyncio.timeout(PATIENCE):
            line = await self.reader.readline()
        assert line, f"rank {self.rank} of round {self.round} ended"
        return json.loads(line)

    async def gone(self) -> None:
        """Wait until it and all processes that it has forked have ended."""
        with suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                while await self.reader.read(1 << 16):
                    pass


class Stage:
    """Agents of one run on a real etcd, and their workers.

    Args:
        folder: for the program.
        etcd: the etcd of the run; None for agents that run alone.
    """

    def __init__(self, folder: Path, etcd: EtcdServer | None) -> None:
        self.run_id = f"stage-{uuid.uuid4()}"
        self.keys = RunKeys.of(self.run_id)
        self.program = folder / "puppet.py"
        self.program.write_text(PUPPET)
        self._etcd = etcd
        self._name = uuid.uuid4().hex
        self._puppets: list[Puppet] = []
        self._agents: list[AgentProcess] = []
        self._came = asyncio.Condition()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._meet, f"\0{self._name}", limit=1 << 20)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for puppet in self._puppets:
            puppet.writer.transport.abort()
        await self._server.wait_closed()

    def agent(
        self, name: str, *flags: str, env: Mapping[str, str] | None = None, within: Sequence[str] = ()
    ) -> AgentProcess:
        """An agent of the run, an async context manager; the last one of repeated flags counts."""
        place = [] if self._etcd is None else [f"--rdzv-endpoint={self._etcd.endpoint}", f"--rdzv-id={self.run_id}"]
        line = [*place, "--local-addr=127.0.0.1", f"--node-name={name}", *flags, self.program, self._name]
        agent = AgentProcess(*line, env={**(env or {}), "OF_NODE": name}, within=within)
        self._agents.append(agent)
        return agent

    async def round(self, number: int, *, world: int) -> list[Puppet]:
        """The workers of a round, in rank order, once all of them have connected."""
        coming = asyncio.ensure_future(self._all_came(number, world))
        ending = asyncio.gather(*(agent.process.wait() for agent in self._agents))
        try:
            await asyncio.wait((coming, ending), timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                said = "\n\n".join(agent.output for agent in self._agents)
                came = [(puppet.round, puppet.rank) for puppet in self._puppets]
                raise AssertionError(f"round {number} has not begun; workers that came: {came}\n{said}")
        finally:
            coming.cancel()
            ending.cancel()
            await asyncio.gather(coming, ending, return_exceptions=True)
        here = self.workers(number)
        assert [(puppet.rank, puppet.world) for puppet in here] == [(rank, world) for rank in range(world)]
        return here

    async def _all_came(self, number: int, world: int) -> None:
        async with self._came:
            while len(self.workers(number)) < world:
                await self._came.wait()

    def workers(self, number: int) -> list[Puppet]:
        """The workers of a round that have connected so far, in rank order."""
        return sorted((puppet for puppet in self._puppets if puppet.round == number), key=lambda puppet: puppet.rank)

    @property
    def rounds(self) -> set[int]:
        """The numbers of all rounds with a connected worker."""
        return {puppet.round for puppet in self._puppets}

    async def store(self) -> Store:
        """A client of the store that takes no part in the run."""
        assert self._etcd is not None
        return await connect(self._etcd.settings)

    async def until(self, condition: Callable[[Mapping[str, Entry]], object]) -> Mapping[str, Entry]:
        """Follow the run's keys in the store until they meet a condition."""
        store = await self.store()
        state: dict[str, Entry] = {}
        try:
            async with asyncio.timeout(PATIENCE), aclosing(follow(store, self.keys.root)) as news:
                async for batch in news:
                    if isinstance(batch, Listing):
                        state = {entry.key: entry for entry in batch.entries}
                    else:
                        now = state | {change.key: change.entry for change in batch}
                        state = {key: entry for key, entry in now.items() if entry is not None}
                    if condition(state):
                        return state
            raise AssertionError("the store's watch has ended")
        finally:
            await store.close()

    async def outcome(self) -> OutcomeRecord:
        """Wait for the end of the run; returns its outcome."""

        def ended(state: Mapping[str, Entry]) -> OutcomeRecord | None:
            return decode_state(state[self.keys.state].value).outcome if self.keys.state in state else None

        outcome = ended(await self.until(ended))
        assert outcome is not None
        return outcome

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if line := await reader.readline():
            fact = json.loads(line)
            async with self._came:
                self._puppets.append(Puppet(fact["pid"], fact["env"], reader, writer))
                self._came.notify_all()
