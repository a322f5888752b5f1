"""The scenarios of the recovery benchmark, with their wanted times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from benchmarks.recovery.launchers import OURS, TORCHRUN_DEFAULTS, TORCHRUN_FAST_LOSS
from benchmarks.recovery.runs import Run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from benchmarks.recovery.launchers import Launcher
    from benchmarks.support.worker_reports import WorkerReport

LEASE: Final = 5.0
"""The default of ``--rdzv-conf lease`` in seconds."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured recovery.

    Attributes:
        since: the time at which the measurement began.
        reports: a report of each worker after its first all-reduce.
    """

    since: float
    reports: Sequence[WorkerReport]

    @property
    def seconds(self) -> float:
        """The seconds until the last worker had done its first training step, which is an all-reduce."""
        return max(report.reduced for report in self.reports) - self.since

    @property
    def agents_share(self) -> float:
        """The seconds until the last worker began to run its program."""
        return max(report.began for report in self.reports) - self.since

    @property
    def phases(self) -> dict[str, float]:
        """The seconds of each phase of the last worker."""
        last = max(self.reports, key=lambda report: report.reduced)
        return {
            "until the first line of its program": last.began - self.since,
            "until torch was imported": last.imported - last.began,
            "until its process group stood": last.met - last.imported,
            "until it was past an all-reduce": last.reduced - last.met,
        }


@dataclass(frozen=True, slots=True)
class Scenario:
    """A start, or a fault and the recovery from it.

    Attributes:
        key: the scenario's name on the command line.
        name: the scenario's name in the report.
        includes: what the measured time includes.
        play: a function that starts the agents of a run and measures once.
        ours: torchelastic-run with its settings.
        others: torchrun with other settings, for ``--others``.
        nnodes: the value of ``--nnodes``.
        ours_at_most: the wanted seconds of torchelastic-run.
        ratio_at_least: the wanted ratio of torchrun's time to that of torchelastic-run.
        network: whether each agent has its own host.
    """

    key: str
    name: str
    includes: str
    play: Callable[[Run], Awaitable[Sample]]
    ours: Launcher = OURS
    others: tuple[Launcher, ...] = ()
    nnodes: str = "1:2"
    ours_at_most: float | None = None
    ratio_at_least: float | None = None
    network: bool = False


async def start(run: Run) -> Sample:
    """Start two agents."""
    since = run.start("a", "b")
    return Sample(since, await run.together("a", "b", since=since))


async def kill_worker(run: Run) -> Sample:
    """Kill one of two workers."""
    await run.settled("a", "b")
    since = run.kill_worker("b")
    return Sample(since, await run.together("a", "b", since=since))


async def join(run: Run) -> Sample:
    """Start a third agent; the measurement begins when the agent has imported torch."""
    await run.settled("a", "b")
    mark = run.processes.folder / "ready"
    reports = await run.together("a", "b", "c", since=run.start("c", ready=mark))
    return Sample(float(mark.read_text()), reports)


def lose_one(fault: Callable[[Run, str], float], choose: Callable[[Run], str]) -> Callable[[Run], Awaitable[Sample]]:
    """Return a scenario in which one of two agents is lost.

    Args:
        fault: inflicts the fault on the agent of this name, and returns the time.
        choose: returns the name of the agent to lose.
    """

    async def play(run: Run) -> Sample:
        await run.settled("a", "b")
        victim = choose(run)
        since = fault(run, victim)
        return Sample(since, await run.together(*run.agents.keys() - {victim}, since=since))

    return play


def lose_each(
    fault: Callable[[Run, str], float],
    key: str,
    name: str,
    includes: str,
    *,
    others: tuple[Launcher, ...],
    ours_at_most: float,
    ratio_at_least: float,
    network: bool = False,
) -> tuple[Scenario, Scenario]:
    """Return the scenarios in which a fault hits the agent that does not lead, and the agent that leads."""
    follower = Scenario(
        key=key,
        name=name,
        includes=includes,
        play=lose_one(fault, Run.follower),
        others=others,
        ours_at_most=ours_at_most,
        ratio_at_least=ratio_at_least,
        network=network,
    )
    leader = replace(
        follower,
        key=f"{key}-leader",
        name=f"leading {name}",
        includes="the same for the agent that leads, or hosts torchrun's store",
        play=lose_one(fault, Run.leader),
        others=(),
    )
    return follower, leader


SCENARIOS: Final = (
    Scenario(
        key="start",
        name="start",
        includes="from the start of both launchers until the first all-reduce of both workers",
        play=start,
        nnodes="2",
        ratio_at_least=1.6,
    ),
    Scenario(
        key="worker",
        name="worker killed",
        includes="from SIGKILL of a worker until the first all-reduce of both new workers",
        play=kill_worker,
        nnodes="2",
        ours_at_most=0.15,
        ratio_at_least=25,
    ),
    *lose_each(
        Run.ask_to_leave,
        "leave",
        "agent leaves",
        "from SIGTERM of a non-leading agent until the first all-reduce of the other agent's new worker",
        others=(TORCHRUN_FAST_LOSS, TORCHRUN_DEFAULTS),
        ours_at_most=0.2,
        ratio_at_least=60,
    ),
    *lose_each(
        Run.kill_with_workers,
        "lost",
        "agent and worker killed",
        "from SIGKILL of an agent with its worker until the first all-reduce of the other agent's new worker",
        others=(TORCHRUN_FAST_LOSS, TORCHRUN_DEFAULTS),
        ours_at_most=0.5,
        ratio_at_least=25,
    ),
    *lose_each(
        Run.silence,
        "silent",
        "host silent",
        "from the first lost packet of a host until the first all-reduce of the other agent's new worker",
        others=(TORCHRUN_FAST_LOSS,),
        ours_at_most=LEASE + 0.5,
        ratio_at_least=2,
        network=True,
    ),
    Scenario(
        key="join",
        name="third agent joins",
        includes="from the end of the third agent's import of torch until the first all-reduce of all three workers",
        play=join,
        ours=replace(OURS, conf={"last_call_timeout": 1}),
        nnodes="1:3",
        ours_at_most=0.3,
    ),
)
"""All scenarios, in the order of the report."""
