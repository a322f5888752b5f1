"""An image in several archives, so that a change of code moves megabytes and not the gigabytes below them.

Each archive but the last ends with a large layer, and is a whole image to whoever imports the archives in their order:
its list of layers begins with those of the archives before it, but only its own are in the file, which OCI's layout
allows. An archive is kept for as long as its layers are those of the image.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tests.support.testbed import packages
from tests.support.testbed.cache import Missing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_LARGE: Final = 100 << 20
"""Bytes of a layer after which an archive ends."""

_WORTHWHILE: Final = 1 << 20
"""Bytes from which on a layer is compressed; zstd's lowest level halves torch in 17 s on two cores, gzip in 150."""

_SIZE: Final = "elastic.pytorch.org/uncompressed-size"
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"

Descriptor = dict[str, Any]
"""How OCI refers to a blob: by mediaType, digest and size."""


class PartLost(Exception):  # noqa: N818 - it says what happened
    """A layer is in no archive that belongs to the image any more, and must be built out again."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer that lies in an archive.

    Attributes:
        described: its blob, maybe compressed.
        size: bytes when uncompressed.
    """

    described: Descriptor
    size: int


class Parts:
    """The archives of one image.

    Args:
        folder: where they lie; must be there.
        image: the image's full name, with its tag.
        stem: how their file names begin.
    """

    def __init__(self, folder: Path, image: str, stem: str) -> None:
        self._folder = folder
        self._image = image
        self._stem = stem
        self._hollow: set[str] = set()

    def prepare(self, layout: Path) -> None:
        """Make an OCI layout in which layers that lie in an archive seem to be there, so that nobody copies them."""
        blobs = layout / "blobs/sha256"
        blobs.mkdir(parents=True)
        known = self._known(self._kept())
        self._hollow = set(known)
        for digest, layer in known.items():
            with (blobs / digest.removeprefix("sha256:")).open("wb") as file:
                file.truncate(layer.size)  # a hole, which takes no room

    def write(self, layout: Path, last: Path) -> list[Path]:
        """Write the archives that are missing.

        Args:
            layout: as it was prepared; since then the image, uncompressed, was copied into it as its only one.
            last: the archive which holds what changes most often, and the image's name.

        Returns:
            All archives in the order in which they are imported.

        Raises:
            PartLost: a layer that :meth:`prepare` took for known is in no archive of this image: start over.
        """
        manifest = _blob_json(layout, json.loads((layout / "index.json").read_text())["manifests"][0]["digest"])
        config = _blob_json(layout, manifest["config"]["digest"])
        layers: list[Descriptor] = manifest["layers"]
        ends = [number for number, layer in enumerate(layers, 1) if layer["size"] >= _LARGE]
        archives: list[Path] = []
        done: list[Descriptor] = []
        for number, end in enumerate(ends):
            path = self._path(number, layers[:end])
            if not path.exists():
                part = {**config, "rootfs": {**config["rootfs"], "diff_ids": config["rootfs"]["diff_ids"][:end]}}
                part.pop("history", None)
                name = f"localhost/{self._stem}-part-{number}:dev"
                self._write(path, name, layout, part, layers[:end], done)
            archives.append(path)
            done = _layers_of(path)
        self._write(last, self._image, layout, config, layers, done)
        return [*archives, last]

    def remove(self, *, but: Sequence[Path] = ()) -> None:
        """Remove all archives of the image but these."""
        for path in self._folder.glob(f"{self._stem}-*.tar"):
            if path not in but:
                path.unlink()

    def _path(self, number: int, layers: Sequence[Descriptor]) -> Path:
        digest = hashlib.sha256("".join(layer["digest"] for layer in layers).encode()).hexdigest()
        return self._folder / f"{self._stem}-part-{number}-{digest[:12]}.tar"

    def _kept(self) -> list[Path]:
        return sorted(self._folder.glob(f"{self._stem}-part-*.tar"))

    @staticmethod
    def _known(archives: Sequence[Path]) -> dict[str, Layer]:
        """The layers that lie in archives, by the digests of what they are uncompressed."""
        known: dict[str, Layer] = {}
        for path in archives:
            for digest, layer in zip(_config_of(path)["rootfs"]["diff_ids"], _layers_of(path), strict=True):
                known[digest] = Layer(described=layer, size=int(layer["annotations"][_SIZE]))
        return known

    def _write(
        self,
        path: Path,
        name: str,
        layout: Path,
        config: Mapping[str, Any],
        layers: Sequence[Descriptor],
        below: Sequence[Descriptor],
    ) -> None:
        """Write an archive; it appears when it is complete.

        Args:
            path: the file.
            name: of the image that it ends in.
            layout: where the layers' blobs are.
            config: of that image.
            layers: all of that image, uncompressed, as in the layout.
            below: those of them that earlier archives hold, as they are there.
        """
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        described = list(below)
        try:
            with tarfile.open(unfinished, "w") as tar:
                _add(tar, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
                for layer in layers[len(below) :]:
                    if layer["digest"] in self._hollow:
                        raise PartLost(layer["digest"])
                    described.append(_add_layer(tar, layout, layer, scratch=unfinished.with_suffix(".zst")))
                manifest = {
                    "schemaVersion": 2,
                    "mediaType": _MANIFEST,
                    "config": _add_blob(tar, json.dumps(config).encode(), _CONFIG),
                    "layers": described,
                }
                root = _add_blob(tar, json.dumps(manifest).encode(), _MANIFEST)
                root["annotations"] = {
                    "io.containerd.image.name": name,
                    "org.opencontainers.image.ref.name": name.rpartition(":")[2],
                }
                _add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": [root]}).encode())
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)


