"""Processes of workers and their streams: torch's, which is imported at the first use of a name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.torch_reexports import reexport

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import *  # noqa: F403

__getattr__ = reexport("torch.distributed.elastic.multiprocessing")
