"""Measure how long a run takes to start and to recover: ``python -m benchmarks.recovery --json``.

Two real agents with one worker each (CPU, gloo) use a real etcd. torchelastic-run and torchrun take turns, each in a
new run. See docs/benchmarks.md.
"""

from __future__ import annotations

import statistics
import sys
from argparse import BooleanOptionalAction
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from benchmarks.recovery import network
from benchmarks.recovery.launchers import TORCHRUN
from benchmarks.recovery.runs import GLOO_TIMEOUT, Run
from benchmarks.recovery.scenarios import SCENARIOS
from benchmarks.support.command_line import parser, run_to_end
from benchmarks.support.etcd import BreakableEtcd, choose_etcd
from benchmarks.support.processes import ProcessTree
from benchmarks.support.report import Measurement, Report, note, summary
from benchmarks.support.worker_reports import Missing, WorkerReports
from elastic_operator.local.processes import free_ports

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from benchmarks.recovery.launchers import Launcher
    from benchmarks.recovery.scenarios import Sample, Scenario

MAX_FAILURES: Final = 2
"""Number of failed attempts after which a launcher is not tried again; each failed attempt takes the whole limit."""


@dataclass
class Samples:
    """The samples of one launcher in one scenario.

    Attributes:
        taken: the samples.
        missing: the reason of each failed attempt.
    """

    taken: list[Sample] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """The times of the samples."""
        return [sample.seconds for sample in self.taken]

    def phases(self) -> dict[str, float]:
        """Return the median seconds of each phase."""
        phases = [sample.phases for sample in self.taken]
        return {name: statistics.median(each[name] for each in phases) for name in phases[0]} if phases else {}


async def measure(scenario: Scenario, arguments: argparse.Namespace, binary: Path) -> dict[str, Samples]:
    """Play a scenario with each launcher in turn; return the samples by launcher, torchelastic-run first."""
    found: dict[str, Samples] = {}
    launchers = [scenario.ours, TORCHRUN, *(scenario.others if arguments.others else ())]
    samples_of = [(launcher, found.setdefault(launcher.name, Samples())) for launcher in launchers]
    for number in range(arguments.repeat):
        for launcher, samples in samples_of:
            if len(samples.missing) >= MAX_FAILURES:
                continue
            try:
                samples.taken.append(await _once(scenario, launcher, arguments, binary))
                outcome = f"{samples.seconds[-1]:.3f} s"
            except Missing as why:
                samples.missing.append(f"{why}")
                outcome = f"never: {why}"
            note(f"{scenario.name} {number + 1}/{arguments.repeat}: {launcher.name}: {outcome}")
    return found


async def _once(scenario: Scenario, launcher: Launcher, arguments: argparse.Namespace, binary: Path) -> Sample:
    async with AsyncExitStack() as stack:
        processes = await stack.enter_async_context(ProcessTree())
        reports = await stack.enter_async_context(WorkerReports(processes.folder / "reports"))
        hosts = None
        if scenario.network:
            hosts = await stack.enter_async_context(network.Network(processes, ("etcd", "a", "b")))
            host, inside = hosts.address("etcd"), hosts.inside("etcd")
            etcd = BreakableEtcd(processes, binary, (2379, 2380), host=host, inside=inside, tls=arguments.tls)
        else:
            etcd = BreakableEtcd(processes, binary, free_ports(2), tls=arguments.tls)
        await etcd.start()
        run = Run(
            processes=processes,
            reports=reports,
            etcd=etcd.endpoint,
            certificates=etcd.certificates,
            launcher=launcher,
            nnodes=scenario.nnodes,
            limit=arguments.limit,
            settle=arguments.settle,
            network=hosts,
        )
        try:
            return await scenario.play(run)
        except Missing as why:
            raise Missing("\n".join([f"{why}", *run.last_output(2000 if launcher.is_ours else 0)])) from None


