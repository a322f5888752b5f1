"""Checkpoints of :func:`torchelastic.train`, and the managers that store them.

Rank 0 reads and writes the checkpoints of the manager that :func:`set_checkpoint_manager` sets; without a manager,
there are none.
"""

from __future__ import annotations

import abc
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from torchelastic.errors import SettingsError
from torchelastic.metrics.api import profile
from torchelastic.training.checkpoint_files import sync_to_disk
from torchelastic.training.errors import NonRetryableException
from torchelastic.training.progress import report_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchelastic.inprocess.coordinator import Coordinator
    from torchelastic.inprocess.state import State

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "CheckpointUtil",
    "FileSystemCheckpointManager",
    "get_checkpoint_manager",
    "set_checkpoint_manager",
]

logger = logging.getLogger(__name__)

_STATE_KEY: Final = "state"
_PARTIAL: Final = ".partial-"


class Checkpoint(abc.ABC):
    """A checkpoint: streams of bytes by key. A new one becomes visible to readers when it is committed."""

    @abc.abstractmethod
    def open_output_stream(self, key: str) -> BinaryIO:
        """Return a stream to write; the caller closes it before :meth:`commit`."""

    @abc.abstractmethod
    def open_input_stream(self, key: str) -> BinaryIO:
        """Return a stream to read; raise OSError if the checkpoint has no such key."""

    @abc.abstractmethod
    def commit(self) -> None:
        """Make this checkpoint the latest one. It is then complete on the disk."""

    @abc.abstractmethod
    def discard(self) -> None:
        """Delete this checkpoint."""


class CheckpointManager(abc.ABC):
    """Stores checkpoints; their sequence ids ascend."""

    @abc.abstractmethod
    def create_checkpoint(self) -> Checkpoint:
        """Return a new checkpoint, which readers do not see yet."""

    @abc.abstractmethod
    def get_checkpoint(self, sequence_id: str) -> Checkpoint | None:
        """Return a committed checkpoint; None if it does not exist."""

    @abc.abstractmethod
    def list_checkpoints(self) -> Sequence[str]:
        """Return the sequence ids of all committed checkpoints, the oldest first."""

    def get_latest_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint that was committed last; None if there is none."""
        ids = self.list_checkpoints()
        return self.get_checkpoint(ids[-1]) if ids else None


class FileSystemCheckpointManager(CheckpointManager):
    """Stores each checkpoint in a folder below ``checkpoint_dir``, which all processes should share.

    Args:
        checkpoint_dir: the folder.
        keep: the number of newest checkpoints that stay after a commit; None to delete none.

    Raises:
        SettingsError: ``keep`` is below 1.
    """

    def __init__(self, checkpoint_dir: str | os.PathLike[str], keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise SettingsError(f"keep={keep} would delete every checkpoint; use 1 or more, or None to delete none.")
        self._folder = Path(checkpoint_dir)
        self._keep = keep

    def create_checkpoint(self) -> Checkpoint:
        """Return a new checkpoint; raise OSError if it cannot be written."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return _FolderCheckpoint(Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=self._folder)), self)

    def get_checkpoint(self, sequence_id: str) -> Checkpoint | None:
        """Return a committed checkpoint; None if it does not exist."""
        known = f"{sequence_id}" in self.list_checkpoints()
        return _FolderCheckpoint(self._folder / f"{sequence_id}", self) if known else None

    def list_checkpoints(self) -> Sequence[str]:
        """Return the sequence ids of all committed checkpoints, the oldest first."""
        try:
            names = [path.name for path in self._folder.iterdir()]
        except FileNotFoundError:
            return []
        return sorted((name for name in names if name.isdecimal()), key=int)

    def next_folder(self) -> Path:
        """Return the folder for the next checkpoint."""
        return self._folder / str(int([0, *map(int, self.list_checkpoints())][-1]) + 1)

    def delete_old(self) -> None:
        """Delete all checkpoints but the newest ones."""
        for name in self.list_checkpoints()[: -self._keep] if self._keep is not None else ():
            shutil.rmtree(self._folder / name, ignore_errors=True)


