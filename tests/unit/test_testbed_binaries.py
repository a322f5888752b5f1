"""Where the programs of a Kubernetes come from."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.support.testbed import binaries
from tests.support.testbed.cache import Missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache, no binaries of the user's, and no Go."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(binaries.ASSETS_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(binaries, "OFTEN_THERE", str(tmp_path))
    forget()
    yield
    forget()


def forget() -> None:
    binaries.binary.cache_clear()
    binaries.of_the_user.cache_clear()


def program(folder: Path, name: str, says: str) -> Path:
    """A program that says something."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("name", "says", "version"),
    [
        ("kube-apiserver", "Kubernetes v1.36.3", (1, 36)),
        ("kubectl", "Client Version: v1.31.0\nKustomize Version: v5.4.2", (1, 31)),
        ("etcd", "etcd Version: 3.5.24\nGit SHA: x", (3, 5)),
        ("etcd", "hello", ()),
    ],
)
def test_a_program_says_its_version(tmp_path: Path, name: str, says: str, version: tuple[int, ...]) -> None:
    assert binaries.version_of(program(tmp_path, name, says)) == version


def test_a_program_of_the_users_is_taken_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = program(tmp_path / "assets", "kubectl", "Client Version: v1.33.0")
    monkeypatch.setenv(binaries.ASSETS_VARIABLE, str(own.parent))
    assert binaries.is_ready("kubectl")
    assert binaries.binary("kubectl") == own
    assert capsys.readouterr().err == "kubectl 1.33 is taken from KUBEBUILDER_ASSETS.\n"


def test_where_a_version_is_meant_a_program_of_the_users_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = program(tmp_path / "assets", "etcd", "etcd Version: 3.6.1")
    monkeypatch.setenv(binaries.ASSETS_VARIABLE, str(own.parent))
    assert binaries.is_ready("etcd")
    assert not binaries.is_ready("etcd", the_users=False)
    with pytest.raises(Missing, match=r"Go 1\.26"):
        binaries.binary("etcd", the_users=False)


@pytest.mark.parametrize("says", ["etcd Version: 3.4.35", "nothing of use"])
def test_a_program_of_the_users_that_is_too_old_is_passed_by_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], says: str
) -> None:
    own = program(tmp_path / "assets", "etcd", says)
    monkeypatch.setenv(binaries.ASSETS_VARIABLE, str(own.parent))
    assert not binaries.is_ready("etcd")
    assert re.match(rf"{own} is .*, and 3\.5 or later is needed", capsys.readouterr().err)


def test_an_old_api_server_is_taken_only_with_the_parts_that_belong_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = program(tmp_path / "assets", "kube-apiserver", "Kubernetes v1.33.0")
    monkeypatch.setenv(binaries.ASSETS_VARIABLE, str(own.parent))
    assert not binaries.is_ready("kube-apiserver")
    forget()
    for name in binaries.SERVERS:
        program(own.parent, name, "Kubernetes v1.33.0")
    assert [binaries.binary(name).parent for name in binaries.SERVERS] == [own.parent] * 3


def test_without_go_the_words_say_which_is_needed_and_where_to_get_it() -> None:
    with pytest.raises(Missing) as caught:
        binaries.binary("helm")
    assert caught.value.part == "Go 1.26 or later"
    assert "https://go.dev/dl/" in caught.value.remedy


def test_a_go_that_is_too_old_is_named(tmp_path: Path) -> None:
    program(tmp_path, "go", "go1.19.8")
    with pytest.raises(Missing, match=r"go is too old for this \(go1\.19\.8\)"):
        binaries.binary("etcd")


def test_what_is_built_once_is_found_again(tmp_path: Path) -> None:
    folder = binaries.built_folder(binaries.project_of("kubectl"))
    assert folder.parent == tmp_path / "cache" / "elastic-operator" / "bin"
    folder.parent.mkdir()
    built = program(folder, "kubectl", "Client Version: v1.36.3")
    assert binaries.is_ready("kubectl")
    assert binaries.binary("kubectl") == built


def test_each_version_of_each_project_has_a_folder_of_its_own() -> None:
    folders = {binaries.built_folder(project).name for project in binaries.PROJECTS}
    assert len(folders) == len(binaries.PROJECTS)
    assert all(re.fullmatch(r"[a-z0-9]+-v\d+\.\d+\.\d+(-[0-9a-z.-]+)?-[0-9a-f]{8}", name) for name in folders)


@pytest.mark.parametrize("project", binaries.PROJECTS, ids=lambda project: project.name)
def test_each_project_is_pinned_to_the_last_byte(project: binaries.Project) -> None:
    assert f"\ngo {binaries.OLDEST_GO}" in (project.folder / "go.mod").read_text()
    assert f"{project.module} {project.version} h1:" in (project.folder / "go.sum").read_text()


def test_the_version_is_written_into_the_programs() -> None:
    project = binaries.project_of("kube-apiserver")
    flags = binaries.linker_flags(project)
    assert f"-X=k8s.io/component-base/version.gitVersion={project.version}" in flags
    assert [flag for flag in flags if "{" in flag] == []
