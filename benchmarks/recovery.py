"""How long a run takes to start and to recover: ``python -m benchmarks.recovery --json``.

Real agents with real workers on CPU and gloo, two agents of one worker each, and a real etcd; ours and torchrun in
turn, each time with a run of its own. See docs/benchmarks.md.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from benchmarks import network
from benchmarks.beats import Beats, Missing
from benchmarks.breakable_etcd import BreakableEtcd
from benchmarks.command_line import at_least, duration, parser, run_to_end
from benchmarks.etcd import choose_etcd
from benchmarks.launchers import Spot
from benchmarks.processes import Household
from benchmarks.report import Measurement, Report
from benchmarks.runs import GLOO_TIMEOUT, Run, Stage
from benchmarks.scenarios import SCENARIOS
from elastic_operator.local.etcd import free_ports

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.launchers import System
    from benchmarks.scenarios import Happened, Scenario


GIVE_UP: Final = 2
"""So often may it take for ever before it is not tried again, which would take the limit's time each time."""


@dataclass
class Samples:
    """What one system has shown in one scenario.

    Attributes:
        taken: each time.
        missing: why there was no end to it, for each time that there was none.
    """

    taken: list[Happened] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """The times of all that came to an end."""
        return [happened.seconds for happened in self.taken]

    def as_json(self) -> dict[str, Any]:
        """What a report tells of it."""
        return {
            "samples": self.seconds,
            "median": statistics.median(self.seconds) if self.taken else None,
            "never": self.missing,
        }

    def phases(self) -> dict[str, float]:
        """The medians of its phases, in seconds."""
        phases = [happened.phases for happened in self.taken]
        return {name: statistics.median(each[name] for each in phases) for name in phases[0]} if phases else {}


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured, and how.

    Attributes:
        repeat: how often.
        settle: seconds that a run trains before anything happens to it.
        limit: seconds after which something counts as never coming.
        others: whether torchrun is measured with other settings, too.
        alone: ours alone, without any peer.
    """

    repeat: int
    settle: float
    limit: float
    others: bool
    alone: bool


async def measure(scenario: Scenario, options: Options, binary: Path) -> dict[str, Samples]:
    """Have it happen to all systems in turn; gives back what they have shown, by the systems' names, ours first."""
    peers = [] if options.alone or scenario.peer is None else [scenario.peer]
    peers += scenario.others if options.others and peers else []
    systems = [scenario.ours, *peers]
    found = {system.name: Samples() for system in systems}
    for number in range(options.repeat):
        for system in systems:
            samples = found[system.name]
            if len(samples.missing) >= GIVE_UP:
                continue
            try:
                samples.taken.append(await _once(scenario, system, options, binary))
                told = f"{samples.seconds[-1]:.3f} s"
            except Missing as why:
                samples.missing.append(f"{why}")
                told = f"never: {why}"
            print(f"{scenario.name} {number + 1}/{options.repeat}: {system.name}: {told}", file=sys.stderr, flush=True)
    return found


async def _once(scenario: Scenario, system: System, options: Options, binary: Path) -> Happened:
    async with AsyncExitStack() as stack:
        household = await stack.enter_async_context(Household())
        beats = await stack.enter_async_context(Beats(household.folder / "beats"))
        hosts = None
        if scenario.network:
            hosts = await stack.enter_async_context(network.Network(household, ("etcd", "a", "b")))
            etcd = BreakableEtcd(
                household, binary, (2379, 2380), host=hosts.address("etcd"), inside=hosts.inside("etcd")
            )
        else:
            etcd = BreakableEtcd(household, binary, free_ports(2))
        await etcd.start()
        stage = Stage(
            household=household,
            beats=beats,
            etcd=etcd.endpoint,
            limit=options.limit,
            settle=options.settle,
            network=hosts,
        )
        run = Run(stage, system, scenario.nnodes)
        try:
            return await scenario.happen(run)
        except Missing as why:
            words = run.last_words(2000 if system is scenario.ours else 0)
            raise Missing("\n".join([f"{why}", *words])) from None


def measurement(scenario: Scenario, found: dict[str, Samples]) -> Measurement:
    """A scenario's part of the report."""
    ours, *others = found.values()
    peer = others[0] if others else Samples()
    details: dict[str, Any] = {"phases of ours": ours.phases(), "commands": _commands(scenario)}
    for name, samples in list(found.items())[2:]:
        details[name] = samples.as_json()
    return Measurement(
        scenario.name,
        ours=ours.seconds,
        peer=peer.seconds,
        ours_never=ours.missing,
        peer_never=peer.missing,
        includes=scenario.includes,
        ours_at_most=scenario.ours_at_most,
        ratio_at_least=scenario.ratio_at_least,
        details=details,
    )


def _commands(scenario: Scenario) -> dict[str, str]:
    """How the agents are started."""
    spot = Spot(run_id="RUN", name="NODE", address="ADDRESS", meeting="HOST:PORT", first=True)
    systems = [scenario.ours, *([scenario.peer] if scenario.peer else []), *scenario.others]
    found = {}
    for system in systems:
        variables = [f"{name}={value}" for name, value in system.environment.items()]
        found[system.name] = " ".join([*variables, *system.command(spot, scenario.nnodes)])
    return found


async def run(chosen: Sequence[Scenario], options: Options, binary: Path) -> tuple[Report, bool]:
    """Measure; gives back the report, and whether ours came to an end every time."""
    settings = {
        "repeat": options.repeat,
        "settle": options.settle,
        "limit": options.limit,
        "timeout of the process group": GLOO_TIMEOUT,
        "etcd": [str(binary), "--unsafe-no-fsync"],
    }
    report = Report("recovery", settings=settings, etcd=binary)
    whole = True
    left_out = []
    for scenario in chosen:
        if scenario.network and (why := network.why_not()):
            left_out.append({"left out": scenario.name, "why": why})
            continue
        found = await measure(scenario, options, binary)
        whole = whole and not next(iter(found.values())).missing
        report.add(measurement(scenario, found))
    if left_out:
        report.tell("left out", left_out)
    return report, whole


def main() -> int:
    """Measure, and print; fails where a run of ours did not recover at all."""
    flags = parser("recovery", __doc__)
    flags.add_argument("--repeat", type=at_least(1), default=5, metavar="N", help="measure each so often (default: 5)")
    keys = [each.key for each in SCENARIOS]
    flags.add_argument("--only", action="append", metavar="WHAT", choices=keys, help=f"one of {', '.join(keys)}")
    flags.add_argument("--settle", type=duration, default=8.0, metavar="SECONDS", help="train before that (default: 8)")
    flags.add_argument("--limit", type=duration, default=60.0, metavar="SECONDS", help="longer is never (default: 60)")
    flags.add_argument("--others", action="store_true", help="measure torchrun with other settings, too")
    flags.add_argument("--alone", action="store_true", help="measure ours alone")
    arguments = flags.parse_args()
    chosen = [each for each in SCENARIOS if not arguments.only or each.key in arguments.only]
    options = Options(arguments.repeat, arguments.settle, arguments.limit, arguments.others, arguments.alone)

    async def measured() -> tuple[Report, bool]:
        return await run(chosen, options, await choose_etcd(arguments.etcd))

    report, whole = run_to_end("recovery", measured())
    report.show(as_json=arguments.json)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
