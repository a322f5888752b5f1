"""The control groups of a node: one folder in each hierarchy, created before its start and removed after its end.

A node's processes run below that folder, in a cgroup namespace that shows nothing else, so kubelet and runc create
their groups there.

**Version 1** (a hierarchy for each controller): the folder is created below the group of the tests.
**Version 2** (one hierarchy): the folder is created at the top, because a group with processes cannot give its children
controllers. The controllers that groups at the top lack are enabled while the node runs. The node's
first process moves itself into a group below (``init``) for the same reason.
If both versions are mounted, version 1 is used, because it has the controllers.

The folders are recorded first, so that a later run can remove them after a ``kill -9``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from testbed.cache import Missing

if TYPE_CHECKING:
    from collections.abc import Iterator

NEEDED_V1: Final = frozenset({"cpu", "cpuacct", "cpuset", "memory", "devices", "pids"})
NEEDED_V2: Final = frozenset({"cpu", "memory", "pids"})
"""The controllers that kubelet and runc need."""

INIT: Final = "init"
"""With version 2, the group of the node's own processes, below the folder."""

_RELEASE_TIMEOUT: Final = 10.0
"""The limit in seconds for the release of a group of killed processes; it usually takes milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Hierarchy:
    """A mounted hierarchy of control groups.

    Attributes:
        mount: the mount point.
        own: the folder of the calling process's group.
        options: the mount options: its controllers, or ``none,name=…``; empty for version 2.
    """

    mount: Path
    own: Path
    options: str

    @property
    def version(self) -> int:
        """The version of control groups: 1 or 2."""
        return 1 if self.options else 2


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The control groups of a node.

    Attributes:
        folders: the node's folder in each hierarchy.
        enabled: the controllers to enable for the node at the top of version 2, and to disable at its end.
    """

    folders: tuple[str, ...]
    enabled: tuple[str, ...] = ()


def hierarchies(mountinfo: str, groups: str) -> list[Hierarchy]:
    """Return the hierarchies in use.

    Args:
        mountinfo: the contents of /proc/self/mountinfo.
        groups: the contents of /proc/self/cgroup.

    Returns:
        All hierarchies of version 1; that of version 2 if there are none.
    """
    own = dict(_own_groups(groups))
    known = frozenset().union(*own)
    found: dict[str, Hierarchy] = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        root, mounted = (unescaped(field) for field in before.split()[3:5])
        kind, _, super_options = after.split()
        if kind == "cgroup":
            key = frozenset(super_options.split(",")) & known
            to_mount = ",".join(sorted(key))
            if to_mount.startswith("name="):
                to_mount = f"none,{to_mount}"
        elif kind == "cgroup2":
            key, to_mount = frozenset({""}), ""
        else:
            continue
        if key in own and to_mount not in found:
            found[to_mount] = Hierarchy(mount=Path(mounted), own=_below(mounted, root, own[key]), options=to_mount)
    return [hierarchy for hierarchy in found.values() if hierarchy.version == 1] or list(found.values())


def of_this_machine() -> list[Hierarchy]:
    """Return the hierarchies in use on this machine."""
    return hierarchies(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())


def check(found: list[Hierarchy]) -> None:
    """Check whether a node can use these hierarchies.

    Raises:
        Missing: a node cannot use them.
    """
    if not found:
        raise Missing("control groups", "mount them at /sys/fs/cgroup, as every distribution does")
    if found[0].version == 1:
        have = {name for hierarchy in found for name in hierarchy.options.split(",")}
        needed, places = NEEDED_V1, [hierarchy.own for hierarchy in found]
    else:
        top = found[0].mount
        have = set((top / "cgroup.controllers").read_text().split())
        needed, places = NEEDED_V2, [top]
        # Only the root group may have both processes and children with controllers; a container's is a child group.
        if (top / "cgroup.type").exists() and (top / "cgroup.procs").read_text().strip():
            raise Missing(
                "the top of the control groups",
                "a container does not see it: run the tests on the machine itself, or on a virtual one",
            )
    if lacking := needed - have:
        raise Missing(f"the control group controllers {', '.join(sorted(lacking))}", "use a kernel that has them")
    for place in places:
        if not os.access(place, os.W_OK):
            raise Missing(
                f"the permission to create control groups in {place}",
                "inside a container, it must be privileged: run the tests on the machine itself",
            )


