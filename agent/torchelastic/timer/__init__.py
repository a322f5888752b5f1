"""Timers that end a worker which holds on to something for too long: torch's, under torchelastic's name.

torch is imported when one of the names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.torchs import names_of

if TYPE_CHECKING:
    from torch.distributed.elastic.timer.api import (
        TimerClient,
        TimerRequest,
        TimerServer,
        configure,
        expires,
    )
    from torch.distributed.elastic.timer.file_based_local_timer import (
        FileTimerClient,
        FileTimerRequest,
        FileTimerServer,
    )
    from torch.distributed.elastic.timer.local_timer import LocalTimerClient, LocalTimerServer

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
]

__getattr__ = names_of("torch.distributed.elastic.timer", __name__, __all__)
