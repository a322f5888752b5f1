"""The base image of the Dockerfiles, debian:…-slim, built from Debian's packages; and writers of image archives.

Images can therefore be built without an image registry. Like Debian's own slim image, the base image has the packages
that apt needs, without documentation and translations. It has no package sources: a build uses those of this machine.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from testbed import build_sandbox, packages
from testbed.cache import cache_folder, locked

if TYPE_CHECKING:
    from collections.abc import Mapping

SUITE: Final = "trixie"
NAME: Final = f"docker.io/library/debian:{SUITE}-slim"

_LEFT_OUT: Final = ("doc", "info", "locale", "man", "lintian", "linda", "groff")
"""Folders below /usr/share that dpkg omits, even from packages that are installed later."""

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
"""The limit of a build in seconds."""


def archive() -> Path:
    """Return the path of the image as a docker archive; build the image if it is missing.

    Raises:
        Missing: the image cannot be built.
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
            "MIRROR": build_sandbox.mirror(SUITE),
            "KEYRING": str(packages.unpacked("build") / "usr/share/keyrings/debian-archive-keyring.gpg"),
            "LEFT_OUT": " ".join(_LEFT_OUT),
            "DPKG": _DPKG,
            **build_sandbox.proxies(),
        }
        build_sandbox.run(_SCRIPT, makes=f"the image {NAME}", limit=_LIMIT, env=environment)
        write_image(path, name=NAME, layer=layer, config=_CONFIG)


def identity() -> str:
    """Return a hash of the settings of the image."""
    inputs = (SUITE, _LEFT_OUT, _DPKG, sorted(_CONFIG.items()), _SCRIPT)
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:12]


_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_NONROOT = b"root:x:0:0:root:/:/\nnonroot:x:65532:65532::/:/\n"


def write_image_of_program(out: Path, *, name: str, program: Path, at: str, config: Mapping[str, Any]) -> None:
    """Write an image with one program, as if it were built FROM scratch.

    Args:
        out: the docker archive, which appears when it is complete.
        name: the image's name, with its tag.
        program: a static program.
        at: the path of the program in the image, such as /usr/local/bin/etcd.
        config: the configuration of the image, such as Env and Cmd, in the format of OCI.
    """
    with tempfile.TemporaryDirectory(dir=out.parent, prefix="tmp-") as scratch:
        layer = Path(scratch) / "layer.tar"
        with tarfile.open(layer, "w") as tar:
            _add_file(tar, at.lstrip("/"), program.read_bytes(), mode=0o755)
            _add_file(tar, "etc/passwd", _NONROOT)
        write_image(out, name=name, layer=layer, config=config)


def write_image(out: Path, *, name: str, layer: Path, config: Mapping[str, Any]) -> None:
    """Write an image of a single layer.

    Args:
        out: the docker archive, which appears when it is complete.
        name: the image's name, with its tag.
        layer: an uncompressed tar file of its root folder.
        config: the configuration of the image, in the format of OCI.
    """
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    described = {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [{"created_by": "testbed"}],
    }
    text = json.dumps(described, sort_keys=True).encode()
    configuration = f"{hashlib.sha256(text).hexdigest()}.json"
    listed = [{"Config": configuration, "RepoTags": [name], "Layers": [f"{digest}.tar"]}]
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with tarfile.open(unfinished, "w") as tar:
            # The manifest comes first, so that it can be read without the layer.
            _add_file(tar, "manifest.json", json.dumps(listed).encode())
            _add_file(tar, configuration, text)
            tar.add(layer, f"{digest}.tar")
        unfinished.rename(out)
    finally:
        unfinished.unlink(missing_ok=True)


def _add_file(tar: tarfile.TarFile, name: str, content: bytes, *, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))
