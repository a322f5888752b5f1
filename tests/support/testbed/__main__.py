"""``python -m tests.support.testbed prepare``: makes what the tests on a real Kubernetes need, before they run.

Without it, the tests make it when they are collected. It ends with 0 also where something cannot be had on this
machine, which it says, unless CI is true in the environment.
"""

from __future__ import annotations

import argparse
import sys

from tests.support.testbed import availability


def main() -> int:
    """Prepare, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.testbed", description=__doc__)
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    preparing = subcommands.add_parser("prepare", help="make what the tests on a real Kubernetes need")
    preparing.add_argument(
        "beds",
        nargs="*",
        choices=[*availability.BEDS, []],  # argparse compares the empty default, too
        metavar="BED",
        help=f"of {', '.join(availability.BEDS)}; default: all",
    )
    beds = parser.parse_args().beds or list(availability.BEDS)
    missing = availability.prepare(beds, lambda line: print(line, flush=True))
    for line in availability.closing_words(missing):
        print(line, file=sys.stderr)
    return 1 if missing and availability.must_not_miss() else 0


if __name__ == "__main__":
    sys.exit(main())
