"""What the pods of a job have printed so far, and which part of it is asked for.

All logs are read, since only the logs themselves say which epoch is the latest, and who had which rank in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elastic_operator.errors import ClusterError, NotFound
from elastic_operator.kube.api import ApiError
from elastic_operator.kube.container_state import ContainerState, container_states, is_over
from elastic_operator.kube.pod_logs import AGENT, LogLine, PodLog
from elastic_operator.kube.resources import PODS
from elastic_operator.kube.task_group import task_group
from elastic_operator.kube.user_api import in_words
from elastic_operator.names import worker_selector
from elastic_operator.showing.words import ranks as in_short
from elastic_operator.template import WORKER
from elastic_operator.unchecked import integer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from elastic_operator.kube.user_api import UserApi
    from elastic_operator.showing.wanted_logs import Wanted
    from elastic_operator.spec import Json

_AT_ONCE: Final = 16
"""So many logs are read side by side."""
_LINES_AT_ONCE: Final = 500


@dataclass(frozen=True, slots=True)
class LogRequest:
    """Which logs are to be printed, and how.

    Attributes:
        job: whose, as the API server has it.
        wanted: of which rank or pod, or of the agents.
        epoch: of this epoch only; None for the current one, and when it is followed for those that come.
        tail: of what is there at the beginning, only so many of the last lines of each rank; None for all.
        write: gets whole lines.
        tell: gets sentences for the user.
    """

    job: Json
    wanted: Wanted
    epoch: int | None
    tail: int | None
    write: Callable[[bytes], object]
    tell: Callable[[str], object]

    @property
    def name(self) -> str:
        """The job's name."""
        return str(self.job["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """Where the job is."""
        return str(self.job["metadata"]["namespace"])

    def asks_for(self, line: LogLine) -> bool:
        """Whether this line is to be printed, if its epoch is."""
        if line.rank == AGENT or self.wanted.agents:
            return line.rank == AGENT and self.wanted.agents
        return self.wanted.rank in (None, line.rank)

    def print(self, lines: Iterable[tuple[LogLine, str]]) -> bool:
        """Print lines, each with the pod that it is of; whether there were any."""
        batch: list[bytes] = []
        any_line = False
        for line, pod in lines:
            any_line = True
            batch.append(line.labelled(pod, self.wanted))
            if len(batch) == _LINES_AT_ONCE:
                self.write(b"".join(batch))
                batch.clear()
        if batch:
            self.write(b"".join(batch))
        return any_line


@dataclass(slots=True)
class ReadLog:
    """A log that was read.

    Attributes:
        log: what it told.
        kept: what may have to be printed, by epoch (0 where it is not known, and for all that is an agent's) and rank.
        whole: nothing will be added to it.
    """

    log: PodLog
    kept: dict[tuple[int, int], deque[LogLine]] = field(default_factory=dict)
    whole: bool = False

    def epoch_of(self, epoch: int, current: int) -> int:
        """An epoch; one that is not known is the one before the first that the log has told of."""
        return epoch or min(self.log.ranks, default=current + 1) - 1


@dataclass(frozen=True, slots=True)
class ReadLogs:
    """The logs of a job's pods, as far as they have come.

    Attributes:
        request: which were asked for.
        by_uid: the logs by the UIDs of their pods.
        current: the latest epoch in which workers were started; 0 where there was none.
        complete: whether all could be read.
    """

    request: LogRequest
    by_uid: dict[str, ReadLog]
    current: int
    complete: bool

    @property
    def epoch(self) -> int:
        """The one to be printed."""
        return self.current if self.request.epoch is None else self.request.epoch

    def print(self) -> bool:
        """Print what was asked for, by time; whether there was anything."""
        chosen = [
            [(line, read.log.pod) for line in lines]
            for read in self.by_uid.values()
            for (epoch, rank), lines in read.kept.items()
            if rank == AGENT or read.epoch_of(epoch, self.current) == self.epoch
        ]
        return self.request.print(heapq.merge(*chosen, key=lambda each: each[0].time))

    def check(self) -> None:
        """See that there is what was asked for; where not all could be read, nobody knows.

        Raises:
            NotFound: there is not; the message says what there is.
        """
        name, wanted = self.request.name, self.request.wanted
        if not self.complete:
            return
        if wanted.agents:
            if not any(read.kept for read in self.by_uid.values()):
                raise NotFound(f"no agent of the job {name} has said anything; see `elasticjob describe`")
            return
        ranks = self._ranks()
        if not ranks:
            raise NotFound(
                f"there is no output of a worker of the job {name}; `elasticjob describe` says how it stands, and "
                "`elasticjob logs --agent` what its agents say"
            )
        if self.epoch not in ranks:
            raise NotFound(f"there is no log of epoch {self.epoch}; there are logs of epochs {_list(ranks)}")
        if wanted.rank is not None and wanted.rank not in (there := ranks[self.epoch]):
            raise NotFound(f"there is no rank {wanted.rank} in epoch {self.epoch}; it has ranks {_list(there)}")

    def _ranks(self) -> dict[int, set[int]]:
        """The ranks of which there are logs, by epoch."""
        found: dict[int, set[int]] = {}
        for read in self.by_uid.values():
            for epoch, ranks in read.log.ranks.items():
                found.setdefault(epoch, set()).update(ranks)
            for epoch, rank in read.kept:
                found.setdefault(read.epoch_of(epoch, self.current), set()).add(rank)
        return found


async def read_logs(api: UserApi, request: LogRequest, *, going_on: bool = False) -> ReadLogs:
    """Read all logs that there are, as far as they may be wanted.

    Args:
        api: the connection, open.
        request: what is wanted.
        going_on: they will be followed: a last line that is not ended yet is left to that.

    Raises:
        NotFound: the job has no such pod.
        ClusterError: the API server refuses.
    """
    with in_words(f"the namespace {request.namespace} is gone"):
        pods, _ = await api.list(PODS, request.namespace, labels=worker_selector(request.name))
    if (only := request.wanted.pod) is not None:
        names = sorted(str(pod["metadata"]["name"]) for pod in pods)
        if only not in names:
            raise NotFound(f"the job {request.name} has no pod {only}; it has {', '.join(names) or 'none'}")
        pods = [pod for pod in pods if pod["metadata"]["name"] == only]
    reading = _Reading(api, request, going_on=going_on)
    async with task_group() as group:
        for pod in pods:
            if has_log(pod):
                group.create_task(reading.read(pod))
    begun = (epoch for read in reading.found.values() for epoch in read.log.ranks)
    told = integer(request.job, "status", "epoch") or 0
    by_pod = dict(sorted(reading.found.items(), key=lambda item: item[1].log.pod))
    return ReadLogs(request, by_pod, max(begun, default=told), reading.complete)


class _Reading:
    """Reads logs, and keeps of them what may have to be printed."""

    def __init__(self, api: UserApi, request: LogRequest, *, going_on: bool) -> None:
        self._api = api
        self._request = request
        self._going_on = going_on
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self.found: dict[str, ReadLog] = {}
        self.complete = True

    async def read(self, pod: Json) -> None:
        name, uid = str(pod["metadata"]["name"]), str(pod["metadata"]["uid"])
        read = self.found[uid] = ReadLog(PodLog(name))
        pieces = self._api.stamped_log(self._request.namespace, name, WORKER, follow=False)
        try:
            async with self._gate, contextlib.aclosing(pieces):
                async for piece in pieces:
                    self._keep(read, read.log.feed(piece))
        except ClusterError as error:
            if not is_gone(error):
                self.complete = False
                self._request.tell(f"the log of {name} cannot be read: {reason(error)}")
            return
        read.whole = has_ended(pod)
        if read.whole or not self._going_on:
            self._keep(read, read.log.rest())

    def _keep(self, read: ReadLog, lines: Iterable[LogLine]) -> None:
        only = self._request.epoch
        for line in lines:
            if self._request.asks_for(line):
                epoch = 0 if line.rank == AGENT else line.epoch
                if epoch in (0, only) or only is None:
                    read.kept.setdefault((epoch, line.rank), deque(maxlen=self._request.tail)).append(line)
            elif line.rank == AGENT and only is None and line.epoch in read.log.ranks:
                # A later epoch has begun: nobody asks for the earlier ones any more.
                for key in [key for key in read.kept if key[0] < line.epoch]:
                    del read.kept[key]


def is_gone(error: ClusterError) -> bool:
    """Whether a log can't be read because its container has not started yet, or its pod is gone.

    Raises:
        ClusterError: no log can be read, whichever it is.
    """
    if isinstance(error, ApiError) and error.status in (401, 403):
        with in_words(""):
            raise error
    return isinstance(error, ApiError) and error.status in (400, 404)


def reason(error: ClusterError) -> str:
    """Why, as the API server says it."""
    return error.words if isinstance(error, ApiError) else str(error)


def has_log(pod: Json) -> bool:
    """Whether the worker container has started."""
    worker = _worker(pod)
    return worker.running is not None or worker.terminated is not None


def has_ended(pod: Json) -> bool:
    """Whether the worker container has ended."""
    return is_over(pod) or _worker(pod).terminated is not None


def _worker(pod: Json) -> ContainerState:
    return next((each for each in container_states(pod) if each.name == WORKER), ContainerState(WORKER))


def _list(numbers: Iterable[int]) -> str:
    return in_short(tuple(sorted(numbers)))
