"""Processes of workers, their streams and failures: torch's, under torchelastic's name.

torch is imported when one of the names is first used. Our agent has no part in this but
:mod:`torchelastic.multiprocessing.errors`: it starts and watches its workers by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.torchs import names_of

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import (
        DefaultLogsSpecs,
        LogsDest,
        LogsSpecs,
        MultiprocessContext,
        PContext,
        ProcessFailure,
        RunProcsResult,
        SignalException,
        Std,
        SubprocessContext,
        start_processes,
        to_map,
    )

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "ProcessFailure",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "start_processes",
    "to_map",
]

__getattr__ = names_of("torch.distributed.elastic.multiprocessing", __name__, __all__)
