"""A process with some of the nodes that :mod:`benchmarks.rendezvous` measures.

The nodes are :class:`~torchelastic.rendezvous.node.RendezvousNode`, each with a store, connections, a lease and a link
of its own, exactly as in the agent of a pod (its run has an id that is never used again); what an agent does beside it,
its workers above all, is not there.

The process is told what to do by lines of JSON on its standard input, and answers each with a line on its standard
output. ``{"at": T, "come": […], "fail": …, "leave": …, "until": {"above": E, "size": N, "with": …}}`` means: at the
time T of the monotonic clock have nodes come, fail and leave, then wait until all others of this process know a round
with a number above E that has N members, the node of this name among them. The answer says when it began, when the last
of them knew, and the processor time that this process had in between. Without "until" nothing is waited for. At the end
of the input the process is gone, as if it were killed: nobody takes leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import encodings.idna  # noqa: F401 - else the socket module imports it when it is first given a host
import gc
import hashlib
import json
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from torchelastic.config.settings import RendezvousSettings
from torchelastic.protocol import FailureRecord, NodeRecord, SizeRecord
from torchelastic.rendezvous.node import RendezvousNode, RoundStarted
from torchelastic.store import StoreSettings, connect

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from torchelastic.protocol import RoundRecord


class Expectation:
    """Waits until all of some nodes know a round.

    Args:
        above: its number is larger.
        size: it has so many members.
        member: the id of one of them; None for any.
        waiting: the names of the nodes that have to know it.
    """

    def __init__(self, *, above: int, size: int, member: str | None, waiting: set[str]) -> None:
        self._above = above
        self._size = size
        self._member = member
        self._waiting = waiting
        self._met = asyncio.Event()
        self.last = 0.0
        """When the last of them knew."""
        self.round = 0
        """The round that they know."""
        if not waiting:
            self._met.set()

    def told(self, name: str, round: RoundRecord) -> None:
        """A node was told of a round."""
        if round.number <= self._above or len(round.members) != self._size or name not in self._waiting:
            return
        # A newcomer is the last in rank, so it is found at once.
        if self._member is not None and not any(each.node == self._member for each in reversed(round.members)):
            return
        self.last = time.monotonic()
        self.round = round.number
        self._waiting.discard(name)
        if not self._waiting:
            self._met.set()

    async def met(self) -> None:
        """Wait until all of them know it."""
        await self._met.wait()


class Complaints(logging.Handler):
    """Keeps count of warnings, of which a thousand nodes may have a thousand, and the first of them.

    Attributes:
        count: how many there were.
        first: what the first one said.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0
        self.first = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Count one."""
        self.count += 1
        self.first = self.first or record.getMessage()


class Nodes:
    """The nodes of this process.

    Args:
        store: where they meet.
        rules: the run's.
    """

    def __init__(self, store: StoreSettings, rules: RendezvousSettings) -> None:
        self._store = store
        self._rules = rules
        self._nodes: dict[str, RendezvousNode] = {}
        self._present: dict[str, asyncio.Task[None]] = {}
        self._rounds: dict[str, RoundRecord] = {}
        self._expectation: Expectation | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._complaints = Complaints()
        logging.getLogger().addHandler(self._complaints)

    async def change(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out one order; see the module."""
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
        await expectation.met()
        return {
            "began": began,
            "last": expectation.last,
            "round": expectation.round,
            "cpu": time.process_time() - had,
            "warnings": self._complaints.count,
            "warning": self._complaints.first,
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
            os._exit(1)  # the measurement is void, and whoever waits for an answer learns so

    async def _come(self, name: str) -> None:
        store = await connect(self._store)
        record = NodeRecord(name=name, address="127.0.0.1", workers=1, size=self._rules.size)
        node = self._nodes[name] = RendezvousNode(store, self._rules, node=node_id(name), record=record)
        try:
            async with node:
                while True:
                    event = await node.events.get()
                    if isinstance(event, RoundStarted):
                        self._told(name, event)
        finally:
            await store.close()

    def _told(self, name: str, event: RoundStarted) -> None:
        if event.store is not None:
            event.store.close()
        self._rounds[name] = event.record
        if self._expectation is not None:
            self._expectation.told(name, event.record)

    async def _leave(self, name: str) -> None:
        """Go as an agent without workers does: say so, and then be gone."""
        await self._nodes.pop(name).leave()
        self._present.pop(name).cancel()

    def _fail(self, name: str) -> None:
        """Report a worker that failed long after its start, so that it counts as one of its own."""
        round = self._rounds[name]
        rank = round.nodes.index(node_id(name))
        failure = FailureRecord(
            round=round.number, rank=rank, local_rank=0, node=node_id(name), exit_code=1, message="Error", uptime=1e3
        )
        self._nodes[name].report(round.number, failure=failure)


def node_id(name: str) -> str:
    """The id of a node: as in an agent, its name and 8 digits that nobody could guess, except that here one can."""
    return f"{name}.{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


async def serve(store: StoreSettings, rules: RendezvousSettings) -> NoReturn:
    """Carry out orders until there are none; then end the process."""
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin.buffer)
    nodes = Nodes(store, rules)
    print("{}", flush=True)
    while line := await orders.readline():
        print(json.dumps(await nodes.change(json.loads(line))), flush=True)
    os._exit(0)


def main() -> None:
    """Read how to reach the store and the rules from the command line, and serve."""
    endpoint, run_id, wanted, patience = sys.argv[1:]
    size = SizeRecord(min=1, max=2 * int(wanted), desired=int(wanted))
    rules = RendezvousSettings(run_id=run_id, size=size, unique_run=True, lease=float(patience))
    store = StoreSettings(endpoints=(endpoint,), silence_limit=float(patience), request_timeout=float(patience))
    # A full collection goes through all that all nodes of this process have; an agent is alone in its process.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 1_000_000)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(store, rules))


if __name__ == "__main__":
    main()
