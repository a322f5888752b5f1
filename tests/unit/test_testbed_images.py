"""What the test bed does to images with files alone: archives in parts, single programs, settings for builds."""

from __future__ import annotations

import hashlib
import json
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.testbed import image_archive, image_build, image_parts, image_settings, images
from tests.support.testbed.image_parts import PartLost, Parts
from tests.support.testbed.node_images import inspected

if TYPE_CHECKING:
    from pathlib import Path

NAME = "docker.io/library/some-image:dev"


@pytest.fixture(autouse=True)
def small_layers_count_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_parts, "_LARGE", 100)


def copied_out(layout: Path, layers: list[bytes]) -> None:
    """Fill a layout as the tool does that copies an image out: blobs that seem to be there are left as they are."""

    def blob(content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        path = layout / "blobs/sha256" / digest
        if not path.exists():
            path.write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": path.stat().st_size}

    described = [blob(layer) for layer in layers]
    config = {"rootfs": {"type": "layers", "diff_ids": [each["digest"] for each in described]}, "history": []}
    manifest = {"config": blob(json.dumps(config).encode()), "layers": described}
    (layout / "index.json").write_text(json.dumps({"manifests": [blob(json.dumps(manifest).encode())]}))


def written(folder: Path, layers: list[bytes], last: str) -> list[Path]:
    """What is written of an image, when it has been copied out anew."""
    parts = Parts(folder, NAME, "some")
    layout = folder / f"layout-{last}"
    parts.prepare(layout)
    copied_out(layout, layers)
    return parts.write(layout, folder / last)


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar if tar.extractfile(member)}  # type: ignore[union-attr]


def manifest_of(path: Path) -> dict[str, Any]:
    files = contents(path)
    digest = json.loads(files["index.json"])["manifests"][0]["digest"]
    found: dict[str, Any] = json.loads(files[f"blobs/{digest.replace(':', '/')}"])
    return found


def test_the_archives_of_an_image_hold_each_of_its_layers_once_and_end_with_its_name(tmp_path: Path) -> None:
    layers = [b"a" * 10, b"b" * 200, b"c" * 300, b"d" * 20, b"e" * 30]
    archives = written(tmp_path, layers, "some-1.tar")
    held = [[layer for layer in layers if layer in contents(path).values()] for path in archives]
    assert held == [layers[:2], layers[2:3], layers[3:]]
    assert [len(manifest_of(path)["layers"]) for path in archives] == [2, 3, 5]
    assert inspected(archives[-1]).names == (NAME,)
    assert NAME not in inspected(archives[0]).names


def test_what_an_archive_says_of_a_blob_is_so(tmp_path: Path) -> None:
    for path in written(tmp_path, [b"a" * 10, b"b" * 200, b"c"], "some-1.tar"):
        for name, content in contents(path).items():
            if name.startswith("blobs/"):
                assert name == f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"


def test_a_change_above_leaves_the_archives_below_as_they_are(tmp_path: Path) -> None:
    first = written(tmp_path, [b"a" * 200, b"old"], "some-1.tar")
    before = first[0].stat()
    second = written(tmp_path, [b"a" * 200, b"new"], "some-2.tar")
    assert second[0] == first[0]
    assert second[0].stat() == before
    assert b"new" in contents(second[-1]).values()
    assert manifest_of(second[-1])["layers"][0] == manifest_of(first[-1])["layers"][0]


def test_a_layer_whose_archive_belongs_to_something_else_is_not_taken_for_one_of_zeros(tmp_path: Path) -> None:
    written(tmp_path, [b"a" * 200, b"b" * 200], "some-1.tar")
    with pytest.raises(PartLost):
        written(tmp_path, [b"other" * 50, b"b" * 200], "some-2.tar")
    parts = Parts(tmp_path, NAME, "some")
    parts.remove()
    again = written(tmp_path, [b"other" * 50, b"b" * 200], "some-3.tar")
    assert b"b" * 200 in contents(again[1]).values()


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
    assert "find-links = https://wheels.example/" in lines  # that folder is not there in a build
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
