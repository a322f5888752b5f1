"""The log files of a run, and functions to read them while they grow.

Workers write ``<pod>/round_E/rank_R/output.log`` (or ``stdout.log`` and ``stderr.log``), agents ``<pod>/agent.log``.
"""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from elastic_operator.client import LogSelector
from elastic_operator.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_WORKER_LOG: Final = re.compile(r"round_(\d+)/rank_(\d+)/[^/]+\.log")
_BLOCK: Final = 1 << 16
_POLL_INTERVAL: Final = 0.1


@dataclass(frozen=True, slots=True, order=True)
class LogFile:
    """The output of one worker in one round, or of an agent, whose round is 0 and rank -1."""

    round: int
    rank: int
    pod: str
    path: Path

    def labelled(self, line: bytes) -> bytes:
        """Return a line with its rank or pod in front; most lines of an agent name their pod already."""
        label = (f"[{self.pod}] " if self.rank < 0 else f"[rank {self.rank}] ").encode()
        return (line if self.rank < 0 and label in line else label + line) + b"\n"


def log_files(logs: Path, selector: LogSelector) -> list[LogFile]:
    """Return the selected log files of all rounds, by round and rank."""
    if selector.agents:
        found = [LogFile(0, -1, path.parent.name, path) for path in logs.glob("*/agent.log")]
    else:
        found = []
        for path in logs.glob("*/round_*/rank_*/*.log"):
            pod, _, file = path.relative_to(logs).as_posix().partition("/")
            if match := _WORKER_LOG.fullmatch(file):
                found.append(LogFile(int(match[1]), int(match[2]), pod, path))
    return sorted(each for each in found if selector.pod in (None, each.pod) and selector.rank in (None, each.rank))


def print_logs(logs: Path, selector: LogSelector, write: Callable[[bytes], object]) -> None:
    """Write the logs of one round: the selected one, or the latest.

    Raises:
        NotFound: there are no such logs; the message says which logs there are.
    """
    everything = log_files(logs, LogSelector(agents=selector.agents))
    there = [file for file in everything if selector.pod in (None, file.pod)]
    if selector.pod is not None and not there:
        pods = sorted({file.pod for file in everything})
        raise NotFound(f"there is no log of pod {selector.pod}; there are logs of {', '.join(pods) or 'none'}")
    ranks: dict[int, set[int]] = {}
    for file in there:
        ranks.setdefault(file.round, set()).add(file.rank)
    if not ranks and not selector.agents:
        raise NotFound(f"no worker has started yet; what the agents say is in {logs}/*/agent.log (--agent)")
    round = max(ranks, default=0) if selector.round is None else selector.round
    if not selector.agents:
        selector.check(ranks, round)
    follow_logs(logs, replace(selector, round=round), write, alive=lambda: False, tell=lambda _: None)


def follow_logs(
    logs: Path,
    selector: LogSelector,
    write: Callable[[bytes], object],
    *,
    alive: Callable[[], bool],
    tell: Callable[[str], object],
) -> None:
    """Write logs as they grow, from round to round, or of the selected round until the next one has begun.

    Args:
        logs: the directory of the run's logs.
        selector: which logs to write.
        write: receives pieces of output.
        alive: returns whether the run continues; if not, no file grows any more.
        tell: receives a sentence when another round begins.
    """
    reader = _LogReader(selector, write)
    at_first = log_files(logs, selector)
    only = selector.round
    first = announced = only or max((file.round for file in at_first), default=0)
    while True:
        rounds = (file.round for file in log_files(logs, LogSelector()))
        more = alive() and (only is None or max(rounds, default=0) <= only)
        for file in log_files(logs, selector):
            if file.round < first or only not in (None, file.round):
                continue
            if announced and file.round > announced:
                tell(f"round {file.round} begins")
            announced = max(announced, file.round)
            reader.read(file, tail=selector.tail if file in at_first else None)
        if not more:
            break
        time.sleep(_POLL_INTERVAL)
    reader.finish()


class _LogReader:
    """Reads files as they grow, and writes what was added, with labels if there are several sources."""

    def __init__(self, selector: LogSelector, write: Callable[[bytes], object]) -> None:
        self._label = not selector.single_source
        self._write = write
        self._offsets: dict[LogFile, int] = {}
        self._partial: dict[LogFile, bytes] = {}

    def read(self, file: LogFile, *, tail: int | None = None) -> None:
        """Write the new part of a file; at the first read of a file, only the last ``tail`` lines."""
        with file.path.open("rb") as content:
            if file not in self._offsets and tail is not None:
                last = deque(content, maxlen=tail)
                self._offsets[file] = content.tell() - sum(map(len, last))
            content.seek(self._offsets.get(file, 0))
            while piece := content.read(_BLOCK):
                self._emit(file, piece)
            self._offsets[file] = content.tell()

    def finish(self) -> None:
        """Write the last lines that do not end with a newline."""
        for file, rest in self._partial.items():
            if rest:
                self._write(file.labelled(rest))

    def _emit(self, file: LogFile, piece: bytes) -> None:
        if not self._label:
            self._write(piece)
            return
        *lines, self._partial[file] = (self._partial.get(file, b"") + piece).split(b"\n")
        if lines:
            self._write(b"".join(file.labelled(line) for line in lines))
