"""The jobs on this machine, as other terminals see them.

The state of a run that is alive is read from its control socket; the state of a run that has ended or was killed is
read from its directory. This module is synchronous and uses only the standard library, so that ``elasticjob get``
starts quickly.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.errors import BadInput, ClusterError, NotFound
from elastic_operator.local.run_dir import RunDir, all_runs, home_dir, job_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    Snapshot = dict[str, Any]
    Snapshots = list[Snapshot]

_TIMEOUT: Final = 10.0


class RunClient:
    """A client of one run. Every method raises NotFound if the run has ended."""

    def __init__(self, job: str, control_socket: Path) -> None:
        self._job = job
        self._socket = str(control_socket)

    def snapshot(self) -> Snapshot:
        """Return the state of the run."""
        return self._request("GET", "/job")

    def report(self) -> bytes:
        """Return the report of the run as it would be now."""
        return json.dumps(self._request("GET", "/job/report")).encode()

    def patch(self, **fields: object) -> None:
        """Set ``replicas`` or ``suspend``. Raises BadInput if the run refuses."""
        self._request("PATCH", "/job", fields)

    def delete(self) -> None:
        """End the run, and return when it has ended."""
        snapshots = self.watch()
        next(snapshots, None)  # watch before the deletion, so that its end is not missed
        self._request("DELETE", "/job")
        for _ in snapshots:
            pass

    def watch(self) -> Iterator[Snapshot]:
        """Yield a snapshot now, after each change, and at the end; without a last one if the run is killed."""
        with contextlib.closing(self._connect()) as connection:
            try:
                connection.request("GET", "/watch", headers={"Host": "localhost"})
                with connection.getresponse() as response:
                    connection.sock.settimeout(None)
                    while line := response.readline():
                        yield json.loads(line)
            except (http.client.HTTPException, ConnectionError, ValueError):
                return

    def _request(self, method: str, path: str, body: object = None) -> Snapshot:
        with contextlib.closing(self._connect()) as connection:
            try:
                data = None if body is None else json.dumps(body)
                connection.request(method, path, data, {"Host": "localhost"})
                response = connection.getresponse()
                answer: Snapshot = json.loads(response.read())
            except (http.client.HTTPException, OSError, ValueError) as error:
                raise ClusterError(f"the run of {self._job} did not answer ({error}); try again") from None
        if response.status == http.client.UNPROCESSABLE_ENTITY:
            raise BadInput(str(answer.get("message")))
        if response.status >= http.client.BAD_REQUEST:
            raise ClusterError(f"the run of {self._job} answered with HTTP status {response.status}; try again")
        return answer

    def _connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("localhost", timeout=_TIMEOUT)
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.settimeout(_TIMEOUT)
            connection.sock.connect(self._socket)
        except OSError:
            connection.sock.close()
            raise NotFound(f"the job {self._job} has ended; `elasticjob get` lists all jobs") from None
        return connection


class LocalRuns:
    """The jobs of a home directory. A name is a job's name or a run's id.

    Args:
        home: see :func:`elastic_operator.local.run_dir.home_dir`; the user's if None.
    """

    def __init__(self, home: Path | None = None) -> None:
        self._home = home_dir(os.environ) if home is None else home

    def list(self, name: str | None = None, *, every: bool = False) -> Snapshots:
        """Return the latest run of each job, those that are alive first.

        Args:
            name: only the runs of this name.
            every: all runs, not just the latest of each job.

        Raises:
            NotFound: no run has that name.
        """
        found = [record for run in all_runs(self._home) if (record := _state(run, name)) is not None]
        if name is not None and not found:
            raise NotFound(f"there is no job or run {name} here; `elasticjob get` lists all jobs")
        found.sort(key=lambda record: not record["run"]["alive"])
        if every:
            return found
        latest: dict[str | None, Snapshot] = {}
        for record in found:
            latest.setdefault(job_name(record), record)
        return list(latest.values())

    def get(self, name: str) -> Snapshot:
        """Return the run of this name that is alive, or else the latest one.

        Raises:
            NotFound: no run has that name.
        """
        return self.list(name)[0]

    def run(self, name: str) -> RunClient:
        """Return a client of the run of this name that is alive.

        Raises:
            NotFound: no such job is running.
        """
        with contextlib.suppress(NotFound):
            job = self.get(name)
            if job["run"]["alive"]:
                return RunClient(name, Path(job["run"]["socket"]))
        raise NotFound(f"no job {name} is running here; `elasticjob get` lists all jobs")

    def scale(self, name: str, replicas: int) -> None:
        """Set the number of pods. Raises BadInput if the job refuses, NotFound if it does not run."""
        self.run(name).patch(replicas=replicas)

    def suspend(self, name: str, *, suspended: bool) -> None:
        """Suspend or resume a job. Raises BadInput if the job refuses, NotFound if it does not run."""
        self.run(name).patch(suspend=suspended)

    def delete(self, name: str) -> None:
        """End a job, and return when it has ended. Raises NotFound if it does not run."""
        self.run(name).delete()

    def report(self, name: str) -> tuple[bytes, str]:
        """Return the report of a job, and how its run has ended (an EndReason, or empty while it goes on).

        Raises:
            NotFound: there is no report, or no run has that name.
        """
        job = self.get(name)
        if job["run"]["alive"]:
            with contextlib.suppress(NotFound):  # it has just ended
                return self.run(name).report(), ""
            job = self.get(name)
        kept = RunDir(Path(str(job["run"].get("directory")))).read_report()
        if kept is None:
            why = "was its run killed, or of a version that wrote none?"
            raise NotFound(f"there is no report of {name}: {why} `elasticjob describe {name}` says what is known")
        return kept, str((job["run"].get("ended") or {}).get("how") or "killed")


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
            return RunClient(job, Path(str(record["run"].get("socket")))).snapshot()
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
        f"go on with `elasticjob run --resume {run.get('id')} {run.get('manifestPath')}`"
    )
    events = record.get("events", [])
    last = max((event.get("time", 0.0) for event in events), default=0.0)
    return record | {
        "pods": [],
        "events": [*events, {"time": last, "reason": "Killed", "message": message, "warning": True}],
    }
