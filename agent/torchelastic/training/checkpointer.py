"""Checkpoints of a program whose ranks have the same state, as with DistributedDataParallel, or parts of it (FSDP2).

All ranks load the same checkpoint: the newest complete one that any rank can read. They agree on it when the training
starts, so it does not matter whether their folders are the same. One rank writes into each folder. If the state is
sharded, each rank writes its part into the folder that all share.
:mod:`torchelastic.training.checkpoint_files` describes the files.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import secrets
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Self

from torchelastic.errors import SettingsError
from torchelastic.protocol.pod import Env
from torchelastic.training.checkpoint_files import CheckpointFiles, CheckpointName
from torchelastic.training.checkpoint_folder import CheckpointFolder, memory_of_agent
from torchelastic.training.collectives import Ranks
from torchelastic.training.errors import NonRetryableException
from torchelastic.training.progress import report_checkpoint
from torchelastic.training.shards import Part, join, sharded_tensors, split
from torchelastic.training.spare_copies import CopyServer, receive_copies

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Iterator, Mapping

    from torch.distributed.tensor import DTensor

__all__ = ["Checkpointer"]

logger = logging.getLogger(__name__)

_NONE: Final = CheckpointName(0, -1, 0, "")
"""Stands for no checkpoint: it is older than all others."""


class Checkpointer:
    """Saves the state of a training in the background, and loads the newest checkpoint of all ranks.

    All ranks create it, call :meth:`load`, and then :meth:`save` after each step::

        checkpointer = torchelastic.Checkpointer(every=100)
        if (state := checkpointer.load()) is not None:
            model.load_state_dict(state["model"])

    The state is a dict of tensors, plain values, and dicts, lists, tuples and sets of them. It is the same on all
    ranks. One rank writes into each folder: rank 0, and the first rank of each node that cannot see rank 0's folder. A
    checkpoint that cannot be written is logged as a warning; training continues, and earlier checkpoints stay.

    Args:
        folder: a path, or a URL of fsspec such as ``s3://bucket/run``. By default ``$TORCHELASTIC_CHECKPOINT_DIR``; if
            this is a pod's folder, ``<job>/<index>``, on a volume that pods share, the job's other folders also count.
        every: the number of steps, or the time, after which a checkpoint is due.
        keep: the number of newest checkpoints that stay.
        memory_every: the same as `every` for a copy that each node's agent keeps in memory until it ends. When workers
            start again, on this or on another node, they continue with the newest copy of the nodes that are left.
            Without an agent, it has no effect. With it, no folder is needed.

    Raises:
        SettingsError: there is no folder, or a value is out of range.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        every: int | dt.timedelta = 1,
        keep: int = 2,
        memory_every: int | dt.timedelta | None = None,
    ) -> None:
        url = os.environ.get(Env.CHECKPOINT_DIR) if folder is None else folder
        for name, interval in (("every", every), ("memory_every", memory_every)):
            if interval is not None and interval <= 0 * interval:  # type: ignore[operator] # of one type
                raise SettingsError(
                    f"{name}={interval} is not positive; use a number of steps of 1 or more, or a longer time."
                )
        if keep < 1:
            raise SettingsError(f"keep={keep} would delete every checkpoint; use 1 or more.")
        in_memory = None if memory_every is None else memory_of_agent()
        self._folder = self._memory = None
        if url:
            self._folder = CheckpointFolder(CheckpointFiles(url, of_pod=folder is None), every, keep)
        if memory_every is not None and in_memory is not None:
            self._memory = CheckpointFolder(CheckpointFiles(in_memory), memory_every, 1)
            self._server = CopyServer(self._memory.files)
        self._folders = [each for each in (self._memory, self._folder) if each is not None]
        if not url and memory_every is None:
            raise SettingsError(f"There is no folder for checkpoints: pass one, or set ${Env.CHECKPOINT_DIR}.")
        self._damaged: set[CheckpointName] = set()
        self._token = self._rank = 0
        self._mark = b""
        self._sharing: Ranks | None = None  # the ranks among which the state is sharded

    def load(self, state: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Return the state of the newest checkpoint that any rank can read, on the CPU; None if there is none.

        All ranks call this together, after ``init_process_group()`` and before :meth:`save`, and get the same state. A
        damaged checkpoint is logged as a warning, and the next older one is loaded. To return to the last checkpoint in
        the same process, call it again.

        Args:
            state: the present state, if it is sharded, as by FSDP2's ``fully_shard``. Its DTensors are overwritten with
                those of the checkpoint, and are part of the result. A DTensor of the checkpoint that it lacks, such as
                the state of a new optimizer, gets the layout of one with the same shape and the same parts; without
                one, it becomes a whole tensor. The checkpoint may come from another number of ranks.

        Raises:
            NonRetryableException: on all ranks, if there are checkpoints, but none can be loaded.
            SettingsError: this process is one of several, and there is no process group; or the state is sharded, and
                a rank does not see the folder, or `memory_every` is set.
            TypeError: the state contains an object that could not be saved.
            OSError: the folder cannot be read.
        """
        self.wait()
        if self._sharing is not None:
            self._sharing.close()
            self._sharing = None
        own, folder = sharded_tensors(state), self._folder
        if own and (folder is None or self._memory is not None):
            raise SettingsError("The state is sharded, and memory_every is for states that all ranks have alike.")
        with self._join() as ranks:
            if folder is not None and own:
                ranks.gather(0)  # the ranks that do not see rank 0's folder have written the mark into theirs
                sees = [each for (each,) in ranks.gather(folder.files.sees_mark(self._token, self._mark))]
                if any(sees) and not all(sees):  # none sees it if the shared folder is full or read-only
                    raise SettingsError(
                        f"Not all ranks see {folder.files.folder}: a sharded state needs a shared folder."
                    )
            step, loaded = self._load_newest(ranks, own)
        self._sharing = Ranks.on_host() if own else None
        for each in self._folders:
            each.begin(max(step, 0))
        return loaded

    def join(self) -> None:
        """Agree with other ranks on who writes, when ranks have joined or left. All ranks call this together.

        :meth:`load` does this, too; ranks that have the state already call this instead.

        Raises:
            SettingsError: this process is one of several, and there is no process group.
            OSError: the folder cannot be read.
        """
        with self._join():
            for folder in self._folders:
                folder.forget()

    @contextlib.contextmanager
    def _join(self) -> Iterator[Ranks]:
        with contextlib.closing(Ranks.on_host()) as ranks:
            self._rank = ranks.rank
            self._token = self._reserve_token(ranks)
            yield ranks

    def stand_by(self, address: str) -> None:
        """Receive copies in memory while this process waits on a spare node: the spare may be all that is left.

        Args:
            address: host:port of the TCPStore of the round, in which rank 0 announces that it sends copies.
        """
        if self._memory is not None:
            receive_copies(address, self._memory.files)

    def save(
        self, step: int, state: Mapping[str, Any] | Callable[[], Mapping[str, Any]], *, force: bool = False
    ) -> bool:
        """Begin to write a checkpoint if one is due; all ranks call this after each step.

        The call returns when the state is copied to the memory of the host, always to the same memory; a thread writes
        the copy. While it does, no other checkpoint begins: one that is due begins at the first call after the write.
        So training never waits for the storage.

        Args:
            step: the number of completed steps.
            state: what :meth:`load` returns later; or a function that returns it, which is called if a write begins.
            force: whether to save even if no checkpoint is due, unless the step is saved already. The call then waits
                for the previous write. Use it before the program ends; :meth:`close` waits for the last write.

        If the state that :meth:`load` got is sharded, the ranks agree in each call, so that all begin or none does. If
        one of them passes `force`, the call returns when all ranks have written.

        Returns:
            Whether this rank has begun to write a checkpoint.

        Raises:
            TypeError: the state contains an object that could not be loaded, or a DTensor that :meth:`load` did not
                get; only on ranks that write.
            RuntimeError: :meth:`load` was not called.
            ValueError: the step is negative.
        """
        if not self._token:
            raise RuntimeError("Call load() before save(): in it, the ranks agree on where the training starts.")
        if step < 0:
            raise ValueError(f"step must be 0 or more, not {step}.")
        if self._sharing is not None:
            return self._save_sharded(step, state, self._sharing, force=force)
        begun = False
        for folder in self._folders:
            if folder.begins(step, force=force and folder is self._folders[-1]):
                self._write(folder, step, state() if callable(state) else state)
                begun = True
        return begun

    def _save_sharded(self, step: int, state: Any, ranks: Ranks, *, force: bool) -> bool:  # noqa: ANN401 - as in save()
        (folder,) = self._folders
        own = force, folder.is_due(step), folder.is_writing(), not folder.is_written(step)
        forced, due, writing, unwritten = map(any, zip(*ranks.gather(*own), strict=True))
        if forced:
            folder.wait()
            folder.files.forget_failure()  # as in CheckpointFolder.begins()
        if not (unwritten and (forced or (due and not writing))):
            return False
        form, parts, contents = split(state() if callable(state) else state)
        content = {"form": form if self._rank == 0 else None, "parts": contents}
        self._write(folder, step, content, parts, ranks.size)
        if forced:
            folder.wait()
            ranks.gather(step)  # before a rank answers a notice, all have written
        return True

    def _write(
        self,
        folder: CheckpointFolder,
        step: int,
        content: object,
        parts: Mapping[str, Part] = MappingProxyType({}),
        ranks: int = 0,
    ) -> None:
        name = CheckpointName(self._token, step, self._rank, folder.files.folder, ranks)
        folder.write(name, content, parts, report_checkpoint(), self._damaged)

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        for folder in self._folders:
            folder.wait()

    def close(self) -> None:
        """Wait until the last checkpoint is written. A ``with`` statement calls this at its end."""
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reserve_token(self, ranks: Ranks) -> int:
        """Agree on a token that is higher than all before, and find out which ranks write."""
        (seen,) = max(ranks.gather(max((folder.files.highest_token() for folder in self._folders), default=0)))
        round = os.environ.get("TORCHELASTIC_ROUND", "")
        token, mark = max(seen + 1, int(round) if round.isdecimal() else 0), secrets.randbits(62)
        if ranks.rank == 0:
            token = self._reserve(token, b"%x" % mark)
            self._reserve_memory(token)
        token, mark = ranks.gather(token, mark)[0]
        self._mark = b"%x" % mark
        if ranks.rank != 0:
            self._reserve_memory(token)
        if self._folder is not None:
            self._folder.is_writer = ranks.rank == 0 or (
                os.environ.get("LOCAL_RANK", "0") == "0" and not self._folder.files.sees_mark(token, self._mark)
            )
            if self._folder.is_writer and ranks.rank != 0:
                self._reserve(token, self._mark)
        return token

    def _reserve(self, token: int, mark: bytes) -> int:
        """Reserve a token, or a higher one, in the folder that other runs may share; return it."""
        if (folder := self._folder) is not None:
            with _unless_unwritable(folder):
                while not folder.files.reserve(token, mark):
                    token += 1
        return token

    def _reserve_memory(self, token: int) -> None:
        """Write into the memory of this node, if no other rank does."""
        if self._memory is not None:
            with _unless_unwritable(self._memory):
                self._memory.is_writer = self._memory.files.reserve(token, b"")
            if self._rank == 0:
                self._server.begin()

    def _load_newest(self, ranks: Ranks, sharded: Mapping[str, DTensor]) -> tuple[int, dict[str, Any] | None]:
        """Return the step and the state of the newest checkpoint that a rank can read; -1 and None if there is none."""
        why = ""
        while True:  # another writer may delete checkpoints meanwhile, so each attempt lists them again
            own = max((each for each in self._checkpoints() if each not in self._damaged), default=_NONE)
            token, step, count = max(ranks.gather(own.token, own.step, own.ranks))
            if step == _NONE.step:
                if any(damaged for (damaged,) in ranks.gather(len(self._damaged))):
                    raise NonRetryableException(why or "No checkpoint can be loaded: the other ranks' logs say why.")
                return step, None
            if count and self._folder is not None:
                name = CheckpointName(token, step, 0, self._folder.files.folder, count)
                state, reason = self._load_sharded(ranks, self._folder.files, name, sharded)
                if state is not None:
                    return step, state
                why = why or reason
                continue
            checksum, state = 0, None
            with contextlib.ExitStack() as stack:
                if (own.token, own.step) == (token, step):
                    try:
                        file, sha256 = stack.enter_context(self._files_of(own).verified(own))
                        state = _load(file)
                        checksum = int(sha256[:15], 16)
                    except Exception as error:  # noqa: BLE001 - torch.load() raises several kinds
                        why = why or self._refuse(own, error)
                        self._damaged.add(own)
                checksums = [each for (each,) in ranks.gather(checksum)]
                source = next((rank for rank, each in enumerate(checksums) if each), None)
                if source is None:
                    continue
                if len(set(checksums)) > 1:
                    received = ranks.broadcast(state if ranks.rank == source else None, source)
                    if checksum != checksums[source]:
                        state = received
            return step, state

    def _checkpoints(self) -> Iterator[CheckpointName]:
        return itertools.chain.from_iterable(folder.files.checkpoints() for folder in self._folders)

    def _files_of(self, name: CheckpointName) -> CheckpointFiles:
        is_in_memory = self._memory is not None and name.folder == self._memory.files.folder
        return self._folders[0 if is_in_memory else -1].files

    def _load_sharded(
        self, ranks: Ranks, files: CheckpointFiles, name: CheckpointName, sharded: Mapping[str, DTensor]
    ) -> tuple[dict[str, Any] | None, str]:
        """Return the state of a sharded checkpoint, if all ranks can read it, and why this rank cannot."""
        names: list[CheckpointName] = []
        state, why, at = None, "", name
        try:
            names = files.of_all_ranks(name)
            if len(names) != name.ranks:
                raise FileNotFoundError("this rank does not see all its files")  # noqa: TRY301 - like a missing file
            for at in names[ranks.rank :: ranks.size]:
                with files.verified(at):
                    pass  # each file is verified by one rank
        except Exception as error:  # noqa: BLE001 - each file system of fsspec has its own
            why = self._refuse(at, error)
        if all(is_readable for (is_readable,) in ranks.gather(not why)):
            load = functools.cache(files.load_on_demand)
            try:
                places = [files.manifest(each).parts for each in names]
                state = join(
                    load(names[0])["form"], places, lambda rank, part: load(names[rank])["parts"][part], sharded
                )
            except Exception as error:  # noqa: BLE001 - torch.load() raises several kinds
                why = self._refuse(names[0], error)
            if all(is_loaded for (is_loaded,) in ranks.gather(state is not None)):
                return state, why
        self._damaged.update(names)
        return None, why

    def _refuse(self, name: CheckpointName, error: Exception) -> str:
        """Log why a checkpoint cannot be loaded, and return what to do if there is no other one."""
        reason = f"{error}".partition("\n")[0]
        logger.warning("The checkpoint %s.pt cannot be loaded: %s", name.path, reason)
        return (
            f"No checkpoint can be loaded, the newest ({name.path}.pt) because {reason}. To train from the beginning, "
            "move the checkpoints to another folder."
        )


@contextlib.contextmanager
def _unless_unwritable(folder: CheckpointFolder) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - each file system of fsspec has its own
        logger.warning("No checkpoint can be written to %s, and training continues: %s", folder.files.folder, error)


def _load(file: BinaryIO) -> dict[str, Any]:
    import torch

    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return state
