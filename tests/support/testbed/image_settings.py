"""This machine's package sources for image builds; the images do not contain them.

Builds get two folders: one in place of root's home, with pip's configuration, and one in place of /etc/apt.
buildah itself passes on a proxy from the environment, without writing it to the image.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.support.testbed import packages
from tests.support.testbed.cache import Missing

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
    """The mirror of Debian's packages: this machine's, or debootstrap's default."""
    if own := _archives().get("Debian"):
        return own
    script = (packages.unpacked("build") / "usr/sbin/debootstrap").read_text()
    found = re.search(r'^DEF_MIRROR="(.+)"', script, re.MULTILINE)
    if found is None:
        raise Missing(f"a mirror of Debian {suite}", "name one in this machine's apt sources")
    return found[1]


def proxies() -> dict[str, str]:
    """Proxy variables from apt's configuration, if the environment has none."""
    named = _output("apt-config", "shell", "http_proxy", "Acquire::http::Proxy", "https_proxy", "Acquire::https::Proxy")
    found = {name: value for name, value in re.findall(r"^(\w+)='(.*)'$", named, re.MULTILINE) if value != "DIRECT"}
    return {name: value for name, value in found.items() if name not in os.environ}


def _sources(suite: str) -> str:
    """The sources file of apt for a release of Debian."""
    places = [(mirror(suite), f"{suite} {suite}-updates")]
    if security := _archives().get("Debian-Security"):
        places.append((security, f"{suite}-security"))
    return "\n".join(
        f"Types: deb\nURIs: {uri}\nSuites: {suites}\nComponents: main\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
        for uri, suites in places
    )


def _archives() -> dict[str, str]:
    """The package archives in this machine's apt sources by label; the first of each label."""
    targets = _output("apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages")
    found = [line.rpartition(" ") for line in targets.splitlines()]
    return {label: uri.rstrip("/") for label, _, uri in reversed(found)}


def _pip_options() -> dict[str, str]:
    """pip's options on this machine, from its files and the environment."""
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
    """The output of a command; empty if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""
