"""``elasticjob logs`` on a cluster.

All logs of the job's pods are read first, since only the logs themselves say which round is the latest and which pod
had which rank in it. When following, each log continues where the last read ended: a stream that breaks is resumed,
and a replacement pod is followed from its first line.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import deque
from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import worker_selector
from elastic_operator.api.json_values import integer, text
from elastic_operator.api.legacy import WORKER
from elastic_operator.api.status import JobState
from elastic_operator.client.pod_log import AGENT, LogLine, PodLog
from elastic_operator.client.user_api import readable_errors
from elastic_operator.errors import ClusterError, NotFound
from elastic_operator.kubernetes.client import ELASTIC_JOBS, PODS, ApiError
from elastic_operator.kubernetes.pod_status import ContainerState, container_states, is_over

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from elastic_operator.api.spec import Json
    from elastic_operator.client import Tell
    from elastic_operator.client.user_api import UserApi
    from elastic_operator.views.log_selector import LogSelector

POLL_INTERVAL: Final = 2.0
"""Seconds between two looks at the job and its pods while their logs are followed."""
_CONCURRENCY: Final = 16
_RETRY_DELAY: Final = 1.0
"""Seconds until a broken stream is resumed."""
_DRAIN_TIMEOUT: Final = 5.0
"""Seconds that the streams get to end after the job and its containers have ended."""
_MAX_TRIES: Final = 3
"""Attempts to read the end of a log."""
_MAX_FAILURES: Final = 6
"""Looks in a row that may fail."""


class _Log:
    """A pod's log.

    Attributes:
        reader: splits it into lines.
        lines: lines that may have to be printed, by round (0 if unknown, and for the agent) and rank.
        ended: whether its container has ended.
        whole: whether it was read to its end before it was followed.
        printed_round: of the last line that was considered for printing.
        stream: the task that follows it.
    """

    def __init__(self, pod: str) -> None:
        self.reader = PodLog(pod)
        self.lines: dict[tuple[int, int], deque[LogLine]] = {}
        self.ended = False
        self.whole = False
        self.printed_round = 0
        self.stream: asyncio.Task[None] | None = None

    def round_of(self, round: int, current: int) -> int:
        """Return a round; an unknown one is the one before the first that the log has."""
        return round or min(self.reader.ranks, default=current + 1) - 1


class ClusterLogs:
    """Prints the logs of a job's pods.

    Args:
        api: an open connection.
        job: the job's object.
        selector: which lines to print.
        write: gets whole lines.
        tell: gets sentences for the user.
    """

    def __init__(
        self, api: UserApi, job: Json, selector: LogSelector, write: Callable[[bytes], object], tell: Tell
    ) -> None:
        self._api = api
        self._job = job
        self._name, self._namespace = str(job["metadata"]["name"]), str(job["metadata"]["namespace"])
        self._selector = selector
        self._write = write
        self._tell = tell
        self._logs: dict[str, _Log] = {}
        self._round = 0
        self._complete = True
        self._job_over = False
        self._stream_ended = asyncio.Event()

    async def print(self) -> bool:
        """Print the logs, and what is added to them if the selector says so; return whether all could be read.

        Raises:
            NotFound: the selected lines do not exist; the message says what does.
            ClusterError: the API server refuses.
        """
        following = self._selector.follow and not is_finished(self._job)
        await self._read_all(following=following)
        if not following:
            self._check_selection()
        printed = self._print_known()
        if following:
            await self._follow()
        elif self._complete and not printed and self._selector.tail != 0:
            self._tell("these workers have printed nothing; what --log-dir sends to files stays in their pods")
        return self._complete

    # -- reading what there is

    async def _read_all(self, *, following: bool) -> None:
        with readable_errors(f"the namespace {self._namespace} is gone"):
            pods, _ = await self._api.list(PODS, self._namespace, labels=worker_selector(self._name))
        names = sorted(map(_pod_name, pods))
        only = self._selector.pod
        if only is not None and only not in names:
            raise NotFound(f"the job {self._name} has no pod {only}; it has {', '.join(names) or 'none'}")
        gate = asyncio.Semaphore(_CONCURRENCY)
        async with _task_group() as reads:
            for pod in sorted(pods, key=_pod_name):
                if _has_log(pod) and only in (None, _pod_name(pod)):
                    log = self._logs[_uid(pod)] = _Log(_pod_name(pod))
                    reads.create_task(self._read(log, gate, ended=_has_ended(pod), following=following))
        started = (round for log in self._logs.values() for round in log.reader.ranks)
        self._round = max(started, default=integer(self._job, "status", "round") or 0)

    async def _read(self, log: _Log, gate: asyncio.Semaphore, *, ended: bool, following: bool) -> None:
        pieces = self._api.log(self._namespace, log.reader.pod, WORKER, follow=False)
        try:
            async with gate, contextlib.aclosing(pieces):
                async for piece in pieces:
                    self._keep(log, log.reader.feed(piece))
        except ClusterError as error:
            if not _is_gone(error):
                self._report_unreadable(f"the log of {log.reader.pod}", error)
            return
        log.whole = ended
        if ended or not following:
            self._keep(log, log.reader.rest())

    def _keep(self, log: _Log, lines: Iterable[LogLine]) -> None:
        only = self._selector.round
        for line in lines:
            if self._selects(line):
                round = 0 if line.rank == AGENT else line.round
                if only is None or round in (0, only):
                    log.lines.setdefault((round, line.rank), deque(maxlen=self._selector.tail)).append(line)

    def _selects(self, line: LogLine) -> bool:
        """Whether this line is to be printed if its round is."""
        if line.rank == AGENT or self._selector.agents:
            return line.rank == AGENT and self._selector.agents
        return self._selector.rank in (None, line.rank)

    def _report_unreadable(self, what: str, error: ClusterError) -> None:
        self._complete = False
        self._tell(f"{what} cannot be read: {error.message if isinstance(error, ApiError) else error}")

    def _check_selection(self) -> None:
        if not self._complete:
            return
        if self._selector.agents:
            if not any(log.lines for log in self._logs.values()):
                raise NotFound(f"no agent of the job {self._name} has said anything; see `elasticjob describe`")
            return
        ranks: dict[int, set[int]] = {}
        for log in self._logs.values():
            for round, started in log.reader.ranks.items():
                ranks.setdefault(round, set()).update(started)
            for round, rank in log.lines:
                ranks.setdefault(log.round_of(round, self._round), set()).add(rank)
        if not ranks:
            raise NotFound(
                f"there is no output of a worker of the job {self._name}; `elasticjob describe` shows its state, "
                "and `elasticjob logs --agent` the logs of its agents"
            )
        self._selector.check(ranks, self._round if self._selector.round is None else self._selector.round)

    # -- printing

    def _print_known(self) -> bool:
        wanted = self._round if self._selector.round is None else self._selector.round
        chosen = [
            [(line, log.reader.pod) for line in lines]
            for log in self._logs.values()
            for (round, rank), lines in log.lines.items()
            if rank == AGENT or log.round_of(round, self._round) == wanted
        ]
        return self._print(heapq.merge(*chosen, key=lambda each: each[0].time))

    def _print(self, lines: Iterable[tuple[LogLine, str]]) -> bool:
        text = b"".join(line.labelled(pod, self._selector) for line, pod in lines)
        if text:
            self._write(text)
        return bool(text)

    def _print_new(self, log: _Log, lines: Iterable[LogLine]) -> None:
        chosen: list[tuple[LogLine, str]] = []
        for line in lines:
            log.printed_round = line.round
            if not self._selects(line):
                continue
            if line.rank != AGENT:
                round = line.round or self._round
                if self._selector.round not in (None, round):
                    continue
                if round > self._round:
                    self._print(chosen)
                    chosen.clear()
                    if self._round:
                        self._tell(f"round {round} begins")
                    self._round = round
            chosen.append((line, log.reader.pod))
        self._print(chosen)

    # -- following

    async def _follow(self) -> None:
        failures = 0
        async with _task_group() as streams:
            while not self._is_over():
                self._stream_ended.clear()
                try:
                    await self._look(streams)
                    failures = 0
                except ClusterError as error:
                    failures += 1
                    if failures > _MAX_FAILURES or (isinstance(error, ApiError) and not error.transient):
                        raise
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stream_ended.wait(), POLL_INTERVAL)
            await self._end_streams()

    async def _look(self, streams: asyncio.TaskGroup) -> None:
        """Follow new pods, and note which containers have ended and whether the job is over."""
        jobs, _ = await self._api.list(ELASTIC_JOBS, self._namespace, name=self._name)
        found, _ = await self._api.list(PODS, self._namespace, labels=worker_selector(self._name))
        pods = {_uid(pod): pod for pod in found if self._selector.pod in (None, _pod_name(pod))}
        for uid, pod in pods.items():
            if not _has_log(pod):
                continue
            log = self._logs.setdefault(uid, _Log(_pod_name(pod)))
            if log.stream is None and not log.whole:
                log.printed_round = log.reader.round
                log.stream = streams.create_task(self._stream(log))
        for uid, log in self._logs.items():
            log.ended = uid not in pods or _has_ended(pods[uid])
        unfinished = [each for each in jobs if _uid(each) == _uid(self._job) and not is_finished(each)]
        self._job_over = not unfinished

    def _is_over(self) -> bool:
        logs = self._logs.values()
        if self._job_over or (self._selector.pod is not None and logs):
            return all(log.ended for log in logs)
        return self._is_round_over()

    def _is_round_over(self) -> bool:
        known = [log.printed_round for log in self._logs.values() if log.printed_round and not log.ended]
        return self._selector.round is not None and bool(known) and min(known) > self._selector.round

    async def _end_streams(self) -> None:
        streams = {log.stream: log for log in self._logs.values() if log.stream is not None}
        if streams and not self._is_round_over():
            await asyncio.wait(streams, timeout=_DRAIN_TIMEOUT)
            for log in (log for stream, log in streams.items() if not stream.done()):
                self._report_unreadable(f"the end of the log of {log.reader.pod}", ClusterError("it does not come"))
        for stream in streams:
            stream.cancel()

    async def _stream(self, log: _Log) -> None:
        """Follow one log until its container has ended and all of it is read."""
        tries = 0
        while True:
            # After the container's end, read once more what came after the stream's end, without waiting.
            last = log.ended
            try:
                await self._resume(log, follow=not last)
                if last:
                    break
            except ClusterError as error:
                if _is_gone(error):
                    break
                tries += last
                if tries == _MAX_TRIES:
                    self._report_unreadable(f"the end of the log of {log.reader.pod}", error)
                    break
            self._stream_ended.set()
            await asyncio.sleep(_RETRY_DELAY)
        self._print_new(log, log.reader.rest())

    async def _resume(self, log: _Log, *, follow: bool) -> None:
        """Read a log from where it was read last."""
        log.reader.resume()
        pieces = self._api.log(self._namespace, log.reader.pod, WORKER, follow=follow, since=log.reader.since)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                self._print_new(log, log.reader.feed(piece))


@contextlib.asynccontextmanager
async def _task_group() -> AsyncGenerator[asyncio.TaskGroup, None]:
    """Open a task group that raises the first error itself, not a group of errors."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def is_finished(job: Json) -> bool:
    """Return whether a job has succeeded or failed."""
    return text(job, "status", "state") in {state for state in JobState if state.finished}


def _is_gone(error: ClusterError) -> bool:
    """Return whether a log is unavailable because its container has not started, or its pod is gone.

    Raises:
        ClusterError: the user may not read any log.
    """
    if isinstance(error, ApiError) and error.status in (401, 403):
        with readable_errors(""):
            raise error
    return isinstance(error, ApiError) and error.status in (400, 404)


def _pod_name(pod: Json) -> str:
    return str(pod["metadata"]["name"])


def _uid(obj: Json) -> str:
    return str(obj["metadata"]["uid"])


def _has_log(pod: Json) -> bool:
    worker = _worker(pod)
    return worker.running is not None or worker.terminated is not None


def _has_ended(pod: Json) -> bool:
    return is_over(pod) or _worker(pod).terminated is not None


def _worker(pod: Json) -> ContainerState:
    return next((each for each in container_states(pod) if each.name == WORKER), ContainerState(WORKER))
