"""What happens to a run while its recovery is measured, and what is wanted of it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.launchers import FLATTERED, TUNED, UNSHARED, Ours, Torchrun
from benchmarks.runs import Run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from benchmarks.beats import Beat
    from benchmarks.launchers import System

LEASE: Final = 5.0
"""Seconds: the default of ``--rdzv-conf lease``."""

_OURS: Final = Ours()
_FLATTERED: Final = Torchrun(conf=FLATTERED, environment=UNSHARED)
_TUNED: Final = Torchrun("torchrun that misses nodes after 5 s", TUNED, UNSHARED)
_UNTOUCHED: Final = Torchrun("torchrun with its defaults")
_OTHERS: Final = (_TUNED, _UNTOUCHED)


@dataclass(frozen=True, slots=True)
class Happened:
    """What was measured once.

    Attributes:
        since: when the clock began.
        beats: of the workers that are past their all-reduce.
    """

    since: float
    beats: Sequence[Beat]

    @property
    def seconds(self) -> float:
        """How long it took until the last of them was past it."""
        return max(beat.reduced for beat in self.beats) - self.since

    @property
    def phases(self) -> dict[str, float]:
        """Where the time of the last of them went, in seconds."""
        last = max(self.beats, key=lambda beat: beat.reduced)
        return {
            "until the first line of its program": last.began - self.since,
            "until torch was imported": last.imported - last.began,
            "until its process group stood": last.met - last.imported,
            "until it was past an all-reduce": last.reduced - last.met,
        }


@dataclass(frozen=True, slots=True)
class Scenario:
    """One thing that happens to a run.

    Attributes:
        key: by which it is chosen on the command line.
        name: in the report.
        includes: from what to what the clock runs.
        happen: has it happen to a run whose agents were not started yet.
        ours: our agent with its settings.
        peer: torchrun with its settings.
        others: torchrun with other settings, told beside it.
        nnodes: as in ``--nnodes``.
        ours_at_most: seconds that are wanted.
        ratio_at_least: torchrun's time over ours that is wanted.
        network: whether each agent is on a host of its own.
    """

    key: str
    name: str
    includes: str
    happen: Callable[[Run], Awaitable[Happened]]
    ours: System = _OURS
    peer: System | None = _FLATTERED
    others: tuple[System, ...] = ()
    nnodes: str = "1:2"
    ours_at_most: float | None = None
    ratio_at_least: float | None = None
    network: bool = False


async def started(run: Run) -> Happened:
    """Two agents are started."""
    since = run.start("a", "b")
    return Happened(since, await run.together("a", "b", since=since))


async def worker_killed(run: Run) -> Happened:
    """A worker of two gets SIGKILL."""
    await run.settled("a", "b")
    victim = run.worker_of("b")
    since = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    return Happened(since, await run.together("a", "b", since=since))


def befalls_one(
    strike: Callable[[Run, str], float], choose: Callable[[Run], str]
) -> Callable[[Run], Awaitable[Happened]]:
    """Something befalls one agent of two, and the other one goes on without it.

    Args:
        strike: does it to the agent of this name, and gives back when.
        choose: chooses the agent.
    """

    async def happen(run: Run) -> Happened:
        await run.settled("a", "b")
        victim = choose(run)
        since = strike(run, victim)
        return Happened(since, await run.together(*run.agents.keys() - {victim}, since=since))

    return happen


async def joined(run: Run) -> Happened:
    """A third agent comes; the clock begins when it has torch imported, and so is ready to."""
    await run.settled("a", "b")
    mark = run.stage.household.folder / "ready"
    beats = await run.together("a", "b", "c", since=run.start("c", ready=mark))
    return Happened(float(mark.read_text()), beats)


SCENARIOS: Final = (
    Scenario(
        key="start",
        name="start",
        includes="from the start of both launchers until both workers are past an all-reduce",
        happen=started,
        nnodes="2",
        ratio_at_least=1.6,
    ),
    Scenario(
        key="worker",
        name="worker killed",
        includes="from SIGKILL of a worker until both are past an all-reduce",
        happen=worker_killed,
        nnodes="2",
        ours_at_most=0.15,
        ratio_at_least=25,
    ),
    Scenario(
        key="leave",
        name="agent leaves",
        includes="from SIGTERM of an agent that does not lead until the other's worker is past an all-reduce",
        happen=befalls_one(Run.ask_to_leave, Run.follower),
        others=_OTHERS,
        ours_at_most=0.2,
        ratio_at_least=60,
    ),
    Scenario(
        key="leave-leader",
        name="leading agent leaves",
        includes="the same of the agent that leads, or hosts torchrun's store",
        happen=befalls_one(Run.ask_to_leave, Run.leader),
        ours_at_most=0.2,
        ratio_at_least=60,
    ),
    Scenario(
        key="lost",
        name="agent and worker killed",
        includes="from SIGKILL of an agent and all its processes until the other's worker is past an all-reduce",
        happen=befalls_one(Run.kill_with_workers, Run.follower),
        others=_OTHERS,
        ours_at_most=0.5,
        ratio_at_least=25,
    ),
    Scenario(
        key="lost-leader",
        name="leading agent and worker killed",
        includes="the same of the agent that leads, or hosts torchrun's store",
        happen=befalls_one(Run.kill_with_workers, Run.leader),
        ours_at_most=0.5,
        ratio_at_least=25,
    ),
    Scenario(
        key="silent",
        name="host silent",
        includes="from the first lost packet of a host until the other's worker is past an all-reduce",
        happen=befalls_one(Run.silence, Run.follower),
        others=(_TUNED,),
        ours_at_most=LEASE + 0.5,
        ratio_at_least=2,
        network=True,
    ),
    Scenario(
        key="silent-leader",
        name="leading host silent",
        includes="the same of the agent that leads, or hosts torchrun's store",
        happen=befalls_one(Run.silence, Run.leader),
        ours_at_most=LEASE + 0.5,
        ratio_at_least=2,
        network=True,
    ),
    Scenario(
        key="join",
        name="third agent joins",
        includes="from the moment at which its agent has torch imported until all three workers are past an all-reduce",
        happen=joined,
        ours=Ours(conf={"last_call_timeout": 1}),
        nnodes="1:3",
        ours_at_most=0.3,
    ),
)
"""All of them, in the order of the report."""
