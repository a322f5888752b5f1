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

_CONCURRENCY: Final = 16
_RETRY_DELAY: Final = 1.0
"""Seconds until a broken stream is resumed."""
_DRAIN_TIMEOUT: Final = 5.0
"""Seconds that a stream gets to end after its container has ended."""
_MAX_TRIES: Final = 3
"""Attempts to read the end of a log."""


class _Log:
    """A pod's log.

    Attributes:
        lines: lines that may have to be printed, by round (0 if unknown, and for the agent) and rank.
        whole: whether it has been read to its end.
        printed_round: of the last line that was considered for printing.
        ended: set when the container has ended.
        stream: the task that follows the log.
        limit: limits the time of the open stream.
    """

    def __init__(self, pod: str) -> None:
        self.reader = PodLog(pod)
        self.lines: dict[tuple[int, int], deque[LogLine]] = {}
        self.whole = False
        self.printed_round = 0
        self.ended = asyncio.Event()
        self.stream: asyncio.Task[None] | None = None
        self.limit: asyncio.Timeout | None = None

    def round_of(self, round: int, current: int) -> int:
        """Return a round; an unknown one is the one before the first that the log has."""
        return round or min(self.reader.ranks, default=current + 1) - 1

    def end(self) -> None:
        """Note that the container has ended."""
        if not self.ended.is_set():
            self.ended.set()
            if self.limit is not None:
                self.limit.reschedule(asyncio.get_running_loop().time() + _DRAIN_TIMEOUT)


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
        self._job_over = self._pods_seen = False
        self._changed = asyncio.Event()

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
        async with _task_group() as group:
            for pod in sorted(pods, key=_pod_name):
                if _has_log(pod) and only in (None, _pod_name(pod)):
                    log = self._logs[pod["metadata"]["uid"]] = _Log(_pod_name(pod))
                    group.create_task(self._read(log, gate, ended=_has_ended(pod), following=following))
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
            elif line.rank == AGENT and only is None and line.round in log.reader.ranks:
                # A later round has begun: the earlier ones are not printed.
                log.lines = {key: lines for key, lines in log.lines.items() if key[0] >= line.round}

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
        self._changed.set()

    # -- following

    async def _follow(self) -> None:
        async with _task_group() as group:
            watches = [group.create_task(self._watch_pods(group)), group.create_task(self._watch_job())]
            while not self._is_over():
                self._changed.clear()
                await self._changed.wait()
            for task in (*watches, *(log.stream for log in self._logs.values() if log.stream)):
                task.cancel()

    def _is_over(self) -> bool:
        followed = [log for log in self._logs.values() if log.stream]
        if self._job_over and self._pods_seen and not followed:
            return True
        known = [log.printed_round for log in followed if log.printed_round]
        return self._selector.round is not None and bool(known) and min(known) > self._selector.round

    async def _watch_pods(self, group: asyncio.TaskGroup) -> None:
        states = self._api.states(PODS, self._namespace, labels=worker_selector(self._name))
        async with contextlib.aclosing(states):
            async for pods in states:
                for uid, pod in pods.items():
                    self._follow_pod(uid, pod, group)
                for uid, log in self._logs.items():
                    if uid not in pods:
                        log.end()
                self._pods_seen = True
                self._changed.set()

    def _follow_pod(self, uid: str, pod: Json, group: asyncio.TaskGroup) -> None:
        name = _pod_name(pod)
        if self._selector.pod not in (None, name) or not _has_log(pod):
            return
        log = self._logs.setdefault(uid, _Log(name))
        if _has_ended(pod):
            log.end()
        if log.stream is None and not log.whole:
            log.printed_round = log.reader.round
            log.stream = group.create_task(self._stream(log))

    async def _watch_job(self) -> None:
        uid = self._job["metadata"]["uid"]
        states = self._api.states(ELASTIC_JOBS, self._namespace, name=self._name)
        async with contextlib.aclosing(states):
            async for jobs in states:
                if uid not in jobs or is_finished(jobs[uid]):
                    self._job_over = True
                    self._changed.set()
                    return

    async def _stream(self, log: _Log) -> None:
        """Follow one log until its container has ended and all of it is read."""
        failures = 0
        while True:
            # After the container's end, read once more what came after the stream's end, without waiting.
            last = log.ended.is_set()
            try:
                await self._resume(log, follow=not last)
                failures = 0
                if last:
                    break
            except ClusterError as error:
                if _is_gone(error):
                    break
                failures += 1
                if last and failures >= _MAX_TRIES:
                    self._report_unreadable(f"the end of the log of {log.reader.pod}", error)
                    break
            if last:
                await asyncio.sleep(_RETRY_DELAY)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(log.ended.wait(), _RETRY_DELAY)
        self._print_new(log, log.reader.rest())
        log.stream, log.whole = None, True
        self._job_over = self._job_over or self._selector.pod is not None

    async def _resume(self, log: _Log, *, follow: bool) -> None:
        """Read a log from where it was read last; when its container has ended, not for long."""
        log.reader.resume()
        pieces = self._api.log(self._namespace, log.reader.pod, WORKER, follow=follow, since=log.reader.since)
        try:
            async with asyncio.timeout(None) as log.limit, contextlib.aclosing(pieces):
                async for piece in pieces:
                    self._print_new(log, log.reader.feed(piece))
        except TimeoutError:
            pass  # its container has ended
        finally:
            log.limit = None


@contextlib.asynccontextmanager
async def _task_group() -> AsyncGenerator[asyncio.TaskGroup, None]:
    """Open a task group that raises the first error itself, not a group of errors."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


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


def _has_log(pod: Json) -> bool:
    worker = _worker(pod)
    return worker.running is not None or worker.terminated is not None


def _has_ended(pod: Json) -> bool:
    return is_over(pod) or _worker(pod).terminated is not None


def _worker(pod: Json) -> ContainerState:
    return next((each for each in container_states(pod) if each.name == WORKER), ContainerState(WORKER))
