"""``python -m tests.support.testbed prepare`` prepares the test bed before the tests run.

Without this command, the test bed is prepared when tests are collected. The command prints the parts
that are unavailable on this machine. Its exit code is then 0, unless the environment has CI=true.
"""

from __future__ import annotations

import argparse
import sys

from tests.support.testbed import availability, binaries


def main() -> int:
    """Prepare, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.testbed", description=__doc__)
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    preparing = subcommands.add_parser("prepare", help="prepare parts of the test bed")
    usual = [bed for bed in availability.BEDS if availability.EXHAUSTIVE or bed not in availability.ONLY_EXHAUSTIVE]
    names = " or ".join(availability.BEDS)
    preparing.add_argument("beds", nargs="*", metavar="BED", help=f"{names}; default: all that `make test` uses")
    beds = parser.parse_args().beds or usual
    if not availability.BEDS.keys() >= set(beds):
        parser.error(f"each BED must be {names}")
    missing = availability.prepare(beds, lambda line: print(line, flush=True))
    binaries.remove_build_cache()
    for bed, why in missing.items():
        print(f"Tests with {availability.BEDS[bed]} cannot run. Missing: {why}", file=sys.stderr)
    return 1 if missing and availability.must_not_miss() else 0


if __name__ == "__main__":
    sys.exit(main())
