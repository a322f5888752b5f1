"""A folder into which this process writes checkpoints in the background."""

from __future__ import annotations

import datetime as dt
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torchelastic.protocol.worker import MEMORY, WORKER_SOCKET
from torchelastic.training.connection import blocked_signals
from torchelastic.training.nested import HostCopies

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torchelastic.training.checkpoint_files import CheckpointFiles, CheckpointName
    from torchelastic.training.progress import CheckpointReport
    from torchelastic.training.shards import Part

logger = logging.getLogger("torchelastic.training.checkpointer")


class CheckpointFolder:
    """Writes checkpoints into a folder, one at a time, when they are due.

    Args:
        files: the files in the folder.
        every: the number of steps, or the time, after which a checkpoint is due.
        keep: the number of newest checkpoints that stay.

    Attributes:
        files: the same.
        is_writer: whether this process writes into the folder.
    """

    def __init__(self, files: CheckpointFiles, every: int | dt.timedelta, keep: int) -> None:
        self.files = files
        self.is_writer = False
        self._every, self._keep = every, keep
        self._written_step: int | None = None
        self._writing: threading.Thread | None = None
        self._copies = HostCopies()
        self.begin(0)

    def begin(self, step: int) -> None:
        """Count from this step, and from now, when the next checkpoint is due."""
        self._last_step, self._last_time = step, time.monotonic()
        self.forget()

    def forget(self) -> None:
        """Forget what is written, because other ranks may lack it, and what could not be written."""
        self._written_step = None
        self.files.forget_failure()

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this number of steps."""
        if isinstance(self._every, dt.timedelta):  # each writer decides on its own: the ranks have the same state
            return time.monotonic() - self._last_time >= self._every.total_seconds()
        return step - self._last_step >= self._every

    def is_writing(self) -> bool:
        """Return whether a checkpoint is being written."""
        return self._writing is not None and self._writing.is_alive()

    def is_written(self, step: int) -> bool:
        """Return whether the last checkpoint of this process is that of this step."""
        return step == self._written_step

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._writing is not None:
            self._writing.join()

    def begins(self, step: int, *, force: bool) -> bool:
        """Return whether this process has to write a checkpoint now; with `force`, wait for the previous one first."""
        if not self.is_writer or not (force or self.is_due(step)):
            return False
        if force:
            self.wait()
            self.files.forget_failure()  # the program may end now, without this checkpoint
        return not self.is_writing() and not self.is_written(step)

    def write(
        self,
        name: CheckpointName,
        state: object,
        parts: Mapping[str, Part],
        report: CheckpointReport,
        damaged: Collection[CheckpointName],
    ) -> None:
        """Copy a state to the memory of the host, and begin to write the copy.

        Args:
            name: the name of the checkpoint.
            state: the state.
            parts: for the manifest, if the state is sharded.
            report: tells the agent when the checkpoint is written.
            damaged: checkpoints that could not be loaded.

        Raises:
            TypeError: the state contains an object that could not be loaded.
        """
        copied = self._copies.copy(state)
        self._last_step, self._last_time = name.step, time.monotonic()

        def write_copy() -> None:
            try:
                self.files.write(name, copied, parts)
            except Exception as error:  # noqa: BLE001 - each file system of fsspec has its own
                message = (
                    "The checkpoint of step %d was not written to %s, and training continues "
                    "(the same warning is not repeated at each checkpoint): %s"
                )
                if self.files.is_new(error):
                    logger.warning(message, name.step, name.folder, error)
                return
            self._written_step = name.step
            report.done()
            try:
                self.files.delete_old(self._keep, name, damaged)
            except Exception as error:  # noqa: BLE001 - likewise
                logger.warning("Old checkpoints could not be deleted, and training continues: %s", error)

        self._writing = threading.Thread(target=write_copy, name="checkpoint")  # Python waits for it before it exits
        with blocked_signals():
            self._writing.start()


def memory_of_agent() -> str | None:
    """Return the folder in memory that the agent of this process keeps until it ends; None if there is none."""
    if not (socket := os.environ.get(WORKER_SOCKET)):
        return None
    folder = Path(socket).with_name(MEMORY)
    return f"{folder.resolve()}/checkpoints" if folder.is_dir() else None
