"""The test bed: missing parts fail in CI, programs are pinned, and images follow their files."""

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
    go = tmp_path / "go"
    go.write_text("#!/bin/sh\necho go1.19.8\n")
    go.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name != "CI"}
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
