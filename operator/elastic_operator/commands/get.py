"""``elasticjob get``: the jobs on this machine, those that live and those that have ended."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from elastic_operator.showing.shown import Shown

_EXAMPLES = """\
examples:
  elasticjob get                   all that live, and the latest run of those that have ended
  elasticjob get digits -o yaml    one job as kubectl would show it
  elasticjob get --all -o wide     every run that left a folder, with its id and place
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "get",
        help="list jobs",
        description="List the jobs on this machine: those that live, and the latest run of those that have ended.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a job's name or a run's id; all jobs where none is given"
    )
    parser.add_argument("-o", "--output", choices=("wide", "json", "yaml"), help="more columns, or the whole objects")
    parser.add_argument("--all", action="store_true", help="every run that left a folder, not just each job's latest")
    parser.set_defaults(execute=_execute)


def table(jobs: Iterable[Shown], now: float, *, wide: bool = False) -> list[str]:
    """The jobs in columns, as ``kubectl get elasticjobs`` has them.

    Args:
        jobs: in the order in which to list them.
        now: seconds since the Unix epoch.
        wide: more columns.
    """
    from elastic_operator.showing.columns import columns
    from elastic_operator.showing.words import duration

    header = ["NAME", "STATE", "READY", "MIN", "MAX", "RESTARTS", "AGE"]
    rows = [[*header, *(["EPOCH", "WORLD", "RUN", "FOLDER"] if wide else [])]]
    for job in jobs:
        start = job.created
        row = [
            job.name,
            job.state,
            f"{job.status.ready}/{job.status.desired}",
            str(job.spec.get("minReplicas", "")),
            str(job.spec.get("maxReplicas", "")),
            str(job.status.restarts),
            duration(now - start) if start else "-",
        ]
        if wide:
            row += [str(job.status.epoch), str(job.status.world_size), job.run.id, job.run.directory]
        rows.append(row)
    return columns(rows)


def as_object(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """The job as ``kubectl get -o json`` would give it: the manifest with its status."""
    return {**snapshot.get("manifest", {}), "status": snapshot.get("status", {})}


def _as_text(snapshots: Sequence[Mapping[str, Any]], form: str, *, single: bool) -> str:
    objects = [as_object(snapshot) for snapshot in snapshots]
    whole = objects[0] if single else {"apiVersion": "v1", "kind": "List", "metadata": {}, "items": objects}
    if form == "json":
        import json

        return json.dumps(whole, indent=4) + "\n"
    import yaml

    return str(yaml.safe_dump(whole, sort_keys=False))


def _execute(arguments: argparse.Namespace) -> int:
    from elastic_operator.local.client import known_jobs
    from elastic_operator.showing.shown import Shown

    snapshots = known_jobs(arguments.name, every=arguments.all)
    if arguments.output in ("json", "yaml"):
        sys.stdout.write(_as_text(snapshots, arguments.output, single=arguments.name is not None))
        return 0
    if not snapshots:
        sys.stderr.write("elasticjob: no jobs here; start one with `elasticjob run FILE`\n")
        return 0
    lines = table([Shown.of(each) for each in snapshots], time.time(), wide=arguments.output == "wide")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
