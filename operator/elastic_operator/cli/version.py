"""``elasticjob version``."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING

from elastic_operator.cli.options import add_command

if TYPE_CHECKING:
    import argparse

    from elastic_operator.cli.options import Commands


def add_to(commands: Commands) -> None:
    """Declare the command."""
    add_command(
        commands,
        "version",
        _execute,
        summary="print the version",
        description="Print the version of elasticjob, Python and torch.",
    )


def _execute(_: argparse.Namespace) -> int:
    sys.stdout.write(f"elasticjob {_version('elastic-operator')}\n")
    sys.stdout.write(f"python {platform.python_version()}\n")
    sys.stdout.write(f"torch {_version('torch')}\n")
    return 0


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "is not installed"
