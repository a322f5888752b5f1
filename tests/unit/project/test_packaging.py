"""Packaging: pins, extras, and the errors of `make install`."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEVER_WITH_THE_AGENT = {"kopf", "kubernetes"}


@pytest.fixture(scope="module")
def installer() -> Iterator[Any]:
    """scripts/install.py as a module."""
    spec = importlib.util.spec_from_file_location("install_script", ROOT / "scripts" / "install.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up the module there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder for the PATH that contains few programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "dirname", "uname"):
        found = shutil.which(name)
        assert found
        (folder / name).symlink_to(found)
    return folder


def program(path: Path, script: str) -> None:
    """Write an executable shell script."""
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def bootstrap(programs: Path | None = None, **environment: object) -> subprocess.CompletedProcess[str]:
    """Run the script that `make install` runs."""
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHON", "VENV"}}
    path = {"PATH": str(programs)} if programs else {}
    given = {name: str(value) for name, value in environment.items()}
    return subprocess.run(
        [ROOT / "scripts" / "bootstrap.sh", "local"],
        env={**kept, **path, **given},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def extra(name: str) -> set[str]:
    """Return the distributions of an extra and of the extras that it includes."""
    found = set()
    for requirement in map(Requirement, PROJECT["optional-dependencies"][name]):
        if requirement.name == PROJECT["name"]:
            found |= {each for included in requirement.extras for each in extra(included)}
        else:
            found.add(canonicalize_name(requirement.name))
    return found


def pins() -> dict[str, str]:
    """Return the pinned versions by name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_constraints_are_plain_versions() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"#[^/@:]*|[a-z0-9-]+==([0-9]+!)?[0-9][0-9a-z.]*", line), line


def test_every_requirement_has_an_allowed_pin() -> None:
    pinned = pins()
    extras = PROJECT["optional-dependencies"].values()
    for requirement in map(Requirement, [*PROJECT["dependencies"], *(line for lines in extras for line in lines)]):
        if requirement.name != PROJECT["name"]:
            assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def test_the_extras_of_agent_and_operator_are_separate() -> None:
    always = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    assert not (always | extra("agent")) & NEVER_WITH_THE_AGENT
    assert "torch" in extra("agent")
    assert "torch" not in always | extra("operator")
    assert extra("agent") <= extra("local") <= extra("dev")


@pytest.mark.parametrize("package", ["torchelastic", "elastic_operator"])
def test_no_module_imports_torch(package: str) -> None:
    program = f"""
import importlib, pathlib, sys, {package}
root = pathlib.Path({package}.__path__[0])
names = [".".join(path.relative_to(root.parent).with_suffix("").parts) for path in root.rglob("*.py")]
torchs = "torchelastic.multiprocessing", "torchelastic.events", "torchelastic.timer", "torchelastic.agent.server.torch_"
torchs += ("torchelastic.distributed.collectives", "torchelastic.training.sampler")
names = [name for name in names if not name.startswith(torchs)]  # torch's own objects, subclasses, and collectives
for name in names:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
print(len(names))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 10


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^(\w+):.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    texts = "\n".join(
        (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "examples/hello/README.md")
    )
    named = set(re.findall(r"(?:`|^    )make ([a-z]+)", texts, flags=re.MULTILINE))
    assert {"run", "test", "check"} <= named <= targets


@pytest.mark.parametrize(
    ("fakes", "environment", "error"),
    [
        ({"uname": "echo Darwin"}, {}, "Linux is needed"),
        ({}, {"VENV": "nowhere"}, "Python 3.11 to 3.14 is needed"),
        ({}, {"VENV": "nowhere"}, "apt install"),
        ({"python3": "echo 9"}, {"VENV": "nowhere"}, "Python 3.11 to 3.14 is needed. python3 is 3.9."),
        ({"python3": "echo 9"}, {"PYTHON": "{}/python3"}, "/python3 is Python 3.9"),
        ({}, {"PYTHON": "{}/python"}, "/python cannot be run as a Python"),
        ({}, {"PYTHON": sys.executable, "VENV": "{}"}, "already exists and was not created by this project"),
        ({}, {"PYTHON": sys.executable, "VENV": "{}/sh/venv"}, "make run VENV="),
    ],
)
def test_an_unsuitable_machine_python_or_folder_is_named_and_not_changed(
    fakes: dict[str, str], environment: dict[str, str], error: str, programs: Path
) -> None:
    for name, script in fakes.items():
        program(programs / name, script)
    before = sorted(programs.iterdir())
    run = bootstrap(programs, **{name: value.format(programs) for name, value in environment.items()})
    assert run.returncode == 2
    assert error in run.stderr
    assert sorted(programs.iterdir()) == before


def test_a_python_without_ensurepip_is_skipped_and_debians_package_is_named(programs: Path) -> None:
    program(programs / "python3.14", "exit 127")  # a shim without an interpreter
    program(programs / "python3.13", 'case "$2" in *version*) echo 13;; *) exit 1;; esac')
    run = bootstrap(programs, VENV="nowhere")
    assert run.returncode == 2
    assert "apt install python3.13-venv" in run.stderr

    program(programs / "python3.12", 'case "$2" in *version*) echo 12;; *ensurepip*) ;; *) echo "$@";; esac')
    run = bootstrap(programs, VENV="nowhere")
    assert (run.returncode, run.stdout) == (0, "scripts/install.py local --venv nowhere\n")


def test_too_little_disk_space_is_reported_in_numbers(installer: Any, tmp_path: Path) -> None:
    with pytest.raises(installer.Refusal, match=r"needs 3000000\.0 GB .* \(2000000\.0 GB afterwards\), and only"):
        installer.check_room(tmp_path / "venv", 1e6, 2e6)
    assert installer.check_room(tmp_path / "venv", 0.0, 0.0) == []


def test_a_complete_installation_is_not_repeated(installer: Any, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    complete = installer.Marker(python=sys.executable, extra="dev", key=installer.requirements_key())
    complete.write(tmp_path)
    run = bootstrap(VENV=tmp_path)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_the_dependencies_of_an_existing_torch_are_kept(installer: Any) -> None:
    left_out = installer.needed_by("torch")
    assert {"torch", "sympy", "filelock"} <= left_out
    kept = {line.split("==")[0] for line in installer.pins_without(left_out).splitlines() if "==" in line}
    assert kept == pins().keys() - left_out
    assert {"aiohttp", "scikit-learn"} <= kept
