"""A job's name is unique among the runs of one home directory that are alive.

A run holds a lock on ``<home>/names/<job>.lock``. The kernel releases it when the process ends, so a killed run never
blocks the next one. The file names the run that holds the lock, and its control socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_operator.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Holder:
    """The run that holds a name: its id, its process and the path of its control socket."""

    run: str
    pid: int
    socket: str


class NameTaken(BadInput):
    """A run that is alive holds the name.

    Attributes:
        holder: that run; None while it has not written itself into the file.
    """

    def __init__(self, job: str, holder: Holder | None) -> None:
        by = f" (run {holder.run}, process {holder.pid})" if holder else ""
        super().__init__(
            f"a job {job} is running here already{by}; end it with `elasticjob delete {job}`, "
            "or give this one another metadata.name"
        )
        self.holder = holder


class NameLock:
    """A lock on a job's name; made by :func:`lock_name`."""

    def __init__(self, file: int) -> None:
        self._file: int | None = file

    def write(self, holder: Holder) -> None:
        """Write down who holds the name."""
        if self._file is not None:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(asdict(holder)).encode(), 0)

    def release(self) -> None:
        """Release the name before the block ends."""
        if self._file is not None:
            os.ftruncate(self._file, 0)  # a file that names a holder is of a run that was killed
            os.close(self._file)
            self._file = None


@contextlib.contextmanager
def lock_name(home: Path, job: str) -> Iterator[NameLock]:
    """Hold the name while the block runs. Removes the control socket of a run that was killed.

    Raises:
        NameTaken: a run that is alive holds the name.
        BadInput: the home directory cannot be written.
    """
    path = home / "names" / f"{job}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadInput(
            f"cannot write {path}: {error.strerror}; set ELASTICJOB_HOME to a directory that can be written"
        ) from None
    before = _read(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if isinstance(error, BlockingIOError):
            raise NameTaken(job, before) from None
        raise BadInput(
            f"cannot lock {path}: {error.strerror}; set ELASTICJOB_HOME to a directory on a local file system"
        ) from None
    lock = NameLock(file)
    try:
        if before is not None:
            _remove_socket(Path(before.socket))
        yield lock
    finally:
        lock.release()


def _read(file: int) -> Holder | None:
    try:
        found = json.loads(os.pread(file, 4096, 0))
        return Holder(run=str(found["run"]), pid=int(found["pid"]), socket=str(found["socket"]))
    except (ValueError, KeyError, TypeError):
        return None


def _remove_socket(path: Path) -> None:
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
