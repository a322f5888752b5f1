"""The directory of a run, which remains after the run has ended.

The path is ``<home>/runs/<job>-<UTC time>-<4 characters>/``. The directory contains::

job.json       the latest snapshot of the run (elastic_operator.views.job_view)
manifest.yaml  the last applied manifest
report.json    the report, once the job has ended or is suspended (elastic_operator.api.status)
logs/          <pod>/agent.log and <pod>/round_N/rank_R/output.log
logs.1/ …      the logs from before each ``elasticjob run --resume``
checkpoints/   <job>/<index>/, the checkpoints of each pod's program
run.log        the log of elasticjob itself
control/       the control socket while the run is alive (elastic_operator.local.control)
etcd/          the data of etcd while the run is alive; etcd.log stays
tls/           the certificates for etcd

A run holds a lock on ``<home>/names/<job>.lock``, so that a job's name is unique among the runs that are alive. The
kernel releases the lock when the process exits. The file names the run that holds the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import msgspec

from elastic_operator.errors import BadInput
from elastic_operator.views.job_view import JobView

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def home_dir(environ: Mapping[str, str]) -> Path:
    """Return the directory of all runs: $ELASTICJOB_HOME, or ``elasticjob`` in the user's state directory."""
    try:
        if chosen := environ.get("ELASTICJOB_HOME"):
            return Path(chosen).expanduser().absolute()
        state = environ.get("XDG_STATE_HOME")
        return (Path(state) if state else Path.home() / ".local" / "state") / "elasticjob"
    except RuntimeError:
        raise BadInput(
            "the home directory cannot be found: set ELASTICJOB_HOME to the full path of a folder for the runs"
        ) from None


class RunDir:
    """The directory of one run: its ``path``, whose last part is ``run_id``, and the paths of its contents."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = path.name
        self.record = path / "job.json"
        self.manifest = path / "manifest.yaml"
        self.report = path / "report.json"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.control = path / "control"
        self.log = path / "run.log"
        self.tls = path / "tls"

    @contextlib.contextmanager
    def socket(self) -> Iterator[str]:
        """Yield a path of the control socket that is shorter than the kernel's limit of 107 bytes. Raises OSError."""
        directory = os.open(self.control, os.O_PATH | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{directory}/socket"
        finally:
            os.close(directory)

    def read_record(self) -> JobView | None:
        """Return the latest snapshot of the run, or None if there is no readable one."""
        try:
            return msgspec.json.decode(self.record.read_bytes(), type=JobView)
        except (OSError, msgspec.DecodeError):
            return None

    def read_report(self) -> bytes | None:
        """Return the report of the run, or None if there is none."""
        try:
            return self.report.read_bytes()
        except OSError:
            return None


def create_run(home: Path, job: str, now: float) -> RunDir:
    """Create the directory of a new run of this job, at ``now`` seconds since the Unix epoch.

    Raises:
        BadInput: the directory cannot be written.
    """
    moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    run = RunDir(home / "runs" / f"{job}-{moment}-{secrets.token_hex(2)}")
    _create(run)
    return run


def reopen_run(home: Path, run_id: str, job: str) -> RunDir:
    """Return the directory of an earlier run of this job; rename its logs to ``logs.1``, ``logs.2``, ….

    Raises:
        BadInput: there is no such run, the run belongs to another job, or its directory cannot be written.
    """
    run = next((run for run in all_runs(home) if run.run_id == run_id), None)
    if run is None:
        raise BadInput(
            f"there is no run {run_id} below {home / 'runs'} to resume; `elasticjob get --all` lists all runs"
        )
    record = run.read_record()
    if record is None or record.name != job:
        raise BadInput(
            f"run {run_id} belongs to the job {record.name if record else '?'}, but metadata.name in the manifest is "
            f"{job}; resume it with the manifest of that job"
        )
    # The numbers of the rounds begin at 1 again, so earlier logs would be mistaken for logs of this run.
    aside = next(path for n in itertools.count(1) if not (path := run.path / f"logs.{n}").exists())
    with contextlib.suppress(FileNotFoundError):
        run.logs.rename(aside)
    _create(run)
    return run


def all_runs(home: Path) -> list[RunDir]:
    """Return the directories of all runs that wrote a snapshot, the one with the latest snapshot first."""
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for path in (home / "runs").iterdir():
            with contextlib.suppress(OSError):
                found.append(((path / "job.json").stat().st_mtime, path))
    return [RunDir(path) for _, path in sorted(found, reverse=True)]


def lock_name(home: Path, job: str) -> TextIO:
    """Lock the name of a job until the returned file is closed; the caller writes the id of its run to the file.

    Raises:
        BadInput: a run that is alive holds the lock, or the home directory cannot be written.
    """
    path = home / "names" / f"{job}.lock"
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("a+"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = path.read_text()
            raise BadInput(
                f"a job {job} is already running on this machine{holder and f' ({holder})'}; end it with "
                f"`elasticjob delete {job}`, or give this one another metadata.name"
            ) from None
        except OSError as error:
            raise BadInput(
                f"cannot write and lock {path}: {error.strerror}; "
                "set ELASTICJOB_HOME to a directory that can be written, on a local file system"
            ) from None
        file.truncate(0)
        stack.pop_all()
        return file


def _create(run: RunDir) -> None:
    try:
        run.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # logs may have secrets of the program
        for path in (run.logs, run.checkpoints):
            path.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=run.path):
            pass
    except OSError as error:
        raise BadInput(
            f"cannot write the run's directory {run.path}: {error.strerror}; "
            "set ELASTICJOB_HOME to a directory that can be written"
        ) from None


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically. Raises OSError."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(data)
    new.replace(path)
