"""Measure launches of functions from Python: ``python -m benchmarks.launcher --json``.

``torchelastic.launcher.launch``, torch's ``elastic_launch`` and two versions of torchrunx take turns. Each sample is a
program of its own, in a folder of its own; all its processes end with it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.launcher.pods import measure_pods
from benchmarks.launcher.torchrunx_versions import VERSIONS, packages
from benchmarks.support.command_line import parser, run_to_end
from benchmarks.support.processes import ProcessTree, until
from benchmarks.support.report import Measurement, Report, note
from elastic_operator.errors import BadInput
from testbed.cache import Missing

if TYPE_CHECKING:
    import argparse

OURS: Final = "torchelastic"
ELASTIC_LAUNCH: Final = "elastic_launch"
LOOPBACK: Final = "loopback"
"""A plain TCP connection, which is compared with the transfer of a large value."""

_PROGRAM: Final = str(Path(__file__).with_name("program.py"))
_FROM_FAULT: Final = "from the fault to the exception in the caller"


@dataclass(frozen=True, slots=True)
class Case:
    """What a program measures.

    Attributes:
        names: the names of the program's measurements.
        at_most: the wanted seconds of each; None for none.
        ratio: the wanted ratio to each baseline that is named here.
        includes: what the time includes.
        raises: whether the launch should raise an exception.
    """

    names: tuple[str, ...]
    at_most: tuple[float | None, ...]
    ratio: dict[str, float] = field(default_factory=dict)
    includes: str = _FROM_FAULT
    raises: bool = True


_CALL: Final = "from the call of the launcher to its return"
_CHECK: Final = "from the call of the launcher to the exception"
CASES: Final = {
    "launch": Case(
        ("first launch", "second launch in one program"), (None, 0.2), {ELASTIC_LAUNCH: 1.0}, _CALL, raises=False
    ),
    "raise": Case(("one rank raises, the other sleeps",), (0.5,)),
    "collective": Case(("one rank raises, the other waits in an all-reduce",), (0.5,)),
    "killed": Case(("worker SIGKILLed",), (0.5,)),
    "stopped": Case(("worker SIGSTOPped, heartbeat time-out 1 s",), (1.5,)),
    "large": Case(
        ("1 GiB result",), (None,), {LOOPBACK: 0.5}, "from the function's return to launch()'s", raises=False
    ),
    "unresolvable": Case(("unresolvable host",), (2.0,), includes=_CHECK),
    "lengths": Case(("two hosts, one number of workers",), (2.0,), includes=_CHECK),
    "allocation": Case(('"slurm" without an allocation',), (2.0,), includes=_CHECK),
    "duplicate": Case(("the same host twice",), (2.0,), includes=_CHECK),
}
_PODS: Final = "kubernetes"
_HOSTS: Final = ("unresolvable", "lengths", "allocation", "duplicate")
"""Cases that elastic_launch does not have: it launches on this machine only."""


async def measure(launcher: str, name: str, limit: float) -> tuple[list[float], str | None]:
    """Run the program of a case; return its seconds, and what the launcher raised.

    Raises:
        TimeoutError: the program did not end in time, or without an answer.
    """
    environment = {"PYTHONPATH": str(packages(launcher))} if launcher in VERSIONS else {}
    async with ProcessTree() as tree:
        log, answer = tree.folder / "log", tree.scratch / "answer"
        argv = ["env", f"--chdir={tree.scratch}", sys.executable, _PROGRAM, launcher, name]
        program = tree.start(argv, log, environment)
        await until(lambda: answer.exists() or not program.running, limit, "no return")
        if not answer.exists():
            raise TimeoutError(f"the program ended: {log.read_text(errors='replace')[-300:]}")
        found: dict[str, Any] = json.loads(answer.read_text())
    return found["seconds"], found["raised"]


async def measure_case(report: Report, name: str, launchers: list[str], arguments: argparse.Namespace) -> None:
    """Take all samples of a case, by turns, and add its measurements to the report."""
    case = CASES[name]
    samples: dict[str, list[list[float]]] = {each: [] for each in launchers}
    never: dict[str, list[str]] = {each: [] for each in launchers}
    raised: dict[str, str | None] = {}
    for number in range(1, arguments.repeat + 1):
        for who in launchers:
            if never[who] and who != OURS:
                continue
            try:
                seconds, raised[who] = await measure(who, name, arguments.limit)
                if case.raises is (raised[who] is None):
                    raise TimeoutError(f"after {seconds[-1]:.3g} s: {raised[who] or 'no exception'}")  # noqa: TRY301
                samples[who].append(seconds)
                outcome = ", ".join(f"{each:.3f} s" for each in seconds) + f" {raised[who] or ''}".splitlines()[0]
            except TimeoutError as error:
                never[who].append(f"{error}")
                outcome = f"never: {error}"
            note(f"{name} {number}/{arguments.repeat}: {who}: {outcome}")
    for index, what in enumerate(case.names):
        for baseline in launchers[1:] or [""]:
            report.add(
                Measurement(
                    f"{what}; {baseline}" if baseline else what,
                    [each[index] for each in samples[OURS]],
                    [each[index] for each in samples.get(baseline, ())],
                    never[OURS],
                    never.get(baseline, ()),
                    baseline,
                    includes=case.includes,
                    ours_at_most=case.at_most[index],
                    ratio_at_least=case.ratio.get(baseline) if case.at_most[index] is None else None,
                    details={"raised": raised.get(OURS), "raised by the baseline": raised.get(baseline)},
                )
            )


async def run(arguments: argparse.Namespace) -> Report:
    """Measure all chosen cases."""
    settings = {"repeat": arguments.repeat, "limit": arguments.limit, "baselines": arguments.baselines}
    report = Report("launcher", settings=settings)
    try:
        for version in VERSIONS:
            if version in arguments.baselines:
                packages(version)
    except Missing as error:
        raise BadInput(f"{error}, or choose other --baselines.") from None
    for name in arguments.only or [*CASES, _PODS]:
        if name == _PODS:
            try:
                await measure_pods(report, arguments.repeat)
            except Missing as error:
                raise BadInput(f"{error}, or choose other cases with --only.") from None
            continue
        baselines = [each for each in arguments.baselines if each != ELASTIC_LAUNCH or name not in _HOSTS]
        await measure_case(report, name, [OURS, *baselines, *([LOOPBACK] if name == "large" else [])], arguments)
    return report


def main() -> int:
    """Measure and print; fail if an attempt of ours did not end."""
    flags = parser("launcher", __doc__, etcd=False, repeat=3, limit=120)
    flags.add_argument("--only", action="append", metavar="CASE", choices=[*CASES, _PODS])
    baselines = [ELASTIC_LAUNCH, *VERSIONS]
    flags.add_argument(
        "--baselines", nargs="*", choices=baselines, default=baselines, help="the baselines; none to measure ours only"
    )
    arguments = flags.parse_args()
    report = run_to_end("launcher", run(arguments))
    report.show(as_json=arguments.json)
    return int(any(each["ours"]["never"] for each in report.as_json()["measurements"]))


if __name__ == "__main__":
    sys.exit(main())
