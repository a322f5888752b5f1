"""Tells when an agent has torch imported, and so can come to a run: in the file BENCHMARK_READY, once.

For ours it is a module to ``--preload``, so that its import ends when the fork server has torch imported. Executed, it
is torchrun, which tells when its agent has torch imported. The time is the monotonic clock's.
"""

import contextlib
import os
import time
from pathlib import Path

import torch.distributed  # noqa: F401 - whatever the order of imports, this comes after it

if __name__ == "__main__":
    from torch.distributed.run import main

with contextlib.suppress(FileExistsError), Path(os.environ["BENCHMARK_READY"]).open("x") as mark:
    mark.write(f"{time.monotonic()}")

if __name__ == "__main__":
    main()
