"""How long nodes take to meet: ours against a real etcd, and torchrun's c10d rendezvous beside it.

N nodes, in a few processes, run the agent's own protocol code: each has a store, connections, a lease, a watch and a
link of its own, and decodes every record itself. The size is known (min 1, max 2 N, N wanted). Measured are:

- *first*: all N come at once, with nothing connected, until the last of them knows the round with all of them;
- *a worker fails*: a member reports it, until all N know the next round;
- *one leaves, one comes*: both at once, until all N that are there then know a round with the newcomer;
- *the leader leaves, one comes*: the same, with the node that led.

The processes are up and have everything imported before the clock starts; what lies between is all that the nodes do,
beginning with their connections to etcd. Every repeat has fresh processes, and an etcd of its own that has served
others before.

The peer is torchrun's dynamic rendezvous with its c10d backend, with the same N in the same run
(:mod:`benchmarks.rendezvous_torch`); its last_call_timeout is 1 s, though torchrun's default is 30 s. It is measured
twice: with room for more nodes (N:2N), as ours, and with none (N:N), where it closes as soon as it is full.

Then the requests to etcd, and the bytes on the wire, are counted in a run of their own (:mod:`benchmarks.metering`),
and the processor time of a first meeting is divided between the nodes, their leader and etcd: on one machine N nodes
share what in a cluster each of them has for itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
from typing import TYPE_CHECKING, Any, Final

from benchmarks.command_line import at_least, parser, run_to_end
from benchmarks.etcd import choose_etcd, cpu_seconds, etcd_serving
from benchmarks.metering import Meter
from benchmarks.rendezvous_crew import Change, Crew
from benchmarks.report import Measurement, Report
from elastic_operator.local.pdeathsig import with_pdeathsig

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from pathlib import Path

FIRST: Final = "first"
FAILED: Final = "a worker fails"
SWAPPED: Final = "one leaves, one comes"
LED: Final = "the leader leaves, one comes"

KINDS: Final = (FIRST, FAILED, SWAPPED, LED)

COMPARED: Final = (FIRST, FAILED)
"""The kinds for which torchrun is measured too."""

INCLUDES: Final = {
    FIRST: "connecting to etcd, lease, key, watch, link to the leader and the round's commit, until the last has it",
    FAILED: "from the member's report until all nodes know the next round",
    SWAPPED: "from both at once, the newcomer's connecting included, until all nodes know the round with it",
    LED: "from both at once, the succession and the newcomer's connecting included, until all know the round with it",
}

AT_MOST: Final = {2: 0.02, 64: 0.1, 1000: 2.0}
"""Seconds that a rendezvous of so many nodes should take at most."""

RATIO_AT_LEAST: Final = {64: 15.0}
"""So many times as long should torchrun take with so many nodes."""

TORCHRUN_LIMIT: Final = 120.0
"""Seconds after which torchrun's two meetings are given up."""

LAST_CALL: Final = 1.0
"""torchrun's last_call_timeout here; its default is 30 s."""

NO_WAIT_FOR_NAMES: Final = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""torchrun's connections ask for the names of hosts; where nobody answers, that is not to take long."""

MANY: Final = 64
"""More nodes than this share the processors too much to renew their leases in time."""

GIVE_UP: Final = 2
"""So often may nodes not meet before they are not tried again, which would take the time limit each time."""

DEFAULT_LEASE: Final = 5.0
"""The agent's own."""

CALM: Final = 60.0
"""The lease of many nodes, and of those whose requests are counted, in seconds: none is sent because time goes by."""


async def timed(etcd: Path, nodes: int, processes: int) -> dict[str, float]:
    """The seconds of one first meeting of so many nodes and of each kind of change after it."""
    layout = shares(nodes, processes)
    taken = {}
    async with (
        etcd_serving(etcd) as server,
        Crew(server.endpoint, direct=server.endpoint, shares=layout, patience=patience(nodes)) as crew,
    ):
        for kind in KINDS:
            change = await carry_out(kind, crew)
            taken[kind] = change.seconds
            await crew.settle()
    if change.warnings:
        _note(f"{nodes} nodes: {change.warnings} warnings, the first: {change.warning}")
    return taken


async def counted(etcd: Path, nodes: int, processes: int) -> list[dict[str, Any]]:
    """The requests and bytes of a first meeting and of the changes after it, each to the last write that it causes."""
    rows = []
    async with etcd_serving(etcd) as server, Meter(server.endpoint) as meter:
        layout = shares(nodes, processes)
        async with Crew(meter.endpoint, direct=server.endpoint, shares=layout, patience=CALM) as crew:
            for kind in KINDS:
                before, round = meter.copy(), crew.round
                await carry_out(kind, crew)
                await crew.settle()
                facts = {"rounds": crew.round - round, "round_bytes": await crew.round_bytes()}
                rows.append({"kind": kind, "nodes": nodes, **facts, **_count(nodes, before, meter)})
    return rows


