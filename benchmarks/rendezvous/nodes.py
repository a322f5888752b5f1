"""A process with some of the nodes of :mod:`benchmarks.rendezvous`.

Each node is a :class:`~torchelastic.rendezvous.node.RendezvousNode` with its own store, connections and lease, as in
the agent of a pod, but without workers.

The process reads orders from standard input, one line of JSON each, and writes one line of JSON as the answer.
``{"at": T, "come": […], "fail": …, "leave": …, "until": {"above": R, "size": N, "with": …}}`` means: at the time T of
the monotonic clock, let these nodes join, fail and leave. Then wait until all remaining nodes of this process know
a round with a number above R and N members, including the node "with". The answer has the start time, the time at which
the last node knew the round, the processor time between the two, and the warnings. If "until" is null, the process does
not wait. At the end of the input, the process exits at once, and its nodes do not announce that they leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import encodings.idna  # noqa: F401 - else the socket module imports it at its first connection
import gc
import hashlib
import json
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from torchelastic.config.settings import RendezvousSettings
from torchelastic.protocol.records import FailureRecord, NodeRecord, SizeRecord
from torchelastic.rendezvous.node import RendezvousNode, RoundStarted
from torchelastic.store import etcd_v3  # noqa: F401 - else it is imported at the first connection
from torchelastic.store.api import StoreSettings
from torchelastic.store.client import connect

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from torchelastic.protocol.records import RoundRecord


class Expectation:
    """Waits until nodes know a round.

    Args:
        above: the number that the round's number must exceed.
        size: the number of members of the round.
        member: the id of a node that must be a member; None for any.
        waiting: the names of the nodes that must know the round.
    """

    def __init__(self, *, above: int, size: int, member: str | None, waiting: set[str]) -> None:
        self._above = above
        self._size = size
        self._member = member
        self._waiting = waiting
        self._met = asyncio.Event()
        self.last = 0.0
        """When the last node knew the round, by the monotonic clock."""
        self.round = 0
        """The number of the round."""
        if not waiting:
            self._met.set()

    def note_round(self, name: str, round: RoundRecord) -> None:
        """Record that a node knows a round."""
        if round.number <= self._above or len(round.members) != self._size or name not in self._waiting:
            return
        # A new node has the last rank, so the search finds it at once.
        if self._member is not None and not any(each.node == self._member for each in reversed(round.members)):
            return
        self.last = time.monotonic()
        self.round = round.number
        self._waiting.discard(name)
        if not self._waiting:
            self._met.set()

    async def wait(self) -> None:
        """Wait until all nodes know the round."""
        await self._met.wait()


class WarningCounter(logging.Handler):
    """Counts warnings instead of printing them, because a thousand nodes may log a thousand warnings.

    Attributes:
        count: the number of warnings.
        first: the text of the first warning; empty if there is none.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0
        self.first = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Count a warning."""
        self.count += 1
        self.first = self.first or record.getMessage()


class Nodes:
    """The nodes of this process.

    Args:
        store: the settings of the nodes' store.
        rules: the settings of the rendezvous.
    """

    def __init__(self, store: StoreSettings, rules: RendezvousSettings) -> None:
        self._store = store
        self._rules = rules
        self._nodes: dict[str, RendezvousNode] = {}
        self._present: dict[str, asyncio.Task[None]] = {}
        self._rounds: dict[str, RoundRecord] = {}
        self._expectation: Expectation | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._warnings = WarningCounter()
        logging.getLogger().addHandler(self._warnings)

    async def change(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out an order, and return the answer."""
        come, fail, leave = order["come"], order["fail"], order["leave"]
        until = order["until"] or {"above": 0, "size": 0, "with": None}
        expectation = self._expectation = Expectation(
            above=until["above"],
            size=until["size"],
            member=node_id(until["with"]) if until["with"] else None,
            waiting={*self._present, *come} - {leave} if order["until"] else set(),
        )
        await asyncio.sleep(max(order["at"] - time.monotonic(), 0.0))
        began, had = time.monotonic(), time.process_time()
        for name in come:
            self._present[name] = self._begin(self._come(name))
        if fail is not None:
            self._fail(fail)
        if leave is not None:
            self._begin(self._leave(leave))
        await expectation.wait()
        return {
            "began": began,
            "last": expectation.last,
            "round": expectation.round,
            "cpu": time.process_time() - had,
            "warnings": self._warnings.count,
            "warning": self._warnings.first,
        }

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            print(f"a node failed: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)  # the benchmark notices that no answer comes

    async def _come(self, name: str) -> None:
        store = await connect(self._store)
        record = NodeRecord(name=name, address="127.0.0.1", workers=1, size=self._rules.size)
        node = self._nodes[name] = RendezvousNode(store, self._rules, node=node_id(name), record=record)
        try:
            async with node:
                while True:
                    event = await node.events.get()
                    if isinstance(event, RoundStarted):
                        self._note_round(name, event)
        finally:
            await store.close()

    def _note_round(self, name: str, event: RoundStarted) -> None:
        if event.tcp_store_listener is not None:
            event.tcp_store_listener.close()
        self._rounds[name] = event.record
        if self._expectation is not None:
            self._expectation.note_round(name, event.record)

    async def _leave(self, name: str) -> None:
        """Let a node leave, like an agent without workers."""
        await self._nodes.pop(name).leave()
        self._present.pop(name).cancel()

    def _fail(self, name: str) -> None:
        """Report the failure of a worker with a long uptime, which does not count towards a crash loop."""
        round = self._rounds[name]
        rank = round.nodes.index(node_id(name))
        failure = FailureRecord(
            round=round.number, rank=rank, local_rank=0, node=node_id(name), exit_code=1, message="Error", uptime=1e3
        )
        self._nodes[name].report(round.number, failure=failure)


def node_id(name: str) -> str:
    """Return the id of a node: its name and 8 digits, which are a digest of the name."""
    return f"{name}.{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


async def serve(store: StoreSettings, rules: RendezvousSettings) -> NoReturn:
    """Carry out orders until the end of the input; then exit."""
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin.buffer)
    nodes = Nodes(store, rules)
    print("{}", flush=True)
    while line := await orders.readline():
        print(json.dumps(await nodes.change(json.loads(line))), flush=True)
    os._exit(0)


def main() -> None:
    """Read the settings from the command line, and carry out orders."""
    endpoint, run_id, wanted, lease = sys.argv[1:]
    size = SizeRecord(min=1, max=2 * int(wanted), desired=int(wanted))
    rules = RendezvousSettings(run_id=run_id, size=size, unique_run=True, max_restarts=100, lease=float(lease))
    store = StoreSettings(endpoints=(endpoint,), silence_limit=float(lease), request_timeout=float(lease))
    # A full garbage collection would visit the objects of all nodes of this process; a real agent has only its own.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 1_000_000)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(store, rules))


if __name__ == "__main__":
    main()
