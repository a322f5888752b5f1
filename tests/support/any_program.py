"""A program that runs the file that PROGRAM names, so that many tests can use the same workers."""

import os
from pathlib import Path

exec(compile(Path(os.environ["PROGRAM"]).read_text(), os.environ["PROGRAM"], "exec"))
