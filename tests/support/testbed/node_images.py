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
    texts = {}
    with tarfile.open(path, "r:") as archive:
        for name in _LISTS:
            try:
                file = archive.extractfile(name)
            except KeyError:
                continue
            texts[name] = file.read() if file else b""
    names = _names({name: json.loads(text) for name, text in texts.items()})
    if not names:
        raise ValueError(f"{path} holds no image that has a name")
    identity = hashlib.sha256(b"\0".join(texts[name] for name in sorted(texts))).hexdigest()
    return Archive(path=path, identity=identity, names=tuple(map(full_name, names)))


def full_name(name: str) -> str:
    """An image's name with host and tag, as containers' runtimes write out what users leave away."""
    first, _, rest = name.partition("/")
    if not rest:
        name = f"docker.io/library/{name}"
    elif "." not in first and ":" not in first and first != "localhost":
        name = f"docker.io/{name}"
    return name if ":" in name.rpartition("/")[2] or "@" in name else f"{name}:latest"


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
        """Whether an archive was imported, and its images are among those which are there."""
        return archive.identity in self._records and there.keys() >= set(archive.names)

    def add(self, archive: Archive) -> None:
        """Write down that an archive was imported; others of its path, or with its names, are no longer wanted."""
        self._records = {
            identity: record
            for identity, record in self._records.items()
            if Path(record["path"]).exists()
            and record["path"] != str(archive.path)
            and not set(record["names"]) & set(archive.names)
        }
        self._records[archive.identity] = {"path": str(archive.path), "names": archive.names}
        self._file.write_text(json.dumps(self._records))

    def unwanted(self, there: Mapping[str, str]) -> list[str]:
        """Of the images which are there, by all their names, those that are not wanted."""
        names = {name for record in self._records.values() for name in record["names"]}
        # The kubelet's interface gives each image a name of its own besides: a digest.
        wanted = {digest for name, digest in there.items() if name in names}
        return sorted(name for name, digest in there.items() if digest not in wanted)
