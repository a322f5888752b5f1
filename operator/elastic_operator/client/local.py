"""Access to the jobs on this machine.

The state of a run that is alive is read from its control socket (:mod:`elastic_operator.local.control`); the state of a
run that has ended or was killed is read from its directory. A ``name`` is a job's name or a run's id. Logs are files:
workers write ``<pod>/round_N/rank_R/output.log`` (or ``stdout.log`` and ``stderr.log``), agents ``<pod>/agent.log``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import re
import socket
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from elastic_operator.client import LogSelector, ScrapedJob, still_running
from elastic_operator.errors import BadInput, ClusterError, NotFound
from elastic_operator.local.run_dir import RunDir, all_runs, home_dir
from elastic_operator.views.job_view import EventView, JobView, PodView

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_operator.client import Notify


_TIMEOUT: Final = 10.0
_WORKER_LOG: Final = re.compile(r"round_(\d+)/rank_(\d+)/[^/]+\.log")
_BLOCK: Final = 1 << 16
_LINE: Final = re.compile(rb"[^\r\n]*(?:\r?\n|\r)|[^\r\n]+")
"""A line with its end, or the rest of a text."""
_POLL_INTERVAL: Final = 0.1


class LocalJobs:
    """Access to the jobs of a home directory.

    Args:
        home: the directory of all runs; None for that of :func:`elastic_operator.local.run_dir.home_dir`.
    """

    place = "on this machine"
    start_command = "elasticjob run FILE"

    def __init__(self, notify: Notify = lambda _: None, home: Path | None = None) -> None:
        self._notify = notify
        self._home = home_dir(os.environ) if home is None else home

    def close(self) -> None:
        """Do nothing: each request closes its own connection."""

    def jobs(self, name: str | None = None, *, every_run: bool = False) -> list[JobView]:
        """Return the latest run of each job, runs that are alive first.

        Args:
            name: the name of a job or the id of a run; None for all runs.
            every_run: whether to return all runs instead of only the latest of each job.

        Raises:
            NotFound: no run has that name.
        """
        found = [job for run in all_runs(self._home) if (job := _state(run, name)) is not None]
        if name is not None and not found:
            raise NotFound(f"there is no job or run {name} here; `elasticjob get` lists all jobs")
        found.sort(key=lambda job: not job.run.alive)
        if every_run:
            return found
        latest: dict[str, JobView] = {}
        for job in found:
            latest.setdefault(job.name, job)
        return list(latest.values())

    def describe(self, name: str) -> JobView:
        """Return the run of this name that is alive, or the latest run if none is alive."""
        return self.jobs(name)[0]

    def scrape(self, name: str | None) -> list[ScrapedJob]:
        """Read the metrics of all agents of a job; if ``name`` is None, those of the leader of each job."""
        import asyncio

        from elastic_operator.views.top import scrape

        jobs = self.jobs() if name is None else [self.describe(name)]
        read = asyncio.run(scrape([(job.pods if job.run.alive else (), _fetch) for job in jobs], leaders=name is None))
        return [ScrapedJob(job, *each) for job, each in zip(jobs, read, strict=True)]

    def logs(self, name: str, selector: LogSelector, write: Callable[[bytes], object]) -> bool:
        """Write a job's logs, and return True."""
        job = self.describe(name)
        logs = Path(job.run.logs)
        if selector.follow and job.run.alive:
            follow_logs(logs, selector, write, alive=lambda: _is_alive(job), notify=self._notify)
        else:
            print_logs(logs, selector, write)
        return True

    def report(self, name: str) -> tuple[bytes, str]:
        """Return the report of a job, and how its run ended: as in EndView, or "killed", or empty if the run is alive.

        Raises:
            NotFound: there is no report, or no run has that name.
        """
        job = self.describe(name)
        kept = RunDir(Path(job.run.directory)).read_report()
        if job.run.alive and (kept is None or not (job.status.finished or job.status.suspended)):
            raise NotFound(still_running(name, job.state))
        if kept is None:
            why = "was its run killed, or started by a version without reports?"
            raise NotFound(f"there is no report of {name}: {why} `elasticjob describe {name}` shows its details")
        return kept, job.run.ended.how if job.run.ended else "" if job.run.alive else "killed"

    def scale(self, name: str, replicas: int) -> None:
        """Set the number of pods. Raises BadInput if the run rejects the number, NotFound if the job does not run."""
        _request(self._running(name), "PATCH", "/job", {"replicas": replicas})

    def suspend(self, name: str, *, suspended: bool) -> None:
        """Suspend or resume a job. Raises BadInput if the run rejects the change, NotFound if the job does not run."""
        _request(self._running(name), "PATCH", "/job", {"suspend": suspended})

    def delete(self, name: str, *, wait: bool = True) -> None:
        """End a job, and wait until its run has ended. Raises BadInput if not ``wait``, NotFound if no run is alive."""
        if not wait:
            raise BadInput(
                "--no-wait is for jobs on a cluster; select one with -n or --context, or leave out --no-wait"
            )
        job = self._running(name)
        with contextlib.closing(_connect(job)) as watch, contextlib.suppress(OSError, http.client.HTTPException):
            watch.request("GET", "/watch")  # before the deletion, so that the end of the run is not missed
            _request(job, "DELETE", "/job")
            watch.sock.settimeout(None)
            watch.getresponse().read()

    def _running(self, name: str) -> JobView:
        with contextlib.suppress(NotFound):
            job = self.describe(name)
            if job.run.alive:
                return job
        raise NotFound(f"no job {name} is running on this machine; `elasticjob get` lists all jobs")


