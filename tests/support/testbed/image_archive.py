"""Write images as files: of single static programs, and of a root folder."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_NONROOT = b"root:x:0:0:root:/:/\nnonroot:x:65532:65532::/:/\n"


def write_image_of_program(out: Path, *, name: str, program: Path, at: str, config: Mapping[str, Any]) -> None:
    """Write an image with one program, as if it were built FROM scratch.

    Args:
        out: the docker archive, which appears when it is complete.
        name: the image's name, with its tag.
        program: a static program.
        at: its path in the image, such as /usr/local/bin/etcd.
        config: Env, Cmd and so on, as in an OCI configuration.
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
        config: as in an OCI configuration.
    """
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    described = {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [{"created_by": "tests.support.testbed"}],
    }
    text = json.dumps(described, sort_keys=True).encode()
    configuration = f"{hashlib.sha256(text).hexdigest()}.json"
    listed = [{"Config": configuration, "RepoTags": [name], "Layers": [f"{digest}.tar"]}]
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with tarfile.open(unfinished, "w") as tar:
            # The list comes first, so that it can be read without the layer.
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
