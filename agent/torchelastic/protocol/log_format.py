"""The format of an agent's output; programs that read an agent's log may rely on this format.

Without a log folder, the agent copies each line of the workers to its own streams, with the rank before the line.
The agent's own messages go to standard error, with the time and the node before the message::

    10:15:02 [digits-0-x4k2p] round 2: digits-1-9kd7w left
    10:15:02 [digits-0-x4k2p] round 2: started ranks 0, 1 of a world of 2; ranks 2, 3 stay
    [rank 0] loss 0.31
    [rank 1] loss 0.33

A role other than the default ones precedes the rank: ``[evaluator rank 1] …``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_ROLE: Final = "default"
LAUNCH_ROLE: Final = "default_role"
"""The default role of torch's ``LaunchConfig``."""

TIME_FORMAT: Final = "%H:%M:%S"

WORKER_LINE: Final = re.compile(rb"\[(?:[^\]]* )?rank (?P<rank>[0-9]{1,9})\] ")
"""Matches the beginning of a worker's line."""

ROUND_LINE: Final = re.compile(
    rb"[0-9:]{8} \[[^\]]*\] round (?P<round>[0-9]{1,15}): (?:started (?:no rank|ranks? (?P<started>[0-9, ]+)) "
    rb"of a world of [0-9]+(?:; ranks? (?P<staying>[0-9, ]+) stays?)?)?"
)
"""Matches a message of an agent about a round; the groups ``started`` and ``staying`` are set if it is :data:`STARTED`
and there are such ranks."""

STARTED: Final = "round %d: started %s of a world of %d%s"
"""The message when a node's workers have started; its arguments are the round, their ranks, the world size, and
:func:`staying` for the workers that continue from the round before."""


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks in words, such as ``ranks 0, 1``."""
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}" if ranks else "no rank"


def staying(ranks: Sequence[int]) -> str:
    """Return the end of a message about started workers: which ranks stay; empty if none stays."""
    return f"; {ranks_in_words(ranks)} stay{'' if len(ranks) > 1 else 's'}" if ranks else ""


def ranks_of(match: re.Match[bytes]) -> list[int]:
    """Return the ranks in a match of :data:`ROUND_LINE`, in ascending order."""
    groups = [match["started"], match["staying"]]
    return sorted(int(number) for group in groups if group for number in group.split(b","))


def rank_label(role: str) -> str:
    """Return the label before the rank in a worker's lines."""
    return "rank" if role in {DEFAULT_ROLE, LAUNCH_ROLE} else f"{role} rank"


def log_format(node: str) -> str:
    """Return the format of an agent's messages for :mod:`logging`."""
    return f"%(asctime)s [{node.replace('%', '%%')}] %(message)s"
