"""Pins the newest versions of all requirements of the project in constraints.txt.

The versions are resolved for the oldest supported Python, and then checked for the others. The file contains only names
and versions, so that each user's pip can use its own package index.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST, OTHERS = "3.11", ("3.12", "3.13", "3.14")
SOURCE_ONLY = {"python-etcd": ("0.4.5", ("dnspython>=1.13", "urllib3>=1.7.1"))}
"""Packages without wheels, which pip cannot resolve for another Python: the latest version and its requirements."""
HEADER = """\
# The versions with which the project is tested; `make run` and `make test` install these. Renewed by `make upgrade`.
"""


def requirements(project: dict[str, Any]) -> list[str]:
    """Return the requirements of the project and all its extras, except the project and packages without wheels."""
    extras = project["optional-dependencies"].values()
    every = {*project["dependencies"], *(requirement for extra in extras for requirement in extra)}
    every |= {need for _, needs in SOURCE_ONLY.values() for need in needs}
    return sorted(requirement for requirement in every if not requirement.startswith((project["name"], *SOURCE_ONLY)))


def resolve(pip: Path, python: str, wanted: list[str]) -> dict[str, str]:
    """Return the versions that pip would install for a Python, by name, except packages without wheels."""
    command = [str(pip), "install", "--dry-run", "--quiet", "--ignore-installed", "--report", "-"]
    command += ["--python-version", python, "--only-binary", ":all:", *wanted]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = [item["metadata"] for item in json.loads(run.stdout)["install"]]
    return {re.sub(r"[-_.]+", "-", each["name"]).lower(): each["version"] for each in found}


def main() -> int:
    """Resolve the versions and write the file."""
    wanted = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
    with tempfile.TemporaryDirectory() as folder:
        venv.EnvBuilder(symlinks=True, with_pip=True).create(folder)
        pip = Path(folder) / "bin" / "pip"
        # An older pip would download all packages.
        subprocess.run([str(pip), "install", "--quiet", "--upgrade", "pip"], check=True)
        pins = resolve(pip, OLDEST, wanted)
        pinned = [f"{name}=={version}" for name, version in sorted(pins.items())]
        for python in OTHERS:
            missing = resolve(pip, python, pinned).keys() - pins.keys()
            print(f"Python {python}: {len(pinned)} pins" + (f"; not pinned: {', '.join(missing)}" if missing else ""))
    pins |= {name: version for name, (version, _) in SOURCE_ONLY.items()}
    lines = [f"{name}=={version}\n" for name, version in sorted(pins.items())]
    CONSTRAINTS.write_text(HEADER + "".join(lines))
    print(f"{CONSTRAINTS.name} is updated; run `make test` to install and test the versions.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
