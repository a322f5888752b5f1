"""Common parts of the commands: their declaration, the flags that select a cluster, and the client for these flags.

Only a flag selects a cluster; a kubeconfig alone does not.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_operator.client.cluster import ClusterJobs
    from elastic_operator.client.local import LocalJobs

    JobClient = LocalJobs | ClusterJobs
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - argparse has no public name for it


def add_command(
    commands: Commands, name: str, execute: Callable[[argparse.Namespace], int], summary: str, text: str
) -> argparse.ArgumentParser:
    """Declare a command; ``execute`` returns its exit code; ``text`` is a description, a blank line, and an epilog."""
    description, _, examples = text.partition("\n\n")
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(execute=execute)
    return parser


def add_cluster_flags(parser: argparse.ArgumentParser, *, all_namespaces: bool = False) -> None:
    """Declare the flags that select a cluster, and one for all its namespaces."""
    group = parser.add_argument_group(
        "on a cluster", "Each of these selects jobs on a Kubernetes cluster; without them, jobs on this machine."
    )
    group.add_argument("-n", "--namespace", metavar="NAMESPACE", help="the jobs' namespace; default, the context's")
    if all_namespaces:
        group.add_argument("-A", "--all-namespaces", action="store_true", help="the jobs of all namespaces")
    group.add_argument("--context", metavar="CONTEXT", help="the kubeconfig's context; default, its current one")
    group.add_argument(
        "--kubeconfig", metavar="FILE", help="default, what KUBECONFIG names, as for kubectl, or ~/.kube/config"
    )


def is_on_cluster(arguments: argparse.Namespace) -> bool:
    """Return whether a command line selects a cluster."""
    named = (getattr(arguments, flag, None) for flag in ("namespace", "context", "kubeconfig"))
    return any(value is not None for value in named) or getattr(arguments, "all_namespaces", False)


def open_client(arguments: argparse.Namespace) -> JobClient:
    """Return the client that a command line selects; the caller closes it.

    Raises:
        ElasticJobError: the flags contradict each other, or a package is missing.
    """
    from elastic_operator.errors import BadInput, ClusterError

    if not is_on_cluster(arguments):
        from elastic_operator.client.local import LocalJobs

        return LocalJobs(tell)
    all_namespaces = getattr(arguments, "all_namespaces", False)
    if all_namespaces and arguments.name is not None:
        raise BadInput("a job has one namespace: name it with -n instead of -A, or leave out the job's name")
    if getattr(arguments, "all", False):
        raise BadInput("--all is about the runs on this machine; -A lists the jobs of all namespaces of a cluster")
    try:
        from elastic_operator.client.cluster import ClusterJobs, connect
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("kubernetes", "yaml"):
            raise
        raise ClusterError(
            f"jobs on a cluster need the Python package {error.name}; install the extra `operator`, in a clone of the "
            "project with `pip install '.[operator]'`"
        ) from None
    connection = connect(
        os.environ, kubeconfig=arguments.kubeconfig, context=arguments.context, namespace=arguments.namespace
    )
    return ClusterJobs(connection, tell, all_namespaces=all_namespaces)


def is_terminal(output: TextIO, environ: Mapping[str, str]) -> bool:
    """Return whether the output is a terminal that can show a live view; NO_COLOR and TERM=dumb ask for plain lines."""
    return not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb" and output.isatty()


def tell(sentence: str) -> None:
    """Print a sentence that is not part of the output."""
    sys.stderr.write(f"elasticjob: {sentence}\n")
    sys.stderr.flush()
