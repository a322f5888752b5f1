"""The events of the training processes (:mod:`benchmarks.training.program`), and the times between them."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a process.

    Attributes:
        kind: the kind of the event.
        time: the time of the monotonic clock.
        step: the number of the training step, from 1.
        size: the number of ranks.
        rank: the rank of the process.
    """

    kind: str
    time: float
    step: int
    size: int
    rank: int


class Process:
    """The events of a process.

    Attributes:
        slot: the agent and the local rank. A process that replaces another one has the same slot.
        pid: the process id.
        events: the events in their order.
    """

    def __init__(self, file: Path) -> None:
        self.slot, _, pid = file.name.rpartition(".")
        self.pid = int(pid)
        lines = (line.split() for line in file.read_text().splitlines(keepends=True) if line.endswith("\n"))
        self.events = [Event(kind, float(at), *map(int, rest)) for kind, at, *rest in lines]

    def times(self, kind: str) -> list[float]:
        """Return the times of the events of a kind."""
        return [event.time for event in self.events if event.kind == kind]

    def first(self, kind: str, since: float, size: int | None = None) -> float | None:
        """Return the time of the first event of a kind in a world that began after a time; None if there is none.

        Args:
            kind: the kind of the event.
            since: a time of the monotonic clock.
            size: the size of the world; None for any.
        """
        began = next((each.time for each in self.events if each.kind == "world" and each.time > since), None)
        if began is None:
            return None
        return next(
            (
                each.time
                for each in self.events
                if each.kind == kind and each.time >= began and size in {None, each.size}
            ),
            None,
        )


class Processes(list[Process]):
    """The processes of a run so far."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the files of all processes in a folder."""
        return cls(Process(path) for path in sorted(folder.iterdir()) if path.suffix[1:].isdecimal())

    def steps_of_world(self, size: int) -> int:
        """Return how many of the last steps of each process that trains were done in a world of this size.

        The result is 0 if the processes of this world are too few.
        """
        counts = []
        for process in self:
            steps = [event.size for event in process.events if event.kind == "step"]
            tail = len([*itertools.takewhile(lambda each: each == size, reversed(steps))])
            counts.append(tail)
        counts = sorted(counts)[-size:]
        return counts[0] if len(counts) == size else 0

    def last(self, kind: str, count: int, since: float, size: int | None = None) -> float | None:
        """Return when the last of the first `count` processes had this event in a world that began after a time.

        Returns:
            The time; None if fewer processes have had the event.
        """
        found = sorted(first for process in self if (first := process.first(kind, since, size)) is not None)
        return found[count - 1] if len(found) >= count else None

    def ready(self, node: str) -> int:
        """Return how many processes of a node have been ready."""
        return sum(process.slot.partition(".")[0] == node and bool(process.times("ready")) for process in self)

    def last_ready(self, since: float) -> float | None:
        """Return when the last new process was ready; None if no process has begun after the time."""
        return max((at for process in self for at in process.times("ready") if at > since), default=None)

    def repeated(self, since: float) -> int:
        """Return how many steps were begun more than once after a time: the maximum of all slots."""
        return max((self._repeated(events, since) for _, events in self._by_slot()), default=0)

    def pause(self, node: str, since: float) -> float:
        """Return the longest time between two steps of a node's slots after a time, less the usual time in seconds."""
        pauses = []
        for slot, events in self._by_slot():
            if slot.partition(".")[0] != node:
                continue
            times = [event.time for event in events if event.kind == "step"]
            gaps = [(after, after - before) for before, after in itertools.pairwise(times)]
            usual = statistics.median(gap for at, gap in gaps if at < since)
            pauses.append(max(gap for at, gap in gaps if at >= since) - usual)
        return max(pauses)

    def _by_slot(self) -> Iterator[tuple[str, list[Event]]]:
        found: defaultdict[str, list[Event]] = defaultdict(list)
        for process in self:
            found[process.slot] += process.events
        for slot, events in found.items():
            yield slot, sorted(events, key=lambda event: event.time)

    @staticmethod
    def _repeated(events: list[Event], since: float) -> int:
        repeated = last = 0
        for event in events:
            if event.kind == "begin":
                if event.step <= last and event.time > since:
                    repeated += last - event.step + 1
                last = event.step
        return repeated
