"""Measure how training continues when its world changes: ``python -m benchmarks.training --json``.

Real agents train on the CPU with gloo and a real etcd. Each time ends with a training step of the program. The same
program with ``@torchelastic.elastic``, with restarts and with other launchers take turns, each in a new run. See
docs/benchmarks.md.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.support.command_line import at_least, parser, run_to_end
from benchmarks.support.etcd import choose_etcd
from benchmarks.support.packages import installed
from benchmarks.support.processes import ProcessTree, until
from benchmarks.support.report import Measurement, Report, note, summary
from benchmarks.training.runs import IN_PLACE, RESTARTS, TORCH_ALONE, TORCHFT, TORCHFT_VERSION, TORCHRUN, running
from elastic_operator.errors import BadInput
from testbed.cache import Missing

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable, Mapping

    from benchmarks.training.runs import Run

ROWS: Final = ("kill", "hang", "spare", "join", "leave", "broadcast", "checkpoint", "commit")
WHERES: Final = ("inside", "outside")
BASELINES: Final = (RESTARTS, TORCHRUN, TORCHFT, TORCH_ALONE)
HEARTBEAT_TIMEOUT: Final = 3.0
"""The value of ``--heartbeat-timeout`` in seconds, for the processes that hang."""

WANTED_REDUCTION: Final = 0.06
WANTED_STEP: Final = 0.12
WANTED_AFTER_TIMEOUT: Final = 0.2
WANTED_AFTER_READY: Final = 0.2
WANTED_WITH_SPARE: Final = 0.3
WANTED_PAUSE: Final = 0.1
"""Wanted seconds until the survivors' all-reduce and step, until their step after the time-out for hung processes, from
a successor that is ready until the next step, until the step of all ranks after a spare has taken the place of a node,
and of the pause of a planned change."""

WANTED_BROADCAST: Final = 0.7
WANTED_COPIES: Final = 1.2
WANTED_COMMIT: Final = 20.0
"""The wanted part of the plain rate, the wanted number of in-memory copies, and the wanted microseconds."""

_STEPS: Final = 50
"""Steps in the next world, after which a planned change is over."""

REDUCED: Final = "survivors' all-reduce"
STEPPED: Final = "survivors' step"
FULL: Final = "step of all ranks"
READY: Final = "successor ready → step of all ranks"
PAUSE: Final = "pause of those that stay"
REPEATED: Final = "steps repeated"

Sample = dict[str, float]
"""The values of one run, by what they measure: seconds, and numbers of steps."""


@dataclass
class Samples:
    """The samples of one launcher.

    Attributes:
        taken: the samples.
        never: the reason of each attempt that did not end.
    """

    taken: list[Sample] = field(default_factory=list)
    never: list[str] = field(default_factory=list)

    def of(self, what: str) -> list[float]:
        """Return all values of what is measured."""
        return [sample[what] for sample in self.taken if what in sample]


@dataclass(frozen=True)
class Case:
    """A fault or a planned change.

    Attributes:
        name: the name in the report.
        play: trains, changes the world and measures once; it gets the run and the number of the attempt.
        wanted: the wanted maximum of each value that the report has.
        workers: the number of workers of each agent.
        baselines: the launchers beside the program that trains in place.
        where: "inside" or "outside" a collective.
        flags: more flags of the agents.
    """

    name: str
    play: Callable[[Run, int], Awaitable[Sample]]
    wanted: Mapping[str, float | None]
    workers: int
    baselines: tuple[str, ...]
    where: str = "outside"
    flags: tuple[str, ...] = ()


async def lose(run: Run, attempt: int, *, number: signal.Signals, agents: int) -> Sample:
    """Kill or stop one process: by turns the last rank and rank 0."""
    ranks = agents * run.workers
    for name in "ab"[:agents]:
        run.start(name)
    await run.settled(ranks)
    since = await run.fault(ranks - 1 if attempt % 2 == 0 else 0, number)
    if run.launcher == TORCH_ALONE:  # the lost rank gets no successor
        reduced = await run.until(lambda: run.seen().last("reduced", ranks - 1, since), "no survivors' all-reduce")
        return {REDUCED: reduced - since}
    full = await run.until(lambda: run.seen().last("step", ranks, since, ranks), "no step of all ranks")
    seen = run.seen()
    sample: Sample = {FULL: full - since, REPEATED: seen.repeated(since)}
    for what, event in ((REDUCED, "reduced"), (STEPPED, "step")):
        if (at := seen.last(event, ranks - 1, since)) is not None:
            sample[what] = at - since
    if (ready := seen.last_ready(since)) is not None:
        sample[READY] = full - ready
    return sample


async def replace(run: Run, _: int) -> Sample:
    """Kill one of two agents with its workers, while a third one is a spare whose workers are ready."""
    ranks = 2 * run.workers
    for name in "ab":
        run.start(name)
    await run.trains(ranks, 1)
    run.start("c")
    await run.until(lambda: 0.0 if run.seen().ready("c") == run.workers else None, "the spare is not ready")
    await run.settled(ranks)
    since = run.terminate("b", signal.SIGKILL)
    full = await run.until(lambda: run.seen().last("step", ranks, since, ranks), "no step of all ranks")
    return {FULL: full - since, REPEATED: float(run.seen().repeated(since))}


async def join(run: Run, _: int) -> Sample:
    """Start a second agent while the first trains."""
    run.start("a")
    await run.settled(run.workers)
    since = run.start("b")
    await run.trains(2 * run.workers, _STEPS)
    seen = run.seen()
    full = seen.last("step", 2 * run.workers, since, 2 * run.workers)
    ready = max(at for process in seen if process.slot.startswith("b") for at in process.times("ready"))
    sample = {PAUSE: seen.pause("a", since), REPEATED: float(seen.repeated(since))}
    return sample if full is None else {**sample, READY: full - ready}


async def leave(run: Run, _: int) -> Sample:
    """Let one of two agents leave."""
    run.start("a")
    run.start("b")
    await run.settled(2 * run.workers)
    since = run.terminate("b")
    await run.trains(run.workers, _STEPS)
    seen = run.seen()
    return {PAUSE: seen.pause("a", since), REPEATED: seen.repeated(since)}


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the chosen cases."""
    lost = {REDUCED: WANTED_REDUCTION, STEPPED: WANTED_STEP, FULL: None, READY: WANTED_AFTER_READY, REPEATED: 1}
    hung = {STEPPED: HEARTBEAT_TIMEOUT + WANTED_AFTER_TIMEOUT, FULL: None, REPEATED: 1}
    planned = {PAUSE: WANTED_PAUSE, REPEATED: 0}
    killed = partial(lose, number=signal.SIGKILL)
    stopped = partial(lose, number=signal.SIGSTOP, agents=1)
    found: list[tuple[str, Case]] = []
    for where in arguments.where or WHERES:
        for ranks in arguments.ranks:
            name = f"worker killed {where} a collective, {ranks} ranks"
            found.append(("kill", Case(name, partial(killed, agents=1), lost, ranks, BASELINES, where)))
        name = f"worker killed {where} a collective, 2 agents of 2 ranks"
        found.append(("kill", Case(name, partial(killed, agents=2), lost, 2, (RESTARTS,), where)))
    flags = (f"--heartbeat-timeout={HEARTBEAT_TIMEOUT:g}",)
    found += [
        ("hang", Case(f"worker stopped, {ranks} ranks", stopped, hung, ranks, (RESTARTS,), "outside", flags))
        for ranks in arguments.ranks
    ]
    wanted = {FULL: WANTED_WITH_SPARE, REPEATED: 1}
    found.append(("spare", Case("agent killed, with a spare", replace, wanted, 2, (), flags=("--warm-spare",))))
    found.append(("join", Case("second agent joins", join, {**planned, READY: WANTED_AFTER_READY}, 2, (RESTARTS,))))
    found.append(("leave", Case("second agent leaves", leave, planned, 2, (RESTARTS,))))
    return [case for row, case in found if not arguments.only or row in arguments.only]


