"""Measure how long nodes take to form a round: torchelastic's with a real etcd, and torchrun's c10d rendezvous.

N nodes in a few processes run the agent's own protocol code, without workers. Each node has its own store, connections,
lease, watch and peer connection. Every sample uses new processes and a new etcd. One further run counts requests
and bytes, and another one measures the processor time of the nodes, their leader and etcd in a first round. See
docs/benchmarks.md.
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

from benchmarks.rendezvous.etcd_proxy import Meter
from benchmarks.rendezvous.processes import Change, NodeProcesses
from benchmarks.support.command_line import at_least, parser, run_to_end
from benchmarks.support.etcd import choose_etcd, cpu_seconds, etcd_serving
from benchmarks.support.report import Measurement, Report, note
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
    FIRST: "the connection to etcd, lease, key, watch, connection to the leader, and commit, until all know the round",
    FAILED: "from the member's report until all nodes know the next round",
    SWAPPED: "from both at once, with the connection of the new node, until all nodes know the round with it",
    LED: "from both at once, with the election and the connection of the new node, until all know the round with it",
}

AT_MOST: Final = {2: 0.02, 64: 0.1, 1000: 2.0}
"""The wanted seconds, by the number of nodes."""

RATIO_AT_LEAST: Final = {64: 15.0}
"""The wanted ratio of torchrun's time to torchelastic's, by the number of nodes."""

TORCHRUN_LIMIT: Final = 120.0
"""Seconds that torchrun's two rounds may take."""

LAST_CALL: Final = 1.0
"""torchrun's last_call_timeout in seconds. Its default is 30."""

SHORT_NAME_LOOKUPS: Final = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""Variables that limit name lookups, because torchrun's connections look up host names even without a name server."""

MANY: Final = 64
"""Maximum number of nodes that renew a default lease in time on one machine."""

MAX_FAILURES: Final = 2
"""Number of failed attempts after which a measurement is not tried again; each failed attempt takes the whole limit."""

DEFAULT_LEASE: Final = 5.0
"""The agent's default lease in seconds."""

LONG_LEASE: Final = 60.0
"""The lease in seconds of more than :data:`MANY` nodes, and of nodes whose requests are counted without renewals."""


async def timed(etcd: Path, nodes: int, processes: int) -> dict[str, float]:
    """Return the seconds of a first round, and of each kind of change after it."""
    layout = shares(nodes, processes)
    taken = {}
    async with (
        etcd_serving(etcd) as server,
        NodeProcesses(server.endpoint, direct=server.endpoint, shares=layout, lease=lease_of(nodes)) as group,
    ):
        for kind in KINDS:
            change = await carry_out(kind, group)
            taken[kind] = change.seconds
            await group.settle()
    if change.warnings:
        note(f"{nodes} nodes: {change.warnings} warnings, the first: {change.warning}")
    return taken


async def counted(etcd: Path, nodes: int, processes: int) -> list[dict[str, Any]]:
    """Return the requests and bytes of a first round and of the changes after it, until the last resulting write."""
    rows = []
    async with etcd_serving(etcd) as server, Meter(server.endpoint) as meter:
        layout = shares(nodes, processes)
        async with NodeProcesses(meter.endpoint, direct=server.endpoint, shares=layout, lease=LONG_LEASE) as group:
            for kind in KINDS:
                before, round = meter.copy(), group.round
                await carry_out(kind, group)
                await group.settle()
                facts = {"rounds": group.round - round, "round_bytes": await group.round_bytes()}
                rows.append({"kind": kind, "nodes": nodes, **facts, **_count(nodes, before, meter)})
    return rows