def plan(found: list[Hierarchy], name: str) -> Groups:
    """Return the groups of a node with this name; they are not created yet."""
    if found[0].version == 1:
        return Groups(folders=tuple(str(hierarchy.own / name) for hierarchy in found))
    top = found[0].mount
    given = set((top / "cgroup.subtree_control").read_text().split())
    return Groups(folders=(str(top / name),), enabled=tuple(sorted(NEEDED_V2 - given)))


def make(groups: Groups) -> None:
    """Create the folders, and enable the controllers.

    Raises:
        OSError: the kernel refuses a change.
    """
    for name in groups.enabled:
        (Path(groups.folders[0]).parent / "cgroup.subtree_control").write_text(f"+{name}")
    for folder in map(Path, groups.folders):
        folder.mkdir()
        if (folder / "cpuset.cpus").exists() and not (folder / "cgroup.controllers").exists():
            # Version 1: a new group has no processors until they are set.
            for file in ("cpuset.cpus", "cpuset.mems"):
                (folder / file).write_text((folder.parent / file).read_text())
            (folder / "cgroup.clone_children").write_text("1")


def join(groups: Groups) -> None:
    """Move the calling process into the groups."""
    for folder in groups.folders:
        with open(f"{folder}/cgroup.procs", "w") as file:  # noqa: PTH123 - this runs between fork and exec
            file.write("0")


def remove(groups: Groups) -> list[str]:
    """Kill the processes in the groups, remove the folders, and disable the controllers again.

    Returns:
        The folders that could not be removed.
    """
    deadline = time.monotonic() + _RELEASE_TIMEOUT
    left = [folder for folder in map(Path, groups.folders) if not _remove(folder, deadline)]
    for name in groups.enabled:
        # The kernel refuses this if another group uses the controller, which then stays enabled.
        with contextlib.suppress(OSError):
            (Path(groups.folders[0]).parent / "cgroup.subtree_control").write_text(f"-{name}")
    return [str(folder) for folder in left]


def written(groups: Groups) -> str:
    """Return a text from which :func:`read` restores the groups."""
    return json.dumps(asdict(groups))


def read(text: str) -> Groups:
    """Return the groups from the text of :func:`written`."""
    fields = json.loads(text)
    return Groups(folders=tuple(fields["folders"]), enabled=tuple(fields["enabled"]))


def processes(folder: Path) -> Iterator[int]:
    """Yield the ids of all processes in a group and below."""
    for file in folder.rglob("cgroup.procs"):
        with contextlib.suppress(OSError):
            yield from map(int, file.read_text().split())


def _remove(folder: Path, deadline: float) -> bool:
    while folder.exists():
        for pid in processes(folder):
            if pid > 0:  # 0 means a process outside of this PID namespace
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for group, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                # Version 1: cached files keep a removed group alive in the kernel.
                Path(group, "memory.force_empty").write_text("0")
            with contextlib.suppress(OSError):
                Path(group).rmdir()
        if folder.exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
    return True


def _own_groups(groups: str) -> Iterator[tuple[frozenset[str], str]]:
    """Yield the controllers and the group of each line of /proc/self/cgroup; in version 2, the controller is ''."""
    for line in groups.splitlines():
        _, controllers, group = line.split(":", 2)
        yield frozenset(controllers.split(",")), group


def _below(mounted: str, root: str, group: str) -> Path:
    """Return the folder of a group in a hierarchy whose group ``root`` is mounted."""
    relative = os.path.relpath(group, root)
    return Path(mounted) if relative.startswith("..") else Path(mounted, relative)


def unescaped(field: str) -> str:
    r"""Return a path of mountinfo without escapes, such as \040 for a blank."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
