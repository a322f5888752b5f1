"""The files of :class:`torchelastic.Checkpointer`: which ones count, how they are written, and which are deleted.

A checkpoint is two files: ``checkpoint-<token>-<step>-<rank>.pt`` has the state, and the manifest, which is written
last, has the same name with ``.json``. The checkpoint counts if the manifest is there and describes the state's file.

If the state is sharded, each rank writes two such files, ``checkpoint-<token>-<step>-<rank>-of-<ranks>``: rank 0's have
the form of the state, and all have the parts of their rank. The checkpoint counts if the manifests of all ranks are
there, so the ranks need not wait for each other.

The token fences writers: each start of the training has a higher token than all before, and the newest checkpoint is
the one with the highest token, then the highest step. Once a later round has written a checkpoint, those of a writer
that has outlived its round are older. The file ``token-<token>`` reserves a token before the first checkpoint.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, NamedTuple

import msgspec

from torchelastic.training.shards import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

_NAME: Final = re.compile(
    r"(?P<partial>\.partial-)?checkpoint-(\d+)-(\d+)-(\d+)(?:-of-(\d+))?\.(?P<suffix>pt|json)|token-(\d+)"
)


class CheckpointName(NamedTuple):
    """The files that one rank writes for a checkpoint: a newer one compares as greater.

    Attributes:
        ranks: the number of ranks that each write a part of it; 0 if this rank writes all of it.
    """

    token: int
    step: int
    rank: int
    folder: str
    ranks: int = 0

    @property
    def path(self) -> str:
        """The path of both files without the suffix."""
        of = f"-of-{self.ranks:04}" if self.ranks else ""
        return f"{self.folder}/checkpoint-{self.token:06}-{self.step:09}-{self.rank:04}{of}"


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of a manifest: the token and the step, and the size in bytes and the SHA-256 of the state's file.

    For a sharded state, `parts` has the place of this rank's part of each tensor.
    """

    token: int
    step: int
    size: int
    sha256: str
    version: Literal[1]
    parts: dict[str, Part] = {}


