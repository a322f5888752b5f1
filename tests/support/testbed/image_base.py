"""The base image of the Dockerfiles, debian:…-slim, built from Debian's packages.

So the images can be built without an image registry. Like Debian's own slim image, it has the packages
that apt needs, without documentation and translations. It has no package sources: a build gets this machine's.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Final

from tests.support.testbed import image_archive, image_room, image_settings, packages
from tests.support.testbed.cache import cache_folder, locked

SUITE: Final = "trixie"
NAME: Final = f"docker.io/library/debian:{SUITE}-slim"

_LEFT_OUT: Final = ("doc", "info", "locale", "man", "lintian", "linda", "groff")
"""Folders below /usr/share that dpkg omits, also from packages that are installed later."""

_DPKG: Final = (
    "".join(f"path-exclude /usr/share/{name}/*\n" for name in _LEFT_OUT)
    + "path-include /usr/share/doc/*/copyright\nforce-unsafe-io\n"
)

_CONFIG: Final = {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"], "Cmd": ["bash"]}

_SCRIPT: Final = r"""
debootstrap --variant=minbase --keyring="$KEYRING" "$SUITE" "$ROOT" "$MIRROR"
cd "$ROOT"
for name in $LEFT_OUT; do
    [ "$name" = doc ] || rm -rf "usr/share/$name"
done
find usr/share/doc ! -type d ! -name copyright -delete
find usr/share/doc -depth -type d -empty -delete
rm -rf var/cache/apt/* var/cache/debconf/*-old var/lib/apt/lists/* var/log/* tmp/* run/*
rm -f etc/apt/sources.list etc/hostname etc/resolv.conf
printf '%s' "$DPKG" > etc/dpkg/dpkg.cfg.d/slim
tar --create --file "$LAYER" --numeric-owner --exclude='./dev/*' --exclude='./proc/*' --exclude='./sys/*' .
"""

_LIMIT: Final = 900.0
"""Seconds."""


def archive() -> Path:
    """The image as a docker archive, built if it is missing.

    Raises:
        Missing: it cannot be built.
    """
    with locked("image-base"):
        path = cache_folder() / "images" / f"base-{identity()}.tar"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            for old in path.parent.glob("base-*"):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            _make(path)
    return path


def _make(path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="base-", ignore_cleanup_errors=True) as scratch:
        layer = Path(scratch) / "layer.tar"
        environment = {
            "SUITE": SUITE,
            "ROOT": f"{scratch}/root",
            "LAYER": str(layer),
            "MIRROR": image_settings.mirror(SUITE),
            "KEYRING": str(packages.unpacked("build") / "usr/share/keyrings/debian-archive-keyring.gpg"),
            "LEFT_OUT": " ".join(_LEFT_OUT),
            "DPKG": _DPKG,
            **image_settings.proxies(),
        }
        image_room.run(_SCRIPT, makes=f"the image {NAME}", limit=_LIMIT, env=environment)
        image_archive.write_image(path, name=NAME, layer=layer, config=_CONFIG)


def identity() -> str:
    """A hash of the settings of the image."""
    inputs = (SUITE, _LEFT_OUT, _DPKG, sorted(_CONFIG.items()), _SCRIPT)
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:12]
