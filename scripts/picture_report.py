"""Takes the screenshot of a report for the README.

    .venv/bin/python scripts/picture_report.py        (writes docs/report.png; takes as long as `make demo`)

The script runs ``elasticjob demo`` and ``elasticjob report``, and opens the report in a browser (`chromium` or
`google-chrome` on the PATH). Run the script on an idle machine, because readers will expect the times in the image.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from playwright.sync_api import sync_playwright

LARGEST: Final = 200_000
"""The maximum size of the image in bytes, which keeps the README quick to load."""
WIDTH: Final = 960
SHARPNESS: Final = 1.4
"""Pixels of the image per pixel of the page."""
UP_TO: Final = "Rounds"
"""The heading above which the image ends."""


def picture(page: Path, browser: str) -> bytes:
    """Return the upper part of a report as a PNG."""
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        window = running.new_page(viewport={"width": WIDTH, "height": 800}, device_scale_factor=SHARPNESS)
        window.goto(page.as_uri())
        end = window.locator("h2", has_text=UP_TO).last.bounding_box()
        height = end["y"] - 12 if end else 800
        taken = window.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
        running.close()
    return taken


def played(folder: Path, manifest: Path) -> Path:
    """Run the demo, and return the report of its job.

    Raises:
        subprocess.CalledProcessError: the demo or the report failed.
    """
    environ = {**os.environ, "ELASTICJOB_HOME": str(folder)}
    elasticjob = [sys.executable, "-m", "elastic_operator.cli.main"]
    subprocess.run([*elasticjob, "demo", "--plain", str(manifest)], env=environ, check=True)
    page = folder / "report.html"
    subprocess.run([*elasticjob, "report", "digits", "-o", str(page)], env=environ, check=True)
    return page


def main() -> int:
    """Run the demo and write the image."""
    parser = argparse.ArgumentParser(description="Takes the picture of a report.")
    parser.add_argument("--manifest", type=Path, default=Path("examples/digits.yaml"))
    parser.add_argument("--page", type=Path, help="an existing report, instead of running the demo")
    parser.add_argument("--output", type=Path, default=Path("docs/report.png"))
    options = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("There is no `chromium` on the PATH; install one.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        page = options.page or played(Path(folder), options.manifest)
        taken = picture(page.resolve(), browser)
    if len(taken) > LARGEST:
        print(f"The picture has {len(taken)} bytes, more than {LARGEST}; lower SHARPNESS.", file=sys.stderr)
        return 1
    options.output.write_bytes(taken)
    print(f"{options.output}: {len(taken) / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
