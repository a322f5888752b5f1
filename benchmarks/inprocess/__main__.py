"""Measure the pause of training in processes that survive a fault: ``python -m benchmarks.inprocess --json``.

One of N ranks is killed, stopped, leaves, or raises an error, inside or outside a collective: by turns the rank that
was started last, and the first one, which leads the run. The time ends when the last survivor has completed a step in
the next world. ``torchelastic.train`` without an agent and torchrun take turns.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.recovery.launchers import TORCHRUN
from benchmarks.support.command_line import at_least, parser, run_to_end
from benchmarks.support.etcd import BreakableEtcd, choose_etcd
from benchmarks.support.processes import ProcessTree, until
from benchmarks.support.report import Measurement, Report, note
from elastic_operator.local.processes import free_ports

if TYPE_CHECKING:
    import argparse

WANTED: Final = 0.15
"""Wanted seconds from a fault to the next step of every survivor."""

WANTED_AFTER_LEASE: Final = 0.2
"""The same for a stopped rank, after the end of its lease."""

FAULTS: Final = (
    ("killed", "inside"),
    ("killed", "outside"),
    ("raising", "inside"),
    ("raising", "outside"),
    ("leaving", "outside"),
    ("stopped", "inside"),
    ("stopped", "outside"),
)
LEASE: Final = 5.0
"""The lease of a node in seconds."""

_STEPS: Final = 400  # about 2 s
_PROGRAM: Final = str(Path(__file__).with_name("program.py"))


def _lines(file: Path, word: str) -> list[list[float]]:
    """Return the numbers of the complete lines of a report that start with this word."""
    lines = [line.split() for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [[float(number) for number in line[1:]] for line in lines if line[:1] == [word]]


def _has_trained(file: Path, ranks: int) -> bool:
    return sum(size == ranks for _, _, size in _lines(file, "step")) >= _STEPS


async def pause(
    command: list[str], processes: int, ranks: int, limit: float, binary: Path, *, stays: bool, first: bool
) -> float:
    """Start a training program, cause the fault, and return the seconds until the last survivor has trained a step.

    Args:
        command: the command of each process, in which FOLDER and ETCD are replaced.
        processes: how many processes to start.
        ranks: the number of ranks.
        limit: the maximum seconds of each wait.
        binary: the etcd binary.
        stays: whether the next world has as many ranks.
        first: whether the process that was started first has the fault; it leads the run.

    Raises:
        TimeoutError: the program did not start, or did not train again, within the limit.
    """
    async with ProcessTree() as tree:
        folder = tree.folder / "steps"
        folder.mkdir()
        etcd = BreakableEtcd(tree, binary, free_ports(2))
        await etcd.start()
        places = {"FOLDER": f"{folder}", "ETCD": etcd.endpoint}
        for index in range(processes):
            arguments = [places.get(argument, argument) for argument in command]
            tree.start(arguments, tree.folder / f"log-{index}", env=TORCHRUN.environment)

        def reports() -> list[Path]:
            return [path for path in folder.iterdir() if path.suffix == ""]

        def resumed() -> list[float]:
            """Return the time of each rank's first step in the next round."""
            steps = [[time for time, round, _ in _lines(file, "step") if round > fault_round] for file in reports()]
            return [each[0] for each in steps if each]

        try:
            await until(lambda: sum(_has_trained(each, ranks) for each in reports()) == ranks, limit, "no steps")
            victim = sorted(reports(), key=lambda file: int(file.name))[0 if first else -1]
            victim.with_suffix(".fault").touch()
            await until(lambda: bool(_lines(victim, "fault")), limit, "no fault")
            fault_round = max(round for _, round, _ in _lines(victim, "step"))
            await until(lambda: len(resumed()) == (ranks if stays else ranks - 1), limit, "no steps after the fault")
            return max(resumed()) - _lines(victim, "fault")[0][0]
        except TimeoutError:
            for log in tree.folder.glob("log-*"):
                note(log.read_text(errors="replace")[-1500:])
            raise


async def measure(
    fault: str, where: str, ranks: int, arguments: argparse.Namespace, binary: Path
) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    """Cause a fault with each launcher in turn; return the seconds, and the reasons of attempts without an end."""
    taken: dict[str, list[float]] = {"ours": [], "baseline": []}
    never: dict[str, list[str]] = {"ours": [], "baseline": []}
    tail = [_PROGRAM, "FOLDER"]
    baseline = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    baseline += ["--max-restarts=1", "--monitor-interval=0.1", *tail, "torchrun", fault, where]
    ours = [sys.executable, *tail, "torchelastic", fault, where, "ETCD", f"{ranks}", f"{LEASE:g}"]
    for number in range(arguments.repeat):
        turns = [("ours", ours, ranks, fault == "raising")]
        if number == 0 and fault != "stopped":  # torchrun does not notice a stopped rank
            turns.append(("baseline", baseline, 1, True))
        for who, command, processes, stays in turns:
            try:
                seconds = await pause(
                    command, processes, ranks, arguments.limit, binary, stays=stays, first=number % 2 == 1
                )
                taken[who].append(seconds)
                outcome = f"{seconds:.3f} s"
            except TimeoutError as why:
                never[who].append(f"{why}")
                outcome = f"never: {why}"
            note(f"{fault} {where} a collective, {ranks} ranks, {number + 1}/{arguments.repeat}: {who}: {outcome}")
    return taken, never


async def run(arguments: argparse.Namespace) -> Report:
    """Cause all chosen faults; return the report."""
    binary = await choose_etcd(arguments.etcd)
    settings = {"repeat": arguments.repeat, "limit": arguments.limit, "lease": LEASE}
    report = Report("inprocess", settings=settings, etcd=binary)
    for fault, where in FAULTS:
        if arguments.only and fault not in arguments.only:
            continue
        for ranks in arguments.ranks:
            taken, never = await measure(fault, where, ranks, arguments, binary)
            report.add(
                Measurement(
                    f"{fault} {where} a collective, {ranks} ranks",
                    ours=taken["ours"],
                    baseline=taken["baseline"],
                    ours_never=never["ours"],
                    baseline_never=never["baseline"],
                    includes="from the fault to the next step of the last survivor",
                    ours_at_most=LEASE + WANTED_AFTER_LEASE if fault == "stopped" else WANTED,
                )
            )
    return report


def main() -> int:
    """Measure and print; fail if an attempt of ours did not end."""
    flags = parser("inprocess", __doc__, repeat=5, limit=60.0)
    flags.add_argument("--ranks", type=at_least(3), nargs="*", default=[3, 4, 8], help="numbers of ranks")
    flags.add_argument("--only", action="append", metavar="FAULT", choices=sorted({fault for fault, _ in FAULTS}))
    arguments = flags.parse_args()
    report = run_to_end("inprocess", run(arguments))
    report.show(as_json=arguments.json)
    return int(any(each["ours"]["never"] for each in report.as_json()["measurements"]))


if __name__ == "__main__":
    sys.exit(main())
