"""The log of one pod, line by line: whose a line is, and of which epoch.

An agent passes the output of its workers on, each line with the rank before it, and says itself when an epoch begins
and which ranks it has started in it. That is all that is needed to find a rank's output, without asking anybody else::

    10:15:02 [digits-0-x4k2p] epoch 2: digits-1-bbbbb left; 1 worker goes on
    10:15:02 [digits-0-x4k2p] epoch 2: started rank 0 of a world of 1
    [rank 0] epoch 12/80 …

Between those two lines the workers of the epoch before may still have a last word, which counts to the new one: the
first words of the new ones are worth more. What stands in a log before its first epoch (the kubelet throws away the
oldest part of a long one) is of an epoch that is not known, 0.
"""

from __future__ import annotations

import re
from collections import deque
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from elastic_operator.status_json import rfc3339
from torchelastic.output import EPOCH_LINE, WORKER_LINE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_operator.showing.wanted_logs import Wanted

AGENT: Final = -1
"""In the place of a rank: the agent's own words."""

_NANOSECONDS: Final = 10**9
_REMEMBERED: Final = 256
"""So many lines are remembered to know them again."""
_DISORDER: Final = 1
"""Seconds. No line stands behind one that came so much later."""
_STAMP: Final = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ")


class LogLine(NamedTuple):
    """A line of a pod's log.

    Attributes:
        time: when it came, in nanoseconds since the Unix epoch.
        epoch: in which it was printed.
        rank: whose it is; :data:`AGENT` for the agent.
        text: what was printed, without the end of the line.
    """

    time: int
    epoch: int
    rank: int
    text: bytes

    def labelled(self, pod: str, wanted: Wanted) -> bytes:
        """The line to be printed: with whose it is in front, as far as that does not go without saying."""
        if wanted.one_speaker:
            return self.text + b"\n"
        name = pod.encode()
        if self.rank == AGENT:  # agents say most of the time who they are
            return (self.text if b"[" + name + b"] " in self.text else b"[" + name + b"] " + self.text) + b"\n"
        where = b"" if wanted.pod is not None else b" on " + name
        return b"[rank %d%s] %s\n" % (self.rank, where, self.text)


class PodLog:
    """Reads a log, in pieces as they come.

    Args:
        pod: whose it is.

    Attributes:
        epoch: the one that the log has come to; 0 as long as it has told of none.
        ranks: those that the agent said it has started, by epoch.
    """

    def __init__(self, pod: str) -> None:
        self.pod = pod
        self.epoch = 0
        self.ranks: dict[int, tuple[int, ...]] = {}
        self._begun = b""
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=_REMEMBERED)
        self._known: set[tuple[int, bytes]] = set()
        self._known_before = 0

    @property
    def since(self) -> str | None:
        """From when on the log has to be read again to go on with it; None for from its beginning."""
        if not self._recent:
            return None
        time, _ = self._recent[-1]
        return rfc3339(time // _NANOSECONDS - _DISORDER)

    def resume(self) -> None:
        """It is about to be read again from :attr:`since` on: what was read already is passed over."""
        self._begun = b""
        self._known = set(self._recent)
        all_known = len(self._recent) < _REMEMBERED
        self._known_before = 0 if all_known else min(time for time, _ in self._recent)

    def feed(self, piece: bytes) -> Iterator[LogLine]:
        """The lines that this piece completes."""
        *lines, self._begun = (self._begun + piece).split(b"\n")
        for line in lines:
            if (read := self._line(line)) is not None:
                yield read

    def rest(self) -> Iterator[LogLine]:
        """The last line, where it was never ended."""
        line, self._begun = self._begun, b""
        if line and (read := self._line(line)) is not None:
            yield read

    def _line(self, line: bytes) -> LogLine | None:
        """What a line says; None where it was read already."""
        stamped = time, text = _stamped(line)
        if time:
            # Standard output and standard error may stand there a little out of their order in time.
            if time < self._known_before or stamped in self._known:
                return None
            self._recent.append(stamped)
        if rank := WORKER_LINE.match(text):
            return LogLine(time, self.epoch, int(rank["rank"]), text[rank.end() :])
        if epoch := EPOCH_LINE.match(text):
            self.epoch = max(self.epoch, int(epoch["epoch"]))
            if epoch["ranks"]:
                self.ranks[int(epoch["epoch"])] = tuple(int(number) for number in epoch["ranks"].split(b","))
        return LogLine(time, self.epoch, AGENT, text)


def _stamped(line: bytes) -> tuple[int, bytes]:
    """When a line came, 0 where that is not said; and the line itself."""
    stamp = _STAMP.match(line)
    if stamp is None:
        return 0, line
    try:
        second = int(datetime.fromisoformat((stamp[1] + stamp[3]).decode()).timestamp())
    except ValueError:
        return 0, line
    return second * _NANOSECONDS + int((stamp[2] or b"").ljust(9, b"0")), line[stamp.end() :]
