"""Installation without package sources: a failed installation and its repetition."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


def install(environment: Path) -> subprocess.CompletedProcess[str]:
    """Run what `make install` runs, with this Python and its torch; pip finds nothing to download."""
    nothing = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PYTHON": sys.executable, "VENV": str(environment)}
    return subprocess.run(
        [ROOT / "scripts" / "bootstrap.sh", "local"],
        env={**os.environ, **nothing},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_failed_installation_is_reported_and_repeated_with_the_torch_of_the_base_python(tmp_path: Path) -> None:
    environment = tmp_path / "an environment"
    first = install(environment)
    assert first.returncode == 1, first.stdout
    assert f"Installing into {environment}, with Python 3." in first.stdout
    assert "and its torch 2." in first.stdout
    assert "The installation failed" in first.stdout
    assert json.loads((environment / "elastic-operator.json").read_text())["extra"] == ""

    (environment / "left behind").touch()
    second = install(environment)
    assert second.returncode == 1, second.stdout
    assert f"An earlier installation into {environment} was not completed; it starts again." in second.stdout
    assert not (environment / "left behind").exists()

    # Both installations fail before pip installs a package; torch is that of the base Python.
    versions = []
    for python in (environment / "bin" / "python", sys.executable):
        ask = [python, "-c", "import importlib.metadata as m; print(m.version('torch').split('+')[0])"]
        versions.append(subprocess.run(ask, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout)
    assert versions[0] == versions[1]
