"""Measure the operator's speed on a real API server with simulated nodes: ``python -m benchmarks.operator --json``.

See docs/benchmarks.md.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.operator import scenarios
from benchmarks.operator.cluster import OperatedCluster
from benchmarks.operator.training_operator import TrainingOperator
from benchmarks.support.command_line import at_least, duration, existing, parser, run_to_end
from benchmarks.support.report import Report, note
from elastic_operator.errors import BadInput
from testbed.binaries import binary
from testbed.cache import Missing

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

ROWS: Final = ("created", "replaced", "scaled", "many", "large")


async def measure(arguments: argparse.Namespace) -> Report:
    """Take all chosen measurements.

    Raises:
        BadInput: a binary is missing.
    """
    try:
        etcd = binary("etcd")
        for name in ("kube-apiserver", "kwok"):
            binary(name)
    except Missing as missing:
        raise BadInput(str(missing)) from None
    paths = ("baseline", "baseline_definition")
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "logs", *paths)}
    report = Report("operator", settings=settings, etcd=etcd)
    with tempfile.TemporaryDirectory(prefix="benchmark-operator-") as folder:
        try:
            async with OperatedCluster(Path(folder)) as cluster:
                baseline = await _measure_baseline(cluster, arguments, Path(folder))
                await _measure_on(cluster, arguments, report, baseline)
        finally:
            if arguments.logs is not None:
                arguments.logs.write_text((Path(folder) / "operator.log").read_text(errors="replace"))
    return report


async def _measure_baseline(
    cluster: OperatedCluster, arguments: argparse.Namespace, folder: Path
) -> dict[int | str, list[float]] | None:
    """Return the baseline's samples by number of pods, and under "replaced" those of replaced pods; None for none."""
    if arguments.baseline is None:
        return None
    only = arguments.only or ROWS
    taken: dict[int | str, list[float]] = {}
    async with TrainingOperator(cluster, arguments.baseline, arguments.baseline_definition, folder) as baseline:
        if "created" in only:
            for pods in arguments.pods:
                taken[pods] = [await baseline.created(pods) for _ in range(arguments.baseline_repeat)]
                _print_progress(f"the baseline: {pods} pods exist", taken[pods][0])
        if "replaced" in only:
            taken["replaced"] = await baseline.replaced(arguments.baseline_repeat)
            _print_progress("the baseline: a deleted pod is replaced", taken["replaced"][0])
    return taken


async def _measure_on(
    cluster: OperatedCluster,
    arguments: argparse.Namespace,
    report: Report,
    baseline: dict[int | str, list[float]] | None,
) -> None:
    only, requests = arguments.only or ROWS, []
    if "created" in only:
        for pods in arguments.pods:
            made, row = await scenarios.created(
                cluster, pods, repeat=arguments.repeat, baseline=None if baseline is None else baseline[pods]
            )
            report.add(made)
            requests.append(row)
            _print_progress(made.name, made.median)
    if "replaced" in only:
        for lingers in (False, True):
            replaced = await scenarios.replaced(
                cluster,
                arguments.deletions,
                lingers=lingers,
                baseline=None if baseline is None else baseline["replaced"],
            )
            report.add(replaced)
            _print_progress(replaced.name, replaced.median)
    if "scaled" in only:
        for scaled in await scenarios.scaled(cluster, *arguments.scale, repeat=arguments.repeat):
            report.add(scaled)
            _print_progress(scaled.name, scaled.median)
    if "many" in only:
        jobs, slowest, row = await scenarios.many(cluster, *arguments.many)
        for each in (jobs, slowest):
            report.add(each)
            _print_progress(each.name, each.median)
        requests.append(row)
    if "large" in only:
        for each in await scenarios.large(cluster, *arguments.large, idle=arguments.idle, changes=arguments.changes):
            report.add(each)
            _print_progress(each.name, each.median)
    report.add_value("requests", requests)


def _print_progress(name: str, value: float | None) -> None:
    note(f"{name}: {value:.4g}")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser("operator", __doc__, etcd=False, repeat=5)
    made.add_argument("--only", action="append", choices=ROWS, help="measure only this; may be repeated")
    made.add_argument(
        "--pods",
        type=_numbers,
        default=(9, 101, 300, 1000),
        metavar="N,…",
        help="numbers of pods of one job (default: 9,101,300,1000)",
    )
    made.add_argument(
        "--deletions", type=at_least(1), default=50, metavar="N", help="number of deleted pods (default: %(default)s)"
    )
    made.add_argument("--scale", type=_pair, default=(10, 200), metavar="A,B", help="numbers of pods (default: 10,200)")
    for flag, pods in (("--many", 4), ("--large", 10)):
        text = f"number of jobs, and of pods of each (default: 500,{pods})"
        made.add_argument(flag, type=_pair, default=(500, pods), metavar="J,P", help=text)
    made.add_argument("--idle", type=duration, default=30.0, metavar="S", help="seconds of rest (default: %(default)g)")
    made.add_argument(
        "--changes",
        type=at_least(1),
        default=20,
        metavar="N",
        help="number of pods deleted after that (default: %(default)s)",
    )
    made.add_argument(
        "--baseline", type=existing, metavar="FILE", help="the training-operator binary to measure as well"
    )
    made.add_argument(
        "--baseline-definition", type=existing, metavar="FILE", help="the definition of the PyTorchJob, for --baseline"
    )
    made.add_argument(
        "--baseline-repeat",
        type=at_least(1),
        default=1,
        metavar="N",
        help="number of its samples (default: %(default)s)",
    )
    made.add_argument("--logs", type=Path, metavar="FILE", help="a file for the operator's log")
    given = made.parse_args(argv)
    if given.baseline is not None and given.baseline_definition is None:
        made.error(
            "--baseline needs --baseline-definition: manifests/base/crds/kubeflow.org_pytorchjobs.yaml of its sources"
        )
    return given


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(at_least(1)(each) for each in text.split(","))


def _pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition(",")
    return at_least(1)(first), at_least(1)(second)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; fail if the operator changed pods that it should not change."""
    arguments = _arguments(argv)
    report = run_to_end("operator", measure(arguments))
    report.show(as_json=arguments.json)
    return int(any(each["ours"]["never"] for each in report.as_json()["measurements"]))


if __name__ == "__main__":
    sys.exit(main())
