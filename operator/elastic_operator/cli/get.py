"""``elasticjob get``: list the jobs on this machine or on a cluster."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from elastic_operator.cli.options import add_cluster_flags, add_command, open_client, tell

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from elastic_operator.cli.options import Commands
    from elastic_operator.views.job_view import JobView

_MAX_ADDRESSES = 3
"""Addresses in a row; `elasticjob describe` shows all."""

_EXAMPLES = """\
examples:
  elasticjob get                   all that live, and the latest run of those that have ended
  elasticjob get digits -o yaml    one job as kubectl would show it
  elasticjob get -o wide           also where each job's agents show metrics, and the run's folder
  elasticjob get --all             every run that left a folder
  elasticjob get -n team           the jobs in a namespace of the cluster that kubectl would ask, too
  elasticjob get -A                the jobs in all its namespaces
"""


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "get",
        _execute,
        summary="list jobs",
        description="List the jobs on this machine: those that live, and the latest run of those that have ended;\n"
        "or the jobs on a cluster.",
        examples=_EXAMPLES,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a job's name or a run's id (default: all jobs)")
    parser.add_argument("-o", "--output", choices=("wide", "json", "yaml"), help="more columns, or the whole objects")
    parser.add_argument(
        "--all", action="store_true", help="on this machine every run that left a folder, not just each job's latest"
    )
    add_cluster_flags(parser, all_namespaces=True)


def table(jobs: Sequence[JobView], now: float, *, wide: bool = False, namespaces: bool = False) -> list[str]:
    """Return the jobs in the columns of ``kubectl get elasticjobs``."""
    from elastic_operator.views.formatting import columns, duration

    addresses = [_metrics_addresses(job) if wide else "" for job in jobs]
    runs, metrics = wide and any(job.run.id for job in jobs), any(addresses)

    def row(namespace: str, common: Sequence[str], round: Sequence[str], address: str, run: Sequence[str]) -> list[str]:
        first = [namespace] if namespaces else []
        return [*first, *common, *(round if wide else ()), *([address] if metrics else ()), *(run if runs else ())]

    common = ("NAME", "STATE", "READY", "MIN", "MAX", "RESTARTS", "AGE")
    rows = [row("NAMESPACE", common, ("ROUND", "WORLD"), "METRICS", ("RUN", "FOLDER"))]
    for job, address in zip(jobs, addresses, strict=True):
        status = job.status
        common = (
            job.name,
            job.state,
            f"{status.ready_replicas}/{status.desired}",
            str(job.spec.get("minReplicas", "")),
            str(job.spec.get("maxReplicas", "")),
            str(status.restarts),
            duration(now - job.created) if job.created else "-",
        )
        round = (str(status.round), str(status.world_size))
        rows.append(row(job.namespace, common, round, address or "-", (job.run.id, job.run.directory)))
    return columns(rows)


def _metrics_addresses(job: JobView) -> str:
    urls = [pod.metrics_url for pod in job.living_pods if pod.metrics_url]
    shown = ",".join(urlsplit(url).netloc for url in urls[:_MAX_ADDRESSES])
    return f"{shown}+{len(urls) - _MAX_ADDRESSES}" if len(urls) > _MAX_ADDRESSES else shown


def _objects(snapshots: Sequence[Mapping[str, Any]], form: str, *, single: bool) -> str:
    """Return the jobs as ``kubectl get -o json`` or ``-o yaml`` does."""
    objects = [
        {**each.get("manifest", {}), **({"status": each["status"]} if each.get("status") else {})} for each in snapshots
    ]
    whole = objects[0] if single else {"apiVersion": "v1", "kind": "List", "metadata": {}, "items": objects}
    if form == "json":
        import json

        return json.dumps(whole, indent=4) + "\n"
    import yaml

    return str(yaml.safe_dump(whole, sort_keys=False))


def _execute(arguments: argparse.Namespace) -> int:
    wide = arguments.output == "wide"
    with open_client(arguments) as jobs:
        snapshots = jobs.snapshots(arguments.name, every_run=arguments.all, pods=wide)
        if arguments.output in ("json", "yaml"):
            sys.stdout.write(_objects(snapshots, arguments.output, single=arguments.name is not None))
            return 0
        if not snapshots:
            tell(f"no jobs {jobs.place}; start one with `{jobs.start_command}`")
            return 0
    from elastic_operator.views.job_view import JobView

    views = [JobView.of(each) for each in snapshots]
    sys.stdout.write("\n".join(table(views, time.time(), wide=wide, namespaces=arguments.all_namespaces)) + "\n")
    return 0
