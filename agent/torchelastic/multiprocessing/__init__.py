"""Processes of workers and their streams: torch's."""

from torch.distributed.elastic.multiprocessing import *  # noqa: F403