def _state(run: RunDir, name: str | None) -> JobView | None:
    """Return the state of a run, or None if the run has another name or its state cannot be read."""
    job = run.read_record()
    if job is None or name not in (None, run.run_id, job.name):
        return None
    if job.run.ended is None:
        with contextlib.suppress(NotFound, ClusterError, msgspec.DecodeError):
            return msgspec.json.decode(_request(job, "GET", "/job"), type=JobView)
        job = run.read_record() or job  # the run has just ended, or was killed
    job = replace(job, run=replace(job.run, alive=False))
    return job if job.run.ended is not None else _as_killed(job)


def _as_killed(job: JobView) -> JobView:
    """Return the state of a job whose run was killed, and its pods with the run."""
    message = (
        f"`elasticjob run` (process {job.run.pid}) was killed, and its pods and etcd with it; "
        f"continue it with `elasticjob run --resume {job.run.id} {job.run.manifest_path}`"
    )
    last = max((event.time for event in job.events), default=0.0)
    return replace(
        job,
        status_json={**job.status_json, "readyReplicas": 0, "readySpares": 0, "replicas": 0, "conditions": []},
        pods=(),
        events=(*job.events, EventView(last, "Killed", message, warning=True)),
    )


def _request(job: JobView, method: str, path: str, body: object = None) -> bytes:
    """Send a request to the run of a job; return the body of its response.

    Raises:
        BadInput: the run rejects the request.
        NotFound: the run has ended.
        ClusterError: the run does not answer.
    """
    with contextlib.closing(_connect(job)) as connection:
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            answer = response.read()
        except (http.client.HTTPException, OSError) as error:
            raise ClusterError(f"the run of {job.name} did not answer ({error}); try again") from None
    if response.status == http.client.UNPROCESSABLE_ENTITY:
        raise BadInput(str(json.loads(answer)["message"]))
    if response.status >= http.client.BAD_REQUEST:
        raise ClusterError(f"the run of {job.name} answered with HTTP status {response.status}; try again")
    return answer


def _is_alive(job: JobView) -> bool:
    with contextlib.suppress(NotFound):
        _connect(job).close()
        return True
    return False


def _connect(job: JobView) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("localhost", timeout=_TIMEOUT)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(_TIMEOUT)
    try:
        with RunDir(Path(job.run.directory)).socket() as path:
            connection.sock.connect(path)
    except OSError:
        connection.close()
        raise NotFound(f"the job {job.name} has ended; `elasticjob get` lists all jobs") from None
    return connection


