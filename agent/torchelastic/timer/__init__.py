"""Timers for what may take too long in a worker: torch's, which is imported at the first use of a name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.torch_reexports import reexport

if TYPE_CHECKING:
    from torch.distributed.elastic.timer.api import *  # noqa: F403
    from torch.distributed.elastic.timer.file_based_local_timer import *  # noqa: F403
    from torch.distributed.elastic.timer.local_timer import *  # noqa: F403

__getattr__ = reexport("torch.distributed.elastic.timer")
