"""What the command lines of all benchmarks have in common."""

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


def parser(name: str, about: str | None, *, etcd: bool = True) -> argparse.ArgumentParser:
    """A parser with the flags that all of them have.

    Args:
        name: of the benchmark.
        about: its documentation, the first paragraph of which is shown.
        etcd: whether it needs an etcd.
    """
    about = (about or "").partition("\n\n")[0].partition(": ``")[0]
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    made.add_argument("--json", action="store_true", help="print the whole document; the table goes to stderr")
    if etcd:
        made.add_argument("--etcd", type=existing, metavar="FILE", help="which etcd (default: the newest one found)")
    return made


def at_least(least: int) -> Callable[[str], int]:
    """For ``type=``: a whole number that is not smaller."""

    def number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} should be a number, {least} or more")
        return int(text)

    return number


def duration(text: str) -> float:
    """For ``type=``: a time."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} should be a time in seconds, 0 or more")
    return value


def existing(text: str) -> Path:
    """For ``type=``: a file that is there."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path


def run_to_end(name: str, work: Coroutine[Any, Any, Result]) -> Result:
    """Run it to its end; the program ends with 130 on Ctrl-C, and with a sentence where something is missing."""
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        sys.exit(130)
    except BadInput as error:
        sys.exit(f"python -m benchmarks.{name}: {error}")
