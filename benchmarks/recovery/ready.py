"""Write the time at which an agent has imported torch to the file BENCHMARK_READY, once.

With ``--preload``, a fork server of torchelastic imports this module after torch. As a program, this module runs
torchrun. The time is from the monotonic clock.
"""

import contextlib
import os
import time
from pathlib import Path

import torch.distributed  # noqa: F401 - the time is taken after this import

if __name__ == "__main__":
    from torch.distributed.run import main

with contextlib.suppress(FileExistsError), Path(os.environ["BENCHMARK_READY"]).open("x") as mark:
    mark.write(f"{time.monotonic()}")

if __name__ == "__main__":
    main()
