"""What an agent prints, and in which form: a promise to those who have nothing but its log, as on a cluster.

Where no folder for logs is given, the workers' output is passed on to the agent's own standard output and standard
error: line by line, each when it is complete, with whose it is in front. The agent's own words go to standard error,
with the time and the node in front::

    10:15:02 [digits-0-x4k2p] epoch 2: digits-1-9kd7w left
    10:15:02 [digits-0-x4k2p] epoch 2: started ranks 0, 1 of a world of 2
    [rank 0] loss 0.31
    [rank 1] loss 0.33

A role other than the default one is named before the rank: ``[evaluator rank 1] …``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_ROLE: Final = "default"

TIME_FORMAT: Final = "%H:%M:%S"

WORKER_LINE: Final = re.compile(rb"\[(?:[^\]]* )?rank (?P<rank>[0-9]{1,9})\] ")
"""The beginning of a line of a worker's."""

EPOCH_LINE: Final = re.compile(
    rb"[0-9:]{8} \[[^\]]*\] epoch (?P<epoch>[0-9]{1,15}): (?:started ranks? (?P<ranks>[0-9, ]+) of a world of [0-9]+)?"
)
"""A line in which an agent speaks of an epoch; with ``ranks``, once its workers run: what stands below is theirs."""


def worker_prefix(rank: int, role: str = DEFAULT_ROLE) -> str:
    """What stands before each line of a worker's output."""
    return f"[rank {rank}] " if role == DEFAULT_ROLE else f"[{role} rank {rank}] "


def log_format(node: str) -> str:
    """The format, for :mod:`logging`, of the words of an agent on this node."""
    return f"%(asctime)s [{node.replace('%', '%%')}] %(message)s"


def started(epoch: int, ranks: Sequence[int], world_size: int) -> str:
    """That the workers of an epoch run."""
    listed = ", ".join(str(rank) for rank in ranks)
    return f"epoch {epoch}: started rank{'' if len(ranks) == 1 else 's'} {listed} of a world of {world_size}"
