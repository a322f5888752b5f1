"""Where the jobs are that a command is about: on this machine, or on a cluster.

Only a word on the command line leads to a cluster; that there is a kubeconfig does not. Once it does, KUBECONFIG counts
as it does for kubectl.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable

    from elastic_operator.kube.user_api import UserApi

Answer = TypeVar("Answer")


def add_flags(parser: argparse.ArgumentParser, *, all_namespaces: bool = False) -> None:
    """Declare the flags that lead to a cluster.

    Args:
        parser: of the command.
        all_namespaces: whether the command can be about all namespaces at once.
    """
    group = parser.add_argument_group(
        "on a cluster", "With any of these, jobs on a Kubernetes cluster are meant; without, those on this machine."
    )
    group.add_argument("-n", "--namespace", metavar="NAMESPACE", help="the jobs' namespace; default, the context's")
    if all_namespaces:
        group.add_argument("-A", "--all-namespaces", action="store_true", help="the jobs of all namespaces")
    group.add_argument("--context", metavar="CONTEXT", help="the kubeconfig's context; default, its current one")
    group.add_argument(
        "--kubeconfig", metavar="FILE", help="default, what KUBECONFIG names, as for kubectl, or ~/.kube/config"
    )


def is_on_cluster(arguments: argparse.Namespace) -> bool:
    """Whether a command line is about jobs on a cluster; also for commands that can't be."""
    named = (getattr(arguments, flag, None) for flag in ("namespace", "context", "kubeconfig"))
    return any(value is not None for value in named) or getattr(arguments, "all_namespaces", False)


def on_cluster(arguments: argparse.Namespace, ask: Callable[[UserApi], Awaitable[Answer]]) -> Answer:
    """Do something on the cluster that the command line means.

    Args:
        arguments: the command line.
        ask: what to do, with the connection to it; in its ``namespace``.

    Returns:
        What that gives back.

    Raises:
        ElasticJobError: it could not be done; the message says why.
    """
    import asyncio

    from elastic_operator.errors import ClusterError

    try:
        from elastic_operator.kube.user_api import Whereabouts, connection, opened
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("kubernetes", "yaml"):
            raise
        raise ClusterError(
            f"jobs on a cluster need the Python package {error.name}; install the extra `operator`, in a clone of the "
            "project with `pip install '.[operator]'`"
        ) from None
    where = Whereabouts(kubeconfig=arguments.kubeconfig, context=arguments.context, namespace=arguments.namespace)

    async def answer() -> Answer:
        async with opened(await connection(where, os.environ)) as api:
            return await ask(api)

    return asyncio.run(answer())


def tell(sentence: str) -> None:
    """Say something that is no part of the answer."""
    sys.stderr.write(f"elasticjob: {sentence}\n")
    sys.stderr.flush()
