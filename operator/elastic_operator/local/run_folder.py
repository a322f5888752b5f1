"""Where a run on this machine keeps what belongs to it.

Each run has a folder ``<home>/runs/<job>-<UTC time>-<4 characters>/``::

    job.json       what is known of the run (elastic_operator.local.snapshot), rewritten whenever it changes
    manifest.yaml  the manifest as it was last applied
    report.json    what is known of the run once it is over, or suspended (elastic_operator.report_json)
    logs/          <pod>/agent.log, and <pod>/epoch_E/rank_R/output.log of its workers
    logs.1/ …      the same of earlier runs, if this one resumed them
    checkpoints/   <job>/<index>/, the folder that each pod's program is given
    run.log        what went wrong inside elasticjob itself
    etcd/          the store's data, thrown away at the end; etcd.log stays beside it

It stays when the run has ended, so that a finished run can still be looked at and gone on with.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.errors import BadInput, NotFound

if TYPE_CHECKING:
    from collections.abc import Mapping

_LONGEST_SOCKET_PATH: Final = 107
"""Bytes in the kernel's ``sun_path``, less the NUL at its end."""

_PRIVATE: Final = 0o700


def home_folder(environ: Mapping[str, str]) -> Path:
    """Where runs are kept: $ELASTICJOB_HOME, or ``elasticjob`` in the user's folder for state."""
    if chosen := environ.get("ELASTICJOB_HOME"):
        return Path(chosen).expanduser().absolute()
    state = environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "elasticjob"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run.

    Attributes:
        path: the folder; its name is the run's id.
    """

    path: Path

    @property
    def run_id(self) -> str:
        """What the run is called: ``<job>-<UTC time>-<4 characters>``."""
        return self.path.name

    @property
    def logs(self) -> Path:
        """Where the logs are, a folder for each pod."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    @property
    def etcd(self) -> Path:
        """The store's data while the run lives."""
        return self.path / "etcd"

    @property
    def etcd_log(self) -> Path:
        """What etcd had to say."""
        return self.path / "etcd.log"

    @property
    def log(self) -> Path:
        """What ``elasticjob run`` itself logged; empty where nothing went wrong."""
        return self.path / "run.log"

    @property
    def manifest(self) -> Path:
        """The manifest as it was last applied."""
        return self.path / "manifest.yaml"

    @property
    def record(self) -> Path:
        """The last that is known of the run."""
        return self.path / "job.json"

    @property
    def report(self) -> Path:
        """What is kept of the job when it has ended, or rests; see :mod:`elastic_operator.report_json`."""
        return self.path / "report.json"

    def pod_logs(self, pod: str) -> Path:
        """Where the logs of one pod are."""
        return self.logs / pod

    def checkpoint(self, job: str, index: int) -> Path:
        """Where the pod of this index keeps its checkpoints."""
        return self.checkpoints / job / str(index)

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Set down what is known of the run, as a whole or not at all.

        Raises:
            OSError: the folder cannot be written.
        """
        _replace(self.record, json.dumps(record, indent=1).encode())

    def read_record(self) -> dict[str, Any] | None:
        """What was last set down of the run; None where nothing (readable) was."""
        try:
            record = json.loads(self.record.read_bytes())
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) else None

    def write_report(self, data: bytes) -> None:
        """Keep the report of the run, as a whole or not at all.

        Raises:
            OSError: the folder cannot be written.
        """
        _replace(self.report, data)

    def read_report(self) -> bytes | None:
        """The report that was last kept; None where there is none."""
        try:
            return self.report.read_bytes()
        except OSError:
            return None

    def write_manifest(self, data: Mapping[str, Any]) -> None:
        """Keep the manifest as it was applied.

        Raises:
            OSError: the folder cannot be written.
        """
        import yaml  # only a run needs it; the commands that read are there sooner without

        _replace(self.manifest, yaml.safe_dump(dict(data), sort_keys=False).encode())


def create_run(home: Path, job: str, now: float) -> RunFolder:
    """A new folder for a run of this job.

    Args:
        home: see :func:`home_folder`.
        job: the job's name.
        now: seconds since the Unix epoch.

    Raises:
        BadInput: the folder cannot be made or written.
    """
    moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    folder = RunFolder(home / "runs" / f"{job}-{moment}-{secrets.token_hex(2)}")
    _make(folder)
    return folder


def reopen_run(home: Path, run_id: str, job: str) -> RunFolder:
    """The folder of an earlier run of this job, to go on with, its logs put aside (``logs.1``, …).

    Whether that run is still alive is not asked here.

    Raises:
        BadInput: there is no such run, it is not of this job, or its folder cannot be written.
    """
    folder = RunFolder(home / "runs" / run_id)
    if run_id not in _names_in(home / "runs") or not folder.path.is_dir():
        raise BadInput(
            f"there is no run {run_id} below {home / 'runs'} to resume; `elasticjob get --all` lists what there is"
        )
    record = folder.read_record()
    name = job_name(record) if record is not None else None
    if name is None:
        raise BadInput(
            f"{folder.record} does not say of which job that run was, so it cannot be resumed; start without --resume"
        )
    if name != job:
        raise BadInput(
            f"run {run_id} was of the job {name}, but the manifest's metadata.name is {job}; "
            "resume it with the manifest of that job"
        )
    # Their epochs count from 1 again: those of the earlier run would be taken for this one's.
    aside = next(path for n in itertools.count(1) if not (path := folder.path / f"logs.{n}").exists())
    with contextlib.suppress(FileNotFoundError):
        folder.logs.rename(aside)
    _make(folder)
    return folder


def all_runs(home: Path) -> tuple[RunFolder, ...]:
    """The folders of all runs that set something down, the latest first."""
    try:
        found = [RunFolder(path) for path in (home / "runs").iterdir() if (path / "job.json").is_file()]
    except OSError:
        return ()
    return tuple(sorted(found, key=lambda folder: _changed(folder.record), reverse=True))


def find_run(home: Path, run_id: str) -> RunFolder:
    """The folder of a run by its id.

    Raises:
        NotFound: there is none.
    """
    for folder in all_runs(home):
        if folder.run_id == run_id:
            return folder
    raise NotFound(f"there is no run {run_id} below {home / 'runs'}")


def job_name(record: Mapping[str, Any]) -> str | None:
    """Of which job a run's record speaks."""
    try:
        name = record["manifest"]["metadata"]["name"]
    except (KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None


def private_folder(environ: Mapping[str, str], file_name: str) -> Path:
    """A folder that only this user can enter, whose path is short enough for a Unix socket.

    Args:
        environ: names the candidates: $XDG_RUNTIME_DIR first, then the folder for temporary files.
        file_name: of the socket, whose whole path must fit.

    Raises:
        BadInput: none of the candidates will do.
    """
    user = os.geteuid()
    candidates = [Path(tempfile.gettempdir()) / f"elasticjob-{user}", Path(f"/tmp/elasticjob-{user}")]  # noqa: S108 - it is checked to be ours alone
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        candidates.insert(0, Path(runtime) / "elasticjob")
    refusals = []
    for folder in candidates:
        refusal = _refusal(folder, file_name, user)
        if refusal is None:
            return folder
        refusals.append(refusal)
    raise BadInput("there is no private folder for the control socket: " + "; ".join(dict.fromkeys(refusals)))


def _refusal(folder: Path, file_name: str, user: int) -> str | None:
    """Why the folder will not do, or None; it is made if it is not there."""
    if len(os.fsencode(folder / file_name)) > _LONGEST_SOCKET_PATH:
        return f"{folder} is too long a path for a socket"
    try:
        folder.mkdir(mode=_PRIVATE, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or stat.S_IMODE(found.st_mode) != _PRIVATE:
        return f"{folder} is not a folder of this user's with mode 0700"
    return None


def _names_in(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir()}
    except OSError:
        return set()


def _make(folder: RunFolder) -> None:
    try:
        for path in (folder.path, folder.logs, folder.checkpoints):
            path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder.path):
            pass
    except OSError as error:
        raise BadInput(
            f"cannot write the run's folder {folder.path}: {error.strerror}; "
            "set ELASTICJOB_HOME to a folder that can be written"
        ) from None


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(data)
    new.replace(path)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
