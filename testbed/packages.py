"""Debian's packages without an installation: apt fetches them, dpkg unpacks them below the cache folder.

A set has the named packages, and those of their dependencies that a minimal Debian lacks. apt resolves them as if this
machine had nothing installed, with separate lists and caches: apt uses only the machine's sources, keys and proxy, and
changes nothing on the machine. Root is not needed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from testbed.cache import Missing, cache_folder, locked

if TYPE_CHECKING:
    from collections.abc import Sequence

SetName = Literal["node", "network_policies", "build", "prometheus", "browser", "ssh", "slurm"]

SETS: Final[dict[SetName, tuple[str, ...]]] = {
    "node": ("containerd", "runc", "containernetworking-plugins", "iptables", "conntrack", "iproute2", "kmod", "mount"),
    "network_policies": ("ipset",),
    "build": (
        "buildah",
        "skopeo",
        "zstd",
        "golang-github-containers-common",
        "golang-github-containers-image",
        "debootstrap",
        "debian-archive-keyring",
        "gpgv",
    ),
    "prometheus": ("prometheus",),
    "browser": ("chromium", "fonts-dejavu-core", "fonts-liberation"),
    "ssh": ("openssh-server", "openssh-client"),
    "slurm": ("slurmctld", "slurmd", "slurm-client", "munge"),
}
"""The packages of each set: for running pods, for enforcing NetworkPolicies, for building images, Prometheus with
promtool, a browser with fonts, a server and client of SSH, and SLURM with its authentication."""

_ALONE: Final[frozenset[SetName]] = frozenset({"prometheus"})
"""Sets that omit dependencies, because only the packages' services and web pages need the dependencies."""

_ON_EVERY_DEBIAN: Final = ("?essential", "apt")
"""Packages that every Debian has; they and their dependencies, such as the C library, are not unpacked."""

_MERGED: Final = ("bin", "sbin", "lib", "lib64")
"""Folders that are merged with those of the same name below usr/, as in Debian since 2023."""

_ALTERNATIVES: Final = {
    "xtables-nft-multi": tuple(
        f"{family}tables{what}" for family in ("ip", "ip6") for what in ("", "-save", "-restore")
    )
}
"""Links below usr/sbin that an installation would create, by the program that they point to."""

_PRIVATE: Final = ("pulseaudio",)
"""Library folders that other libraries find by the absolute path of an installation."""

_LAYOUT: Final = 2
"""The version of the unpacking, which must be raised when the unpacking changes."""

_REMEDY: Final = "these tests need Debian or Ubuntu, whose packages they unpack below the cache folder"


def unpacked(name: SetName) -> Path:
    """Return the root folder of a set; fetch and unpack the set if it is missing.

    Raises:
        Missing: the machine runs neither Debian nor Ubuntu, or apt cannot get the packages.
    """
    root = _root(name)
    if not root.exists():
        with locked("packages"):
            if not root.exists():
                _make(name, root)
    return root


def is_ready(name: SetName) -> bool:
    """Return whether :func:`unpacked` will find the set without fetching it."""
    return _root(name).exists()


def environment(root: Path) -> dict[str, str]:
    """Return variables that put the programs and libraries of a set first."""
    programs = [root / "usr" / folder for folder in ("sbin", "bin")]
    libraries = list((root / "usr/lib").glob("*-linux-gnu*"))
    private = [folder for library in libraries for name in _PRIVATE if (folder := library / name).is_dir()]
    return {
        "PATH": os.pathsep.join([*map(str, programs), "/usr/sbin", "/usr/bin", "/sbin", "/bin"]),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, [*libraries, *private])),
        "XTABLES_LIBDIR": os.pathsep.join(str(library / "xtables") for library in libraries),
    }


def _root(name: SetName) -> Path:
    """Return the folder of a set; it depends on the packages and the release of the distribution."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    inputs = (release.get("ID"), release.get("VERSION_ID"), platform.machine(), SETS[name], _LAYOUT)
    digest = hashlib.sha256(repr(inputs).encode()).hexdigest()[:8]
    return cache_folder() / "packages" / f"{name}-{digest}"


def _make(name: SetName, root: Path) -> None:
    """Fetch and unpack a set; the folder appears when it is complete."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise Missing(f"`{tool}`, which gets Debian's packages", _REMEDY)
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix="tmp-", ignore_cleanup_errors=True) as scratch:
        apt = _Apt(Path(scratch) / "apt")
        everywhere = apt.closure(SETS[name] if name in _ALONE else _ON_EVERY_DEBIAN)
        needed = [p for p in apt.closure(SETS[name]) if p not in everywhere or p.partition("=")[0] in SETS[name]]
        archives = apt.fetched(sorted(needed))
        made = Path(scratch) / "root"
        for folder in _MERGED:
            (made / "usr" / folder).mkdir(parents=True)
            (made / folder).symlink_to(f"usr/{folder}")
        for archive in archives:
            _unpack(archive, made)
        _point_links_inside(made)
        _add_alternatives(made)
        made.chmod(0o755)
        made.rename(root)
    _remove_others(root, name)


