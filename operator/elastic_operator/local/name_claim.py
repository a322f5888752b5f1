"""A job's name is unique among the runs of one home folder that are alive.

The name is held by a lock on ``<home>/names/<job>.lock``. The kernel lets go of it when the process ends, however it
ends, so a run that was killed never blocks the next one. The file says which run holds the name, and where its control
socket is.
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
    """Who holds a name.

    Attributes:
        run: the run's id.
        pid: the process that holds the lock.
        socket: path of its control socket.
    """

    run: str
    pid: int
    socket: str


class NameTaken(BadInput):
    """Another run that is alive holds the name.

    Attributes:
        holder: which one, where it has said so already.
    """

    def __init__(self, job: str, holder: Holder | None) -> None:
        by = f" (run {holder.run}, process {holder.pid})" if holder else ""
        super().__init__(
            f"a job {job} is running here already{by}; end it with `elasticjob delete {job}`, "
            "or give this one another metadata.name"
        )
        self.holder = holder


class NameClaim:
    """The right to run a job of this name; made by :func:`claim`."""

    def __init__(self, file: int) -> None:
        self._file: int | None = file

    def tell(self, holder: Holder) -> None:
        """Say who holds the name, for those who ask for it meanwhile."""
        if self._file is not None:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(asdict(holder)).encode(), 0)

    def release(self) -> None:
        """Let go of the name before the block ends."""
        if self._file is not None:
            # Empty: whoever holds the name next does not take us for a run that was killed.
            os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = None


@contextlib.contextmanager
def claim(home: Path, job: str) -> Iterator[NameClaim]:
    """Hold the name for as long as the block runs.

    What a run that was killed left of its socket is removed.

    Raises:
        NameTaken: a run that is alive holds it.
        BadInput: the home folder cannot be written.
    """
    path = home / "names" / f"{job}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadInput(
            f"cannot write {path}: {error.strerror}; set ELASTICJOB_HOME to a folder that can be written"
        ) from None
    name = NameClaim(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _read(file)
        os.close(file)
        if isinstance(error, BlockingIOError):
            raise NameTaken(job, holder) from None
        raise BadInput(
            f"cannot lock {path}: {error.strerror}; set ELASTICJOB_HOME to a folder on a local file system"
        ) from None
    try:
        if (before := _read(file)) is not None:
            _remove_socket(Path(before.socket))
        yield name
    finally:
        name.release()


def _read(file: int) -> Holder | None:
    try:
        told = json.loads(os.pread(file, 4096, 0))
        return Holder(run=str(told["run"]), pid=int(told["pid"]), socket=str(told["socket"]))
    except (ValueError, KeyError, TypeError):
        return None


def _remove_socket(path: Path) -> None:
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