def measurement(scenario: Scenario, found: dict[str, Samples]) -> Measurement:
    """Return the measurement of a scenario."""
    ours, baseline, *_ = found.values()
    details: dict[str, Any] = {"phases of ours": ours.phases(), "commands": _commands(scenario)}
    for name, samples in list(found.items())[2:]:
        details[name] = summary(samples.seconds, samples.missing)
    return Measurement(
        scenario.name,
        ours=ours.seconds,
        baseline=baseline.seconds,
        ours_never=ours.missing,
        baseline_never=baseline.missing,
        includes=scenario.includes,
        ours_at_most=scenario.ours_at_most,
        ratio_at_least=scenario.ratio_at_least,
        details=details,
    )


def steps_and_shares(scenario: Scenario, found: dict[str, Samples]) -> dict[str, Any]:
    """Return the median seconds until the next training step, and the agents' share of them, with torchrun's."""
    ours, baseline, *_ = (samples.taken for samples in found.values())
    row: dict[str, Any] = {"after": scenario.name}
    for what, seconds in (
        ("next training step", attrgetter("seconds")),
        ("agents' share", attrgetter("agents_share")),
    ):
        mine, theirs = (statistics.median(map(seconds, samples)) if samples else None for samples in (ours, baseline))
        row |= {
            f"{what} (s)": mine,
            f"{what} of torchrun (s)": theirs,
            f"{what}, ratio": theirs / mine if mine and theirs else None,
        }
    return row


def _commands(scenario: Scenario) -> dict[str, str]:
    """Return the commands of the agents, by launcher."""
    found = {}
    for launcher in (scenario.ours, TORCHRUN, *scenario.others):
        command = launcher.command(
            node="NODE",
            address="ADDRESS",
            endpoint="HOST:PORT",
            run_id="RUN",
            nnodes=scenario.nnodes,
            first=True,
            reports_ready=False,
        )
        found[launcher.name] = " ".join(
            [*(f"{name}={value}" for name, value in launcher.environment.items()), *command]
        )
    return found


async def run(arguments: argparse.Namespace) -> tuple[Report, bool]:
    """Play all chosen scenarios; return the report, and whether all attempts of torchelastic-run succeeded."""
    binary = await choose_etcd(arguments.etcd)
    settings = {
        "repeat": arguments.repeat,
        "settle": arguments.settle,
        "limit": arguments.limit,
        "timeout of the process group": GLOO_TIMEOUT,
        "etcd": [str(binary), "--unsafe-no-fsync", *(["--client-cert-auth"] if arguments.tls else [])],
    }
    report = Report("recovery", settings=settings, etcd=binary)
    complete = True
    left_out, shares = [], []
    for scenario in SCENARIOS:
        if arguments.only and scenario.key not in arguments.only:
            continue
        if scenario.network and (why := network.why_not()):
            left_out.append({"left out": scenario.name, "why": why})
            continue
        found = await measure(scenario, arguments, binary)
        complete = complete and not found[scenario.ours.name].missing
        report.add(measurement(scenario, found))
        shares.append(steps_and_shares(scenario, found))
    report.add_value("next training step and agents' share", shares)
    if left_out:
        report.add_value("left out", left_out)
    return report, complete


def main() -> int:
    """Measure and print; fail if a run of torchelastic-run did not recover."""
    flags = parser("recovery", __doc__, repeat=5, settle=8.0, limit=60.0)
    keys = [each.key for each in SCENARIOS]
    flags.add_argument("--only", action="append", metavar="SCENARIO", choices=keys, help=f"one of {', '.join(keys)}")
    flags.add_argument(
        "--tls", default=True, action=BooleanOptionalAction, help="whether etcd requires certificates (default: yes)"
    )
    flags.add_argument("--others", action="store_true", help="also measure torchrun with other settings")
    arguments = flags.parse_args()
    report, complete = run_to_end("recovery", run(arguments))
    report.show(as_json=arguments.json)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