async def measure(case: Case, arguments: argparse.Namespace, binary: Path) -> dict[str, Samples]:
    """Play a case with each launcher in turn; return the samples by launcher."""
    launchers = [IN_PLACE, *(each for each in case.baselines if each in arguments.baselines)]
    found = {launcher: Samples() for launcher in launchers}
    for attempt in range(arguments.repeat):
        for launcher, samples in found.items():
            if samples.never and launcher != IN_PLACE:
                continue
            try:
                async with running(
                    launcher,
                    case.where,
                    workers=case.workers,
                    limit=arguments.limit,
                    settle=arguments.settle,
                    binary=binary,
                    flags=case.flags,
                ) as run:
                    samples.taken.append(await case.play(run, attempt))
                outcome = ", ".join(f"{what} {value:.3f}" for what, value in samples.taken[-1].items())
            except TimeoutError as why:
                samples.never.append(f"{why}")
                outcome = f"never: {why}"
            note(f"{case.name} {attempt + 1}/{arguments.repeat}: {launcher}: {outcome}")
    return found


def measurements(case: Case, found: Mapping[str, Samples]) -> list[Measurement]:
    """Return a measurement for each value of a case. Its baseline is the first of those in the code that has run."""
    ours, *_ = found.values()
    baseline = next((name for name in (TORCHRUN, RESTARTS, TORCH_ALONE) if name in found), "")
    theirs = found.get(baseline, Samples())
    others = {name: samples for name, samples in found.items() if name not in {IN_PLACE, baseline}}
    return [
        Measurement(
            f"{case.name}: {what}",
            ours=ours.of(what),
            baseline=theirs.of(what),
            ours_never=ours.never,
            baseline_never=theirs.never,
            baseline_name=baseline,
            unit="steps" if what == REPEATED else "s",
            includes="from the change until the last of these ranks" if what in {REDUCED, STEPPED, FULL} else "",
            ours_at_most=wanted,
            details={name: summary(samples.of(what), samples.never) for name, samples in others.items()},
        )
        for what, wanted in case.wanted.items()
    ]


