"""The launcher as older guides start it: ``python -m torchelastic.distributed.launch``, with the same arguments.

It is :func:`torchelastic.run.main` under another name, nothing else.
"""

from __future__ import annotations

import sys

from torchelastic.run import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
