"""Creates the virtual environment and installs the project into it, unless it is up to date.

scripts/bootstrap.sh runs this with the Python of the environment, so only the standard library is used. A marker file
in the environment records the installed extra only after a complete installation. So an interrupted installation is
repeated, and an environment without a marker is never changed.

If the user chose the Python and it has torch, the environment also sees that Python's packages, and the pins of torch
and its requirements are left out. `venv --system-site-packages` is not sufficient: if that Python belongs to a
virtual environment, the new one would see the packages of the base Python instead.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKER = "elastic-operator.json"

# Measured on Linux x86_64, Python 3.11, with torch 2.15: in GB, of the dev extra.
DOWNLOAD_GB, DISK_GB = 3.1, 6.2
WITHOUT_TORCH_DOWNLOAD_GB, WITHOUT_TORCH_DISK_GB = 0.14, 0.6


class Refusal(Exception):  # noqa: N818 - the input is wrong
    """Nothing was installed because of the user's input or environment; the message says what to change."""


@dataclass(frozen=True)
class Marker:
    """The marker of an environment.

    Attributes:
        python: the path of the Python that created the environment.
        torch: the version of that Python's torch, if it is used; otherwise empty.
        extra: the completely installed extra, local or dev; empty if there is none.
        key: the :func:`requirements_key` of the installation.
    """

    python: str
    torch: str = ""
    extra: str = ""
    key: str = ""

    @classmethod
    def read(cls, environment: Path) -> Marker | None:
        """Return the marker of an environment; None if it has none."""
        try:
            return cls(**json.loads((environment / MARKER).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, environment: Path) -> None:
        """Write the marker into an environment."""
        temporary = environment / f"{MARKER}.tmp"
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(environment / MARKER)

    def covers(self, extra: str) -> bool:
        """Return whether the extra is installed and up to date."""
        return self.key == requirements_key() and extra in {self.extra, "local"}


def requirements_key() -> str:
    """Return a hash of the requirements and of the path of the clone, to which the environment refers."""
    parts = [str(ROOT).encode(), *((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def normalized(name: str) -> str:
    """Return the normalized name of a distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()


def torch_here() -> str:
    """Return the version of this Python's torch if it is new enough; otherwise an empty string."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
    least = re.search(r'"torch>=([0-9.]+)', (ROOT / "pyproject.toml").read_text())
    if least and numbers(version) < numbers(least[1]):
        print(f"torch {version} of {sys.executable} is older than {least[1]}, so a newer one is installed.")
        return ""
    return version


def numbers(version: str) -> tuple[int, ...]:
    """Return the first numbers of a version, for comparison."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+", maxsplit=1)[0])[:3])


def needed_by(name: str) -> set[str]:
    """Return the names of a distribution and of its direct and indirect requirements, if this Python has them."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        wanted = waiting.pop()
        if wanted in seen:
            continue
        seen.add(wanted)
        name, extras = re.findall(r"^([\w.-]+)\s*(?:\[(.*?)\])?", wanted)[0]
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(normalized(name))
        for requirement in requirements:
            for_extra = re.search(r"extra\s*==\s*[\"'](.*?)[\"']", requirement)
            if for_extra is None or normalized(for_extra[1]) in map(normalized, extras.split(",")):
                waiting.append(requirement.split(";")[0])
    return found


def pins_without(names: set[str]) -> str:
    """Return the lines of constraints.txt that pin other distributions."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "\n".join(line for line in lines if normalized(line.split("==")[0]) not in names)


def check_room(environment: Path, download: float, disk: float) -> list[str]:
    """Return the flags with which the disk space is sufficient for pip.

    Raises:
        Refusal: the disk space is not sufficient.
    """
    cache = Path(os.environ.get("PIP_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "pip")
    free = {place: shutil.disk_usage(nearest(place)).free / 1e9 for place in (environment, cache.expanduser())}
    least = download + disk  # downloads are kept until they are unpacked
    if free[environment] < least:
        raise Refusal(
            f"{environment} needs {least:.1f} GB during the installation ({disk:.1f} GB afterwards), and only "
            f"{free[environment]:.1f} GB are free there; free some, or use another folder: make run VENV=/other/folder"
        )
    same = nearest(environment).stat().st_dev == nearest(cache.expanduser()).stat().st_dev
    return ["--no-cache-dir"] if free[cache.expanduser()] < download + (least if same else 0) else []


def nearest(path: Path) -> Path:
    """Return the path, or its closest existing parent."""
    return path if path.exists() else nearest(path.parent)


def make(environment: Path, marker: Marker, *, with_pip: bool) -> None:
    """Create an empty environment with this Python."""
    if environment.exists():
        shutil.rmtree(environment)
    environment.mkdir(parents=True, exist_ok=True)
    marker.write(environment)
    venv.EnvBuilder(symlinks=True, with_pip=with_pip).create(environment)
    if marker.torch:
        packages = next(environment.glob("lib/python3*/site-packages"))
        behind = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
        (packages / "packages-of-the-python-below.pth").write_text("\n".join(behind) + "\n")


def install(environment: Path, marker: Marker, extra: str, flags: list[str]) -> int:
    """Install the project with an extra, and return the installer's exit code."""
    uv = None if marker.torch else shutil.which("uv")  # uv does not see the packages of the other Python
    python = environment / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    temporary = environment / "tmp"  # /tmp may be small or in memory
    temporary.mkdir(exist_ok=True)
    if marker.torch:
        constraints = temporary / "constraints.txt"
        constraints.write_text(pins_without(needed_by("torch")))
    if not uv and not any(environment.glob("lib/python3*/site-packages/pip")):  # created while uv was installed
        subprocess.run([python, "-m", "ensurepip"], stdout=subprocess.DEVNULL, check=True)
    installer = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install", *flags]
    if marker.torch:
        installer.append("--quiet")  # otherwise pip lists each existing package
    command = [*map(str, installer), "--constraint", str(constraints), "--editable", f"{ROOT}[{extra}]"]
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore", "TMPDIR": str(temporary)}
    try:
        return subprocess.run(command, cwd=ROOT, env={**os.environ, **quiet}, check=False).returncode
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def announce(environment: Path, marker: Marker, download: float, disk: float) -> None:
    """Print what is installed, its size, and where."""
    version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    with_torch = f" and its torch {marker.torch}" if marker.torch else ""
    print(f"Installing into {environment}, with {version} ({marker.python}){with_torch}.")
    largest = "" if marker.torch else ", nearly all of it torch and CUDA's libraries"
    print(f"  download  about {size(download)}{largest}")
    print(f"  on disk   about {size(disk)}")
    if not marker.torch:
        where = sys.executable if torch_here() else "/the/python/that/has/it"
        print(f"To use a torch that is installed already: make run PYTHON={where}")
    sys.stdout.flush()


def size(gigabytes: float) -> str:
    """Return gigabytes as text."""
    return f"{gigabytes:.1f} GB" if gigabytes >= 1 else f"{gigabytes * 1000:.0f} MB"


def bring_about(environment: Path, extra: str, *, chosen: bool) -> int:
    """Create or update the environment.

    Args:
        environment: the path of the environment.
        extra: the extra to install, local or dev.
        chosen: whether the user chose this Python.

    Returns:
        The exit code.
    """
    before = Marker.read(environment)
    if not os.access(ROOT, os.W_OK):
        raise Refusal(f"{ROOT} cannot be written to; clone the project into a folder of your own.")
    if before is None and environment.is_dir() and any(environment.iterdir()):
        raise Refusal(
            f"{environment} already exists and was not created by this project; remove it, or choose another folder: "
            "make run VENV=/other/folder"
        )
    own = Path(sys.prefix).resolve() == environment.resolve()
    if before and chosen and not own and before.python != sys.executable:
        before = None  # the user chose another Python
    if before and before.covers(extra):
        return 0
    if own:
        raise Refusal(f"PYTHON is the Python of {environment} itself; name another Python, or omit PYTHON.")
    if before and before.torch and not chosen and Path(before.python).exists():
        os.execv(before.python, [before.python, __file__, extra, "--venv", str(environment), "--chosen"])
    if before and (not before.extra or not (environment / "bin" / "python").exists()):
        print(f"An earlier installation into {environment} was not completed; it starts again.")
        before = None

    marker = before or Marker(python=sys.executable, torch=torch_here() if chosen else "")
    download, disk = WITHOUT_TORCH_DOWNLOAD_GB, WITHOUT_TORCH_DISK_GB
    if not (before or marker.torch):
        download, disk = DOWNLOAD_GB, DISK_GB
    flags = check_room(environment, download, disk)
    began = time.monotonic()
    if before:
        print(f"Bringing {environment} up to date; only what is missing is downloaded.", flush=True)
        replace(before, extra="", key="").write(environment)
        extra = before.extra if extra == "local" else extra
    else:
        announce(environment, marker, download, disk)
        make(environment, marker, with_pip=bool(marker.torch) or shutil.which("uv") is None)
    code = install(environment, marker, extra, flags)
    if code == 0:
        replace(marker, extra=extra, key=requirements_key()).write(environment)
        print(f"Installed in {time.monotonic() - began:.0f} s.", flush=True)
        return 0
    if before and code > 0:  # the installer failed, and has restored the old packages
        before.write(environment)
    print("The installation failed. Correct the problem that is shown above, then run the same command again.")
    return 1


def main() -> int:
    """Read the command line, and install after other installations have ended."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("extra", choices=("local", "dev"))
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--check", action="store_true", help="only check: exit with 0 if the environment is up to date")
    parser.add_argument("--chosen", action="store_true", help="the user chose this Python")
    options = parser.parse_args()
    environment = ROOT / options.venv.expanduser()
    if options.check:
        marker = Marker.read(environment)
        return 0 if marker and marker.covers(options.extra) else 1
    folder = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("Another `make` is installing; waiting for it.", flush=True)
        fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        return bring_about(environment, options.extra, chosen=options.chosen)
    except subprocess.CalledProcessError as error:
        print(f"{environment} could not be created: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 141  # the reader of the output has closed it
    except OSError as error:
        print(
            f"{error.filename or environment} cannot be written: {error.strerror}; use another folder: "
            "make run VENV=/other/folder",
            file=sys.stderr,
        )
        return 2
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted; the next `make` starts the installation again.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