def medians(case: Case, found: Mapping[str, Samples]) -> list[dict[str, Any]]:
    """Return a row with the medians of each launcher, and the ratio of its survivors' all-reduce to ours."""
    columns = (REDUCED, STEPPED, FULL, READY, PAUSE, REPEATED)
    rows = []
    for launcher, samples in found.items():
        values = {what: statistics.median(each) if (each := samples.of(what)) else None for what in columns}
        reduced, ours = values[REDUCED], found[IN_PLACE].of(REDUCED)
        ratio = reduced / statistics.median(ours) if reduced is not None and ours else None
        row = {"case": case.name, "launcher": launcher, **values, f"{REDUCED}, ratio": ratio}
        rows.append({**row, "never": len(samples.never)})
    return rows


async def costs(cost: str, workers: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Measure a cost in one run of :mod:`benchmarks.training.costs`; return the lists of samples.

    Raises:
        TimeoutError: the run does not end within the limit.
    """
    async with ProcessTree() as tree:
        answer, log = tree.folder / "answer", tree.folder / "log"
        program = [str(Path(__file__).with_name("costs.py")), cost, str(answer)]
        flags = ["--standalone", f"--nproc-per-node={workers}", "--max-restarts=0"]
        agent = tree.start(
            [
                sys.executable,
                "-m",
                "torchelastic.run",
                *flags,
                *program,
                f"{arguments.repeat}",
                f"{arguments.gigabytes}",
            ],
            log,
            {"OMP_NUM_THREADS": "1"},
        )
        await until(lambda: not agent.running, arguments.limit * arguments.repeat, f"{cost} has not ended")
        if not answer.exists():
            raise TimeoutError(f"{cost} has failed: {log.read_text(errors='replace')[-1500:]}")
        found: dict[str, list[float]] = json.loads(answer.read_text())
    return found


async def cost_measurements(arguments: argparse.Namespace) -> list[Measurement]:
    """Return the measurements of the chosen costs."""
    found = []
    size = f"{arguments.gigabytes:g} GB"
    for cost, workers in (("broadcast", 2), ("checkpoint", 1), ("commit", 1)):
        if arguments.only and cost not in arguments.only:
            continue
        samples: dict[str, list[float]] = defaultdict(list)
        never = []
        try:
            samples |= await costs(cost, workers, arguments)
        except TimeoutError as why:
            never.append(f"{why}")
        note(f"{cost}: {never or dict(samples)}")
        if cost == "broadcast":
            rates = {
                f"bytes per second, {name}": [samples["bytes"][0] / each for each in samples[name]]
                for name in ("restore", "plain")
            }
            measurement = Measurement(
                f"{size} of state to a new rank",
                ours=samples["restore"],
                baseline=samples["plain"],
                ours_never=never,
                baseline_name="one broadcast of as many bytes",
                includes="TorchState.restore() of two ranks",
                ratio_at_least=WANTED_BROADCAST,
                details=rates,
            )
        elif cost == "checkpoint":
            measurement = Measurement(
                f"pause for a checkpoint of {size}",
                ours=samples["save"],
                baseline=samples["clone"],
                ours_never=never,
                baseline_name="one copy in memory",
                includes="Checkpointer.save()",
                ratio_at_least=1 / WANTED_COPIES,
                details={"torch.save": samples["torch.save"], "until it is written": samples["write"]},
            )
        else:
            measurement = Measurement(
                "TorchState.commit()",
                ours=samples["commit"],
                ours_never=never,
                unit="µs",
                includes="with a module, an optimizer and a sampler, under an agent",
                ours_at_most=WANTED_COMMIT,
            )
        found.append(measurement)
    return found


async def run_all(arguments: argparse.Namespace) -> Report:
    """Measure all chosen rows; return the report."""
    binary = await choose_etcd(arguments.etcd)
    names = ("repeat", "limit", "settle", "ranks", "gigabytes", "baselines")
    report = Report("training", settings={name: getattr(arguments, name) for name in names}, etcd=binary)
    chosen = cases(arguments)
    if TORCHFT in arguments.baselines and any(TORCHFT in case.baselines for case in chosen):
        try:
            installed("torchft", TORCHFT_VERSION)
        except Missing as error:
            raise BadInput(f"{error}, or choose other --baselines.") from None
    rows = []
    for case in chosen:
        found = await measure(case, arguments, binary)
        for measurement in measurements(case, found):
            report.add(measurement)
        rows += medians(case, found)
    for measurement in await cost_measurements(arguments):
        report.add(measurement)
    if rows:
        report.add_value("medians (s)", rows)
    return report


def main() -> int:
    """Measure and print; fail if an attempt of ours did not end."""
    flags = parser("training", __doc__, repeat=5, settle=5.0, limit=60.0)
    flags.add_argument("--only", action="append", metavar="ROW", choices=ROWS, help=f"one of {', '.join(ROWS)}")
    flags.add_argument(
        "--where",
        action="append",
        choices=WHERES,
        help="in the row kill: inside or outside a collective (default: both)",
    )
    flags.add_argument(
        "--ranks",
        type=lambda text: [at_least(3)(each) for each in text.split(",")],
        default=[3, 8],
        metavar="N,…",
        help="numbers of ranks of one agent, 3 or more (default: 3,8)",
    )
    flags.add_argument(
        "--gigabytes", type=float, default=1.0, metavar="N", help="size of the large state (default: %(default)g)"
    )
    flags.add_argument(
        "--baselines",
        nargs="*",
        choices=BASELINES,
        default=BASELINES,
        help=f'the baselines; none to measure ours only; "{TORCH_ALONE}" has no agents and measures only {REDUCED}',
    )
    arguments = flags.parse_args()
    report = run_to_end("training", run_all(arguments))
    report.show(as_json=arguments.json)
    return int(any(each["ours"]["never"] for each in report.as_json()["measurements"]))


if __name__ == "__main__":
    sys.exit(main())
