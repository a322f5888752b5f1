"""A program that runs the source in the file that PROGRAM names, so that one set of workers serves many tests."""

import os
from pathlib import Path

exec(compile(Path(os.environ["PROGRAM"]).read_text(), os.environ["PROGRAM"], "exec"))
