"""An isolated environment for image builds: changes to /etc, /run and /var vanish with a build, even a killed one.

buildah and debootstrap expect a machine of their own: they write below /etc and /var, and mount file systems. They run
in mount and PID namespaces that end with this process, with overlays over those folders. They use the machine's
network, and change only the cache folder.

Builds also get this machine's package sources, which the images do not contain: one folder in place of root's home,
with pip's configuration, and one in place of /etc/apt. buildah itself passes on a proxy from the environment, without
writing it to the image.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from testbed import packages
from testbed.cache import Missing, cache_folder, locked

if TYPE_CHECKING:
    from collections.abc import Mapping

_ENTER: Final = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"),
)

_SANDBOX: Final = r"""
set -e
exec 3<"$CACHE"
mkdir "$SANDBOX/run" "$SANDBOX/names"
# In a container, these two are mounts of their own, which an overlay does not show.
cat /etc/resolv.conf > "$SANDBOX/names/resolv.conf"
cat /etc/hosts > "$SANDBOX/names/hosts"
mount -t tmpfs -o mode=755 sandbox "$SANDBOX/run"
for folder in etc run var; do
    upper="$SANDBOX/run/$folder" work="$SANDBOX/run/$folder.work"
    mkdir "$upper" "$work"
    mount -t overlay -o "lowerdir=/$folder,upperdir=$upper,workdir=$work" overlay "/$folder"
done
mount --no-canonicalize --bind /proc/self/fd/3 "$CACHE"
exec 3<&-
for name in resolv.conf hosts; do
    rm -f "/etc/$name"
    cat "$SANDBOX/names/$name" > "/etc/$name"
done
mkdir -p /etc/containers
cp -r "$TOOLS"/etc/containers/. /etc/containers/
# buildah re-executes itself with an empty environment, so its libraries must be found without LD_LIBRARY_PATH.
echo "$LD_LIBRARY_PATH" | tr : '\n' > /etc/ld.so.conf.d/000-tools.conf
unset LD_LIBRARY_PATH
ldconfig -X
exec "$@"
"""
"""A script that mounts the overlays, and mounts the cache folder again, which may be below one of the overlays."""

_PREFIX: Final = "sandbox-"
_TAIL: Final = 4000
"""Number of characters of a failed command's output in the error."""

_REMEDY: Final = "the first time, Debian's and Python's packages must be reachable, and 20 GB free in the cache folder"


def run(script: str, *, makes: str, limit: float, env: Mapping[str, str]) -> None:
    """Run a shell script in an isolated environment with the programs of the package set "build".

    Args:
        script: the script for `sh`.
        makes: a description of the result.
        limit: seconds after which the script is killed.
        env: more variables.

    Raises:
        Missing: the user is not root, or the script failed.
    """
    if os.geteuid() != 0:
        raise Missing("root", "images are built in namespaces: run `make test` as root")
    tools = packages.unpacked("build")
    with locked("sandbox"):
        _sweep()
        with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=_PREFIX, ignore_cleanup_errors=True) as sandbox:
            environment = {
                **os.environ,
                **packages.environment(tools),
                "LC_ALL": "C",
                "DEBOOTSTRAP_DIR": str(tools / "usr/share/debootstrap"),
                "CACHE": str(cache_folder().resolve()),
                "SANDBOX": sandbox,
                "TOOLS": str(tools),
                "TMPDIR": sandbox,
                **env,
            }
            try:
                done = subprocess.run(
                    [*_ENTER, "sh", "-c", _SANDBOX, "sandbox", "sh", "-e", "-c", script],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    check=False,
                    timeout=limit,
                )
            except subprocess.TimeoutExpired as error:
                raise Missing(f"{makes}, which took longer than {limit:.0f} s", _REMEDY) from error
    if done.returncode:
        raise Missing(f"{makes}, which could not be built:\n{done.stdout[-_TAIL:]}", _REMEDY)


def _sweep() -> None:
    """Remove the folders of killed builds; there is no other build while the lock is held."""
    for sandbox in cache_folder().glob(f"{_PREFIX}*"):
        shutil.rmtree(sandbox, ignore_errors=True)


_PIP_OPTIONS: Final = (
    "index-url",
    "extra-index-url",
    "find-links",
    "trusted-host",
    "proxy",
    "timeout",
    "default-timeout",
    "retries",
)
"""pip's options about indexes, apart from certificates."""

_AUTHORITIES: Final = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
"""Variables with a file of trusted certificates."""


