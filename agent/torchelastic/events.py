"""Events of a run: torch's. Our agent records none."""

from torch.distributed.elastic.events import *  # noqa: F403
