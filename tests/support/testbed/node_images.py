"""The images that containerd has kept from earlier runs, so that only changed images are imported.

An archive is identified by the digests in its list of contents, without reading its layers.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_LISTS = ("index.json", "manifest.json")
"""The lists of OCI archives and of docker archives; some archives have both."""
_NAMED_BY = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


@dataclass(frozen=True, kw_only=True)
class Archive:
    """An image in a file.

    Attributes:
        path: the file.
        identity: a hash of its contents.
        names: the full names of the image.
    """

    path: Path
    identity: str
    names: tuple[str, ...]


def inspected(path: Path) -> Archive:
    """Read an archive.

    Raises:
        ValueError: the file has no named image.
    """
    with tarfile.open(path, "r:") as archive:
        texts = {name: text for name in _LISTS if (text := _text(archive, name)) is not None}
        lists = {name: json.loads(text) for name, text in texts.items()}
        # Docker's list may not use digests as file names; the configuration has them.
        configurations = [_text(archive, image["Config"]) or b"" for image in lists.get("manifest.json", ())]
    names = _names(lists)
    if not names:
        raise ValueError(f"{path} holds no image that has a name")
    identity = hashlib.sha256(b"\0".join([*texts.values(), *configurations])).hexdigest()
    return Archive(path=path, identity=identity, names=tuple(map(full_name, names)))


def full_name(name: str) -> str:
    """An image's name with host and tag, as container runtimes complete it."""
    first, _, rest = name.partition("/")
    if not rest:
        name = f"docker.io/library/{name}"
    elif "." not in first and ":" not in first and first != "localhost":
        name = f"docker.io/{name}"
    return name if ":" in name.rpartition("/")[2] or "@" in name else f"{name}:latest"


def _text(archive: tarfile.TarFile, name: str) -> bytes | None:
    """The contents of a file in an archive; None if it is missing."""
    try:
        file = archive.extractfile(name)
    except KeyError:
        return None
    return file.read() if file else None


def _names(lists: Mapping[str, Any]) -> list[str]:
    """The names of the images in the archive's lists."""
    names = [name for image in lists.get("manifest.json", ()) for name in image.get("RepoTags") or ()]
    for manifest in lists.get("index.json", {}).get("manifests", ()):
        annotations = manifest.get("annotations", {})
        names += [annotations[key] for key in _NAMED_BY if key in annotations][:1]
    return list(dict.fromkeys(names))


def listed(table: str) -> dict[str, str]:
    """The digests of the images in the output of ``ctr images list``, by name."""
    rows = (line.split() for line in table.splitlines()[1:])
    return {row[0]: row[2] for row in rows}


class Kept:
    """The record of the imported images.

    Args:
        file: the file of the record.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._records: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}

    def has(self, archive: Archive, there: Mapping[str, str]) -> bool:
        """Whether the images of an archive with these contents are still present."""
        digests = self._records.get(archive.identity, {}).get("names", {})
        return bool(digests) and digests.items() <= there.items()

    def add(self, archive: Archive, there: Mapping[str, str]) -> None:
        """Record the import of an archive; others with its path or its names are outdated."""
        self._records = {
            identity: record
            for identity, record in self._records.items()
            if Path(record["path"]).exists()
            and record["path"] != str(archive.path)
            and not record["names"].keys() & set(archive.names)
        }
        names = {name: there[name] for name in archive.names}
        self._records[archive.identity] = {"path": str(archive.path), "names": names}
        self._file.write_text(json.dumps(self._records))

    def unwanted(self, there: Mapping[str, str]) -> list[str]:
        """The present images that are not in the record."""
        # The CRI also gives each image a digest as its name.
        wanted = {digest for record in self._records.values() for digest in record["names"].values()}
        return sorted(name for name, digest in there.items() if digest not in wanted)
