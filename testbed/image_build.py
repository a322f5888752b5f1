"""Build an image from its Dockerfile with buildah, which needs no service and no image registry.

Layers are kept in a storage below the cache folder, one for each image, so that only changed layers are built.
In images, stubs replace CUDA's libraries (:mod:`testbed.cuda_stubs`).
Each stage gets a name in the storage, so that unused layers can be removed. When the pinned versions change, the
storage is replaced.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from pathlib import Path
from typing import Final

from testbed import build_sandbox, cuda_stubs, image_base

ROOT: Final = Path(__file__).parents[1]
"""The project's folder, which is the build context."""

_LIMIT: Final = 1800.0
"""The limit in seconds; the first build downloads torch, three gigabytes."""

_BUILD: Final = r"""
bud() { buildah --root "$STORAGE" --runroot /run/images --storage-driver overlay "$@"; }
bud inspect --type image "$BASE_NAME" > /dev/null 2>&1 || bud pull --quiet "docker-archive:$BASE"
bud rm --all > /dev/null  # what a killed build has left
build() {
    bud bud --layers --isolation chroot --network host --pull=never --file "$DOCKERFILE" \
        --volume "$SETTINGS/home:/root" --volume "$SETTINGS/apt:/etc/apt" "$@" "$CONTEXT"
}
for stage in $STAGES; do
    build --target "$stage" --tag "localhost/stage:$stage"
done
build --tag "$IMAGE"
bud rmi --prune > /dev/null
skopeo copy --quiet --dest-compress-format zstd --dest-compress-level 1 \
    "containers-storage:[overlay@$STORAGE+/run/images]$IMAGE" "oci-archive:$ARCHIVE:$IMAGE"
"""


def build(dockerfile: Path, *, image: str, folder: Path, archive: Path) -> None:
    """Build an image, and copy it into an archive.

    Args:
        dockerfile: the Dockerfile, in the project's root.
        image: the full name of the image, with its tag.
        folder: the folder of this image's storage.
        archive: the OCI archive to write.

    Raises:
        Missing: the image cannot be built; the error has the end of the output.
    """
    storage = folder / f"storage-{_digest(_base(), (ROOT / 'constraints.txt').read_text())}"
    for other in [
        *folder.glob("storage-*"),
        *folder.glob("tmp-*"),
    ]:  # killed builds leave names with the prefix tmp-
        if other != storage:
            shutil.rmtree(other, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="tmp-") as settings:
        for name in ("home", "apt"):
            Path(settings, name).mkdir()
        wheels = Path(settings, "home/wheels")
        wheels.mkdir()
        cuda_stubs.write_packages(ROOT / "constraints.txt", wheels)
        build_sandbox.write_home(Path(settings, "home"))
        build_sandbox.write_apt(Path(settings, "apt"), suite=image_base.SUITE)
        environment = {
            "STORAGE": str(storage),
            "BASE": str(image_base.archive()),
            "BASE_NAME": image_base.NAME,
            "IMAGE": image,
            "DOCKERFILE": str(dockerfile),
            "CONTEXT": str(ROOT),
            "SETTINGS": settings,
            "STAGES": " ".join(re.findall(r"^FROM .* AS (\S+)$", dockerfile.read_text(), re.MULTILINE)),
            "ARCHIVE": str(archive),
            **build_sandbox.proxies(),
        }
        build_sandbox.run(_BUILD, makes=f"the image {image}", limit=_LIMIT, env=environment)


def identity(dockerfile: Path) -> str:
    """Return a hash of the files from which an image is built."""
    parts = [_base(), dockerfile.read_text()]
    for path in sorted(_copied(dockerfile)):
        parts += [str(path.relative_to(ROOT)), oct(path.stat().st_mode), _digest(path.read_bytes())]
    return _digest(*parts)


def _base() -> str:
    return f"{image_base.identity()} {cuda_stubs.VERSION}"


def _copied(dockerfile: Path) -> set[Path]:
    """Return the project's files that a Dockerfile copies."""
    found: set[Path] = set()
    for line in dockerfile.read_text().splitlines():
        match line.split():
            case ["COPY", first, *rest] if not first.startswith("--from"):
                for source in [first, *rest][:-1]:
                    path = ROOT / source
                    found |= {path} if path.is_file() else {each for each in path.rglob("*") if _is_taken(each)}
    return found


def _is_taken(path: Path) -> bool:
    """Return whether a path is a file that .dockerignore does not exclude."""
    below = path.relative_to(ROOT).parts
    ignored = any(part == "__pycache__" or part.startswith(".") or part.endswith(".egg-info") for part in below)
    return path.is_file() and not ignored and path.suffix != ".pyc"


def _digest(*parts: str | bytes) -> str:
    hashed = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        hashed.update(f"{len(data)}:".encode() + data)
    return hashed.hexdigest()[:12]