def _add_layer(tar: tarfile.TarFile, layout: Path, layer: Descriptor, *, scratch: Path) -> Descriptor:
    """Add a layer's blob, compressed if it is worthwhile; returns how it is referred to."""
    source = _blob(layout, layer["digest"])
    annotations = {_SIZE: str(layer["size"])}
    if layer["size"] < _WORTHWHILE:
        tar.add(source, _name(layer["digest"]))
        return {"mediaType": _LAYER, "digest": layer["digest"], "size": layer["size"], "annotations": annotations}
    try:
        _compress(source, scratch)
        with scratch.open("rb") as file:
            digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        tar.add(scratch, _name(digest))
        size = scratch.stat().st_size
    finally:
        scratch.unlink(missing_ok=True)
    return {"mediaType": f"{_LAYER}+zstd", "digest": digest, "size": size, "annotations": annotations}


def _compress(source: Path, target: Path) -> None:
    environment = {**os.environ, **packages.environment(packages.unpacked("build"))}
    done = subprocess.run(
        ["zstd", "-1", "-T0", "-q", "-f", source, "-o", target], env=environment, stderr=subprocess.PIPE, check=False
    )
    if done.returncode:
        raise Missing(f"{target.name} (zstd said: {done.stderr.decode().strip()})", "is the disk full?")


def _add_blob(tar: tarfile.TarFile, content: bytes, kind: str) -> Descriptor:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    _add(tar, _name(digest), content)
    return {"mediaType": kind, "digest": digest, "size": len(content)}


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def _layers_of(path: Path) -> list[Descriptor]:
    """The layers of an archive's image, also those that earlier archives hold."""
    layers: list[Descriptor] = _manifest_of(path)["layers"]
    return layers


def _config_of(path: Path) -> dict[str, Any]:
    return _member_json(path, _name(_manifest_of(path)["config"]["digest"]))


def _manifest_of(path: Path) -> dict[str, Any]:
    return _member_json(path, _name(_member_json(path, "index.json")["manifests"][0]["digest"]))


def _member_json(path: Path, name: str) -> dict[str, Any]:
    with tarfile.open(path, "r:") as tar:
        file = tar.extractfile(name)
        assert file is not None
        found: dict[str, Any] = json.load(file)
        return found


def _blob_json(layout: Path, digest: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_blob(layout, digest).read_text())
    return found


def _blob(layout: Path, digest: str) -> Path:
    return layout / _name(digest)


def _name(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"
