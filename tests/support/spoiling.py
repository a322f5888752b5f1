"""What a program may do to the file in which it leaves what it measures; by accident or not, and in its own process."""

from __future__ import annotations

import os
import struct
import sys
import zlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

LENGTH_OF_NAMES: Final = 8
DROPPED: Final = 2 * 8
VALUES: Final = 16 * 8
NAMES: Final = 16384 * 8
"""Where in the file they stand, in bytes."""

SIZE: Final = 512 << 10


def write_names(path: Path, *bodies: bytes) -> None:
    """Put names there, each with the right checksum, whatever it says."""
    entries = b"".join(
        struct.pack("=II", len(body), zlib.crc32(body)) + body + bytes(-len(body) % 8) for body in bodies
    )
    with path.open("r+b") as file:
        file.seek(LENGTH_OF_NAMES)
        file.write(len(entries).to_bytes(8, sys.byteorder))
        file.seek(NAMES)
        file.write(entries)


def _truncate(path: Path) -> None:
    path.open("w").close()


def _write_text(path: Path) -> None:
    path.write_text("loss=1\n")


def _cut_short(path: Path) -> None:
    os.truncate(path, 100)


def _empty_at_full_length(path: Path) -> None:
    os.truncate(path, 0)
    os.truncate(path, SIZE)


def _fill(path: Path) -> None:
    mark = path.read_bytes()[:8]
    path.write_bytes(mark + b"\xff" * (SIZE - len(mark)))


def _name_huge_bucket(path: Path) -> None:
    write_names(path, b'[["my_app", "n"], "histogram", [1%s], 16]' % (b"0" * 400))


def _grow(path: Path) -> None:
    os.truncate(path, 1 << 40)


def _remove(path: Path) -> None:
    path.unlink()


def _forbid(path: Path) -> None:
    path.chmod(0)


def _replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    (path / "folder").mkdir(parents=True)


def _replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _replace_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("moved"))
    path.parent.symlink_to("/nowhere/at/all")


SPOILING: Final[Mapping[str, Callable[[Path], None]]] = {
    "truncated": _truncate,
    "written as text": _write_text,
    "cut short": _cut_short,
    "emptied at full length": _empty_at_full_length,
    "filled with ones": _fill,
    "a huge number for a bucket": _name_huge_bucket,
}
"""After which nothing that was measured there is left."""

BESIDE: Final[Mapping[str, Callable[[Path], None]]] = {
    "grown": _grow,
    "removed": _remove,
    "forbidden": _forbid,
    "a FIFO in its place": _replace_by_fifo,
    "a folder in its place": _replace_by_folder,
    "a link in its place": _replace_by_link,
    "its folder gone": _replace_folder,
}
"""After which all that was measured is there as it was."""
