"""What this machine is: its own address, and how many CPUs and GPUs this process may use.

Torch could tell the number of GPUs, but the agent's process never imports it; and it counts CPUs that the container's
limit takes away again, so that ``--nproc-per-node auto`` would start one worker for each core of a large host.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchelastic.endpoints import split_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_ELSEWHERE: Final = ("192.0.2.1", 9)
"""An address reserved for documentation: the route to it is the default route."""


def own_address(endpoints: Iterable[str]) -> str:
    """The address of the interface that routes to the first endpoint whose name resolves; no packet is sent to it.

    Where no name resolves (yet), it is the address of the interface with the default route, and without such a route
    the loopback address.

    Args:
        endpoints: host:port of each server, IPv6 addresses in brackets.
    """
    for endpoint in endpoints:
        host, port = split_endpoint(endpoint)
        try:
            candidates = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        for family, _, _, _, peer in candidates:
            if (address := _source_address(family, peer)) is not None:
                return address
    return _source_address(socket.AF_INET, _ELSEWHERE) or "127.0.0.1"


def _source_address(family: int, peer: tuple[str | int, ...] | tuple[int, bytes]) -> str | None:
    """The address from which this machine would speak to the peer; None where there is no route."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(peer)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def cpu_count(root: Path = Path("/")) -> int:
    """How many CPUs this process may use: its affinity, and below that the CPU limit of its control groups.

    A limit of 2.5 CPUs counts as 2, and one below 1 as 1: a worker that has to share a core holds up all the others.

    Args:
        root: where /proc and /sys are looked up.
    """
    available = len(os.sched_getaffinity(0))
    limit = _cgroup_cpu_limit(root)
    return available if limit is None else max(1, min(available, int(limit)))


def _cgroup_cpu_limit(root: Path) -> float | None:
    """The smallest CPU limit among the control groups (version 1 and 2) that this process is in, in CPUs."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if controllers:
            if "cpu" not in controllers.split(","):
                continue
            # Version 1 mounts each controller by itself, and systemd links "cpu" to where it is together with others.
            mount /= "cpu"
        here = mount / group.strip("/")
        # A container often sees the host's path in /proc but only its own part of the tree in /sys: what is not there
        # is skipped, and its own part is the top.
        for folder in (here, *here.parents):
            limits += _limits_in(folder)
            if folder == mount:
                break
    return min(limits, default=None)


def _limits_in(folder: Path) -> list[float]:
    """The CPU limit set on one control group, if there is one."""
    fields = _read(folder / "cpu.max").split() or [
        _read(folder / "cpu.cfs_quota_us").strip(),
        _read(folder / "cpu.cfs_period_us").strip(),
    ]
    try:
        quota, period = (int(field) for field in fields)
    except ValueError:  # "max", or no such file
        return []
    return [quota / period] if quota > 0 and period > 0 else []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def gpu_count(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """How many NVIDIA GPUs a CUDA program would find here: those present, as far as CUDA_VISIBLE_DEVICES shows them.

    Args:
        environ: the environment that the program will have.
        root: where /dev and /proc are looked up.
    """
    # A container may see all of the host's GPUs in /proc but has device files only for its own; on a host the device
    # files may not have been made yet.
    present = sum(1 for device in (root / "dev").glob("nvidia[0-9]*") if device.name[6:].isdigit())
    if present == 0:
        present = sum(1 for _ in (root / "proc/driver/nvidia/gpus").glob("*"))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return present if visible is None else _visible(visible, present)


def _visible(devices: str, present: int) -> int:
    """How many of the devices CUDA takes: those before the first invalid one, and none where one is named twice."""
    names: list[str] = []
    for part in devices.split(","):
        name = part.strip()
        if not (name.isdecimal() and int(name) < present) and not name.startswith(("GPU-", "MIG-")):
            break
        names.append(name)
    if len(set(names)) < len(names):
        return 0
    # CUDA gives a process one instance of a partitioned GPU and no more.
    return min(len(names), 1 if any(name.startswith("MIG-") for name in names) else present)
