"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from elastic_operator.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

Result = TypeVar("Result")


def parser(
    name: str,
    description: str | None,
    *,
    etcd: bool = True,
    repeat: int | None = None,
    settle: float | None = None,
    limit: float | None = None,
) -> argparse.ArgumentParser:
    """Return a parser with the common flags.

    Args:
        name: the name of the benchmark.
        description: the docstring of the benchmark; ``--help`` shows its first paragraph.
        etcd: whether the benchmark has ``--etcd``.
        repeat: the default of ``--repeat``; None for no such flag.
        settle: the default of ``--settle``; None for no such flag.
        limit: the default of ``--limit``; None for no such flag.
    """
    description = (description or "").partition("\n\n")[0].partition(": ``")[0]
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    made.add_argument("--json", action="store_true", help="print a JSON document; the table goes to stderr")
    if etcd:
        made.add_argument(
            "--etcd", type=existing, metavar="FILE", help="the etcd binary (default: the newest one found)"
        )
    if repeat is not None:
        made.add_argument(
            "--repeat", type=at_least(1), default=repeat, metavar="N", help="number of samples (default: %(default)s)"
        )
    if settle is not None:
        text = "wait before each measurement (default: %(default)g)"
        made.add_argument("--settle", type=duration, default=settle, metavar="SECONDS", help=text)
    if limit is not None:
        text = "stop waiting after this time (default: %(default)g)"
        made.add_argument("--limit", type=duration, default=limit, metavar="SECONDS", help=text)
    return made


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of integers that are not below a minimum, for argparse's ``type``."""

    def number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} should be a number, {least} or more")
        return int(text)

    return number


def duration(text: str) -> float:
    """Parse a string as seconds, for argparse's ``type``."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} should be a time in seconds, 0 or more")
    return value


def existing(text: str) -> Path:
    """Parse a string as the path of an existing file, for argparse's ``type``."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path


def run_to_end(name: str, work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine and return its result; exit with 130 on Ctrl-C, and with a message on bad input."""
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        sys.exit(130)
    except BadInput as error:
        sys.exit(f"python -m benchmarks.{name}: {error}")
