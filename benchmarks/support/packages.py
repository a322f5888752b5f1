"""Packages of baselines, installed from the package index below the user's cache folder; the project needs none."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Final

from testbed.cache import Missing, cache_folder, locked

_INSTALL_TIMEOUT: Final = 300.0


def installed(name: str, version: str) -> Path:
    """Return the folder with a package and those of its requirements that this environment lacks.

    Raises:
        Missing: the package index cannot be reached.
    """
    folder = cache_folder() / f"{name}-{version}-{sys.implementation.cache_tag}"
    with locked(name):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix="tmp-") as scratch:
                _install(name, version, Path(scratch)).rename(folder)
    return folder


def _install(name: str, version: str, scratch: Path) -> Path:
    """Install into a new environment, which finds the packages of this one; return its folder of packages."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(scratch / "venv")
    [own] = scratch.glob("venv/lib/python3*/site-packages")
    known = [path for path in sys.path if Path(path).name == "site-packages"]
    found = own / "known.pth"
    found.write_text("\n".join(f"import site; site.addsitedir({path!r})" for path in known))
    pip = [sys.executable, "-m", "pip", "--python", str(scratch / "venv" / "bin" / "python"), "install", "--quiet"]
    done = subprocess.run(
        [*pip, "--no-cache-dir", f"{name}=={version}"],
        env={**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=_INSTALL_TIMEOUT,
    )
    if done.returncode:
        words = " ".join(done.stderr.split())[-300:]
        raise Missing(f"{name} {version}", f"the package index must be reachable (pip said: {words})")
    found.unlink()
    return own
