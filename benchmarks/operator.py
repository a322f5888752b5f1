"""Measure the operator on a real API server with simulated nodes: ``python -m benchmarks.operator --json``.

See docs/benchmarks.md for what each row means.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks import operator_scenarios as scenarios
from benchmarks.command_line import at_least, duration, existing, parser, run_to_end
from benchmarks.operator_field import Field
from benchmarks.operator_peer import TrainingOperator
from benchmarks.report import Report
from elastic_operator.errors import BadInput
from tests.support.testbed.binaries import binary
from tests.support.testbed.cache import Missing

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

ROWS: Final = ("created", "replaced", "scaled", "many", "large")


async def measure(arguments: argparse.Namespace) -> Report:
    """Take all samples that are asked for.

    Raises:
        BadInput: what is needed is not there.
    """
    try:
        etcd = binary("etcd")
        for name in ("kube-apiserver", "kwok"):
            binary(name)
    except Missing as missing:
        raise BadInput(str(missing)) from None
    paths = ("peer", "peer_definition")
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "logs", *paths)}
    report = Report("operator", settings=settings, etcd=etcd)
    with tempfile.TemporaryDirectory(prefix="benchmark-operator-") as folder:
        try:
            async with Field(Path(folder)) as field:
                peer = await _measure_peer(field, arguments, Path(folder))
                await _measure_on(field, arguments, report, peer)
        finally:
            if arguments.logs is not None:
                arguments.logs.write_text((Path(folder) / "operator.log").read_text(errors="replace"))
    return report


async def _measure_peer(
    field: Field, arguments: argparse.Namespace, folder: Path
) -> dict[int | str, list[float]] | None:
    """The peer's samples by number of pods, and "replaced"; None where no peer is given."""
    if arguments.peer is None:
        return None
    only = arguments.only or ROWS
    taken: dict[int | str, list[float]] = {}
    async with TrainingOperator(field, arguments.peer, arguments.peer_definition, folder) as peer:
        if "created" in only:
            for pods in arguments.pods:
                taken[pods] = [await peer.created(pods) for _ in range(arguments.peer_repeat)]
                _tell(f"the peer: {pods} pods exist", taken[pods][0])
        if "replaced" in only:
            taken["replaced"] = await peer.replaced(arguments.peer_repeat)
            _tell("the peer: a deleted pod is replaced", taken["replaced"][0])
    return taken


async def _measure_on(
    field: Field, arguments: argparse.Namespace, report: Report, peer: dict[int | str, list[float]] | None
) -> None:
    only, requests = arguments.only or ROWS, []
    if "created" in only:
        for pods in arguments.pods:
            made, row = await scenarios.created(
                field, pods, repeat=arguments.repeat, peer=None if peer is None else peer[pods]
            )
            report.add(made)
            requests.append(row)
            _tell(made.name, made.median)
    if "replaced" in only:
        for lingers in (False, True):
            replaced = await scenarios.replaced(
                field, arguments.deletions, lingers=lingers, peer=None if peer is None else peer["replaced"]
            )
            report.add(replaced)
            _tell(replaced.name, replaced.median)
    if "scaled" in only:
        for scaled in await scenarios.scaled(field, *arguments.scale, repeat=arguments.repeat):
            report.add(scaled)
            _tell(scaled.name, scaled.median)
    if "many" in only:
        jobs, slowest, row = await scenarios.many(field, *arguments.many)
        for each in (jobs, slowest):
            report.add(each)
            _tell(each.name, each.median)
        requests.append(row)
    if "large" in only:
        for each in await scenarios.large(field, *arguments.large, idle=arguments.idle, changes=arguments.changes):
            report.add(each)
            _tell(each.name, each.median)
    report.tell("requests", [row.as_row() for row in requests])


def _tell(name: str, value: float | None) -> None:
    print(f"{name}: {value:.4g}", file=sys.stderr, flush=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser("operator", __doc__, etcd=False)
    made.add_argument("--only", action="append", choices=ROWS, help="measure this alone; may be repeated")
    made.add_argument("--repeat", type=at_least(1), default=5, metavar="N", help="samples of a row (%(default)s)")
    made.add_argument(
        "--pods", type=_numbers, default=(9, 101, 300, 1000), metavar="N,…", help="sizes of one job (9,101,300,1000)"
    )
    made.add_argument(
        "--deletions", type=at_least(1), default=50, metavar="N", help="pods that are deleted (%(default)s)"
    )
    made.add_argument("--scale", type=_pair, default=(10, 200), metavar="A,B", help="sizes between which (10,200)")
    made.add_argument("--many", type=_pair, default=(500, 4), metavar="J,P", help="jobs at once, pods each (500,4)")
    made.add_argument("--large", type=_pair, default=(500, 10), metavar="J,P", help="jobs at rest, pods each (500,10)")
    made.add_argument("--idle", type=duration, default=30.0, metavar="S", help="seconds of rest (%(default)s)")
    made.add_argument("--changes", type=at_least(1), default=20, metavar="N", help="pods changed then (%(default)s)")
    made.add_argument("--peer", type=existing, metavar="FILE", help="the peer: a training-operator; measured as well")
    made.add_argument(
        "--peer-definition", type=existing, metavar="FILE", help="the definition of its PyTorchJob; with --peer"
    )
    made.add_argument("--peer-repeat", type=at_least(1), default=1, metavar="N", help="its samples (%(default)s)")
    made.add_argument("--logs", type=Path, metavar="FILE", help="gets the operator's log")
    given = made.parse_args(argv)
    if given.peer is not None and given.peer_definition is None:
        made.error(
            "--peer needs --peer-definition, such as manifests/base/crds/kubeflow.org_pytorchjobs.yaml of its sources"
        )
    return given


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(at_least(1)(each) for each in text.split(","))


def _pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition(",")
    return at_least(1)(first), at_least(1)(second)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and tell; fails where the operator touched what it should have left alone."""
    arguments = _arguments(argv)
    report = run_to_end("operator", measure(arguments))
    report.show(as_json=arguments.json)
    return int(any(each["ours"]["never"] for each in report.as_json()["measurements"]))


if __name__ == "__main__":
    sys.exit(main())
