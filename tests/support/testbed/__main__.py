"""``python -m tests.support.testbed prepare``: prepares the test bed before the tests run.

Without it, the test bed is prepared when tests are collected. The exit code is 0 even if a part is unavailable on this
machine, which is printed, unless the environment has CI=true.
"""

from __future__ import annotations

import argparse
import sys

from tests.support.testbed import availability


def main() -> int:
    """Prepare, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.testbed", description=__doc__)
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    preparing = subcommands.add_parser("prepare", help="make what the tests run on")
    preparing.add_argument(
        "beds",
        nargs="*",
        type=_bed,
        default=[
            bed for bed in availability.BEDS if availability.EXHAUSTIVE or bed not in availability.ONLY_EXHAUSTIVE
        ],
        metavar="BED",
        help=f"{_NAMES}; default: all that `make test` uses",
    )
    missing = availability.prepare(parser.parse_args().beds, lambda line: print(line, flush=True))
    for line in availability.closing_words(missing):
        print(line, file=sys.stderr)
    return 1 if missing and availability.must_not_miss() else 0


_NAMES = " or ".join(availability.BEDS)


def _bed(text: str) -> str:
    if text not in availability.BEDS:
        raise argparse.ArgumentTypeError(f"must be {_NAMES}, and is {text!r}")
    return text


if __name__ == "__main__":
    sys.exit(main())
