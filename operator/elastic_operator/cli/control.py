"""The commands that change a job: ``elasticjob scale``, ``suspend``, ``resume`` and ``delete``."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from elastic_operator.cli.options import add_cluster_flags, add_command, open_client

if TYPE_CHECKING:
    import argparse

    from elastic_operator.cli.options import Commands

_SCALE_EXAMPLES = """\
examples:
  elasticjob scale digits --replicas 3            on this machine
  elasticjob scale digits --replicas 3 -n team    on a cluster, as `kubectl scale` does it
"""
_SUSPEND_EXAMPLES = """\
examples:
  elasticjob suspend digits            on this machine
  elasticjob suspend digits -n team    on a cluster, as `kubectl patch` of spec.suspend does it
"""
_RESUME_EXAMPLES = """\
examples:
  elasticjob resume digits            on this machine
  elasticjob resume digits -n team    on a cluster
"""
_DELETE_EXAMPLES = """\
examples:
  elasticjob delete digits            on this machine
  elasticjob delete digits -n team    on a cluster; returns when its pods are gone
"""


def add_to(commands: Commands) -> None:
    """Declare the commands."""
    scale = add_command(
        commands,
        "scale",
        _execute,
        summary="change a running job's size",
        description="Change the number of a running job's pods, within its minReplicas and maxReplicas.",
        examples=_SCALE_EXAMPLES,
    )
    suspend = add_command(
        commands,
        "suspend",
        _execute,
        summary="suspend a job: delete its pods, keep its progress",
        description="Suspend a job. Its workers get the time to save; then all its pods and its etcd are deleted.\n"
        "Its counters stay, and while it is suspended nearly everything in its spec may be changed.",
        examples=_SUSPEND_EXAMPLES,
    )
    resume = add_command(
        commands,
        "resume",
        _execute,
        summary="resume a suspended job",
        description="Resume a suspended job from its last checkpoint.",
        examples=_RESUME_EXAMPLES,
    )
    delete = add_command(
        commands,
        "delete",
        _execute,
        summary="end a job",
        description="End a job and wait until it is gone. On this machine its logs and checkpoints stay in the run's\n"
        "folder; on a cluster, files that its pods wrote to their own volumes are deleted with the pods.",
        examples=_DELETE_EXAMPLES,
    )
    for parser, change in ((scale, "scale"), (suspend, "suspend"), (resume, "resume"), (delete, "delete")):
        parser.add_argument("name", metavar="NAME", help="the job's name")
        parser.set_defaults(change=change)
    scale.add_argument("--replicas", type=int, required=True, metavar="N", help="the number of pods")
    delete.add_argument("--no-wait", action="store_true", help="do not wait until it is gone (on a cluster only)")
    for parser in (scale, suspend, resume, delete):
        add_cluster_flags(parser)


def _execute(arguments: argparse.Namespace) -> int:
    name = arguments.name
    with contextlib.closing(open_client(arguments)) as jobs:
        match arguments.change:
            case "scale":
                jobs.scale(name, arguments.replicas)
                done = f"scaled to {arguments.replicas}"
            case "suspend":
                jobs.suspend(name, suspended=True)
                done = "suspended"
            case "resume":
                jobs.suspend(name, suspended=False)
                done = "resumed"
            case _:
                jobs.delete(name, wait=not arguments.no_wait)
                done = "deleted"
    sys.stdout.write(f"elasticjob {name} {done}\n")
    return 0