def write_home(folder: Path) -> None:
    """Write root's home folder for a build: pip's configuration, certificates, and passwords.

    Wheels below its subfolder ``wheels`` are preferred to those of the index.
    """
    options = _pip_options()
    options["find-links"] = f"/root/wheels {options.get('find-links', '')}".strip()
    lines = [f"{name} = {value}" for name, value in options.items() if name in _PIP_OPTIONS]
    for name in ("cert", "client-cert"):
        if (file := Path(options.get(name, ""))).is_file():
            shutil.copy(file, folder / f"{name}.pem")
            lines.append(f"{name} = /root/{name}.pem")
    (folder / ".config/pip").mkdir(parents=True)
    (folder / ".config/pip/pip.conf").write_text("\n".join(["[global]", *lines, ""]))
    netrc = Path("~/.netrc").expanduser()
    if netrc.is_file():
        shutil.copy(netrc, folder)


def write_apt(folder: Path, *, suite: str) -> None:
    """Write /etc/apt for a build on this release of Debian: this machine's mirror, proxies and passwords."""
    for name in ("apt.conf.d", "auth.conf.d", "preferences.d", "sources.list.d", "trusted.gpg.d"):
        (folder / name).mkdir()
    (folder / "sources.list.d/debian.sources").write_text(_sources(suite))
    dumped = _output("apt-config", "dump").splitlines()
    kept = [line for line in dumped if re.match(r"Acquire::(?!\S*Auto-?Detect)(https?|Check-|Retries)\S* ", line)]
    if authorities := next(filter(None, map(os.environ.get, _AUTHORITIES)), None):
        shutil.copy(authorities, folder / "authorities.pem")
        kept.append('Acquire::https::CAInfo "/etc/apt/authorities.pem";')
    (folder / "apt.conf.d/99-this-machine").write_text("\n".join([*kept, ""]))
    for passwords in [Path("/etc/apt/auth.conf"), *Path("/etc/apt/auth.conf.d").glob("*.conf")]:
        if passwords.is_file():
            shutil.copy(passwords, folder / passwords.relative_to("/etc/apt"))


def mirror(suite: str) -> str:
    """Return the mirror of Debian's packages: this machine's, or debootstrap's default."""
    if own := _archives().get("Debian"):
        return own
    script = (packages.unpacked("build") / "usr/sbin/debootstrap").read_text()
    found = re.search(r'^DEF_MIRROR="(.+)"', script, re.MULTILINE)
    if found is None:
        raise Missing(f"a mirror of Debian {suite}", "name one in this machine's apt sources")
    return found[1]


def proxies() -> dict[str, str]:
    """Return the proxy variables from apt's configuration that the environment lacks."""
    named = _output("apt-config", "shell", "http_proxy", "Acquire::http::Proxy", "https_proxy", "Acquire::https::Proxy")
    found = {name: value for name, value in re.findall(r"^(\w+)='(.*)'$", named, re.MULTILINE) if value != "DIRECT"}
    return {name: value for name, value in found.items() if name not in os.environ}


def _sources(suite: str) -> str:
    """Return the sources file of apt for a release of Debian."""
    places = [(mirror(suite), f"{suite} {suite}-updates")]
    if security := _archives().get("Debian-Security"):
        places.append((security, f"{suite}-security"))
    return "\n".join(
        f"Types: deb\nURIs: {uri}\nSuites: {suites}\nComponents: main\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
        for uri, suites in places
    )


def _archives() -> dict[str, str]:
    """Return the first package archive of each label in this machine's apt sources, by label."""
    targets = _output("apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages")
    found = [line.rpartition(" ") for line in targets.splitlines()]
    return {label: uri.rstrip("/") for label, _, uri in reversed(found)}


def _pip_options() -> dict[str, str]:
    """Return pip's options on this machine, from its files and the environment."""
    options = {}
    if authorities := next(filter(None, map(os.environ.get, _AUTHORITIES)), None):
        options["cert"] = authorities
    listed = _output(sys.executable, "-m", "pip", "config", "list")
    # Options of the environment, which override those of files, are named `:env:.index-url`.
    found = re.findall(r"^(global|install|:env:)\.([\w-]+)=('.*'|\".*\")$", listed, re.MULTILINE)
    for _, name, value in sorted(found, key=lambda option: ("global", "install", ":env:").index(option[0])):
        text = str(ast.literal_eval(value))
        # A folder of this machine does not exist in a build.
        options[name] = " ".join(word for word in text.split() if name != "find-links" or "://" in word)
    return {name: value for name, value in options.items() if value}


def _output(*command: str) -> str:
    """Return the output of a command, or an empty string if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""
