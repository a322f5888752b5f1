"""The requirements of a node on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.testbed import node_cgroups
from tests.support.testbed.cache import Missing, cache_folder

_RIGHTS = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


def check_machine() -> None:
    """Check whether a node can run here.

    Raises:
        Missing: it cannot.
    """
    if not sys.platform.startswith("linux"):
        raise Missing("Linux", "run the tests on a Linux machine; a virtual one will do")
    if os.geteuid() != 0:
        raise Missing("root", "a kubelet makes namespaces, mounts and control groups: run `make test` as root")
    if lacking := lacking_rights(Path("/proc/self/status").read_text()):
        raise Missing(
            f"root's right {' and '.join(lacking)}",
            "a container must be privileged: run the tests on the machine itself",
        )
    node_cgroups.check(node_cgroups.of_this_machine())
    cache = cache_folder().resolve()
    if file_system(cache, Path("/proc/self/mountinfo").read_text()) == "overlay":
        raise Missing(
            f"a disk below {cache}",
            "a container's own files cannot hold those of containers: set XDG_CACHE_HOME to a folder on a disk",
        )


def lacking_rights(status: str) -> list[str]:
    """The missing capabilities of a process, from its /proc/…/status."""
    held = int(status.partition("CapEff:")[2].split()[0], 16)
    return [name for name, number in _RIGHTS.items() if not held >> number & 1]


def file_system(path: Path, mountinfo: str) -> str:
    """The type of the file system of a path, from /proc/self/mountinfo."""
    found, kind = Path("/"), ""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        mounted = Path(node_cgroups.unescaped(before.split()[4]))
        if path.is_relative_to(mounted) and mounted.is_relative_to(found):  # a later mount covers an earlier one
            found, kind = mounted, after.split()[0]
    return kind
