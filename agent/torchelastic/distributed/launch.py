"""``python -m torchelastic.distributed.launch``, the older name of ``torchelastic-run``."""

import sys

from torchelastic.run import command, main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(command())