async def _fetch(pod: PodView) -> str:
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession(trust_env=False) as session,  # agents are on loopback: no proxy
            session.get(pod.metrics_url or "") as response,
        ):
            if response.status != 200:
                raise ClusterError(f"its agent answers with HTTP status {response.status}")
            return (await response.read()).decode(errors="replace")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        number = error.errno if isinstance(error, OSError) else None
        why = os.strerror(number) if number else str(error) or type(error).__name__
        raise ClusterError(f"its agent does not answer ({why})") from None


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class LogFile:
    """The log file of one worker in one round, or of an agent, which has the round 0 and the rank -1."""

    round: int
    rank: int
    pod: str
    path: Path

    def labeled(self, line: bytes) -> bytes:
        """Return a line with its rank or pod as a label; an agent's line that contains the label gets no second one."""
        label = (f"[{self.pod}] " if self.rank < 0 else f"[rank {self.rank}] ").encode()
        return line if self.rank < 0 and label in line else label + line


def log_files(logs: Path, selector: LogSelector) -> list[LogFile]:
    """Return the selected log files of all rounds, sorted by round and rank."""
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
    matching = [file for file in everything if selector.pod in (None, file.pod)]
    if selector.pod is not None and not matching:
        pods = sorted({file.pod for file in everything})
        raise NotFound(f"there is no log of pod {selector.pod}; there are logs of {', '.join(pods) or 'none'}")
    ranks: dict[int, set[int]] = {}
    for file in matching:
        ranks.setdefault(file.round, set()).add(file.rank)
    if not ranks and not selector.agents:
        raise NotFound(f"no worker has started yet; the logs of the agents are {logs}/*/agent.log (see --agent)")
    round = max(ranks, default=0) if selector.round is None else selector.round
    if not selector.agents:
        selector.check(ranks, round)
    follow_logs(logs, dataclasses.replace(selector, round=round), write, alive=lambda: False, notify=lambda _: None)


def follow_logs(
    logs: Path,
    selector: LogSelector,
    write: Callable[[bytes], object],
    *,
    alive: Callable[[], bool],
    notify: Callable[[str], object],
) -> None:
    """Write logs as they grow: of each round in turn, or of the selected round until the next one begins.

    The files may grow while ``alive`` returns true. ``notify`` receives a sentence when another round begins.
    """
    reader = LogReader(selector, write)
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
                notify(f"round {file.round} begins")
            announced = max(announced, file.round)
            reader.read(file, tail=selector.tail if file in at_first else None)
        if not more:
            break
        time.sleep(_POLL_INTERVAL)
    reader.finish()


class LogReader:
    """Reads files as they grow, and writes the added text, with labels if there are several sources."""

    def __init__(self, selector: LogSelector, write: Callable[[bytes], object]) -> None:
        self._label = not selector.single_source
        self._write = write
        self._offsets: dict[LogFile, int] = {}
        self._unfinished: LogFile | None = None  # the last line that was written is of this file and has no end
        self._returned = False  # the last line that was written ends with a carriage return

    def read(self, file: LogFile, *, tail: int | None = None) -> None:
        """Write the new part of a file; at the first read, write only the last ``tail`` lines if ``tail`` is set."""
        with file.path.open("rb") as content:
            if file not in self._offsets and tail is not None:
                last = deque(content, maxlen=tail)
                self._offsets[file] = content.tell() - sum(map(len, last))
            content.seek(self._offsets.get(file, 0))
            while piece := content.read(_BLOCK):
                self._emit(file, piece)
            self._offsets[file] = content.tell()

    def finish(self) -> None:
        """End the last line, if it has a label and no end."""
        if self._unfinished is not None:
            self._write(b"\n")

    def _emit(self, file: LogFile, piece: bytes) -> None:
        if not self._label:
            self._write(piece)
            return
        continues = self._unfinished == file and not self._returned
        output = b"" if self._unfinished in (None, file) else b"\n"
        for line in _LINE.findall(piece):
            output += line if continues else file.labeled(line)
            continues = False
        self._unfinished = None if piece.endswith(b"\n") else file
        self._returned = piece.endswith(b"\r")
        self._write(output)