async def shared_out(etcd: Path, nodes: int, processes: int) -> dict[str, Any]:
    """Return the processor time that is used while all other nodes join a leader, which has its own process."""
    layout = [1, *shares(nodes - 1, processes)]
    async with (
        etcd_serving(etcd) as server,
        NodeProcesses(server.endpoint, direct=server.endpoint, shares=layout, lease=lease_of(nodes)) as group,
    ):
        await group.lead()
        before = cpu_seconds(server.pid or 0)
        change = await group.come()
        of_etcd = cpu_seconds(server.pid or 0) - before
    of_leader, *of_nodes = change.cpu
    total = of_leader + sum(of_nodes) + of_etcd
    return {
        "nodes": nodes,
        "seconds": change.seconds,
        "cpu_of_leader": of_leader,
        "cpu_of_nodes": sum(of_nodes),
        "cpu_of_etcd": of_etcd,
        "cpu_per_node": sum(of_nodes) / (nodes - 1),
        "share_of_leader": of_leader / total,
        "share_of_nodes": sum(of_nodes) / total,
        "share_of_etcd": of_etcd / total,
    }


async def torchrun(nodes: int, most: int) -> dict[str, float]:
    """Return the seconds of torchrun's first and second round of this number of nodes, with ``most`` as the maximum."""
    command = (sys.executable, "-m", "benchmarks.rendezvous.torchrun", str(nodes), str(most), str(LAST_CALL))
    process = await asyncio.create_subprocess_exec(
        *with_pdeathsig(command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | SHORT_NAME_LOOKUPS,
    )
    try:
        async with asyncio.timeout(TORCHRUN_LIMIT):
            printed, errors = await process.communicate()
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise RuntimeError(f"{nodes} nodes of torchrun formed no round within {TORCHRUN_LIMIT:g} seconds") from error
    if process.returncode != 0:
        raise RuntimeError(f"torchrun's rendezvous of {nodes} nodes failed: {errors.decode()[-2000:]}")
    first, again = json.loads(printed)
    return {FIRST: first, FAILED: again}


async def carry_out(kind: str, group: NodeProcesses) -> Change:
    """Carry out one change of a kind."""
    if kind == FIRST:
        return await group.come()
    leader = await group.leader()
    if kind == FAILED:
        return await group.fail(group.others(leader)[-1])
    if kind == SWAPPED:
        return await group.swap(leave=group.others(leader)[-1], come="late-1")
    return await group.swap(leave=leader, come="late-2")


def shares(nodes: int, processes: int) -> list[int]:
    """Return the number of nodes of each process."""
    count = max(min(nodes, processes), 1)
    return [nodes // count + (index < nodes % count) for index in range(count)]


def lease_of(nodes: int) -> float:
    """Return the lease of the nodes and their timeout for etcd: the agent's default, or a minute for many nodes.

    More than :data:`MANY` nodes on a few cores cannot all renew a short lease in time. No measured time depends on the
    lease.
    """
    return DEFAULT_LEASE if nodes <= MANY else LONG_LEASE


class Samples:
    """The samples of one launcher for one number of nodes.

    Attributes:
        samples: the seconds of each sample, by kind of change.
        never: the reason of each failed attempt.
    """

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}
        self.never: list[str] = []

    async def take(self, what: str, work: Coroutine[Any, Any, dict[str, float]]) -> None:
        """Measure once, unless there were too many failures."""
        if len(self.never) >= MAX_FAILURES:
            work.close()
            return
        note(what)
        try:
            taken = await work
        except RuntimeError as why:
            self.never.append(f"{why}")
            note(f"{what}: never: {why}")
        else:
            for kind, value in taken.items():
                self.samples.setdefault(kind, []).append(value)


async def measure(arguments: argparse.Namespace) -> tuple[Report, bool]:
    """Take all measurements; return the report, and whether all attempts of torchelastic succeeded."""
    etcd = await choose_etcd(arguments.etcd)
    settings = {
        "nodes": arguments.nodes,
        "baseline_nodes": arguments.baseline_nodes,
        "repeat": arguments.repeat,
        "processes": arguments.processes,
        "etcd": [str(etcd), "--unsafe-no-fsync"],
        "size": "min 1, max 2 N, N desired",
        "lease": {nodes: lease_of(nodes) for nodes in arguments.nodes},
        "torchrun": {
            "nnodes": "N:2N, and N:N in torchrun_full",
            "last_call_timeout": LAST_CALL,
            "default_last_call_timeout": 30,
            "includes": "next_rendezvous of all nodes, called at once with open connections",
        },
    }
    report = Report("rendezvous", settings=settings, etcd=etcd)
    full: list[dict[str, Any]] = []
    operations: list[dict[str, Any]] = []
    processor: list[dict[str, Any]] = []
    complete = True
    for nodes in arguments.nodes:
        ours, baselines, fulls = Samples(), Samples(), Samples()
        for _ in range(arguments.repeat):
            await ours.take(f"{nodes} nodes", timed(etcd, nodes, arguments.processes))
            if nodes in arguments.baseline_nodes:
                await baselines.take(f"{nodes} nodes of torchrun", torchrun(nodes, 2 * nodes))
                await fulls.take(f"{nodes} nodes of torchrun, N:N", torchrun(nodes, nodes))
        complete = complete and not ours.never
        for kind in KINDS:
            compared = kind in COMPARED
            report.add(
                Measurement(
                    f"N={nodes}, {kind}",
                    ours=ours.samples.get(kind, ()),
                    baseline=baselines.samples.get(kind, ()),
                    ours_never=ours.never,
                    baseline_never=baselines.never if compared else (),
                    baseline_name="torchrun, c10d",
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
        note(f"{nodes} nodes, counting")
        try:
            operations += await counted(etcd, nodes, arguments.processes)
            processor.append(await shared_out(etcd, nodes, arguments.processes))
        except RuntimeError as why:
            complete = False
            note(f"{nodes} nodes, counting: never: {why}")
    report.add_value("torchrun_full", full)
    report.add_value("requests_and_bytes", operations)
    report.add_value("processor_seconds", processor)
    return report, complete


def main() -> int:
    """Measure and print; fail if torchelastic's nodes formed no round."""
    flags = parser("rendezvous", __doc__, repeat=5)
    flags.add_argument(
        "--nodes",
        type=_numbers,
        default=[2, 8, 64, 256, 1000],
        metavar="N,…",
        help="numbers of nodes (default: 2,8,64,256,1000)",
    )
    flags.add_argument(
        "--baseline-nodes",
        type=_numbers,
        default=[2, 8, 64],
        metavar="N,…",
        help="numbers of nodes for which torchrun is also measured (default: 2,8,64)",
    )
    cores = len(os.sched_getaffinity(0))
    flags.add_argument(
        "--processes",
        type=at_least(1),
        default=cores,
        metavar="N",
        help="number of processes with nodes (default: one for each core)",
    )
    arguments = flags.parse_args()
    # A thousand nodes have about ten thousand connections. Child processes inherit this limit.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    report, complete = run_to_end("rendezvous", measure(arguments))
    report.show(as_json=arguments.json)
    return 0 if complete else 1


def _count(nodes: int, before: Meter, after: Meter) -> dict[str, Any]:
    requests = after.requests.total() - before.requests.total()
    sent = after.sent.total() - before.sent.total()
    received = after.received.total() - before.received.total()
    return {
        "requests": requests,
        "requests_per_node": requests / nodes,
        "sent_bytes": sent,
        "received_bytes": received,
        "bytes_per_node": (sent + received) / nodes,
    }


def _against_full(nodes: int, kind: str, ours: Sequence[float], full: Sequence[float]) -> dict[str, Any]:
    mine, theirs = statistics.median(ours), statistics.median(full)
    return {"nodes": nodes, "kind": kind, "ours": mine, "torchrun N:N": theirs, "ratio": theirs / mine}


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part]
    except ValueError:
        numbers = [0]
    if any(number < 2 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} should be numbers of nodes, each 2 or more, separated by commas")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
