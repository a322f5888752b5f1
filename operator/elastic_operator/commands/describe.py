"""``elasticjob describe``: all that is known of one job, for a person."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from elastic_operator.showing.shown import Shown, ShownPod

_EXAMPLES = """\
examples:
  elasticjob describe digits
  elasticjob describe digits-20260102-101500-3fa2    an earlier run, by its id
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "describe",
        help="all that is known of a job",
        description="Say all that is known of a job: what was asked for, how it stands, its pods, and what happened.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="the job's name, or a run's id")
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
    yield "Run", run.id + (f" (process {run.pid})" if run.alive and run.pid else "")
    yield "UID", str(metadata.get("uid") or "")
    for label, values in (("Labels", metadata.get("labels")), ("Annotations", metadata.get("annotations"))):
        yield label, ", ".join(f"{key}={value}" for key, value in (values or {}).items())
    yield "State", shown.state
    yield "Age", duration(now - shown.created) if shown.created else ""
    yield "Took", duration(shown.age(now)) if shown.completed else ""
    yield "Pods", f"{status.ready} ready of {status.desired} wanted, {status.replicas} there"
    yield "Epoch", f"{status.epoch}, world size {status.world_size}" if status.epoch else "none yet"
    yield "Restarts", f"{status.restarts} of workers, {status.pod_failures} of pods"
    yield "Last Failure", (status.last_failure or "").replace("\n", "\n  ")
    yield "Progress", shown.progress.line if shown.progress else ""
    yield "Manifest", run.manifest_path
    yield "Logs", run.logs
    yield "Checkpoints", run.checkpoints
    if shown.etcd and shown.etcd.endpoint:
        again = f", started again {count(shown.etcd.restarts, 'time')}" if shown.etcd.restarts else ""
        yield "Etcd", shown.etcd.endpoint + (f" (process {shown.etcd.pid}{again})" if shown.etcd.pid else "")


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
    yield "Agent", f"process {pod.pid}" if pod.pid and not pod.over else ""
    yield "Ranks", ranks(pod.ranks) if pod.ranks else ""
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
        rows.append((kind, duration(now - event.time), event.reason, printed(event.message.replace("\n", " "))))
    return ["Events:", *columns(rows, "  ")]


def _execute(arguments: argparse.Namespace) -> int:
    from elastic_operator.local.client import find_job
    from elastic_operator.showing.shown import Shown

    shown = Shown.of(find_job(arguments.name))
    sys.stdout.write("\n".join(description(shown, time.time())) + "\n")
    return 0
