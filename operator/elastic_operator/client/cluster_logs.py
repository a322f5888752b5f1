"""``elasticjob logs`` on a cluster.

An agent forwards the output of its workers, with the rank in front of each line. The agent also logs when a round
begins and which ranks it has started::

    10:15:02 [digits-0-x4k2p] round 2: digits-1-bbbbb left
    10:15:02 [digits-0-x4k2p] round 2: started rank 0 of a world of 1
    [rank 0] step 12/80 …

Lines that workers of the previous round print between these two lines are assigned to the new round. Lines before the
first such message have round 0, because the kubelet drops the oldest part of a long log.

All logs of the job's pods are read first, because only the logs show which round is the latest and which ranks each
pod had in this round. With ``--follow``, each log is read further from where the last read ended: a broken stream is
resumed, and the log of a replacement pod is read from its first line.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import deque
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from elastic_operator.api.constants import worker_selector
from elastic_operator.api.json_values import Json, get_int, get_str, rfc3339
from elastic_operator.api.spec import WORKER
from elastic_operator.api.status import JobState
from elastic_operator.controller.model import Pod, PodPhase
from elastic_operator.errors import ClusterError, NotFound
from elastic_operator.kubernetes.client import ELASTIC_JOBS, PODS, READ_TIMEOUT, Api, ApiError
from elastic_operator.kubernetes.pod_status import pod_of
from torchelastic.protocol.log_format import ROUND_LINE, WORKER_LINE, ranks_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator

    from elastic_operator.client import LogSelector, Notify

AGENT: Final = -1
"""The rank of the agent's own lines."""
POLL_INTERVAL: Final = 2.0
"""Seconds between two checks of the job and its pods while their logs are followed."""
_MAX_DISORDER: Final = 1
"""Seconds by which the timestamps of standard output and standard error may be out of order."""
_CONCURRENCY: Final = 16
_RETRY_DELAY: Final = 1.0
"""Seconds until a broken stream is resumed."""
_MAX_FAILURES: Final = 6
"""Maximum number of consecutive checks that may fail."""


class LogLine(NamedTuple):
    """A line of a pod's log; ``time`` is in seconds since the Unix epoch, ``text`` has no line end."""

    time: float
    round: int
    rank: int
    text: bytes

    def labeled(self, pod: str, selector: LogSelector) -> bytes:
        """Return the line with a label, unless the selector or the text itself identifies the source of the line."""
        name = pod.encode()
        if selector.single_source or (self.rank == AGENT and b"[" + name + b"] " in self.text):
            return self.text + b"\n"
        if self.rank == AGENT:
            return b"[" + name + b"] " + self.text + b"\n"
        place = b"" if selector.pod is not None else b" on " + name
        return b"[rank %d%s] %s\n" % (self.rank, place, self.text)


class PodLog:
    """The log of the pod with the name ``pod``, read piece by piece.

    Attributes:
        round: the latest round in the log; 0 before the first.
        ranks: the ranks that the pod has started, by round.
        lines: the selected lines, by round (0 if unknown, and for the agent) and rank.
        ended: whether the pod's container has ended.
        whole: whether the whole log has been read.
        stream: the task that follows the log; None if there is none.
    """

    def __init__(self, pod: str) -> None:
        self.pod = pod
        self.round = 0
        self.ranks: dict[int, tuple[int, ...]] = {}
        self.lines: dict[tuple[int, int], deque[LogLine]] = {}
        self.ended = False
        self.whole = False
        self.stream: asyncio.Task[None] | None = None
        self._partial = b""
        self._last = (0.0, b"")
        self._latest = 0.0
        self._resuming = False

    def round_of(self, round: int, current: int) -> int:
        """Return a line's round; 0 stands for the round before the first one that the log mentions."""
        return round or min(self.ranks, default=current + 1) - 1

    def resume(self) -> str | None:
        """Prepare another read: return its start time, or None for the beginning; :meth:`feed` skips known lines."""
        self._partial = b""
        self._resuming = self._latest > 0
        return rfc3339(int(self._last[0]) - _MAX_DISORDER) if self._resuming else None

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
            if ranks := ranks_of(round):
                self.ranks[int(round["round"])] = tuple(ranks)
        yield LogLine(time, self.round, AGENT, text)


