"""``elasticjob get``: the jobs on this machine, those that live and those that have ended, or those on a cluster."""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from elastic_operator.commands import place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_operator.kube.user_api import UserApi
    from elastic_operator.showing.shown import Shown
    from elastic_operator.spec import Json

_MOST_ADDRESSES = 3
"""Addresses that a row lists; `elasticjob describe` has all."""

_EXAMPLES = """\
examples:
  elasticjob get                   all that live, and the latest run of those that have ended
  elasticjob get digits -o yaml    one job as kubectl would show it
  elasticjob get -o wide           also where each job's agents show metrics, and the run's folder
  elasticjob get --all             every run that left a folder
  elasticjob get -n team           the jobs in a namespace of the cluster that kubectl would ask, too
  elasticjob get -A                the jobs in all its namespaces
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "get",
        help="list jobs",
        description="List the jobs on this machine: those that live, and the latest run of those that have ended;\n"
        "or the jobs on a cluster.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a job's name or a run's id; all jobs where none is given"
    )
    parser.add_argument("-o", "--output", choices=("wide", "json", "yaml"), help="more columns, or the whole objects")
    parser.add_argument(
        "--all", action="store_true", help="on this machine every run that left a folder, not just each job's latest"
    )
    place.add_flags(parser, all_namespaces=True)
    parser.set_defaults(execute=_execute)


def table(jobs: Sequence[Shown], now: float, *, wide: bool = False, namespaces: bool = False) -> list[str]:
    """The jobs in columns, as ``kubectl get elasticjobs`` has them.

    Args:
        jobs: in the order in which to list them.
        now: seconds since the Unix epoch.
        wide: more columns.
        namespaces: say the namespace of each.
    """
    from elastic_operator.showing.columns import columns
    from elastic_operator.showing.words import duration

    runs = wide and any(job.run.id for job in jobs)
    addresses = [_metrics_addresses(job) if wide else "" for job in jobs]
    header = ["NAME", "STATE", "READY", "MIN", "MAX", "RESTARTS", "AGE"]
    header = [*(["NAMESPACE"] if namespaces else []), *header, *(["EPOCH", "WORLD"] if wide else [])]
    rows = [[*header, *(["METRICS"] if any(addresses) else []), *(["RUN", "FOLDER"] if runs else [])]]
    for job, metrics in zip(jobs, addresses, strict=True):
        start = job.created
        row = [
            *([job.namespace] if namespaces else []),
            job.name,
            job.state,
            f"{job.status.ready}/{job.status.desired}",
            str(job.spec.get("minReplicas", "")),
            str(job.spec.get("maxReplicas", "")),
            str(job.status.restarts),
            duration(now - start) if start else "-",
        ]
        if wide:
            row += [str(job.status.epoch), str(job.status.world_size)]
        if any(addresses):
            row.append(metrics or "-")
        if runs:
            row += [job.run.id, job.run.directory]
        rows.append(row)
    return columns(rows)


def _metrics_addresses(job: Shown) -> str:
    """Where the job's agents show metrics, as host:port; empty where none does."""
    urls = [pod.metrics_url for pod in job.living_pods if pod.metrics_url]
    shown = ",".join(urlsplit(url).netloc for url in urls[:_MOST_ADDRESSES])
    return f"{shown}+{len(urls) - _MOST_ADDRESSES}" if len(urls) > _MOST_ADDRESSES else shown


def as_object(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """The job as ``kubectl get -o json`` would give it: the manifest with its status."""
    return {**snapshot.get("manifest", {}), "status": snapshot.get("status", {})}


def _as_text(objects: Sequence[Mapping[str, Any]], form: str, *, single: bool) -> str:
    whole = dict(objects[0]) if single else {"apiVersion": "v1", "kind": "List", "metadata": {}, "items": [*objects]}
    if form == "json":
        import json

        return json.dumps(whole, indent=4) + "\n"
    import yaml

    return str(yaml.safe_dump(whole, sort_keys=False))


def _execute(arguments: argparse.Namespace) -> int:
    if place.is_on_cluster(arguments):
        return _of_cluster(arguments)
    from elastic_operator.local.client import known_jobs
    from elastic_operator.showing.shown import Shown

    snapshots = known_jobs(arguments.name, every=arguments.all)
    if arguments.output in ("json", "yaml"):
        objects = [as_object(snapshot) for snapshot in snapshots]
        sys.stdout.write(_as_text(objects, arguments.output, single=arguments.name is not None))
        return 0
    if not snapshots:
        place.tell("no jobs here; start one with `elasticjob run FILE`")
        return 0
    lines = table([Shown.of(each) for each in snapshots], time.time(), wide=arguments.output == "wide")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _of_cluster(arguments: argparse.Namespace) -> int:
    from elastic_operator.errors import BadInput

    if arguments.all:
        raise BadInput("--all is about the runs on this machine; -A lists the jobs of all namespaces of a cluster")
    if arguments.name is not None and arguments.all_namespaces:
        raise BadInput("a job has one namespace: name it with -n instead of -A, or leave out the job's name")
    objects, pods, where = place.on_cluster(arguments, lambda api: _ask(api, arguments))
    if arguments.output in ("json", "yaml"):
        sys.stdout.write(_as_text(objects, arguments.output, single=arguments.name is not None))
        return 0
    if not objects:
        place.tell(f"no jobs in {where}; start one with `kubectl apply -f FILE`")
        return 0
    from elastic_operator.kube.snapshot import snapshot_of
    from elastic_operator.names import LABEL_JOB
    from elastic_operator.showing.shown import Shown

    of_job = defaultdict(list)
    for pod in pods:
        of_job[pod["metadata"]["namespace"], pod["metadata"]["labels"][LABEL_JOB]].append(pod)
    names = [(each["metadata"]["namespace"], each["metadata"]["name"]) for each in objects]
    jobs = [Shown.of(snapshot_of(each, of_job[name])) for each, name in zip(objects, names, strict=True)]
    lines = table(jobs, time.time(), wide=arguments.output == "wide", namespaces=arguments.all_namespaces)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


async def _ask(api: UserApi, arguments: argparse.Namespace) -> tuple[list[Json], list[Json], str]:
    """The jobs; their pods, where these are shown; and where all that was looked for."""
    from elastic_operator.kube.jobs import ClusterJobs

    jobs = ClusterJobs(api, place.tell)
    everywhere = arguments.all_namespaces
    if arguments.name is not None:
        objects, where = [await jobs.object(arguments.name)], ""
    else:
        where = "any namespace" if everywhere else f"the namespace {jobs.namespace}"
        objects = await jobs.objects(all_namespaces=everywhere)
    shows_pods = objects and arguments.output == "wide"
    pods = await jobs.workers(arguments.name or "", all_namespaces=everywhere) if shows_pods else []
    return objects, pods, where
