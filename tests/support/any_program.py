"""A program that runs the source in the file that PROGRAM names: one set of workers serves many tests with it."""

import os
from pathlib import Path

exec(compile(Path(os.environ["PROGRAM"]).read_text(), os.environ["PROGRAM"], "exec"))
