"""The log of one pod, split into lines by rank and round.

An agent forwards the output of its workers, each line with the rank in front, and logs when a round begins and which
ranks it has started::

    10:15:02 [digits-0-x4k2p] round 2: digits-1-bbbbb left; 1 worker goes on
    10:15:02 [digits-0-x4k2p] round 2: started rank 0 of a world of 1
    [rank 0] step 12/80 …

Lines that the workers of the previous round print between these two count to the new round. Lines before the first
round (the kubelet drops the oldest part of a long log) have round 0.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from elastic_operator.api.json_values import rfc3339
from torchelastic.output import ROUND_LINE, WORKER_LINE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_operator.views.log_selector import LogSelector

AGENT: Final = -1
"""The rank of the agent's own lines."""

_MAX_DISORDER: Final = 1
"""Seconds by which the timestamps of standard output and standard error may be out of order."""


class LogLine(NamedTuple):
    """A line of a pod's log; ``time`` is in seconds since the Unix epoch, ``text`` has no line end."""

    time: float
    round: int
    rank: int
    text: bytes

    def labelled(self, pod: str, selector: LogSelector) -> bytes:
        """Return the line with its source in front, unless the selector makes it obvious."""
        name = pod.encode()
        if selector.single_source or (self.rank == AGENT and b"[" + name + b"] " in self.text):
            return self.text + b"\n"
        if self.rank == AGENT:
            return b"[" + name + b"] " + self.text + b"\n"
        place = b"" if selector.pod is not None else b" on " + name
        return b"[rank %d%s] %s\n" % (self.rank, place, self.text)


class PodLog:
    """Reads a pod's log piece by piece.

    Attributes:
        round: the latest round in the log; 0 before the first.
        ranks: the started ranks by round.
    """

    def __init__(self, pod: str) -> None:
        self.pod = pod
        self.round = 0
        self.ranks: dict[int, tuple[int, ...]] = {}
        self._partial = b""
        self._last = (0.0, b"")
        self._latest = 0.0
        self._resuming = False

    @property
    def since(self) -> str | None:
        """The time from which to read the log again; None for its beginning."""
        return rfc3339(int(self._last[0]) - _MAX_DISORDER) if self._latest else None

    def resume(self) -> None:
        """Prepare for reading the log again from :attr:`since` on: all lines up to the last known one are skipped."""
        self._partial = b""
        self._resuming = self._latest > 0

    def feed(self, piece: bytes) -> Iterator[LogLine]:
        """Yield the lines that this piece completes."""
        *lines, self._partial = (self._partial + piece).split(b"\n")
        for line in lines:
            yield from self._read(line)

    def rest(self) -> Iterator[LogLine]:
        """Yield the last line, if it has no line end."""
        line, self._partial = self._partial, b""
        if line:
            yield from self._read(line)

    def _read(self, line: bytes) -> Iterator[LogLine]:
        time, text = stamped = _split_timestamp(line)
        if time:
            if self._resuming and time <= self._latest:
                self._resuming = stamped != self._last
                return
            self._last, self._latest, self._resuming = stamped, max(time, self._latest), False
        if rank := WORKER_LINE.match(text):
            yield LogLine(time, self.round, int(rank["rank"]), text[rank.end() :])
            return
        if round := ROUND_LINE.match(text):
            self.round = max(self.round, int(round["round"]))
            if round["ranks"]:
                self.ranks[int(round["round"])] = tuple(int(number) for number in round["ranks"].split(b","))
        yield LogLine(time, self.round, AGENT, text)


def _split_timestamp(line: bytes) -> tuple[float, bytes]:
    """Return a line's time, 0 if it has none, and its text."""
    stamp, _, text = line.partition(b" ")
    try:
        time = datetime.fromisoformat(stamp.decode())
    except ValueError:
        return 0.0, line
    return (0.0, line) if time.tzinfo is None else (time.timestamp(), text)
