"""``elasticjob version``: which version this is, of what."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "version", help="say the version", description="Say the version of elasticjob, Python and torch."
    )
    parser.set_defaults(execute=_execute)


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
