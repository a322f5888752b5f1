"""The faults of the soak: which there are, how a seed chooses among them, and how each is inflicted and repaired."""

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

from benchmarks.beats import Missing
from torchelastic.protocol import ExitCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from benchmarks.soak_field import Field

GUARD: Final = "torchelastic: guard"
FORK_SERVER: Final = "torchelastic: fork server"
STORE: Final = "torchelastic: store of the round"

_DEATH: Final = 5.0
"""Seconds within which nothing is left of what a killed agent has started, on a machine that is busy."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: what happens.
        slots: to which agents.
        seconds: how long until it is repaired, for what has to be.
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
        inflict: does it, and returns when it is repaired.
        weight: how often it is chosen, relative to the others.
        least: seconds until it is repaired, in leases, at least.
        most: the same at most.
        many: to how many agents it may happen at once.
        calm: whether the round has to outlive it.
    """

    inflict: Callable[[Field, Fault], Awaitable[None]]
    weight: int
    least: float = 0.0
    most: float = 0.0
    many: int = 1
    calm: bool = False


def missing() -> str:
    """Which faults cannot be inflicted here, as a sentence; empty where all can."""
    if shutil.which("ss") is None or os.geteuid() != 0:
        return "Connections are not cut: that takes root, and ss from iproute2."
    return ""


def plan(seed: int, count: int, agents: int, lease: float) -> list[tuple[Fault, ...]]:
    """Faults, chosen by a seed, each kind once before any comes again; now and then two strike at once.

    Args:
        seed: the same one chooses the same faults.
        count: how many.
        agents: how many agents there are.
        lease: in seconds.
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
            number -= 1  # each of those to come hits one agent at least, and no agent is hit by two
            hit = tuple(slots.pop() for _ in range(chance.randint(1, min(kind.many, len(slots) - number))))
            strike.append(Fault(name, hit, round(lease * chance.uniform(kind.least, kind.most), 2)))
        chosen.append(tuple(strike))
    return chosen


def _collide(one: str, other: str) -> bool:
    """Whether two faults would repair each other's: there is one etcd."""
    return one.startswith("etcd") and other.startswith("etcd")


# -- workers and what stands beside them


async def _worker(field: Field, fault: Fault) -> None:
    for slot in fault.slots:
        field.kill(field.worker(slot))


async def _helper(field: Field, fault: Fault) -> None:
    title = FORK_SERVER if fault.kind.startswith("fork server") else GUARD
    for slot in fault.slots:
        for pid in field.titled(slot, title):
            field.kill(pid)


async def _store(field: Field, fault: Fault) -> None:
    del fault  # it is wherever it is
    for slot in range(field.agents):
        for pid in field.titled(slot, STORE):
            field.kill(pid)


# -- agents


async def _agent(field: Field, fault: Fault) -> None:
    trees = [field.tree(slot) for slot in fault.slots]
    for slot in fault.slots:
        field.kill(field.child(slot).pid)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _DEATH
    for slot, tree in zip(fault.slots, trees, strict=True):
        while left := tree & field.tree(None):
            if loop.time() > deadline:
                raise Missing(f"agent {slot} was killed, and of what it had started this outlives it: {left}")
            await asyncio.sleep(0.02)
    await asyncio.sleep(fault.seconds)
    for slot in fault.slots:
        field.start(slot)


async def _leave(field: Field, fault: Fault) -> None:
    for slot in fault.slots:
        field.child(slot).signal(signal.SIGTERM)
    for slot in fault.slots:
        code = await field.ends(slot)
        if code != ExitCode.LEFT:
            raise Missing(f"agent {slot} left with exit code {code}, not {ExitCode.LEFT:d}")
    await asyncio.sleep(fault.seconds)
    for slot in fault.slots:
        field.start(slot)


async def _stopped(field: Field, fault: Fault) -> None:
    stopped = [field.child(slot) for slot in fault.slots]
    if fault.kind.startswith("worker"):
        pids = [field.worker(slot) for slot in fault.slots]
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


async def _cut(field: Field, fault: Fault) -> None:
    await asyncio.to_thread(_cut_now, [field.child(slot).pid for slot in fault.slots])


def _cut_now(pids: Sequence[int]) -> None:
    """Have the kernel break all TCP connections of these processes off; only root may."""
    ss = shutil.which("ss")
    if ss is None:
        return  # said at the beginning
    listed = subprocess.run([ss, "-tnpH", "state", "established"], capture_output=True, text=True, check=True).stdout
    for pid in pids:
        owner = f"pid={pid},"
        for line in listed.splitlines():
            if owner in line and (ends := re.match(r"\s*\d+\s+\d+\s+(\S+):(\d+)\s+(\S+):(\d+)", line)):
                here, port, there, their_port = ends.groups()
                command = [ss, "-K", "-t", "src", here, "sport", "=", port, "dst", there, "dport", "=", their_port]
                subprocess.run(command, capture_output=True, check=False)


# -- etcd


async def _etcd_killed(field: Field, fault: Fault) -> None:
    await field.etcd.kill()
    if fault.kind == "etcd loses its data":
        field.etcd.wipe()
    await asyncio.sleep(fault.seconds)
    await field.etcd.start()


async def _etcd_paused(field: Field, fault: Fault) -> None:
    field.etcd.pause()
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        field.etcd.resume()


KINDS: Final[Mapping[str, Kind]] = {
    "worker killed": Kind(_worker, 6, many=4),
    "worker stopped": Kind(_stopped, 1, least=0.1, most=1, calm=True),
    "store process killed": Kind(_store, 2),
    "fork server killed": Kind(_helper, 2, many=2, calm=True),
    "guard killed": Kind(_helper, 2, many=2, calm=True),
    "agent killed": Kind(_agent, 3, most=1.5, many=2),
    "agent leaves": Kind(_leave, 3, most=1.5, many=2),
    "agent stopped": Kind(_stopped, 2, least=0.1, most=0.6, many=2, calm=True),
    "agent stopped for long": Kind(_stopped, 2, least=1.2, most=2.5, many=2),
    "connections cut": Kind(_cut, 3, many=4, calm=True),
    "etcd killed": Kind(_etcd_killed, 2, most=1.5, calm=True),
    "etcd loses its data": Kind(_etcd_killed, 2, most=1.5),
    "etcd paused": Kind(_etcd_paused, 2, least=0.2, most=2, calm=True),
}
"""All of them, by what they are called."""
