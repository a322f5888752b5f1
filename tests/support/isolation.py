"""Commands that execute their arguments in new namespaces or with a memory limit, as in a container.

If the user may not create namespaces or control groups, the test is skipped; with CI=true, it fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from testbed import node_cgroups
from testbed.cache import Missing
from tests.support.collection import unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator


def first_process() -> tuple[str, ...]:
    """Return a command that executes its arguments as the first process of a PID namespace."""
    return _tried("--pid", "--fork", "--mount-proc", "--kill-child")


def mounts() -> tuple[str, ...]:
    """Return a command that executes its arguments in a mount namespace."""
    return _tried("--mount", "--kill-child")


def network(interface: str, address: str) -> tuple[str, ...]:
    """Return a command that executes its arguments in a network namespace with an interface of this address."""
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
        unavailable("there is no unshare: install util-linux")
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        unavailable(f"no namespace can be created: {tried.stderr.strip()}")
    return command


@contextlib.contextmanager
def memory_limit(megabytes: int) -> Iterator[tuple[str, ...]]:
    """Yield a command that executes its arguments in a control group with a memory limit in megabytes."""
    try:
        found = node_cgroups.of_this_machine()
        node_cgroups.check(found)
    except Missing as why:
        unavailable(why)
    groups = node_cgroups.plan(
        [hierarchy for hierarchy in found if hierarchy.version == 2 or hierarchy.options == "memory"],
        f"elastic-test-{os.getpid()}",
    )
    node_cgroups.make(groups)
    try:
        [folder] = map(Path, groups.folders)
        limit = folder / ("memory.max" if (folder / "memory.max").exists() else "memory.limit_in_bytes")
        limit.write_text(str(megabytes << 20))
        for swap in ("memory.swap.max", "memory.swappiness"):
            if (folder / swap).exists():
                (folder / swap).write_text("0")
        yield ("sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh")
    finally:
        left = node_cgroups.remove(groups)
        assert not left
