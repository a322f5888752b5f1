"""Timers for operations that may take too long in a worker: torch's."""

from torch.distributed.elastic.timer import *  # noqa: F403
