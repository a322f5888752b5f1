"""Installation without package sources: an interrupted installation and its repetition."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

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


def test_a_failed_installation_is_reported_and_repeated(tmp_path: Path) -> None:
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
    assert f"An earlier installation into {environment} was not completed; it begins anew." in second.stdout
    assert not (environment / "left behind").exists()


def test_the_environment_has_the_torch_of_the_base_python(tmp_path: Path) -> None:
    install(tmp_path / "venv")  # this needs nothing that pip would have added
    found = subprocess.run(
        [tmp_path / "venv" / "bin" / "python", "-c", "import importlib.metadata as m; print(m.version('torch'))"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    here = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout.split("+")[0].strip() == here.stdout.split("+")[0].strip()
