"""Access to the jobs on this machine.

The state of a run that is alive is read from its control socket (:mod:`elastic_operator.local.control`); the state of a
run that has ended or was killed is read from its directory. A name is a job's name or a run's id.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.client import ScrapedJob
from elastic_operator.errors import BadInput, ClusterError, NotFound
from elastic_operator.local.run_dir import RunDir, all_runs, home_dir, job_name
from elastic_operator.views.job_view import JobView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from elastic_operator.client import Tell
    from elastic_operator.views.job_view import PodView
    from elastic_operator.views.log_selector import LogSelector

    Snapshot = dict[str, Any]

_TIMEOUT: Final = 10.0


class LocalJobs:
    """Access to the jobs of a home directory.

    Args:
        tell: gets sentences for the user.
        home: see :func:`elastic_operator.local.run_dir.home_dir`; the user's if None.
    """

    place = "here"
    start_command = "elasticjob run FILE"

    def __init__(self, tell: Tell = lambda _: None, home: Path | None = None) -> None:
        self._tell = tell
        self._home = home_dir(os.environ) if home is None else home

    def close(self) -> None:
        """Do nothing: no connection stays open."""

    def snapshots(self, name: str | None = None, *, every_run: bool = False, pods: bool = True) -> list[Snapshot]:  # noqa: ARG002
        """Return the latest run of each job, those that are alive first.

        Args:
            name: only the runs of this name.
            every_run: all runs, not just the latest of each job.
            pods: ignored; a snapshot always has them.

        Raises:
            NotFound: no run has that name.
        """
        found = [record for run in all_runs(self._home) if (record := _state(run, name)) is not None]
        if name is not None and not found:
            raise NotFound(f"there is no job or run {name} here; `elasticjob get` lists all jobs")
        found.sort(key=lambda record: not record["run"]["alive"])
        if every_run:
            return found
        latest: dict[str | None, Snapshot] = {}
        for record in found:
            latest.setdefault(job_name(record), record)
        return list(latest.values())

    def describe(self, name: str) -> Snapshot:
        """Return the run of this name that is alive, or else the latest one."""
        return self.snapshots(name)[0]

    def scrape(self, name: str) -> ScrapedJob:
        """Read the metrics of all agents of a job."""
        import asyncio

        from elastic_operator.views.scrape import scrape

        job = JobView.of(self.describe(name))
        return ScrapedJob(job, *asyncio.run(scrape(_live_pods(job), _fetch)))

    def scrape_leaders(self) -> list[ScrapedJob]:
        """Read for each job the metrics of its leader."""
        import asyncio

        from elastic_operator.views.scrape import scrape_leaders

        jobs = [JobView.of(each) for each in self.snapshots()]
        pages = asyncio.run(scrape_leaders([(_live_pods(job), _fetch) for job in jobs]))
        return [ScrapedJob(*each) for each in zip(jobs, pages, strict=True)]

    def logs(self, name: str, selector: LogSelector, write: Callable[[bytes], object]) -> bool:
        """Write a job's logs."""
        from elastic_operator.local.log_files import follow_logs, print_logs

        record = self.describe(name)
        run = JobView.of(record).run
        logs = Path(run.logs)
        if selector.follow and run.alive:
            follow_logs(logs, selector, write, alive=lambda: _is_alive(record), tell=self._tell)
        else:
            print_logs(logs, selector, write)
        return True

    def report(self, name: str) -> tuple[bytes, str]:
        """Return the report of a job, and how its run has ended (an EndReason, or empty while it goes on).

        Raises:
            NotFound: there is no report, or no run has that name.
        """
        job = self.describe(name)
        if job["run"]["alive"]:
            with contextlib.suppress(NotFound):  # it has just ended
                return json.dumps(_request(job, "GET", "/job/report")).encode(), ""
            job = self.describe(name)
        kept = RunDir(Path(str(job["run"].get("directory")))).read_report()
        if kept is None:
            why = "was its run killed, or started by a version without reports?"
            raise NotFound(f"there is no report of {name}: {why} `elasticjob describe {name}` says what is known")
        return kept, str((job["run"].get("ended") or {}).get("how") or "killed")

    def scale(self, name: str, replicas: int) -> None:
        """Set the number of pods. Raises BadInput if the job refuses, NotFound if it does not run."""
        _request(self._running(name), "PATCH", "/job", {"replicas": replicas})

    def suspend(self, name: str, *, suspended: bool) -> None:
        """Suspend or resume a job. Raises BadInput if the job refuses, NotFound if it does not run."""
        _request(self._running(name), "PATCH", "/job", {"suspend": suspended})

    def delete(self, name: str, *, wait: bool = True) -> None:
        """End a job, and return when it has ended. Raises NotFound if it does not run."""
        if not wait:
            raise BadInput("--no-wait is for jobs on a cluster; name one with -n or --context, or leave --no-wait out")
        job = self._running(name)
        snapshots = _watch(job)
        next(snapshots, None)  # watch before the deletion, so that its end is not missed
        _request(job, "DELETE", "/job")
        for _ in snapshots:
            pass

    def _running(self, name: str) -> Snapshot:
        with contextlib.suppress(NotFound):
            job = self.describe(name)
            if job["run"]["alive"]:
                return job
        raise NotFound(f"no job {name} is running here; `elasticjob get` lists all jobs")