class _FolderCheckpoint(Checkpoint):
    """A checkpoint in a folder, which is renamed when the checkpoint is committed."""

    def __init__(self, folder: Path, manager: FileSystemCheckpointManager) -> None:
        self._folder = folder
        self._manager = manager

    def open_output_stream(self, key: str) -> BinaryIO:
        return self._path(key).open("xb")

    def open_input_stream(self, key: str) -> BinaryIO:
        return self._path(key).open("rb")

    def commit(self) -> None:
        mask = os.umask(0)
        os.umask(mask)
        self._folder.chmod(0o777 & ~mask)  # mkdtemp() creates a private folder
        for path in (*self._folder.iterdir(), self._folder):
            sync_to_disk(path)
        while True:
            folder = self._manager.next_folder()
            try:
                self._folder.rename(folder)
            except OSError:
                if not folder.exists():
                    raise
                continue  # another process has committed a checkpoint meanwhile
            break
        self._folder = folder
        sync_to_disk(folder.parent)
        self._manager.delete_old()

    def discard(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, key: str) -> Path:
        if Path(key).name != key:
            raise ValueError(f"{key!r} cannot be a key of a checkpoint: a key is the name of a file.")
        return self._folder / key


def _load_newest(manager: CheckpointManager, state: State) -> str:
    """Load the newest checkpoint that can be read; return why none could be loaded, or an empty string."""
    why = ""
    try:
        ids = manager.list_checkpoints()
    except OSError as error:
        return f"The checkpoints cannot be listed: {error}"
    for sequence_id in reversed(ids):
        try:
            checkpoint = manager.get_checkpoint(sequence_id)
            if checkpoint is None:
                continue  # it has been deleted meanwhile
            with checkpoint.open_input_stream(_STATE_KEY) as stream:
                state.load(stream)
        except Exception as error:  # noqa: BLE001 - load() is the program's
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            logger.warning("checkpoint %s cannot be loaded: %s", sequence_id, reason)
            why = why or (
                f"None of the checkpoints can be loaded, the newest ({sequence_id}) because of {reason}. To train from "
                "the beginning, move them to another folder."
            )
        else:
            return ""
    return why


_manager: CheckpointManager | None = None


def set_checkpoint_manager(manager: CheckpointManager | None) -> None:
    """Set the manager of this process's checkpoints; None for no checkpoints."""
    global _manager  # noqa: PLW0603 - the established interface
    _manager = manager


def get_checkpoint_manager() -> CheckpointManager | None:
    """Return the manager of this process's checkpoints; None for no checkpoints."""
    return _manager


class CheckpointUtil:
    """Loads and saves a state: rank 0 reads and writes; :meth:`~torchelastic.State.sync` brings it to the others."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    @profile()
    def load_checkpoint(self, state: State, rank: int, *, is_current: bool = False) -> None:
        """Load the newest checkpoint that can be read into the state, on rank 0; all ranks call this.

        Args:
            state: the state.
            rank: this process's rank.
            is_current: whether the state is at least as new as the checkpoints; then nothing is loaded.

        Raises:
            NonRetryableException: on all ranks, if there are checkpoints, but none can be loaded.
        """
        if _manager is None:
            return
        why = _load_newest(_manager, state) if rank == 0 and not is_current else ""
        if self._coordinator.any_rank(bool(why)):
            raise NonRetryableException(why or "Rank 0 cannot load any of the checkpoints.")

    @profile()
    def save_checkpoint(self, state: State, rank: int) -> None:
        """Write a checkpoint of the state, on rank 0; all ranks wait until it is written.

        If the file system refuses the checkpoint, for example because it is full, the error is logged, the previous
        checkpoint stays the latest, and training continues.
        """
        if _manager is None:
            return
        if rank == 0:
            try:
                self._save(_manager, state)
            except OSError as error:
                logger.error("The checkpoint was not written, and training continues: %s", error)  # noqa: TRY400 - no traceback for a full disk
        self._coordinator.barrier()

    def _save(self, manager: CheckpointManager, state: State) -> None:
        with report_checkpoint():
            checkpoint = manager.create_checkpoint()
            try:
                with checkpoint.open_output_stream(_STATE_KEY) as stream:
                    state.save(stream)
                checkpoint.commit()
            except BaseException:
                checkpoint.discard()
                raise
