"""The test bed: missing parts fail in CI, programs are chosen by version, and images follow their files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.testbed import availability, binaries, image_build, images
from tests.support.testbed.cache import Missing

ROOT = Path(__file__).parents[2]


def program(folder: Path, name: str, output: str) -> Path:
    """Write a program that prints a text."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)
    return path


# Missing parts


def test_a_missing_part_of_several_beds_is_reported_once_with_its_remedy() -> None:
    go = Missing("Go 1.26 or later", "install it")
    root = Missing("root", "run the tests as root")
    assert availability.closing_words({"control_plane": go, "node": root}, {"control_plane": 7, "node": 1}) == [
        "Did NOT run: 7 tests with a real API server.",
        "  missing: Go 1.26 or later",
        "  what brings it: install it",
        "Did NOT run: 1 test with a real kubelet.",
        "  missing: root",
        "  what brings it: run the tests as root",
    ]
    words = availability.closing_words({"control_plane": go, "node": go})
    assert words[0] == "Did NOT run: tests with a real API server and a real kubelet."
    assert availability.closing_words({}) == []


def with_an_old_go(tmp_path: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python with an old Go and an empty cache."""
    program(tmp_path, "go", "go1.19.8")
    without = {"CI", "KUBEBUILDER_ASSETS", "ELASTICJOB_TEST_KUBECONFIG"}
    kept = {name: value for name, value in os.environ.items() if name not in without}
    own = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**kept, **own, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("ci", "code"), [("false", 5), ("true", 1)])
def test_tests_that_cannot_run_are_named_at_the_end_and_fail_in_ci(tmp_path: Path, ci: str, code: int) -> None:
    run = with_an_old_go(
        tmp_path, "-m", "pytest", "-p", "no:cacheprovider", "tests/kubernetes/test_control_plane.py", CI=ci
    )
    _, _, end = run.stdout.rpartition(" tests that did not run =")
    assert re.search(r"Did NOT run: \d+ tests with a real API server\.", end)
    assert "missing: Go 1.26 or later" in end
    assert "too old for this (go1.19.8)" in end
    assert run.returncode == code


# Programs


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's own programs; the cache is empty, and there is no Go."""
    folder = tmp_path / "assets"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(binaries, "OFTEN_THERE", str(tmp_path))
    monkeypatch.setenv(binaries.ASSETS_VARIABLE, str(folder))
    binaries.binary.cache_clear()
    binaries.of_the_user.cache_clear()
    return folder


def test_a_recent_program_of_the_user_is_used(assets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = program(assets, "kubectl", "Client Version: v1.33.0")
    assert binaries.binary("kubectl") == own
    assert capsys.readouterr().err == "kubectl 1.33 is taken from KUBEBUILDER_ASSETS.\n"


@pytest.mark.parametrize("output", ["etcd Version: 3.4.35", "no version"])
def test_an_old_program_of_the_user_is_not_used(assets: Path, capsys: pytest.CaptureFixture[str], output: str) -> None:
    own = program(assets, "etcd", output)
    assert not binaries.is_ready("etcd")
    assert re.match(rf"{own} is .*, and 3\.5 or later is needed", capsys.readouterr().err)


@pytest.mark.parametrize("project", binaries.PROJECTS, ids=lambda project: project.name)
def test_each_project_is_pinned_by_hash(project: binaries.Project) -> None:
    assert f"\ngo {binaries.OLDEST_GO}" in (project.folder / "go.mod").read_text()
    assert f"{project.module} {project.version} h1:" in (project.folder / "go.sum").read_text()


# Images


def test_an_image_is_built_again_when_a_file_of_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_build, "ROOT", tmp_path)
    (tmp_path / "code/__pycache__").mkdir(parents=True)
    (tmp_path / "code/a.py").write_text("1")
    (tmp_path / "Dockerfile").write_text("FROM base AS first\nCOPY code /there/\nCOPY --from=first /x /y\n")
    first = image_build.identity(tmp_path / "Dockerfile")
    (tmp_path / "code/__pycache__/a.pyc").write_text("compiled")
    (tmp_path / "elsewhere").write_text("not in the image")
    assert image_build.identity(tmp_path / "Dockerfile") == first
    (tmp_path / "code/a.py").write_text("2")
    assert image_build.identity(tmp_path / "Dockerfile") != first


def test_manifests_use_the_image_names_of_the_dockerfiles() -> None:
    for name in ("agent", "operator"):
        text = (ROOT / f"Dockerfile.{name}").read_text()
        assert f"docker build -f Dockerfile.{name} -t {images.IMAGES[name]} ." in text
