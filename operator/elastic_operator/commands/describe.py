"""``elasticjob describe``: all that is known of one job, for a person."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from elastic_operator.commands import place

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from elastic_operator.kube.user_api import UserApi
    from elastic_operator.showing.shown import Shown, ShownPod
    from elastic_operator.spec import Json

_EXAMPLES = """\
examples:
  elasticjob describe digits
  elasticjob describe digits-20260102-101500-3fa2    an earlier run, by its id
  elasticjob describe digits -n team                 a job on a cluster
"""

_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""kubectl's own note of the whole manifest."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "describe",
        help="all that is known of a job",
        description="Say all that is known of a job: what was asked for, how it stands, its pods, and what happened.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="the job's name; on this machine also a run's id")
    place.add_flags(parser)
    parser.set_defaults(execute=_execute)


def description(shown: Shown, now: float) -> list[str]:
    """All that is known of a job, in lines.

    Args:
        shown: what is known of it.
        now: seconds since the Unix epoch.
    """
    return [
        *_sections(_facts(shown, now)),
        "Spec:",
        *_tree(shown.spec, "  "),
        *_conditions(shown, now),
        *_pods(shown, now),
        *_events(shown, now),
    ]


def _sections(facts: Iterator[tuple[str, str]]) -> list[str]:
    kept = [(label, value) for label, value in facts if value]
    widest = max(len(label) for label, _ in kept)
    return [f"{label + ':':<{widest + 2}} {value}" for label, value in kept]


def _facts(shown: Shown, now: float) -> Iterator[tuple[str, str]]:
    from elastic_operator.showing.words import count, duration

    status, run, metadata = shown.status, shown.run, shown.manifest.get("metadata") or {}
    yield "Name", shown.name
    yield "Namespace", shown.namespace if shown.on_cluster else ""
    yield "Run", run.id + (f" (process {run.pid})" if run.alive and run.pid else "")
    yield "UID", str(metadata.get("uid") or "")
    for label, values in (("Labels", metadata.get("labels")), ("Annotations", metadata.get("annotations"))):
        yield label, ", ".join(f"{key}={value}" for key, value in (values or {}).items() if key != _LAST_APPLIED)
    yield "State", shown.state + _behind(shown)
    yield "Age", duration(now - shown.created) if shown.created else ""
    yield "Took", duration(shown.age(now)) if shown.completed else ""
    yield "Pods", f"{status.ready} ready of {status.desired} wanted, {status.replicas} there"
    yield "Epoch", f"{status.epoch}, world size {status.world_size}" if status.epoch else "none yet"
    yield "Restarts", f"{status.restarts} charged, {status.free_restarts} free"
    yield "Pods Died", str(status.pod_failures or "")
    yield "Last Failure", _last_failure(shown, now).replace("\n", "\n  ")
    yield "Deadline", f"in {duration(shown.deadline - now)}" if shown.deadline is not None else ""
    yield "Excluded Nodes", ", ".join(status.excluded_nodes)
    yield "Progress", shown.progress.line if shown.progress else ""
    yield "Manifest", run.manifest_path
    yield "Logs", run.logs
    yield "Checkpoints", run.checkpoints
    if shown.etcd and shown.etcd.endpoint:
        again = f", started again {count(shown.etcd.restarts, 'time')}" if shown.etcd.restarts else ""
        state = f"process {shown.etcd.pid}{again}" if shown.etcd.pid else shown.etcd.state
        yield "Etcd", shown.etcd.endpoint + (f" ({state})" if state else "")


def _last_failure(shown: Shown, now: float) -> str:
    from elastic_operator.showing.shown import ShownFailure, seconds
    from elastic_operator.showing.words import duration

    failure = shown.status.last_failure
    when = seconds(failure.time) if isinstance(failure, ShownFailure) else None
    ago = f" ({duration(now - when)} ago)" if when is not None else ""
    return shown.status.what_failed + ago if shown.status.what_failed else ""


def _behind(shown: Shown) -> str:
    """What to know where the status does not speak of the spec as it is."""
    generation = (shown.manifest.get("metadata") or {}).get("generation")
    if not shown.on_cluster or not isinstance(generation, int) or shown.status.observed_generation >= generation:
        return ""
    if shown.status.observed_generation:
        return " (the operator has not seen the latest change of the spec yet)"
    return " (no operator has taken it up yet; is one installed that watches this namespace?)"


def _tree(value: Mapping[str, Any], indent: str) -> Iterator[str]:
    """A part of the manifest as kubectl describes it."""
    import yaml

    for line in yaml.safe_dump(dict(value), sort_keys=False).splitlines():
        yield indent + line


def _conditions(shown: Shown, now: float) -> list[str]:
    from elastic_operator.showing.columns import columns
    from elastic_operator.showing.shown import seconds
    from elastic_operator.showing.words import duration

    if not shown.status.conditions:
        return []
    rows = [("TYPE", "STATUS", "SINCE", "REASON", "MESSAGE")]
    for each in shown.status.conditions:
        since = seconds(each.last_transition_time)
        rows.append((each.type, each.status, duration(now - since) if since else "-", each.reason, each.message))
    return ["Conditions:", *columns(rows, "  ")]


def _pods(shown: Shown, now: float) -> list[str]:
    lines = ["Pods:" if shown.pods else "Pods: none"]
    for pod in (*shown.living_pods, *shown.ended_pods):
        lines.append(f"  {pod.name}")
        lines += [f"    {line}" for line in _sections(_pod(pod, now))]
    return lines


def _pod(pod: ShownPod, now: float) -> Iterator[tuple[str, str]]:
    from elastic_operator.showing.words import doing, duration, ranks

    word = doing(pod).word
    yield "State", word if pod.exit_code is None or str(pod.exit_code) in word else f"{word}, exit code {pod.exit_code}"
    yield "Age", duration((pod.ended or now) - pod.created)
    yield "Node", pod.node + (f" (pod address {pod.address})" if pod.address else "")
    yield "Agent", f"process {pod.pid}" if pod.pid and not pod.over else ""
    yield "Ranks", ranks(pod.ranks) if pod.ranks else ""
    yield "Note", pod.note.replace("\n", "\n      ")
    yield "Last Words", pod.words.replace("\n", "\n      ")
    yield "Logs", pod.log_dir or ""
    yield "Metrics", pod.metrics_url or ""


def _events(shown: Shown, now: float) -> list[str]:
    from elastic_operator.showing.columns import columns
    from elastic_operator.showing.words import duration, printed

    if not shown.events:
        return ["Events: none"]
    rows = [("TYPE", "AGE", "REASON", "MESSAGE")]
    for event in shown.events:
        kind = "Warning" if event.warning else "Normal"
        message = printed(event.message.replace("\n", " "))
        often = f" ({event.count} times)" if event.count > 1 else ""
        rows.append((kind, duration(now - event.time), event.reason, message + often))
    return ["Events:", *columns(rows, "  ")]


def _execute(arguments: argparse.Namespace) -> int:
    from elastic_operator.showing.shown import Shown

    if place.is_on_cluster(arguments):
        snapshot = place.on_cluster(arguments, lambda api: _ask(api, arguments.name))
    else:
        from elastic_operator.local.client import find_job

        snapshot = find_job(arguments.name)
    sys.stdout.write("\n".join(description(Shown.of(snapshot), time.time())) + "\n")
    return 0


async def _ask(api: UserApi, name: str) -> Json:
    from elastic_operator.kube.jobs import ClusterJobs

    return await ClusterJobs(api, place.tell).snapshot(name)