async def shared_out(etcd: Path, nodes: int, processes: int) -> dict[str, Any]:
    """Who had the processor while N - 1 nodes came to one that leads already, alone in a process of its own."""
    layout = [1, *shares(nodes - 1, processes)]
    async with (
        etcd_serving(etcd) as server,
        Crew(server.endpoint, direct=server.endpoint, shares=layout, patience=patience(nodes)) as crew,
    ):
        await crew.lead()
        before = cpu_seconds(server.pid or 0)
        change = await crew.come()
        of_etcd = cpu_seconds(server.pid or 0) - before
    of_leader, *of_nodes = change.cpu
    whole = of_leader + sum(of_nodes) + of_etcd
    return {
        "nodes": nodes,
        "seconds": change.seconds,
        "cpu_of_leader": of_leader,
        "cpu_of_nodes": sum(of_nodes),
        "cpu_of_etcd": of_etcd,
        "cpu_per_node": sum(of_nodes) / (nodes - 1),
        "share_of_leader": of_leader / whole,
        "share_of_nodes": sum(of_nodes) / whole,
        "share_of_etcd": of_etcd / whole,
    }


async def torchrun(nodes: int, most: int) -> dict[str, float]:
    """The seconds of torchrun's first and second meeting of so many nodes, and room for so many."""
    process = await asyncio.create_subprocess_exec(
        *with_pdeathsig((sys.executable, "-m", "benchmarks.rendezvous_torch", str(nodes), str(most), str(LAST_CALL))),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | NO_WAIT_FOR_NAMES,
    )
    try:
        async with asyncio.timeout(TORCHRUN_LIMIT):
            told, complaints = await process.communicate()
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise RuntimeError(f"{nodes} nodes of torchrun have not met within {TORCHRUN_LIMIT:g} seconds") from error
    if process.returncode != 0:
        raise RuntimeError(f"torchrun's rendezvous of {nodes} nodes failed: {complaints.decode()[-2000:]}")
    first, again = json.loads(told)
    return {FIRST: first, FAILED: again}


async def carry_out(kind: str, crew: Crew) -> Change:
    """Make one change of this kind."""
    if kind == FIRST:
        return await crew.come()
    leader = await crew.leader()
    if kind == FAILED:
        return await crew.fail(crew.others(leader)[-1])
    if kind == SWAPPED:
        return await crew.swap(leave=crew.others(leader)[-1], come="late-1")
    return await crew.swap(leave=leader, come="late-2")


def shares(nodes: int, processes: int) -> list[int]:
    """How many nodes each process gets."""
    count = max(min(nodes, processes), 1)
    return [nodes // count + (index < nodes % count) for index in range(count)]


def patience(nodes: int) -> float:
    """The lease of the nodes, and what they wait for etcd: the agent's own defaults, but for many a minute.

    Of many that share a few cores some would not get to renew theirs in time, and be lost. No time that is measured
    depends on it: nobody falls silent.
    """
    return DEFAULT_LEASE if nodes <= MANY else CALM


class Takings:
    """The samples of one system with so many nodes, by the kind of change, and what came of the others.

    Attributes:
        samples: the seconds of each time.
        never: why there was no end to it, for each time that there was none.
    """

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}
        self.never: list[str] = []

    async def take(self, what: str, work: Coroutine[Any, Any, dict[str, float]]) -> None:
        """Measure once; after two failures not at all."""
        if len(self.never) >= GIVE_UP:
            work.close()
            return
        _note(what)
        try:
            taken = await work
        except RuntimeError as why:
            self.never.append(f"{why}")
            _note(f"{what}: never: {why}")
        else:
            for kind, value in taken.items():
                self.samples.setdefault(kind, []).append(value)


