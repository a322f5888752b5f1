"""Torch's ``@record`` and its errors of failed runs."""

from torch.distributed.elastic.multiprocessing.errors import *  # noqa: F403
