"""A Python for test programs that finds the oldest supported torch before this environment's torch.

CUDA's libraries are stubs (:mod:`testbed.cuda_stubs`); everything else is torch as released.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Final

from testbed import cuda_stubs
from testbed.cache import Missing, cache_folder, locked

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION: Final = "2.8.0"

_LAST_PYTHON: Final = (3, 13)
_LAYOUT: Final = 1
_GIGABYTES: Final = 4.0
"""Gigabytes of disk that the installation needs; 1.8 remain in use."""

_WITH_CUDA: Final = ("nvidia-cuda-runtime-cu12==12.8.90", "nvidia-cuda-cupti-cu12==12.8.90")
"""The packages with functions that torch calls during its import."""


def make_python(folder: Path) -> Path:
    """Create a Python with the packages of this one and the oldest supported torch, and return its path.

    Args:
        folder: a folder that does not exist yet.

    Raises:
        Missing: this torch cannot be installed on this machine.
    """
    torch = packages()
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    (own,) = folder.glob("lib/python3*/site-packages")
    behind = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    lines = [f"import site; site.addsitedir({path!r})" for path in (str(torch), *behind)]
    (own / "oldest-torch.pth").write_text("\n".join(lines) + "\n")
    return folder / "bin" / "python"


def packages() -> Path:
    """Return the folder with the packages that precede this environment's; create the folder if it is missing.

    Raises:
        Missing: a requirement is missing on this machine.
    """
    folder = _folder()
    if not folder.exists():
        with locked("torch"):
            if not folder.exists():
                _make(folder)
    return folder


def is_ready() -> bool:
    """Return whether the folder of :func:`packages` exists."""
    return _folder().exists()


def _folder() -> Path:
    return cache_folder() / f"torch-{VERSION}-{sys.implementation.cache_tag}-{_LAYOUT}"


def _make(folder: Path) -> None:
    if sys.version_info[:2] > _LAST_PYTHON:
        newest = ".".join(map(str, _LAST_PYTHON))
        raise Missing(f"torch {VERSION} for Python {platform.python_version()}", f"run the tests on Python {newest}")
    if shutil.disk_usage(folder.parent).free < _GIGABYTES * 1e9:
        raise Missing(f"{_GIGABYTES:g} GB of disk for torch {VERSION}", f"free some below {folder.parent}")
    cuda = _WITH_CUDA if platform.machine() == "x86_64" else ()
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="tmp-", ignore_cleanup_errors=True) as scratch:
        made = Path(scratch) / "packages"
        _install([f"torch=={VERSION}", *cuda], made, Path(scratch))
        cuda_stubs.write_libraries(made / "torch" / "lib", made / "torch" / "lib")
        made.rename(folder)


def _install(packages: Sequence[str], target: Path, scratch: Path) -> None:
    tool = (
        [sys.executable, "-m", "pip", "install", "--no-compile", "--no-cache-dir", "--quiet"]
        if importlib.util.find_spec("pip")
        else ["uv", "pip", "install", "--python", sys.executable, "--no-cache", "--quiet"]
    )
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        done = subprocess.run(
            [*tool, "--no-deps", "--target", str(target), *packages],
            env={**environment, "PIP_ROOT_USER_ACTION": "ignore"},
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"torch {VERSION}", f"{tool[-1]} could not be run: {error}") from None
    if done.returncode:
        words = " ".join(done.stderr.split())[-300:]
        raise Missing(f"torch {VERSION}", f"the package index must be reachable (pip said: {words})")
