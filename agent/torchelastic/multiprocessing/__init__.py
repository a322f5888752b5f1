"""torch's module for worker processes and their streams, re-exported."""

from torch.distributed.elastic.multiprocessing import *  # noqa: F403
