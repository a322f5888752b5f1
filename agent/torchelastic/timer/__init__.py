"""torch's timers for operations of a worker that may take too long, re-exported."""

from torch.distributed.elastic.timer import *  # noqa: F403