class CheckpointFiles:
    """The checkpoints in one folder, and in the folders beside it if these belong to other pods of the job.

    Args:
        url: a path, or a URL of fsspec.
        of_pod: whether the folder may be a pod's, ``<job>/<index>``; all such folders of the job are then read.

    Attributes:
        folder: the folder, without the protocol of its URL.
    """

    def __init__(self, url: str | os.PathLike[str], *, of_pod: bool = False) -> None:
        import fsspec.core
        from fsspec.implementations.local import LocalFileSystem

        self._files, path = fsspec.core.url_to_fs(url)
        self.folder: str = path.rstrip("/")
        self._is_local = isinstance(self._files, LocalFileSystem)
        self._of_pod = of_pod and self.folder.rpartition("/")[2].isdecimal()
        self._failure: tuple[type[Exception], int | str] | None = None

    def checkpoints(self) -> list[CheckpointName]:
        """Return the checkpoints that have all their manifests, each of their ranks by itself; they may be damaged.

        Raises:
            OSError: a folder cannot be read.
        """
        names = {name for name, match in self._entries() if match["suffix"] == "json" and not match["partial"]}
        found = collections.Counter((name.token, name.step, name.ranks) for name in names)
        return [name for name in names if found[name.token, name.step, name.ranks] >= name.ranks]

    def of_all_ranks(self, name: CheckpointName) -> list[CheckpointName]:
        """Return the names of a sharded checkpoint in the order of the ranks.

        Raises:
            OSError: a folder cannot be read.
        """
        own = name.token, name.step, name.ranks
        return sorted(each for each in self.checkpoints() if (each.token, each.step, each.ranks) == own)

    def highest_token(self) -> int:
        """Return the highest token of any file; 0 if there is none."""
        return max((name.token for name, _ in self._entries()), default=0)

    def reserve(self, token: int, mark: bytes) -> bool:
        """Write the file of a token, with a mark by which other processes recognize it.

        Returns:
            Whether the token is reserved; False if another process has reserved it.

        Raises:
            OSError: the file cannot be written.
        """
        self._files.makedirs(self.folder, exist_ok=True)
        path = f"{self.folder}/token-{token}"
        if self._files.exists(path):
            return False
        if self._is_local:
            try:
                with Path(path).open("xb") as file:
                    file.write(mark)
            except FileExistsError:
                return False
        else:
            self._files.pipe_file(path, mark)
        return True

    def sees_mark(self, token: int, mark: bytes) -> bool:
        """Return whether one of the folders has the file of a token, with this mark."""
        for folder in self._folders():
            with contextlib.suppress(OSError):
                if self._files.cat_file(f"{folder}/token-{token}") == mark:
                    return True
        return False

    def manifest(self, name: CheckpointName) -> Manifest:
        """Return a manifest.

        Raises:
            ValueError: it is malformed.
            OSError: it is missing or cannot be read.
        """
        try:
            return msgspec.json.decode(self._files.cat_file(f"{name.path}.json"), type=Manifest)
        except msgspec.DecodeError as error:
            raise ValueError(f"its manifest is malformed: {error}") from None

    def load_on_demand(self, name: CheckpointName) -> dict[str, Any]:
        """Return the content of a checkpoint's file without a check of it; what is not used is not read from a disk.

        Raises:
            Exception: the file cannot be loaded.
        """
        import torch

        path = f"{name.path}.pt"
        file: Any = path if self._is_local else io.BytesIO(self._files.cat_file(path))
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=self._is_local)
        return content

    @contextlib.contextmanager
    def verified(self, name: CheckpointName) -> Iterator[tuple[BinaryIO, str]]:
        """Open the file of a checkpoint's state within a block, and return it with its SHA-256.

        Raises:
            ValueError: the manifest is malformed, or the file is not the one that the manifest describes.
            OSError: a file is missing or cannot be read.
        """
        manifest = self.manifest(name)
        path = f"{name.path}.pt"
        with Path(path).open("rb") if self._is_local else io.BytesIO(self._files.cat_file(path)) as file:
            size = file.seek(0, os.SEEK_END)
            if size != manifest.size:
                raise ValueError(f"it has {size} bytes, and its manifest says {manifest.size}")
            file.seek(0)
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest.sha256:
                raise ValueError("its SHA-256 is not the one in its manifest")
            file.seek(0)
            yield file, manifest.sha256

    def write(self, name: CheckpointName, state: object, parts: Mapping[str, Part]) -> None:
        """Write a checkpoint, or one rank's files of it; when this returns, they are complete on the disk.

        Args:
            name: the name of the files.
            state: their content.
            parts: for the manifest, if the state is sharded.

        Raises:
            Exception: of the file system; the incomplete files are then deleted.
        """
        import torch

        def fill(file: _HashedFile) -> Manifest:
            try:
                torch.save(state, file)  # type: ignore[arg-type] # needs only write() and flush()
            except RuntimeError as error:  # torch's own, after an error of the file
                raise file.error or error from None
            return Manifest(name.token, name.step, file.size, file.digest.hexdigest(), 1, {**parts})

        self._write(name, fill)

    def write_received(self, manifest: Manifest, content: Iterable[bytes]) -> CheckpointName:
        """Write the copy of a checkpoint of another node, and return its name.

        Args:
            manifest: the manifest that the other node has written.
            content: the parts of the state's file.

        Raises:
            ValueError: the content is not the one that the manifest describes; the files are then deleted.
            Exception: of the file system or of the content; likewise.
        """
        name = CheckpointName(manifest.token, manifest.step, 0, self.folder)

        def fill(file: _HashedFile) -> Manifest:
            for part in content:
                file.write(part)
            if (file.size, file.digest.hexdigest()) != (manifest.size, manifest.sha256):
                raise ValueError("its SHA-256 is not the one in its manifest")
            return manifest

        self._write(name, fill)
        return name

    def _write(self, name: CheckpointName, fill: Callable[[_HashedFile], Manifest]) -> None:
        """Write the state's file with a function that returns its manifest, and then the manifest."""
        try:
            self._files.makedirs(name.folder, exist_ok=True)
            with self._replacing(f"{name.path}.pt") as file:
                manifest = fill(_HashedFile(file))
            with self._replacing(f"{name.path}.json") as file:
                file.write(msgspec.json.encode(manifest))
            if self._is_local:
                sync_to_disk(Path(name.folder))
            self._failure = None
        except BaseException:
            with contextlib.suppress(Exception):
                self._delete(name)
            raise

    def forget_failure(self) -> None:
        """Let the next error of a write be new."""
        self._failure = None

    def is_new(self, error: Exception) -> bool:
        """Remember the error of a write, and return whether the write before had no error of this kind."""
        before, self._failure = self._failure, (type(error), getattr(error, "errno", None) or f"{error}")
        return self._failure != before

    def delete_old(self, keep: int, writer: CheckpointName, damaged: Collection[CheckpointName]) -> None:
        """Delete what no reader needs: old checkpoints, the remains of interrupted writes, and reserved tokens.

        Args:
            keep: the number of newest checkpoints that stay; a damaged one counts as older than all others.
            writer: the checkpoint that the caller has just written.
            damaged: checkpoints that could not be loaded.
        """
        ages = {name: (name not in damaged, name.token, name.step) for name in self.checkpoints()}
        kept = set(sorted(set(ages.values()))[-keep:])
        complete = {name for name, age in ages.items() if age in kept}
        for name in ages.keys() - complete:
            self._delete(name)
        for name, match in list(self._entries()):
            is_own = (name.token, name.rank) == (writer.token, writer.rank) and match["suffix"] is not None
            is_own &= name.step < writer.step  # other ranks may still write their parts of this one
            if (match["partial"] or name not in complete) and (is_own or name.token < writer.token):
                with contextlib.suppress(FileNotFoundError):  # its writer still runs, and has renamed it
                    self._files.rm_file(f"{name.folder}/{match.string}")

    def _delete(self, name: CheckpointName) -> None:
        for suffix in (".json", ".pt"):  # in this order, so that no manifest is without its file
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(f"{name.path}{suffix}")

    def _entries(self) -> Iterator[tuple[CheckpointName, re.Match[str]]]:
        """Return the files of checkpoints and tokens; the name of a token's file has the step and the rank 0."""
        self._files.invalidate_cache()
        for folder in self._folders():
            for path in self._list(folder):
                if match := _NAME.fullmatch(path.rpartition("/")[2]):
                    _, token, step, rank, ranks, _, reserved = match.groups()
                    numbers = int(token or reserved), int(step or 0), int(rank or 0)
                    yield CheckpointName(*numbers, folder, int(ranks or 0)), match

    def _folders(self) -> list[str]:
        if not self._of_pod:
            return [self.folder]
        found = self._list(self.folder.rpartition("/")[0])
        return sorted({self.folder, *(path for path in found if path.rpartition("/")[2].isdecimal())})

    def _list(self, folder: str) -> list[str]:
        try:
            return [path.rstrip("/") for path in self._files.ls(folder, detail=False)]
        except FileNotFoundError:
            return []

    @contextlib.contextmanager
    def _replacing(self, path: str) -> Iterator[Any]:
        """Open a file for writing, which replaces the one at the path when the block ends without an exception."""
        if not self._is_local:  # an object store shows an object when it is complete
            with self._files.open(path, "wb") as file:
                yield file
            return
        target = Path(path)
        partial = target.with_name(f".partial-{target.name}")
        try:
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise


class _HashedFile:
    """A file for writing, with the size and the SHA-256 of its content, and the first error of a write."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size, self.digest = 0, hashlib.sha256()
        self.error: Exception | None = None

    def write(self, data: bytes) -> int:
        try:
            written = self._file.write(data)
        except Exception as error:
            self.error = self.error or error
            raise
        self.digest.update(data)
        self.size += len(data)
        return written

    def flush(self) -> None:
        self._file.flush()


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
