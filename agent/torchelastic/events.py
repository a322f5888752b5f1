"""torch's module for the events of a run, re-exported. The agent of torchelastic records no such events."""

from torch.distributed.elastic.events import *  # noqa: F403