def _state(run: RunDir, name: str | None) -> Snapshot | None:
    """Return the state of a run, or None if it is not of this name."""
    record = run.read_record()
    job = job_name(record)
    if record is None or job is None or not isinstance(record.get("run"), dict):
        return None
    if name not in (None, run.run_id, job):
        return None
    if record["run"].get("ended") is None:
        with contextlib.suppress(NotFound, ClusterError):
            return _request(record, "GET", "/job")
        record = run.read_record() or record  # it has just ended, or was killed
    record["run"]["alive"] = False
    return record if record["run"].get("ended") is not None else _as_killed(record)


def _as_killed(record: Snapshot) -> Snapshot:
    """Return the snapshot of a run that was killed: its pods ended with it."""
    status, run = record.get("status"), record["run"]
    if isinstance(status, dict):
        status |= {"readyReplicas": 0, "replicas": 0, "readyDesired": f"0/{status.get('desired', 0)}", "conditions": []}
    message = (
        f"`elasticjob run` (process {run.get('pid')}) was killed, and its pods and etcd with it; "
        f"continue it with `elasticjob run --resume {run.get('id')} {run.get('manifestPath')}`"
    )
    events = record.get("events", [])
    last = max((event.get("time", 0.0) for event in events), default=0.0)
    return record | {
        "pods": [],
        "events": [*events, {"time": last, "reason": "Killed", "message": message, "warning": True}],
    }


def _request(record: Snapshot, method: str, path: str, body: object = None) -> Snapshot:
    """Send a request to the run of a snapshot.

    Raises:
        BadInput: the run refuses.
        NotFound: the run has ended.
        ClusterError: it does not answer.
    """
    with contextlib.closing(_connect(record)) as connection:
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Host": "localhost"})
            response = connection.getresponse()
            answer: Snapshot = json.loads(response.read())
        except (http.client.HTTPException, OSError, ValueError) as error:
            raise ClusterError(f"the run of {job_name(record)} did not answer ({error}); try again") from None
    if response.status == http.client.UNPROCESSABLE_ENTITY:
        raise BadInput(str(answer.get("message")))
    if response.status >= http.client.BAD_REQUEST:
        raise ClusterError(f"the run of {job_name(record)} answered with HTTP status {response.status}; try again")
    return answer


def _watch(record: Snapshot) -> Iterator[Snapshot]:
    """Yield a snapshot now, after each change, and at the end; without a last one if the run is killed."""
    with contextlib.closing(_connect(record)) as connection:
        try:
            connection.request("GET", "/watch", headers={"Host": "localhost"})
            with connection.getresponse() as response:
                connection.sock.settimeout(None)
                while line := response.readline():
                    yield json.loads(line)
        except (http.client.HTTPException, ConnectionError, ValueError):
            return


def _is_alive(record: Snapshot) -> bool:
    with contextlib.suppress(NotFound):
        _connect(record).close()
        return True
    return False


def _connect(record: Snapshot) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("localhost", timeout=_TIMEOUT)
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.settimeout(_TIMEOUT)
        connection.sock.connect(str(record["run"].get("socket")))
    except OSError:
        connection.sock.close()
        raise NotFound(f"the job {job_name(record)} has ended; `elasticjob get` lists all jobs") from None
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


def _live_pods(job: JobView) -> Sequence[PodView]:
    return job.pods if job.run.alive else ()
