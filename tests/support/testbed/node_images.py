"""The images that containerd has kept from earlier runs, so that only changed images are imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def full_name(name: str) -> str:
    """An image's name with its host, as container runtimes complete it."""
    return name if "/" in name else f"docker.io/library/{name}"


def listed(table: str) -> dict[str, str]:
    """The digests of the images in the output of ``ctr images list``, by name."""
    rows = (line.split() for line in table.splitlines()[1:])
    return {row[0]: row[2] for row in rows}


class Kept:
    """The record of the imported images: by full name, the archive, its size and time, and the image's digest.

    Args:
        file: the file of the record.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._records: dict[str, list[str]] = json.loads(file.read_text()) if file.exists() else {}

    def has(self, name: str, archive: Path, there: Mapping[str, str]) -> bool:
        """Whether the image of this archive is still present."""
        return name in there and self._records.get(name) == [*_state(archive), there[name]]

    def add(self, name: str, archive: Path, there: Mapping[str, str]) -> None:
        """Record the import of an archive; the records of removed archives are dropped."""
        self._records[name] = [*_state(archive), there[name]]
        self._records = {each: record for each, record in self._records.items() if Path(record[0]).exists()}
        self._file.write_text(json.dumps(self._records))

    def unwanted(self, there: Mapping[str, str]) -> list[str]:
        """The present images that are not in the record."""
        # The CRI also gives each image a digest as its name.
        wanted = {record[-1] for record in self._records.values()}
        return sorted(name for name, digest in there.items() if digest not in wanted)


def _state(archive: Path) -> list[str]:
    about = archive.stat()
    return [str(archive.resolve()), str(about.st_size), str(about.st_mtime_ns)]
