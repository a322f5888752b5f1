"""Commands that execute their arguments in new namespaces, as a container has them.

If this user may not create any, the test is skipped; with CI=true it fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from tests.support.testbed import availability


def first_process() -> tuple[str, ...]:
    """Execute as the first process of a PID namespace."""
    return _tried("--pid", "--fork", "--mount-proc", "--kill-child")


def network(interface: str, address: str) -> tuple[str, ...]:
    """Execute in a network namespace with only loopback and an interface with this address."""
    other = f"{interface}-peer"
    lines = (
        "ip link set lo up",
        f"ip link add {interface} type veth peer name {other}",
        f"ip address add {address}/24 dev {interface}",
        f"ip link set {interface} up",
        f"ip link set {other} up",
        'exec "$@"',
    )
    return _tried("--net", "sh", "-c", " && ".join(lines), "sh")


def _tried(*arguments: str) -> tuple[str, ...]:
    rights = () if os.geteuid() == 0 else ("--map-root-user",)
    command = ("unshare", *rights, *arguments)
    if not shutil.which("unshare"):
        availability.unavailable("there is no unshare: install util-linux")
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        availability.unavailable(f"no namespace can be had: {tried.stderr.strip()}")
    return command