async def measure(arguments: argparse.Namespace) -> tuple[Report, bool]:
    """Measure everything that was asked for; gives back the report, and whether ours came to an end every time."""
    etcd = await choose_etcd(arguments.etcd)
    settings = {
        "nodes": arguments.nodes,
        "peer_nodes": arguments.peer_nodes,
        "repeat": arguments.repeat,
        "processes": arguments.processes,
        "etcd": [str(etcd), "--unsafe-no-fsync"],
        "size": "min 1, max 2 N, N wanted",
        "lease": {nodes: patience(nodes) for nodes in arguments.nodes},
        "torchrun": {
            "nnodes": "N:2N, and N:N in torchrun_full",
            "last_call_timeout": LAST_CALL,
            "default_last_call_timeout": 30,
            "includes": "next_rendezvous of all, called at once; their connections stand before",
        },
    }
    report = Report("rendezvous", settings=settings, etcd=etcd)
    full: list[dict[str, Any]] = []
    operations: list[dict[str, Any]] = []
    processor: list[dict[str, Any]] = []
    whole = True
    for nodes in arguments.nodes:
        ours, peers, fulls = Takings(), Takings(), Takings()
        for _ in range(arguments.repeat):
            await ours.take(f"{nodes} nodes", timed(etcd, nodes, arguments.processes))
            if nodes in arguments.peer_nodes:
                await peers.take(f"{nodes} nodes of torchrun", torchrun(nodes, 2 * nodes))
                await fulls.take(f"{nodes} nodes of torchrun, which are all", torchrun(nodes, nodes))
        whole = whole and not ours.never
        for kind in KINDS:
            compared = kind in COMPARED
            report.add(
                Measurement(
                    f"N={nodes}, {kind}",
                    ours=ours.samples.get(kind, ()),
                    peer=peers.samples.get(kind, ()),
                    ours_never=ours.never,
                    peer_never=peers.never if compared else (),
                    peer_name="torchrun, c10d",
                    includes=INCLUDES[kind],
                    ours_at_most=AT_MOST.get(nodes),
                    ratio_at_least=RATIO_AT_LEAST.get(nodes) if compared else None,
                    details={"nodes": nodes, "torchrun_full": fulls.samples.get(kind, [])},
                )
            )
        full += [
            _against_full(nodes, kind, ours.samples[kind], fulls.samples[kind])
            for kind in fulls.samples
            if ours.samples
        ]
        _note(f"{nodes} nodes, counting")
        try:
            operations += await counted(etcd, nodes, arguments.processes)
            processor.append(await shared_out(etcd, nodes, arguments.processes))
        except RuntimeError as why:
            whole = False
            _note(f"{nodes} nodes, counting: never: {why}")
    report.tell("torchrun_full", full)
    report.tell("requests_and_bytes", [_flat(row) for row in operations])
    report.tell("requests_by_kind", [{name: row[name] for name in ("kind", "nodes", "by_kind")} for row in operations])
    report.tell("processor_seconds", processor)
    return report, whole


def main() -> int:
    """Read the command line, measure, print; fails where nodes of ours did not meet."""
    flags = parser("rendezvous", __doc__)
    flags.add_argument(
        "--nodes",
        type=_numbers,
        default=[2, 8, 64, 256, 1000],
        metavar="N,…",
        help="how many nodes (default: 2,8,64,256,1000)",
    )
    flags.add_argument(
        "--peer-nodes",
        type=_numbers,
        default=[2, 8, 64],
        metavar="N,…",
        help="for which of these torchrun is measured too (default: 2,8,64)",
    )
    flags.add_argument("--repeat", type=at_least(1), default=5, metavar="N", help="measure each so often (default: 5)")
    cores = len(os.sched_getaffinity(0))
    flags.add_argument(
        "--processes", type=at_least(1), default=cores, metavar="N", help="that share the nodes (default: one a core)"
    )
    arguments = flags.parse_args()
    # A thousand nodes have some ten thousand connections; whatever is started here may have as many.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    report, whole = run_to_end("rendezvous", measure(arguments))
    report.show(as_json=arguments.json)
    return 0 if whole else 1


def _count(nodes: int, before: Meter, after: Meter) -> dict[str, Any]:
    kinds = {path: after.requests[path] - before.requests[path] for path in sorted(after.requests)}
    requests = sum(kinds.values())
    sent = after.sent.total() - before.sent.total()
    received = after.received.total() - before.received.total()
    return {
        "requests": requests,
        "requests_per_node": requests / nodes,
        "sent_bytes": sent,
        "received_bytes": received,
        "bytes_per_node": (sent + received) / nodes,
        "by_kind": {path: count for path, count in kinds.items() if count},
    }


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "by_kind"}


def _against_full(nodes: int, kind: str, ours: Sequence[float], full: Sequence[float]) -> dict[str, Any]:
    mine, theirs = statistics.median(ours), statistics.median(full)
    return {"nodes": nodes, "kind": kind, "ours": mine, "torchrun N:N": theirs, "ratio": theirs / mine}


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part]
    except ValueError:
        numbers = [0]
    if any(number < 2 for number in numbers):
        raise argparse.ArgumentTypeError(
            f"{text!r} should be numbers of nodes with commas between them, each 2 or more"
        )
    return numbers


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
