"""Pins the newest versions of everything that any part of the project needs, in constraints.txt.

They are resolved for the oldest Python that is supported, so that they fit all, and then tried for the others. Only
names and versions are written: from where packages come is for each user's own pip to say.
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
"""What has no wheels, without which pip resolves for no other Python: its version, the last one, and what it needs."""
HEADER = """\
# The versions with which the project is tested; `make run` and `make test` install these. Renewed by `make upgrade`.
"""


def requirements(project: dict[str, Any]) -> list[str]:
    """What the project needs with all its extras, leaving out what it needs of itself."""
    extras = project["optional-dependencies"].values()
    every = {*project["dependencies"], *(requirement for extra in extras for requirement in extra)}
    every |= {need for _, needs in SOURCE_ONLY.values() for need in needs}
    return sorted(requirement for requirement in every if not requirement.startswith((project["name"], *SOURCE_ONLY)))


def resolve(pip: Path, python: str, wanted: list[str]) -> dict[str, str]:
    """The versions that pip would install for a Python, by name. Packages without wheels do not count."""
    command = [str(pip), "install", "--dry-run", "--quiet", "--ignore-installed", "--report", "-"]
    command += ["--python-version", python, "--only-binary", ":all:", *wanted]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = [item["metadata"] for item in json.loads(run.stdout)["install"]]
    return {re.sub(r"[-_.]+", "-", each["name"]).lower(): each["version"] for each in found}


def main() -> int:
    """Resolves, tries and writes."""
    wanted = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
    with tempfile.TemporaryDirectory() as folder:
        venv.EnvBuilder(symlinks=True, with_pip=True).create(folder)
        pip = Path(folder) / "bin" / "pip"
        # An older pip downloads all that it resolves.
        subprocess.run([str(pip), "install", "--quiet", "--upgrade", "pip"], check=True)
        pins = resolve(pip, OLDEST, wanted)
        pinned = [f"{name}=={version}" for name, version in sorted(pins.items())]
        for python in OTHERS:
            missing = resolve(pip, python, pinned).keys() - pins.keys()
            print(f"Python {python}: {len(pinned)} pins" + (f"; not pinned: {', '.join(missing)}" if missing else ""))
    pins |= {name: version for name, (version, _) in SOURCE_ONLY.items()}
    lines = [f"{name}=={version}\n" for name, version in sorted(pins.items())]
    CONSTRAINTS.write_text(HEADER + "".join(lines))
    print(f"{CONSTRAINTS.name} is renewed; `make test` installs and tries it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
