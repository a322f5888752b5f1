"""torch's ``@record`` and its exceptions for failed runs, re-exported."""

from torch.distributed.elastic.multiprocessing.errors import *  # noqa: F403
