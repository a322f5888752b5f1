"""The images that a node runs, as archives in the cache: from the Dockerfiles, and of single programs.

No registry of images and no container engine is needed; root is, for those with a Dockerfile. Each archive is made anew
when what it is made of changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.support.testbed import image_archive, image_build
from tests.support.testbed.binaries import binary
from tests.support.testbed.binaries import is_ready as is_built
from tests.support.testbed.cache import Missing, cache_folder, locked
from tests.support.testbed.image_parts import PartLost, Parts
from tests.support.testbed.node_images import full_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_PATH: Final = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PAUSE: Final = Path(__file__).parent / "pause"

IMAGES: Final[Mapping[str, str]] = {
    "agent": "elastic-agent:dev",
    "operator": "elastic-operator:dev",
    "etcd": "quay.io/coreos/etcd:v3.7.3",
    "pause": "registry.k8s.io/pause:3.10",
}
"""What manifests call the images, by the names that :func:`archive` takes."""

_BINARIES: Final = ("etcd",)
_DOCKERFILES: Final = {name: image_build.ROOT / f"Dockerfile.{name}" for name in ("agent", "operator")}


@dataclass(frozen=True, kw_only=True)
class Program:
    """What an image is made of that holds nothing but one static program.

    Attributes:
        found: returns the program's path; it may be built first.
        at: its path in the image.
        config: what the image says of how it is run.
    """

    found: Callable[[], Path]
    at: str
    config: Mapping[str, Any]


def _pause() -> Path:
    """Compile the program that holds a pod's namespaces."""
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if go is None:
        raise Missing("Go", "install it (https://go.dev/dl/) so that `go` is on the PATH")
    program = _folder("pause") / "pause"
    command = [go, "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", str(program), "."]
    environment = {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off", "GOTOOLCHAIN": "local", "GOOS": "linux"}
    done = subprocess.run(command, cwd=_PAUSE, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing("a program that holds a pod's namespaces", f"Go could not compile it: {done.stderr}")
    return program


_PROGRAMS: Final[Mapping[str, Program]] = {
    "etcd": Program(
        found=lambda: binary("etcd"),
        at="/usr/local/bin/etcd",
        config={"Env": [_PATH], "Cmd": ["/usr/local/bin/etcd"]},
    ),
    "pause": Program(found=_pause, at="/pause", config={"Env": [_PATH], "Entrypoint": ["/pause"], "User": "65535"}),
}


def archive(name: str) -> Path:
    """The archive that holds an image's name; made if it is not there, which takes minutes the first time.

    For the images of Dockerfiles it is the last of several: see :func:`archives`.

    Raises:
        Missing: it cannot be made.
    """
    return archives(name)[-1]


def archives(name: str) -> Sequence[Path]:
    """All archives of an image, in the order in which they are imported; made if they are not there.

    Args:
        name: one of :data:`IMAGES`.

    Raises:
        Missing: it cannot be made.
    """
    with locked(f"image-{name}"):
        identity = _identity(name)
        return _there(name, identity) or _make(name, identity)


def is_ready(name: str) -> bool:
    """Whether :func:`archives` will find an image as it is now, without making it."""
    if name in _BINARIES and not is_built(name):
        return False
    return _there(name, _identity(name)) is not None


def _there(name: str, identity: str) -> list[Path] | None:
    """The archives of an image, if all of them are there."""
    try:
        paths = [_folder(name) / file for file in json.loads(_list(name, identity).read_text())]
    except FileNotFoundError:
        return None
    return paths if all(path.exists() for path in paths) else None


def _make(name: str, identity: str) -> list[Path]:
    """Make an image's archives, and remove what they supersede."""
    folder = _folder(name)
    _sweep(folder)
    last = folder / f"{name}-{identity}.tar"
    if name in _DOCKERFILES:
        made = _built(name, folder, last)
    else:
        made = [last]
        program = _PROGRAMS[name]
        image_archive.write_image_of_program(
            last, name=IMAGES[name], program=program.found(), at=program.at, config=program.config
        )
    complete = _list(name, identity)
    complete.write_text(json.dumps([path.name for path in made]))
    for path in [*folder.glob("*.tar"), *folder.glob("*.json")]:
        if path not in (complete, *made):
            path.unlink()
    return made


def _built(name: str, folder: Path, last: Path) -> list[Path]:
    """Build an image from its Dockerfile."""
    image = full_name(IMAGES[name])
    parts = Parts(folder, image, name)
    while True:
        with tempfile.TemporaryDirectory(dir=folder, prefix="tmp-", ignore_cleanup_errors=True) as scratch:
            layout = Path(scratch) / "layout"
            parts.prepare(layout)
            image_build.build(_DOCKERFILES[name], image=image, folder=folder, layout=layout)
            try:
                return parts.write(layout, last)
            except PartLost:
                parts.remove()


def _list(name: str, identity: str) -> Path:
    """The file which says that an image is complete, and which archives it has."""
    return _folder(name) / f"{name}-{identity}.json"


def _identity(name: str) -> str:
    """Another one for each content of what an image is made of."""
    if name in _DOCKERFILES:
        return image_build.identity(_DOCKERFILES[name])
    program = _PROGRAMS[name]
    inputs = [IMAGES[name], program.at, repr(program.config)]
    if name in _BINARIES:
        # Its path is another one for each version; the user's own may change where it lies.
        path = program.found()
        inputs += [str(path), str(path.stat().st_size), str(path.stat().st_mtime_ns)]
    else:
        inputs.append((_PAUSE / "main.go").read_text())
    return hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:12]


def _folder(name: str) -> Path:
    folder = cache_folder() / "images" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _sweep(folder: Path) -> None:
    """Remove what a killed run has left."""
    for left in folder.glob("tmp-*"):
        shutil.rmtree(left, ignore_errors=True)
    for left in folder.glob(".*"):
        left.unlink()
