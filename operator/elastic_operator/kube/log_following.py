"""``elasticjob logs -f`` on a cluster: what the pods of a job print, as it comes, until the job is over.

Each log goes on where it was read last. A stream that breaks off is taken up again where it broke, and a pod that takes
the place of another is followed from its first line on. All that happens goes through one queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final, NamedTuple

from elastic_operator.errors import ClusterError
from elastic_operator.kube.job_logs import has_ended, has_log, is_gone, reason
from elastic_operator.kube.jobs import has_finished
from elastic_operator.kube.pod_logs import AGENT, LogLine, PodLog
from elastic_operator.kube.resources import ELASTIC_JOBS, PODS
from elastic_operator.kube.task_group import task_group
from elastic_operator.names import worker_selector
from elastic_operator.template import WORKER

if TYPE_CHECKING:
    from elastic_operator.kube.job_logs import ReadLogs
    from elastic_operator.kube.user_api import UserApi
    from elastic_operator.spec import Json

_AGAIN: Final = 1.0
"""Seconds until a stream that broke off is taken up again."""
_LAST_WORDS: Final = 5.0
"""Seconds that a stream gets to end once its container has."""
_TRIES: Final = 3
"""How often it is tried to read the end of a log."""
_BATCHES: Final = 64


class _Pods(NamedTuple):
    """The worker pods as they are now, by UID."""

    now: dict[str, Json]


class _JobOver(NamedTuple):
    """The job has finished, or is gone."""


class _Lines(NamedTuple):
    """Lines that have come."""

    log: PodLog
    lines: list[LogLine]


class _LogOver(NamedTuple):
    """A log has no more lines."""

    uid: str


_Happening = _Pods | _JobOver | _Lines | _LogOver


class _Followed:
    """A log that is followed.

    Attributes:
        log: reads it.
        uid: the pod's.
        ended: set when its container has ended.
    """

    def __init__(self, log: PodLog, uid: str) -> None:
        self.log = log
        self.uid = uid
        self.ended = asyncio.Event()


class LogFollowing:
    """Follows the logs of a job.

    Args:
        api: the connection, open.
        read: what was read of them before.

    Attributes:
        complete: whether nothing was missed.
    """

    def __init__(self, api: UserApi, read: ReadLogs) -> None:
        self._api = api
        self._read = read
        self._request = read.request
        self._told = read.current
        self._followed: dict[str, _Followed] = {}
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._printed_up_to: dict[PodLog, int] = {}
        self._queue: asyncio.Queue[_Happening] = asyncio.Queue(_BATCHES)
        self.complete = read.complete

    async def run(self) -> None:
        """Print what comes, until the job is over.

        Raises:
            ClusterError: the cluster can't be reached any more, or refuses.
        """
        async with task_group() as group:
            watching = [group.create_task(self._watch_pods()), group.create_task(self._watch_job())]
            await self._live(group)
            for task in (*watching, *self._streams.values()):
                task.cancel()

    async def _live(self, group: asyncio.TaskGroup) -> None:
        over = pods_seen = False
        while not (over and pods_seen and not self._streams) and not self._epoch_is_over():
            match await self._queue.get():
                case _Pods(now):
                    pods_seen = True
                    self._take(now, group)
                case _JobOver():
                    over = True
                case _Lines(log, lines):
                    self._print(log, lines)
                case _LogOver(uid):
                    del self._streams[uid]
                    over = over or self._request.wanted.pod is not None

    def _take(self, pods: dict[str, Json], group: asyncio.TaskGroup) -> None:
        """Follow the pods that have a log now; see which have ended."""
        for uid, pod in pods.items():
            name = str(pod["metadata"]["name"])
            read = self._read.by_uid.get(uid)
            if self._request.wanted.pod not in (None, name) or not has_log(pod) or (read and read.whole):
                continue
            if uid not in self._followed:
                followed = self._followed[uid] = _Followed(read.log if read else PodLog(name), uid)
                self._printed_up_to[followed.log] = followed.log.epoch
                self._streams[uid] = group.create_task(self._stream(followed))
            if has_ended(pod):
                self._followed[uid].ended.set()
        for uid, followed in self._followed.items():
            if uid not in pods:
                followed.ended.set()

    def _print(self, log: PodLog, lines: list[LogLine]) -> None:
        chosen: list[tuple[LogLine, str]] = []
        for line in lines:
            self._printed_up_to[log] = line.epoch
            if not self._request.asks_for(line):
                continue
            if line.rank != AGENT:
                epoch = line.epoch or self._told
                if self._request.epoch not in (None, epoch):
                    continue
                if epoch > self._told:
                    self._request.print(chosen)
                    chosen.clear()
                    if self._told:
                        self._request.tell(f"epoch {epoch} begins")
                    self._told = epoch
            chosen.append((line, log.pod))
        self._request.print(chosen)

    def _epoch_is_over(self) -> bool:
        """Whether only one epoch was asked for, and all that are followed have gone on to a later one."""
        if self._request.epoch is None:
            return False
        epochs = [self._printed_up_to[self._followed[uid].log] for uid in self._streams]
        known = [epoch for epoch in epochs if epoch]
        return bool(known) and min(known) > self._request.epoch

    async def _watch_pods(self) -> None:
        states = self._api.states(PODS, self._request.namespace, labels=worker_selector(self._request.name))
        async with contextlib.aclosing(states):
            async for now in states:
                await self._queue.put(_Pods(dict(now)))

    async def _watch_job(self) -> None:
        uid = self._request.job["metadata"]["uid"]
        states = self._api.states(ELASTIC_JOBS, self._request.namespace, name=self._request.name)
        async with contextlib.aclosing(states):
            async for now in states:
                if uid not in now or has_finished(now[uid]):
                    await self._queue.put(_JobOver())
                    return

    async def _stream(self, followed: _Followed) -> None:
        """Follow one log until its container has ended and all of it is read."""
        failures = 0
        while True:
            # What came between the end of a stream and that of the container is read in the end, without waiting.
            last = followed.ended.is_set()
            try:
                await self._read_on(followed, follow=not last)
                failures = 0
            except ClusterError as error:
                if is_gone(error):
                    break
                failures += 1
                if last and failures >= _TRIES:
                    self.complete = False
                    self._request.tell(f"the end of the log of {followed.log.pod} cannot be read: {reason(error)}")
                    break
            if last and not failures:
                break
            if last:
                await asyncio.sleep(_AGAIN)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(followed.ended.wait(), _AGAIN)
        await self._queue.put(_Lines(followed.log, list(followed.log.rest())))
        await self._queue.put(_LogOver(followed.uid))

    async def _read_on(self, followed: _Followed, *, follow: bool) -> None:
        """Go on with a log where it was read last; once its container has ended, not for long."""
        followed.log.resume()
        reading = asyncio.ensure_future(self._pump(followed.log, follow=follow))
        ending = asyncio.ensure_future(followed.ended.wait())
        try:
            await asyncio.wait([reading, ending] if follow else [reading], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait([reading], timeout=_LAST_WORDS)
            if reading.done():
                reading.result()
        finally:
            for task in (reading, ending):
                task.cancel()
            await asyncio.gather(reading, ending, return_exceptions=True)

    async def _pump(self, log: PodLog, *, follow: bool) -> None:
        pieces = self._api.stamped_log(self._request.namespace, log.pod, WORKER, follow=follow, since=log.since)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                if lines := list(log.feed(piece)):
                    await self._queue.put(_Lines(log, lines))
