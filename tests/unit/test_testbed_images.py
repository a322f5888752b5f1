"""Images of the test bed: those of single programs, and the settings for builds."""

from __future__ import annotations

import hashlib
import json
import tarfile
from typing import TYPE_CHECKING

from tests.support.testbed import image_archive, image_build, image_settings, images
from tests.support.testbed.node_images import inspected

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar if tar.extractfile(member)}  # type: ignore[union-attr]


def test_an_image_of_a_program_holds_it_where_it_was_said_to_be(tmp_path: Path) -> None:
    program = tmp_path / "etcd"
    program.write_bytes(b"a program")
    out = tmp_path / "etcd.tar"
    image_archive.write_image_of_program(
        out, name="quay.io/coreos/etcd:v9", program=program, at="/usr/local/bin/etcd", config={"Cmd": ["etcd"]}
    )
    assert inspected(out).names == ("quay.io/coreos/etcd:v9",)
    (listed,) = json.loads(contents(out)["manifest.json"])
    config = json.loads(contents(out)[listed["Config"]])
    assert config["config"] == {"Cmd": ["etcd"]}
    layer = contents(out)[listed["Layers"][0]]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    (tmp_path / "layer.tar").write_bytes(layer)
    with tarfile.open(tmp_path / "layer.tar") as tar:
        assert tar.getmember("usr/local/bin/etcd").mode == 0o755
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_pip_in_a_build_reaches_what_it_reaches_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authorities = tmp_path / "ca.crt"
    authorities.write_text("certificates")
    monkeypatch.setenv("PIP_CERT", str(authorities))
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:secret@mirror.example/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "/some/folder https://wheels.example/")
    home = tmp_path / "home"
    home.mkdir()
    image_settings.write_home(home)
    lines = (home / ".config/pip/pip.conf").read_text().splitlines()
    assert "index-url = https://me:secret@mirror.example/simple" in lines
    assert "find-links = /root/wheels https://wheels.example/" in lines  # another folder does not exist in a build
    assert "cert = /root/cert.pem" in lines
    assert (home / "cert.pem").read_text() == "certificates"


def test_an_image_is_made_anew_when_a_file_of_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_build, "ROOT", tmp_path)
    (tmp_path / "code/__pycache__").mkdir(parents=True)
    (tmp_path / "code/a.py").write_text("1")
    (tmp_path / "Dockerfile").write_text("FROM base AS first\nCOPY code notes /there/\nCOPY --from=first /x /y\n")
    (tmp_path / "notes").write_text("n")

    def identity() -> str:
        return image_build.identity(tmp_path / "Dockerfile")

    first = identity()
    (tmp_path / "code/__pycache__/a.pyc").write_text("compiled")
    (tmp_path / "elsewhere").write_text("not in the image")
    assert identity() == first
    (tmp_path / "code/a.py").write_text("2")
    second = identity()
    assert second != first
    (tmp_path / "notes").write_text("m")
    assert identity() not in (first, second)


def test_manifests_name_the_images_that_the_dockerfiles_say_how_to_build() -> None:
    for name in ("agent", "operator"):
        text = (image_build.ROOT / f"Dockerfile.{name}").read_text()
        assert f"docker build -f Dockerfile.{name} -t {images.IMAGES[name]} ." in text
