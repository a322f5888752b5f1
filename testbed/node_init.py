"""The first process of a node: sets up its namespaces, starts the parts, and reaps orphans.

The process runs in new namespaces (mount, network, PID, IPC, UTS, cgroup), which vanish with it: mounts, addresses and
routes need no clean-up. Effects beyond the namespaces are prevented:

- **/proc/sys**, apart from the network's part, is read-only, with the values that the kubelet would set.
- writes to **/var** and **/etc** stay in memory; **/run** is empty.
- **control groups** begin at the node's own (:mod:`node_cgroups`).

The folders that the node and its user share keep their paths.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from testbed import node_cgroups, node_components, node_config
from testbed.node_config import NodeConfig
from testbed.node_syscalls import Mount, mount

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_NO_PROGRAMS = Mount.NO_SUID | Mount.NO_DEVICES | Mount.NO_EXEC
_COVERED = ("/var", "/etc")
_HIDDEN = ("/run",)
_PROGRAM_FAILED = 1


def main(folder: str, place: str) -> int:
    """Run the node until it is killed or a part exits; return the exit code.

    Args:
        folder: the folder with the node's :class:`NodeConfig`.
        place: the folder of files that must be on a disk.
    """
    config = NodeConfig.read(Path(folder, "node.json").read_text())
    try:
        arrange(config, Path(place))
    except (OSError, subprocess.CalledProcessError) as error:
        words = getattr(error, "stderr", None) or error
        node_components.say("failed", words=f"the node's namespaces cannot be set up: {words}")
        return _PROGRAM_FAILED
    child = os.fork()
    if child == 0:
        os._exit(node_components.main(config))
    while True:  # orphans become children of this process
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def arrange(config: NodeConfig, place: Path) -> None:
    """Set up the namespaces.

    Raises:
        OSError: the kernel refuses a change.
        CalledProcessError: ``ip`` fails.
    """
    mount("none", "/", flags=Mount.RECURSIVE | Mount.PRIVATE)
    socket.sethostname(node_config.NAME)
    hierarchies = node_cgroups.of_this_machine()
    hidden = [path for path in map(Path, config.shown) if any(map(path.is_relative_to, (*_COVERED, *_HIDDEN)))]
    shown = {path: os.open(path, os.O_PATH) for path in hidden}
    shown |= {path: os.open(place / path.name, os.O_PATH) for path in (node_config.CONTAINERD, node_config.KUBELET)}

    mount("proc", "/proc", "proc", _NO_PROGRAMS)
    mount("sysfs", "/sys", "sysfs", _NO_PROGRAMS)
    _mount_cgroups(hierarchies)
    mount("tmpfs", "/run", "tmpfs", Mount.NO_SUID | Mount.NO_DEVICES, "mode=755")
    for folder in ("bin", "home", "tmp", "values"):
        (node_config.INSIDE / folder).mkdir(parents=True)
    for covered in _COVERED:
        _cover(covered)
    for path, opened in shown.items():
        path.mkdir(parents=True, exist_ok=True)
        mount(f"/proc/self/fd/{opened}", path, flags=Mount.BIND | Mount.RECURSIVE)
        os.close(opened)

    _connect(config.environ)
    _choose_iptables(config)
    _cover_kernel_values(node_config.KERNEL_VALUES)


def _mount_cgroups(hierarchies: Iterable[node_cgroups.Hierarchy]) -> None:
    top = Path("/sys/fs/cgroup")
    for hierarchy in hierarchies:
        if hierarchy.version == 2:
            mount("cgroup2", top, "cgroup2", _NO_PROGRAMS)
            init = top / node_cgroups.INIT
            init.mkdir()
            (init / "cgroup.procs").write_text("0")
            available = (top / "cgroup.controllers").read_text().split()
            (top / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in available))
            return
    mount("tmpfs", top, "tmpfs", _NO_PROGRAMS, "mode=755")
    for hierarchy in hierarchies:
        folder = top / hierarchy.mount.name
        folder.mkdir()
        mount("cgroup", folder, "cgroup", _NO_PROGRAMS, hierarchy.options)
        for controller in hierarchy.options.split(","):
            if "," in hierarchy.mount.name and controller != folder.name:
                (top / controller).symlink_to(folder.name)


def _cover(folder: str) -> None:
    """Keep writes below the folder in memory."""
    over = node_config.INSIDE / "over" / folder.strip("/")
    for name in ("upper", "work"):
        (over / name).mkdir(parents=True)
    mount("overlay", folder, "overlay", options=f"lowerdir={folder},upperdir={over}/upper,workdir={over}/work")


def _connect(environ: Mapping[str, str]) -> None:
    """Set the node's address and the route to services, and forward the packets of pods."""
    for command in (
        "ip link set lo up",
        f"ip address add {node_config.ADDRESS}/32 dev lo",
        f"ip route add {node_config.SERVICES} dev lo src {node_config.ADDRESS}",
    ):
        subprocess.run(command.split(), env=environ, check=True, capture_output=True, text=True, timeout=30)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def _choose_iptables(config: NodeConfig) -> None:
    """Use the older iptables backend if the kernel lacks the newer one."""
    asked = ["iptables", "--table=nat", "--list", "--numeric"]
    if subprocess.run(asked, env=config.environ, capture_output=True, timeout=30, check=False).returncode != 0:
        for name in (f"ip{version}tables{what}" for version in ("", "6") for what in ("", "-save", "-restore")):
            (node_config.BIN / name).symlink_to(f"{config.tools}/usr/sbin/xtables-legacy-multi")


def _cover_kernel_values(values: Mapping[str, str]) -> None:
    top = Path("/proc/sys")
    mount(top, top, flags=Mount.BIND)
    mount("none", top, flags=Mount.BIND | Mount.REMOUNT | Mount.READ_ONLY | _NO_PROGRAMS)
    mount("/proc/sys/net", "/proc/sys/net", flags=Mount.BIND)
    mount("none", "/proc/sys/net", flags=Mount.BIND | Mount.REMOUNT | _NO_PROGRAMS)
    for name, value in values.items():
        file = node_config.INSIDE / "values" / name.replace("/", ".")
        file.write_text(f"{value}\n")
        if (top / name).exists():
            mount(file, top / name, flags=Mount.BIND)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor stops the node
    sys.exit(main(*sys.argv[1:]))
