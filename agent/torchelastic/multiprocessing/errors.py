"""``@record``, and the errors of failed runs: torch's."""

from torch.distributed.elastic.multiprocessing.errors import *  # noqa: F403
