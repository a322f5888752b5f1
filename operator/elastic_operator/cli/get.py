"""``elasticjob get``: list the jobs on this machine or on a cluster."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from elastic_operator.cli.options import add_cluster_flags, add_command, open_client, tell
from elastic_operator.views.formatting import columns, since

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from elastic_operator.cli.options import Commands
    from elastic_operator.views.job_view import JobView

_MAX_ADDRESSES = 3
"""Addresses in a row; `elasticjob describe` shows all."""

_EXAMPLES = """\
examples:
  elasticjob get                   all running jobs, and the latest run of each that has ended
  elasticjob get digits -o yaml    one job as kubectl would show it
  elasticjob get -o wide           also where each job's agents show metrics, and the run's folder
  elasticjob get --all             every run that left a folder
  elasticjob get -n team           the jobs in a namespace of kubectl's current cluster
  elasticjob get -A                the jobs in all its namespaces
"""


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "get",
        _execute,
        summary="list jobs",
        description="List the jobs on this machine: all running jobs, and the latest run of each that has ended;\n"
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
    rows = []
    for job in jobs:
        status = job.status
        row = {
            "NAMESPACE": job.namespace,
            "NAME": job.name,
            "STATE": job.state,
            "READY": status.ready,
            "MIN": str(job.spec.get("minReplicas", "")),
            "MAX": str(job.spec.get("maxReplicas", "")),
            "RESTARTS": str(status.restarts),
            "AGE": since(job.created, now),
            "ROUND": str(status.round),
            "WORLD": str(status.world_size),
            "METRICS": _metrics_addresses(job) or "-",
            "RUN": job.run.id,
            "FOLDER": job.run.directory,
        }
        rows.append(row)
    hidden = set() if namespaces else {"NAMESPACE"}
    if not wide:
        hidden |= {"ROUND", "WORLD", "METRICS", "RUN", "FOLDER"}
    if all(row["METRICS"] == "-" for row in rows):
        hidden.add("METRICS")
    if not any(row["RUN"] for row in rows):
        hidden |= {"RUN", "FOLDER"}
    titles = [title for title in rows[0] if title not in hidden]
    return columns([titles, *([row[title] for title in titles] for row in rows)])


def _metrics_addresses(job: JobView) -> str:
    urls = [pod.metrics_url for pod in job.living_pods if pod.metrics_url]
    shown = ",".join(urlsplit(url).netloc for url in urls[:_MAX_ADDRESSES])
    return f"{shown}+{len(urls) - _MAX_ADDRESSES}" if len(urls) > _MAX_ADDRESSES else shown


def _objects(jobs: Sequence[JobView], form: str, *, single: bool) -> str:
    """Return the jobs as ``kubectl get -o json`` or ``-o yaml`` does."""
    objects = [job.manifest | ({"status": job.status_json} if job.status_json else {}) for job in jobs]
    whole = objects[0] if single else {"apiVersion": "v1", "kind": "List", "metadata": {}, "items": objects}
    if form == "json":
        import json

        return json.dumps(whole, indent=4) + "\n"
    import yaml

    return str(yaml.safe_dump(whole, sort_keys=False))


def _execute(arguments: argparse.Namespace) -> int:
    wide = arguments.output == "wide"
    with contextlib.closing(open_client(arguments)) as client:
        jobs = client.jobs(arguments.name, every_run=arguments.all, pods=wide)
        if arguments.output in ("json", "yaml"):
            sys.stdout.write(_objects(jobs, arguments.output, single=arguments.name is not None))
        elif jobs:
            lines = table(jobs, time.time(), wide=wide, namespaces=arguments.all_namespaces)
            sys.stdout.write("\n".join(lines) + "\n")
        else:
            tell(f"no jobs {client.place}; start one with `{client.start_command}`")
    return 0
