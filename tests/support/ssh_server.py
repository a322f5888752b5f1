"""A real server of SSH on the loopback interface, with keys of its own, that several names of hosts reach."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from typing import TYPE_CHECKING

from testbed import packages
from tests.support.isolation import mounts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# sshd needs a user of its own and a folder in /run; both exist only in its mount namespace.
_START = """
cp /etc/passwd "$1/passwd"
grep -q ^sshd: "$1/passwd" || echo "sshd:x:65533:65533::/run/sshd:/bin/false" >> "$1/passwd"
mount --bind "$1/passwd" /etc/passwd && mount -t tmpfs none /run && mkdir /run/sshd && exec "$2" -D -e -f "$1/server"
"""


@contextlib.contextmanager
def ssh_server(folder: Path, *hosts: str) -> Iterator[Path]:
    """Serve SSH to this user; yield a folder for PATH whose ``ssh`` reaches the server by these names of hosts."""
    root = packages.unpacked("ssh")
    environment = {**os.environ, **packages.environment(root)}
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name]
        subprocess.run(command, check=True, env=environment)
    (ssh := folder / "bin/ssh").parent.mkdir()
    libraries = f"LD_LIBRARY_PATH={environment['LD_LIBRARY_PATH']}"
    ssh.write_text(f'#!/bin/sh\n{libraries} exec {root}/usr/bin/ssh -F {folder}/config "$@"\n')
    ssh.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (folder / "server").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        "PidFile none\nStrictModes no\nUsePAM no\nMaxStartups 100\n"
    )
    (folder / "config").write_text(
        f"Host {' '.join(hosts)}\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {folder}/user\n"
        "  UserKnownHostsFile /dev/null\n  StrictHostKeyChecking no\n  LogLevel ERROR\n"
    )
    server = [*mounts(), "sh", "-c", _START, "sh", str(folder), str(root / "usr/sbin/sshd")]
    with (folder / "log").open("wb") as log, subprocess.Popen(server, env=environment, stderr=log) as process:
        try:
            until = time.monotonic() + 60
            while not _answers(port):
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < until, (folder / "log").read_text()
            yield ssh.parent
        finally:
            process.kill()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        return connection.recv(4) == b"SSH-"
    return False
