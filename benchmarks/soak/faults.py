"""The faults of the soak: a plan that a seed determines, and functions that inflict and repair each fault."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.support.worker_reports import Missing
from torchelastic.protocol.pod import ExitCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from benchmarks.soak.agents import Agents

WATCHDOG: Final = "torchelastic: watchdog"
FORK_SERVER: Final = "torchelastic: fork server"
STORE: Final = "torchelastic: TCPStore of a round"

_DEATH: Final = 5.0
"""Seconds within which the processes of a killed agent must exit, on a busy machine."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: a key of KINDS.
        slots: the slots of the agents that the fault hits.
        seconds: the time until the repair, for faults that are repaired.
    """

    kind: str
    slots: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind} (agents {', '.join(map(str, self.slots))}; {self.seconds:.2f} s)"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault.

    Attributes:
        inflict: a function that inflicts the fault, and returns when the fault is repaired.
        weight: the relative frequency of the kind.
        least: the minimum time until the repair, in leases.
        most: the maximum time until the repair, in leases.
        many: the maximum number of agents that one fault hits.
        calm: whether the round must not change.
    """

    inflict: Callable[[Agents, Fault], Awaitable[None]]
    weight: int
    least: float = 0.0
    most: float = 0.0
    many: int = 1
    calm: bool = False


def missing() -> str:
    """Return a sentence that names the faults that cannot be inflicted here; empty if there are none."""
    if shutil.which("ss") is None or os.geteuid() != 0:
        return "Connections are not cut: that needs root, and ss from iproute2."
    return ""


def plan(seed: int, count: int, agents: int, lease: float) -> list[tuple[Fault, ...]]:
    """Return strikes of one or two simultaneous faults. Each kind occurs once before any kind occurs again.

    Args:
        seed: the seed of the random generator.
        count: the number of faults.
        agents: the number of agents.
        lease: the lease in seconds.
    """
    chance = random.Random(seed)
    weights = [kind.weight for kind in KINDS.values()]
    first = chance.sample([*KINDS], len(KINDS))
    left, chosen = count, []
    while left:
        number = 2 if left > 1 and chance.random() < 0.15 else 1
        left -= number
        kinds: list[str] = []
        while len(kinds) < number:
            name = first.pop() if first else chance.choices([*KINDS], weights)[0]
            if not any(_collide(name, other) for other in kinds):
                kinds.append(name)
            elif first:
                first.insert(0, name)
        slots = chance.sample(range(agents), agents)
        strike = []
        for name in kinds:
            kind = KINDS[name]
            number -= 1  # each remaining fault of the strike needs an agent that no other fault hits
            hit = tuple(slots.pop() for _ in range(chance.randint(1, min(kind.many, len(slots) - number))))
            strike.append(Fault(name, hit, round(lease * chance.uniform(kind.least, kind.most), 2)))
        chosen.append(tuple(strike))
    return chosen


def _collide(one: str, other: str) -> bool:
    """Return whether both faults hit etcd, so that one would repair the other."""
    return one.startswith("etcd") and other.startswith("etcd")


# -- workers and helper processes


async def _worker(agents: Agents, fault: Fault) -> None:
    for slot in fault.slots:
        agents.kill(agents.worker(slot))


async def _helper(agents: Agents, fault: Fault) -> None:
    title = FORK_SERVER if fault.kind.startswith("fork server") else WATCHDOG
    for slot in fault.slots:
        for pid in agents.titled(slot, title):
            agents.kill(pid)


async def _store(agents: Agents, fault: Fault) -> None:
    del fault  # an agent may serve the TCPStore of the round, or that of the next one, so search all agents
    for slot in range(agents.count):
        for pid in agents.titled(slot, STORE):
            agents.kill(pid)


# -- agents


async def _agent(agents: Agents, fault: Fault) -> None:
    trees = [agents.tree(slot) for slot in fault.slots]
    for slot in fault.slots:
        agents.kill(agents.child(slot).pid)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _DEATH
    for slot, tree in zip(fault.slots, trees, strict=True):
        while left := tree & agents.tree(None):
            if loop.time() > deadline:
                raise Missing(f"agent {slot} was killed, and these of its processes still run: {left}")
            await asyncio.sleep(0.02)
    await asyncio.sleep(fault.seconds)
    for slot in fault.slots:
        agents.start(slot)


async def _leave(agents: Agents, fault: Fault) -> None:
    for slot in fault.slots:
        agents.child(slot).signal(signal.SIGTERM)
    for slot in fault.slots:
        code = await agents.ends(slot)
        if code != ExitCode.LEFT:
            raise Missing(f"agent {slot} left with exit code {code}, not {ExitCode.LEFT:d}")
    await asyncio.sleep(fault.seconds)
    for slot in fault.slots:
        agents.start(slot)


async def _stopped(agents: Agents, fault: Fault) -> None:
    stopped = [agents.child(slot) for slot in fault.slots]
    if fault.kind.startswith("worker"):
        pids = [agents.worker(slot) for slot in fault.slots]
    else:
        pids = [child.pid for child in stopped]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def _cut(agents: Agents, fault: Fault) -> None:
    await asyncio.to_thread(_cut_now, [agents.child(slot).pid for slot in fault.slots])


def _cut_now(pids: Sequence[int]) -> None:
    """Break all TCP connections of these processes; needs root."""
    ss = shutil.which("ss")
    if ss is None:
        return  # missing() reports this at the beginning
    listed = subprocess.run([ss, "-tnpH", "state", "established"], capture_output=True, text=True, check=True).stdout
    for pid in pids:
        owner = f"pid={pid},"
        for line in listed.splitlines():
            if owner in line and (ends := re.match(r"\s*\d+\s+\d+\s+(\S+):(\d+)\s+(\S+):(\d+)", line)):
                here, port, there, their_port = ends.groups()
                command = [ss, "-K", "-t", "src", here, "sport", "=", port, "dst", there, "dport", "=", their_port]
                subprocess.run(command, capture_output=True, check=False)


# -- etcd


async def _etcd_killed(agents: Agents, fault: Fault) -> None:
    await agents.etcd.kill()
    if fault.kind == "etcd loses its data":
        agents.etcd.wipe()
    await asyncio.sleep(fault.seconds)
    await agents.etcd.start()


async def _etcd_paused(agents: Agents, fault: Fault) -> None:
    agents.etcd.pause()
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        agents.etcd.resume()


KINDS: Final[Mapping[str, Kind]] = {
    "worker killed": Kind(_worker, 6, many=4),
    "worker stopped": Kind(_stopped, 1, least=0.1, most=1, calm=True),
    "store process killed": Kind(_store, 2),
    "fork server killed": Kind(_helper, 2, many=2, calm=True),
    "watchdog killed": Kind(_helper, 2, many=2, calm=True),
    "agent killed": Kind(_agent, 3, most=1.5, many=2),
    "agent leaves": Kind(_leave, 3, most=1.5, many=2),
    "agent stopped": Kind(_stopped, 2, least=0.1, most=0.6, many=2, calm=True),
    "agent stopped for long": Kind(_stopped, 2, least=1.2, most=2.5, many=2),
    "connections cut": Kind(_cut, 3, many=4, calm=True),
    "etcd killed": Kind(_etcd_killed, 2, most=1.5, calm=True),
    "etcd loses its data": Kind(_etcd_killed, 2, most=1.5),
    "etcd paused": Kind(_etcd_paused, 2, least=0.2, most=2, calm=True),
}
"""All kinds, by name."""
