"""``python -m scripts.monitoring``: writes the dashboards and the alerting rules of the chart."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from scripts.monitoring.files import ROOT, files

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Write all files, or with ``--check`` say which differ from what would be written.

    Args:
        argv: the command line without the program's name; None for this process's own.

    Returns:
        The exit code: 1 where files differ.
    """
    parser = argparse.ArgumentParser(
        prog="python -m scripts.monitoring",
        description="Write the dashboards and the alerting rules of the chart, and print their paths.",
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; print which files differ, with exit code 1 if any does"
    )
    if parser.parse_args(argv).check:
        differing = [path for path, text in files().items() if not path.is_file() or path.read_text() != text]
        for path in differing:
            print(path.relative_to(ROOT), "differs" if path.is_file() else "is missing")
        return 1 if differing else 0
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
