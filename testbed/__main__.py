"""``python -m testbed prepare`` prepares the test bed before the tests run.

If you skip this command, pytest prepares the test bed when it collects the tests. The command prints the parts
that are unavailable on this machine. If a part is unavailable, the exit code is 0, or 1 if the environment
variable CI is true.
"""

from __future__ import annotations

import argparse
import sys

from testbed import availability, binaries


def main() -> int:
    """Prepare the test bed, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m testbed", description=__doc__)
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    preparing = subcommands.add_parser("prepare", help="prepare parts of the test bed")
    usual = [part for part in availability.PARTS if availability.EXHAUSTIVE or part not in availability.ONLY_EXHAUSTIVE]
    names = ", ".join(availability.PARTS)
    default = "default: all parts that `make test` uses"
    preparing.add_argument("parts", nargs="*", metavar="PART", help=f"one of {names}; {default}")
    parts = parser.parse_args().parts or usual
    if not availability.PARTS.keys() >= set(parts):
        parser.error(f"PART must be one of {names}")
    missing = availability.prepare(parts, lambda line: print(line, flush=True))
    binaries.remove_build_cache()
    for part, why in missing.items():
        print(f"Tests that need {availability.PARTS[part]} cannot run. Missing: {why}", file=sys.stderr)
    return 1 if missing and availability.fail_if_unavailable() else 0


if __name__ == "__main__":
    sys.exit(main())
