"""The test bed: missing parts fail in CI, programs are pinned, and images follow their files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from testbed import binaries, image_build, images

ROOT = Path(__file__).parents[3]


# Missing parts


@pytest.mark.parametrize(("ci", "code"), [("false", pytest.ExitCode.OK), ("true", pytest.ExitCode.USAGE_ERROR)])
def test_tests_that_cannot_run_are_named_at_the_end_and_fail_in_ci(
    tmp_path: Path, ci: str, code: pytest.ExitCode
) -> None:
    go = tmp_path / "go"
    go.write_text("#!/bin/sh\necho go1.19.8\n")
    go.chmod(0o755)
    own = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path), "CI": ci}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/kubernetes/test_control_plane.py"],
        cwd=ROOT,
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert re.search(r"Go 1\.26 or later: .* is too old \(go1\.19\.8\); install a newer one", run.stdout)
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
