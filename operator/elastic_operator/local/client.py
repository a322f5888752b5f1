"""Finds the runs of this machine, alive or over, and talks to those that are alive.

What is known of a run that is over, or was killed, comes from its folder; of one that is alive, from itself. Reading is
plain and synchronous, on the standard library alone, so that ``elasticjob get`` is there at once.
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
from elastic_operator.local.run_folder import RunFolder, all_runs, home_folder, job_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    Snapshot = dict[str, Any]

_TIMEOUT: Final = 10.0
_REFUSED: Final = 422


class LocalClient:
    """Talks to one run that was alive when this was made."""

    def __init__(self, job: str, control_socket: Path) -> None:
        self._job = job
        self._socket = control_socket

    def snapshot(self) -> Snapshot:
        """How the run stands now.

        Raises:
            NotFound: it is over.
        """
        return self._ask("GET", "/job")

    def report(self) -> bytes:
        """The report of the run, as it would be kept if it ended now.

        Raises:
            NotFound: it is over.
        """
        return json.dumps(self._ask("GET", "/job/report")).encode()

    def scale(self, replicas: int) -> None:
        """Ask for another number of pods.

        Raises:
            BadInput: that number cannot be; the message says why.
            NotFound: the run is over.
        """
        self._ask("PATCH", "/job/scale", {"replicas": replicas})

    def suspend(self, *, rest: bool) -> None:
        """Have the job rest, or go on.

        Raises:
            BadInput: the job is over.
            NotFound: so is the run.
        """
        self._ask("PATCH", "/job/suspend", {"suspend": rest})

    def delete(self) -> None:
        """End the run; returns when it has ended.

        Raises:
            NotFound: it is over already.
        """
        # Watched before it is told, so that its end is not missed.
        end = self.watch()
        next(end, None)
        self._ask("DELETE", "/job")
        for _ in end:
            pass

    def watch(self) -> Iterator[Snapshot]:
        """Snapshots: how it stands now, after every change, and the last one.

        It ends early, without a last one, where the run is killed.

        Raises:
            NotFound: the run is over already.
        """
        connection = self._connect()
        try:
            with self._request(connection, "GET", "/watch") as response:
                # There is no saying when the next change comes.
                connection.sock.settimeout(None)
                while line := response.readline():
                    yield json.loads(line)
        except (http.client.HTTPException, ConnectionError, ValueError):
            return
        finally:
            connection.close()

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Snapshot:
        connection = self._connect()
        try:
            with self._request(connection, method, path, body) as response:
                answer: Snapshot = json.loads(response.read())
        except (http.client.HTTPException, OSError, ValueError) as error:
            raise ClusterError(f"the run of {self._job} did not answer ({error}); try again") from None
        finally:
            connection.close()
        if response.status == _REFUSED:
            raise BadInput(str(answer.get("message")))
        if response.status >= http.client.BAD_REQUEST:
            raise ClusterError(f"the run of {self._job} answered with HTTP status {response.status}; try again")
        return answer

    def _connect(self) -> http.client.HTTPConnection:
        try:
            return _connection(self._socket)
        except OSError:
            raise NotFound(f"the job {self._job} has ended; `elasticjob get` lists what there is") from None

    @staticmethod
    def _request(
        connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None = None
    ) -> http.client.HTTPResponse:
        connection.request(method, path, None if body is None else json.dumps(body), {"Host": "localhost"})
        return connection.getresponse()


def known_jobs(name: str | None = None, *, every: bool = False, home: Path | None = None) -> list[Snapshot]:
    """What is known of the runs on this machine: the latest of each job, those that are alive first.

    Args:
        name: of a job, or the id of a run, where only that is wanted.
        every: all runs, not just the latest of each job.
        home: see :func:`elastic_operator.local.run_folder.home_folder`; the user's where None.

    Raises:
        NotFound: a name was given, and there is no such job or run.
    """
    found = [record for folder in all_runs(_home(home)) if (record := _known(folder, name)) is not None]
    if name is not None and not found:
        raise NotFound(f"there is no job or run {name} here; `elasticjob get` lists what there is")
    found.sort(key=lambda record: not record["run"]["alive"])
    if every:
        return found
    latest: dict[str | None, Snapshot] = {}
    for record in found:
        latest.setdefault(job_name(record), record)
    return list(latest.values())


def find_job(name: str, *, home: Path | None = None) -> Snapshot:
    """What is known of one job: of its run that is alive, or else of its latest.

    Args:
        name: of a job, or the id of a run.
        home: see :func:`known_jobs`.

    Raises:
        NotFound: there is no such job or run.
    """
    return known_jobs(name, home=home)[0]


def report_of(name: str, *, home: Path | None = None) -> tuple[bytes, str]:
    """The report of a job: of one that goes on as it would be now, or else as its run's folder has it.

    Args:
        name: of a job, or the id of a run.
        home: see :func:`known_jobs`.

    Returns:
        It, and how the run has ended (:class:`elastic_operator.local.ending.How`), which is empty where it goes on.

    Raises:
        NotFound: there is none, and the message says why; or there is no such job or run.
    """
    job = find_job(name, home=home)
    if job["run"]["alive"]:
        with contextlib.suppress(NotFound):  # it has ended meanwhile
            return connect(name, home=home).report(), ""
        job = find_job(name, home=home)
    kept = RunFolder(Path(str(job["run"].get("directory")))).read_report()
    if kept is None:
        why = "was its run killed, or of a version that wrote none?"
        raise NotFound(f"there is no report of {name}: {why} `elasticjob describe {name}` says what is known")
    return kept, str((job["run"].get("ended") or {}).get("how") or "killed")


def connect(name: str, *, home: Path | None = None) -> LocalClient:
    """A client for the run of this job that is alive.

    Args:
        name: of a job, or the id of a run.
        home: see :func:`known_jobs`.

    Raises:
        NotFound: no such job is running here.
    """
    for folder in all_runs(_home(home)):
        record = folder.read_record()
        if record is None or not _is_called(folder, record, name):
            continue
        control_socket = _socket(record)
        if control_socket is not None and _listens(control_socket):
            return LocalClient(str(job_name(record)), control_socket)
    raise NotFound(f"no job {name} is running here; `elasticjob get` lists what is")


def _known(folder: RunFolder, name: str | None) -> Snapshot | None:
    """What is known of the run, from itself or from its folder; None where it is another one."""
    record = folder.read_record()
    if record is None or job_name(record) is None or not isinstance(record.get("run"), dict):
        return None
    if name is not None and not _is_called(folder, record, name):
        return None
    control_socket = _socket(record)
    if control_socket is not None:
        try:
            return LocalClient(str(job_name(record)), control_socket).snapshot()
        except (NotFound, ClusterError):
            # It has ended meanwhile, or was killed; the folder knows how it stood last.
            record = folder.read_record() or record
    record["run"]["alive"] = False
    return record if record["run"].get("ended") is not None else _as_killed(record)


def _as_killed(record: Snapshot) -> Snapshot:
    """What is left of a run that could not say how it ended: its pods ended with it."""
    status = record.get("status")
    if isinstance(status, dict):
        status |= {"ready": 0, "replicas": 0, "readyDesired": f"0/{status.get('desired', 0)}"}
        status["conditions"] = []
    record["pods"] = []
    run = record["run"]
    message = (
        f"`elasticjob run` (process {run.get('pid')}) was killed, and its pods and etcd with it; "
        f"go on with `elasticjob run --resume {run.get('id')} {run.get('manifestPath')}`"
    )
    record["events"] = [
        *record.get("events", []),
        {"time": _last_sign(record), "reason": "Killed", "message": message, "warning": True},
    ]
    return record


def _last_sign(record: Snapshot) -> float:
    return max((event.get("time", 0.0) for event in record.get("events", [])), default=0.0)


def _is_called(folder: RunFolder, record: Snapshot, name: str) -> bool:
    return name in (folder.run_id, job_name(record))


def _socket(record: Snapshot) -> Path | None:
    """The control socket of a run that has not said that it is over."""
    run = record.get("run")
    if not isinstance(run, dict) or run.get("ended") is not None or not isinstance(run.get("socket"), str):
        return None
    return Path(run["socket"])


def _home(home: Path | None) -> Path:
    return home_folder(os.environ) if home is None else home


def _listens(control_socket: Path) -> bool:
    try:
        _connection(control_socket).close()
    except OSError:
        return False
    return True


def _connection(control_socket: Path) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("localhost", timeout=_TIMEOUT)
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.settimeout(_TIMEOUT)
        connection.sock.connect(str(control_socket))
    except OSError:
        connection.sock.close()
        raise
    return connection
