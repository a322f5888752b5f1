"""Makes the virtual environment and installs the project into it; done in a moment when all is there already.

scripts/bootstrap.sh runs this with the Python on which the environment is to stand, so only the standard library is
used. What has been installed is written down, in the environment, when it is complete: one that was interrupted is
never taken for a whole one, and one that was made by somebody else is never touched.

Where the Python was chosen by the user and has torch, the environment sees that Python's packages behind its own, and
the pins of torch and of what torch needs are left out. `venv --system-site-packages` would not do: for a Python that is
itself a virtual environment's it shows the packages of the Python below.
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


class Refusal(Exception):  # noqa: N818 - what the user gave cannot be; the message says what to change
    """Nothing was installed; the message says what to change."""


@dataclass(frozen=True)
class Marker:
    """What is known of an environment.

    Attributes:
        python: the Python on which it stands.
        torch: the version of that Python's torch, where it is used; else empty.
        extra: what was installed completely, local or dev; empty while that is not so.
        key: of what was installed: changes when the project's requirements do.
    """

    python: str
    torch: str = ""
    extra: str = ""
    key: str = ""

    @classmethod
    def read(cls, environment: Path) -> Marker | None:
        """What an environment says of itself; None where it is not one of ours."""
        try:
            return cls(**json.loads((environment / MARKER).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, environment: Path) -> None:
        """Let the environment say this of itself."""
        temporary = environment / f"{MARKER}.tmp"
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(environment / MARKER)

    def covers(self, extra: str) -> bool:
        """Whether nothing is left to be done."""
        return self.key == requirements_key() and extra in {self.extra, "local"}


def requirements_key() -> str:
    """Changes when what has to be installed changes, or the clone moves: the environment points to it by its path."""
    parts = [str(ROOT).encode(), *((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def normalized(name: str) -> str:
    """A distribution's name as all its spellings have it in common."""
    return re.sub(r"[-_.]+", "-", name).lower()


def torch_here() -> str:
    """The version of this Python's torch if it is there and new enough, else an empty text."""
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
    """The leading numbers of a version, for comparison."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+", maxsplit=1)[0])[:3])


def needed_by(name: str) -> set[str]:
    """A distribution and, of what it needs, directly or not, all that this Python has."""
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
    """The lines of constraints.txt that pin none of these."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "\n".join(line for line in lines if normalized(line.split("==")[0]) not in names)


def check_room(environment: Path, download: float, disk: float) -> list[str]:
    """Flags for pip with which there is room for everything.

    Raises:
        Refusal: there is none.
    """
    cache = Path(os.environ.get("PIP_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "pip")
    free = {place: shutil.disk_usage(nearest(place)).free / 1e9 for place in (environment, cache.expanduser())}
    least = download + disk  # what is downloaded stands beside the environment until it is unpacked
    if free[environment] < least:
        raise Refusal(
            f"{environment} needs {least:.1f} GB while it is being made ({disk:.1f} GB afterwards), and only "
            f"{free[environment]:.1f} GB are free there; free some, or put it elsewhere: make run VENV=/other/folder"
        )
    same = nearest(environment).stat().st_dev == nearest(cache.expanduser()).stat().st_dev
    return ["--no-cache-dir"] if free[cache.expanduser()] < download + (least if same else 0) else []


def nearest(path: Path) -> Path:
    """The path, or the closest folder above it that exists."""
    return path if path.exists() else nearest(path.parent)


def make(environment: Path, marker: Marker, *, with_pip: bool) -> None:
    """Makes an empty environment, on this Python."""
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
    """Installs the project with an extra.

    Returns:
        The installer's exit code.
    """
    uv = None if marker.torch else shutil.which("uv")  # uv does not see what stands behind an environment
    python = environment / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    temporary = environment / "tmp"  # /tmp may be small, or in memory
    temporary.mkdir(exist_ok=True)
    if marker.torch:
        constraints = temporary / "constraints.txt"
        constraints.write_text(pins_without(needed_by("torch")))
    if not uv and not any(environment.glob("lib/python3*/site-packages/pip")):  # uv was there when it was made
        subprocess.run([python, "-m", "ensurepip"], stdout=subprocess.DEVNULL, check=True)
    installer = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install", *flags]
    if marker.torch:
        installer.append("--quiet")  # it would name each package that is there already
    command = [*map(str, installer), "--constraint", str(constraints), "--editable", f"{ROOT}[{extra}]"]
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore", "TMPDIR": str(temporary)}
    try:
        return subprocess.run(command, cwd=ROOT, env={**os.environ, **quiet}, check=False).returncode
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def announce(environment: Path, marker: Marker, download: float, disk: float) -> None:
    """Says what will be installed, how large it is, and where."""
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
    """Gigabytes for people."""
    return f"{gigabytes:.1f} GB" if gigabytes >= 1 else f"{gigabytes * 1000:.0f} MB"


def bring_about(environment: Path, extra: str, *, chosen: bool) -> int:
    """Sees to it that the environment has everything.

    Args:
        environment: where it stands, or will.
        extra: local or dev.
        chosen: whether the user chose this Python.

    Returns:
        The exit code.
    """
    before = Marker.read(environment)
    if not os.access(ROOT, os.W_OK):
        raise Refusal(f"{ROOT} cannot be written to; clone the project into a folder of your own.")
    if before is None and environment.is_dir() and any(environment.iterdir()):
        raise Refusal(
            f"{environment} is there already and was not made by this; remove it, or choose another folder: "
            "make run VENV=/other/folder"
        )
    own = Path(sys.prefix).resolve() == environment.resolve()
    if before and chosen and not own and before.python != sys.executable:
        before = None  # the user wants another Python
    if before and before.covers(extra):
        return 0
    if own:
        raise Refusal(f"PYTHON is {environment}'s own; name the Python on which it shall stand, or leave PYTHON out.")
    if before and before.torch and not chosen and Path(before.python).exists():
        os.execv(before.python, [before.python, __file__, extra, "--venv", str(environment), "--chosen"])
    if before and (not before.extra or not (environment / "bin" / "python").exists()):
        print(f"An earlier installation into {environment} was not completed; it begins anew.")
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
    if before and code > 0:  # it gave up by itself, and has put back what it had changed
        before.write(environment)
    print("The installation failed; the reason stands above. Once it is removed, the same command tries again.")
    return 1


def main() -> int:
    """Reads the command line and keeps others from installing at the same time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("extra", choices=("local", "dev"))
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--check", action="store_true", help="only tell, by the exit code, whether all is there")
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
        print("Another `make` is installing; this one waits for it.", flush=True)
        fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        return bring_about(environment, options.extra, chosen=options.chosen)
    except subprocess.CalledProcessError as error:
        print(f"{environment} could not be made: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 141  # whoever read the output went away
    except OSError as error:
        print(
            f"{error.filename or environment} cannot be written: {error.strerror}; put the environment elsewhere: "
            "make run VENV=/other/folder",
            file=sys.stderr,
        )
        return 2
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted; the next `make` begins the installation anew.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
