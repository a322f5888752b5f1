"""A module for ``--preload``: it tells when a fork server has torch imported, and so its agent can start workers.

The time, by the monotonic clock, goes to the file BENCHMARK_READY.
"""

import os
import time
from pathlib import Path

import torch.distributed  # noqa: F401 - whatever the order of imports, this comes after it

Path(os.environ["BENCHMARK_READY"]).write_text(f"{time.monotonic()}")