class _Apt:
    """The machine's apt with its sources and a separate, empty state."""

    def __init__(self, folder: Path) -> None:
        self._archives = folder / "archives"
        for needed in ("state/lists/partial", "cache/archives/partial", "archives"):
            (folder / needed).mkdir(parents=True)
        (folder / "status").touch()
        self._configuration = folder / "apt.conf"
        self._configuration.write_text(
            # Update hooks of the machine are for its own lists and caches.
            "#clear APT::Update::Pre-Invoke;\n#clear APT::Update::Post-Invoke;\n"
            "#clear APT::Update::Post-Invoke-Success;\n#clear DPkg::Post-Invoke;\n"
            f'Dir::State "{folder}/state";\nDir::State::status "{folder}/status";\nDir::Cache "{folder}/cache";\n'
            # Without this, root's apt fetches as a user who cannot read the cache folder.
            'APT::Sandbox::User "root";\n'
            'APT::Install-Recommends "false";\nAPT::Install-Suggests "false";\nDebug::NoLocking "true";\n'
            'Acquire::Languages "none";\nAcquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";\n'
            'Acquire::Retries "3";\n'
        )
        # An unreachable source may be irrelevant, so errors are reported only if a later command fails.
        self._complaints = self._answer("update").stderr

    def closure(self, packages: Sequence[str]) -> set[str]:
        """Return the packages and all their dependencies, as name=version."""
        output = self._run("--print-uris", "install", *packages)
        files = re.findall(r"^'\S+' (\S+)\.deb ", output, re.MULTILINE)
        return {"{}={}".format(*urllib.parse.unquote(file).split("_")[:2]) for file in files}

    def fetched(self, packages: Sequence[str]) -> list[Path]:
        """Fetch the packages, check their hashes against the signed lists, and return their files."""
        self._run("download", *packages)
        return sorted(self._archives.glob("*.deb"))

    def _run(self, *arguments: str) -> str:
        done = self._answer(*arguments)
        if done.returncode:
            words = " ".join((self._complaints + done.stderr).split()) or f"exit code {done.returncode}"
            raise Missing(f"Debian's packages (`apt-get {arguments[0]}` said: {words})", _REMEDY)
        return done.stdout

    def _answer(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["apt-get", "-c", str(self._configuration), "-qq", "-y", *arguments]
        environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
        try:
            return subprocess.run(
                command,
                cwd=self._archives,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=900,
            )
        except subprocess.TimeoutExpired as error:
            raise Missing("Debian's packages (apt-get took longer than 15 minutes)", _REMEDY) from error


def _unpack(archive: Path, root: Path) -> None:
    """Unpack a package below the root, without setuid bits and capabilities."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as contents:
        subprocess.run(
            ["tar", "-x", "--keep-directory-symlink", "--no-same-owner", "--no-same-permissions", "-C", root],
            stdin=contents.stdout,
            check=True,
        )
    if contents.returncode:
        raise Missing(f"{archive.name}, which dpkg-deb cannot read", "try again: the file may be damaged")


def _point_links_inside(root: Path) -> None:
    """Redirect absolute links to files of the set, if the set has these files."""
    for folder, folders, files in os.walk(root):
        for link in (Path(folder, name) for name in [*folders, *files]):
            if not link.is_symlink() or not (target := link.readlink()).is_absolute():
                continue
            inside = root / target.relative_to("/")
            if inside.exists():
                link.unlink()
                link.symlink_to(os.path.relpath(inside.resolve(), link.parent))


def _add_alternatives(root: Path) -> None:
    """Create the links of :data:`_ALTERNATIVES` whose program is in the set."""
    for program, names in _ALTERNATIVES.items():
        for name in names:
            if (root / "usr/sbin" / program).exists():
                (root / "usr/sbin" / name).symlink_to(program)


def _remove_others(root: Path, name: SetName) -> None:
    """Remove outdated folders of this set."""
    for other in root.parent.glob(f"{name}-*"):
        if other != root:
            shutil.rmtree(other, ignore_errors=True)
