"""The images of the node, as archives in the cache: from the Dockerfiles, and of single programs.

No image registry and no container engine is needed; images with a Dockerfile need root. Each archive is rebuilt
when its files change. containerd keeps the images between runs, so that only changed images are imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from testbed import image_base, image_build
from testbed.binaries import DEFAULT_GO_BIN, binary
from testbed.binaries import is_ready as is_built
from testbed.cache import Missing, cache_folder, locked

if TYPE_CHECKING:
    from collections.abc import Mapping

_PATH: Final = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PAUSE: Final = Path(__file__).parent / "pause"

IMAGES: Final[Mapping[str, str]] = {
    "agent": "elastic-agent:dev",
    "operator": "elastic-operator:dev",
    "etcd": "quay.io/coreos/etcd:v3.7.3",
    "pause": "registry.k8s.io/pause:3.10",
}
"""The full names of the images, by the names that :func:`archive` takes."""

_DOCKERFILES: Final = {name: image_build.ROOT / f"Dockerfile.{name}" for name in ("agent", "operator")}


_PROGRAMS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "etcd": ("/usr/local/bin/etcd", {"Env": [_PATH], "Cmd": ["/usr/local/bin/etcd"]}),
    "pause": ("/pause", {"Env": [_PATH], "Entrypoint": ["/pause"], "User": "65535"}),
}
"""The path in the image, and the image's configuration, of each image with one static program."""


def _pause() -> Path:
    """Compile the pause program, which keeps a pod's namespaces."""
    go = shutil.which("go") or shutil.which("go", path=DEFAULT_GO_BIN)
    if go is None:
        raise Missing("Go", "install it (https://go.dev/dl/) so that `go` is on the PATH")
    program = _folder("pause") / "pause"
    command = [go, "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", str(program), "."]
    environment = {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off", "GOTOOLCHAIN": "local", "GOOS": "linux"}
    done = subprocess.run(command, cwd=_PAUSE, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing("a program that keeps a pod's namespaces", f"Go could not compile it: {done.stderr}")
    return program


def archive(name: str) -> Path:
    """Return the path of an image's archive; build the archive if it is missing or outdated.

    Args:
        name: one of :data:`IMAGES`.

    Raises:
        Missing: the image cannot be built.
    """
    with locked(f"image-{name}"):
        path = _path(name)
        if not path.exists():
            _make(name, path)
        return path


def is_ready(name: str) -> bool:
    """Return whether the archive of the image is up to date."""
    return (name != "etcd" or is_built("etcd")) and _path(name).exists()


def _make(name: str, path: Path) -> None:
    """Build an image's archive, and remove outdated ones."""
    for other in path.parent.glob("*.tar*"):
        other.unlink()
    unfinished = path.with_suffix(".tar.tmp")
    if name in _DOCKERFILES:
        image_build.build(_DOCKERFILES[name], image=full_name(IMAGES[name]), folder=path.parent, archive=unfinished)
    else:
        at, config = _PROGRAMS[name]
        program = binary("etcd") if name == "etcd" else _pause()
        image_base.write_image_of_program(unfinished, name=IMAGES[name], program=program, at=at, config=config)
    unfinished.rename(path)


def _path(name: str) -> Path:
    return _folder(name) / f"{name}-{_identity(name)}.tar"


def _identity(name: str) -> str:
    """Return a hash of the files and settings from which an image is built."""
    if name in _DOCKERFILES:
        return image_build.identity(_DOCKERFILES[name])
    inputs = [IMAGES[name], repr(_PROGRAMS[name])]
    if name == "etcd":
        # The path contains the version; the user's own program may change at the same path.
        path = binary("etcd")
        inputs += [str(path), str(path.stat().st_size), str(path.stat().st_mtime_ns)]
    else:
        inputs.append((_PAUSE / "main.go").read_text())
    return hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:12]


def _folder(name: str) -> Path:
    folder = cache_folder() / "images" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def full_name(name: str) -> str:
    """Return an image's name with its host, as container runtimes complete it."""
    return name if "/" in name else f"docker.io/library/{name}"


def listed(table: str) -> dict[str, str]:
    """Return the digests of the images in the output of ``ctr images list``, by name."""
    rows = (line.split() for line in table.splitlines()[1:])
    return {row[0]: row[2] for row in rows}


class Kept:
    """The record of imported images: by full name, the archive's path, size and time, and the image's digest.

    Args:
        file: the file of the record.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._records: dict[str, list[str]] = json.loads(file.read_text()) if file.exists() else {}

    def has(self, name: str, archive: Path, there: Mapping[str, str]) -> bool:
        """Return whether the image of this archive is still present; ``there`` has the digests of present images."""
        return name in there and self._records.get(name) == [*_state(archive), there[name]]

    def add(self, name: str, archive: Path, there: Mapping[str, str]) -> None:
        """Record the import of an archive; the records of removed archives are dropped."""
        self._records[name] = [*_state(archive), there[name]]
        self._records = {each: record for each, record in self._records.items() if Path(record[0]).exists()}
        self._file.write_text(json.dumps(self._records))

    def unwanted(self, there: Mapping[str, str]) -> list[str]:
        """Return the names of the present images that are not in the record."""
        # The CRI also gives each image a digest as its name.
        wanted = {record[-1] for record in self._records.values()}
        return sorted(name for name, digest in there.items() if digest not in wanted)


def _state(archive: Path) -> list[str]:
    about = archive.stat()
    return [str(archive.resolve()), str(about.st_size), str(about.st_mtime_ns)]