class ClusterLogs:
    """Prints the logs of a job's pods.

    Args:
        write: receives whole lines.
    """

    def __init__(
        self, api: Api, job: Json, selector: LogSelector, write: Callable[[bytes], object], notify: Notify
    ) -> None:
        self._api = api
        self._job = job
        self._name, self._namespace = str(job["metadata"]["name"]), str(job["metadata"]["namespace"])
        self._selector = selector
        self._write = write
        self._notify = notify
        self._logs: dict[str, PodLog] = {}
        self._round = 0
        self._complete = True

    async def print(self) -> bool:
        """Print the logs, and follow them if the selector asks for it; return whether all could be read.

        Raises:
            NotFound: the selected lines do not exist; the message says which ones do.
            ClusterError: the API server rejects a request.
        """
        following = self._selector.follow and not is_finished(self._job)
        await self._read_all()
        if not following:
            self._check_selection()
        printed = self._print_known()
        if following:
            await self._follow()
        elif self._complete and not printed and self._selector.tail != 0:
            self._notify(
                "these workers have printed nothing; output that --log-dir writes to files stays in their pods"
            )
        return self._complete

    # -- reading the existing logs

    async def _pods(self) -> list[Pod]:
        found, _ = await self._api.list(PODS, self._namespace, labels=worker_selector(self._name))
        return sorted(map(pod_of, found), key=lambda pod: pod.name)

    async def _read_all(self) -> None:
        pods = await self._pods()
        only = self._selector.pod
        if only not in (None, *(pod.name for pod in pods)):
            names = ", ".join(pod.name for pod in pods)
            raise NotFound(f"the job {self._name} has no pod {only}; it has {names or 'none'}")
        gate = asyncio.Semaphore(_CONCURRENCY)
        async with _task_group() as reads:
            for log in self._update(pods):
                reads.create_task(self._read_known(log, gate))
        started = (round for log in self._logs.values() for round in log.ranks)
        self._round = max(started, default=get_int(self._job, "status", "round") or 0)

    def _update(self, pods: Iterable[Pod]) -> list[PodLog]:
        """Record which selected pods have a log, and which containers have ended; return the logs."""
        for log in self._logs.values():
            log.ended = True  # corrected below if the pod still runs
        for pod in pods:
            if pod.phase is not PodPhase.PENDING and self._selector.pod in (None, pod.name):
                log = self._logs.setdefault(pod.uid, PodLog(pod.name))
                log.ended = pod.phase is not PodPhase.RUNNING
        return [*self._logs.values()]

    async def _read_known(self, log: PodLog, gate: asyncio.Semaphore) -> None:
        try:
            async with gate:
                await self._read(log, self._keep)
        except ClusterError as error:
            if not _is_gone(error):
                self._report_unreadable(log, error)
        else:
            log.whole = log.ended
        if log.whole or not self._selector.follow:
            self._keep(log, log.rest())

    async def _read(
        self, log: PodLog, take: Callable[[PodLog, Iterable[LogLine]], None], *, follow: bool = False
    ) -> None:
        """Read a log from where the last read ended."""
        query = {"container": WORKER, "timestamps": "true"} | ({"follow": "true"} if follow else {})
        if (since := log.resume()) is not None:
            query["sinceTime"] = since
        # A followed log needs no timeout: it is silent while the program prints nothing.
        path = PODS.path(self._namespace, log.pod, "log")
        pieces = self._api.stream(path, query, silence=None if follow else READ_TIMEOUT)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                take(log, log.feed(piece))

    def _keep(self, log: PodLog, lines: Iterable[LogLine]) -> None:
        only = self._selector.round
        for line in lines:
            if self._selects(line):
                round = 0 if line.rank == AGENT else line.round
                if only is None or round in (0, only):
                    log.lines.setdefault((round, line.rank), deque(maxlen=self._selector.tail)).append(line)

    def _selects(self, line: LogLine) -> bool:
        """Return whether the selector includes this line, apart from its round."""
        if line.rank == AGENT or self._selector.agents:
            return line.rank == AGENT and self._selector.agents
        return self._selector.rank in (None, line.rank)

    def _report_unreadable(self, log: PodLog, error: ClusterError) -> None:
        self._complete = False
        why = error.message if isinstance(error, ApiError) else error
        self._notify(f"the log of {log.pod} cannot be read: {why}")

    def _check_selection(self) -> None:
        if not self._complete:
            return
        if self._selector.agents:
            if not any(log.lines for log in self._logs.values()):
                raise NotFound(f"no agent of the job {self._name} has logged anything; see `elasticjob describe`")
            return
        ranks: dict[int, set[int]] = {}
        for log in self._logs.values():
            for round, started in log.ranks.items():
                ranks.setdefault(round, set()).update(started)
            for round, rank in log.lines:
                ranks.setdefault(log.round_of(round, self._round), set()).add(rank)
        if not ranks:
            raise NotFound(
                f"no worker of the job {self._name} has printed anything; `elasticjob describe` shows its state, "
                "and `elasticjob logs --agent` the logs of its agents"
            )
        self._selector.check(ranks, self._round if self._selector.round is None else self._selector.round)

    def _print_known(self) -> bool:
        wanted = self._round if self._selector.round is None else self._selector.round
        chosen = [
            [(line, log.pod) for line in lines]
            for log in self._logs.values()
            for (round, rank), lines in log.lines.items()
            if rank == AGENT or log.round_of(round, self._round) == wanted
        ]
        return self._print(heapq.merge(*chosen, key=lambda each: each[0].time))

    def _print(self, lines: Iterable[tuple[LogLine, str]]) -> bool:
        text = b"".join(line.labeled(pod, self._selector) for line, pod in lines)
        if text:
            self._write(text)
        return bool(text)

    def _print_new(self, log: PodLog, lines: Iterable[LogLine]) -> None:
        chosen: list[tuple[LogLine, str]] = []
        only = self._selector.round
        for line in lines:
            if line.rank != AGENT and line.round > self._round:
                self._print(chosen)
                chosen.clear()
                if self._round and only is None and not self._selector.agents:
                    self._notify(f"round {line.round} begins")
                self._round = line.round
            if self._selects(line) and (line.rank == AGENT or only in (None, line.round or self._round)):
                chosen.append((line, log.pod))
        self._print(chosen)

    # -- following

    async def _follow(self) -> None:
        """Follow the logs until the job, the selected pod or the selected round has ended; then read the rest."""
        failures = 0
        async with _task_group() as streams:
            while True:
                try:
                    over = await self._look(streams)
                    failures = 0
                except ClusterError as error:
                    failures += 1
                    if failures > _MAX_FAILURES or (isinstance(error, ApiError) and not error.transient):
                        raise
                    over = False
                if over:
                    break
                await asyncio.sleep(POLL_INTERVAL)
            for log in self._logs.values():
                if log.stream is not None:
                    log.stream.cancel()
        for log in self._logs.values():
            try:
                if not log.whole:
                    await self._read(log, self._print_new)
            except ClusterError as error:
                if not _is_gone(error):
                    self._report_unreadable(log, error)
            self._print_new(log, log.rest())

    async def _look(self, streams: asyncio.TaskGroup) -> bool:
        """Follow new pods; return whether the followed job, pod or round has ended."""
        jobs, _ = await self._api.list(ELASTIC_JOBS, self._namespace, name=self._name)
        logs = self._update(await self._pods())
        for log in logs:
            if log.stream is None and not log.whole:
                log.stream = streams.create_task(self._stream(log))
        continues = any(uid_of(each) == uid_of(self._job) and not is_finished(each) for each in jobs)
        if not continues or (self._selector.pod is not None and logs):
            return all(log.ended for log in logs)
        return self._selector.round is not None and self._round > self._selector.round

    async def _stream(self, log: PodLog) -> None:
        """Follow one log until its container has ended and the whole log has been read."""
        while not log.whole:
            ended = log.ended  # in this case, read the rest without waiting for more
            try:
                await self._read(log, self._print_new, follow=not ended)
                log.whole = ended
            except ClusterError as error:
                log.whole = _is_gone(error)
            await asyncio.sleep(_RETRY_DELAY)


@contextlib.asynccontextmanager
async def _task_group() -> AsyncGenerator[asyncio.TaskGroup, None]:
    """Open a task group that raises the first error instead of an exception group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def is_finished(job: Json) -> bool:
    """Return whether a job has succeeded or failed."""
    return get_str(job, "status", "state") in {state for state in JobState if state.finished}


def _is_gone(error: ClusterError) -> bool:
    """Return whether an error means that the log's container has not started, or that its pod is gone.

    Raises:
        ClusterError: the user may not read any log.
    """
    if isinstance(error, ApiError) and error.status in (401, 403):
        raise error
    return isinstance(error, ApiError) and error.status in (400, 404)


def uid_of(obj: Json) -> str:
    """Return the UID of an object."""
    return str(obj["metadata"]["uid"])


def _split_timestamp(line: bytes) -> tuple[float, bytes]:
    """Return a line's time, 0 if it has none, and its text."""
    stamp, _, text = line.partition(b" ")
    try:
        time = datetime.fromisoformat(stamp.decode())
    except ValueError:
        return 0.0, line
    return (0.0, line) if time.tzinfo is None else (time.timestamp(), text)
