"""Which images containerd has kept from earlier runs, so that only what has changed is imported.

An archive is known by the list of its contents, which names a digest of each; so no gigabytes are read to know it.
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
"""Of an OCI archive and of docker's; some archives have both."""
_NAMED_BY = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


@dataclass(frozen=True, kw_only=True)
class Archive:
    """An image in a file.

    Attributes:
        path: the file.
        identity: another one for each content.
        names: of the image, as Kubernetes writes them out.
    """

    path: Path
    identity: str
    names: tuple[str, ...]


def inspected(path: Path) -> Archive:
    """What an archive is.

    Raises:
        ValueError: the file holds no image that has a name.
    """
    with tarfile.open(path, "r:") as archive:
        texts = {name: text for name in _LISTS if (text := _text(archive, name)) is not None}
        lists = {name: json.loads(text) for name, text in texts.items()}
        # Docker's list may name files by other words than their digests; what it calls the configuration has them.
        configurations = [_text(archive, image["Config"]) or b"" for image in lists.get("manifest.json", ())]
    names = _names(lists)
    if not names:
        raise ValueError(f"{path} holds no image that has a name")
    identity = hashlib.sha256(b"\0".join([*texts.values(), *configurations])).hexdigest()
    return Archive(path=path, identity=identity, names=tuple(map(full_name, names)))


def full_name(name: str) -> str:
    """An image's name with host and tag, as containers' runtimes write out what users leave away."""
    first, _, rest = name.partition("/")
    if not rest:
        name = f"docker.io/library/{name}"
    elif "." not in first and ":" not in first and first != "localhost":
        name = f"docker.io/{name}"
    return name if ":" in name.rpartition("/")[2] or "@" in name else f"{name}:latest"


def _text(archive: tarfile.TarFile, name: str) -> bytes | None:
    """The content of a file in an archive; None if it is not there."""
    try:
        file = archive.extractfile(name)
    except KeyError:
        return None
    return file.read() if file else None


def _names(lists: Mapping[str, Any]) -> list[str]:
    """The names of the images, by what the archive's lists say."""
    names = [name for image in lists.get("manifest.json", ()) for name in image.get("RepoTags") or ()]
    for manifest in lists.get("index.json", {}).get("manifests", ()):
        annotations = manifest.get("annotations", {})
        names += [annotations[key] for key in _NAMED_BY if key in annotations][:1]
    return list(dict.fromkeys(names))


def listed(table: str) -> dict[str, str]:
    """The digest of each image that ``ctr images list`` prints, by each of its names."""
    rows = (line.split() for line in table.splitlines()[1:])
    return {row[0]: row[2] for row in rows}


class Kept:
    """The images that were imported, as they are written down beside them.

    Args:
        file: where.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._records: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}

    def has(self, archive: Archive, there: Mapping[str, str]) -> bool:
        """Whether what was imported from an archive with these contents is there still, by its names."""
        digests = self._records.get(archive.identity, {}).get("names", {})
        return bool(digests) and digests.items() <= there.items()

    def add(self, archive: Archive, there: Mapping[str, str]) -> None:
        """Write down that an archive was imported; others of its path, or with its names, are no longer wanted."""
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
        """Of the images which are there, by all their names, those that are not wanted."""
        # The kubelet's interface gives each image a name of its own besides: a digest.
        wanted = {digest for record in self._records.values() for digest in record["names"].values()}
        return sorted(name for name, digest in there.items() if digest not in wanted)
