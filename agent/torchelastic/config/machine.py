"""This machine: the id of its host, its address, and the number of CPUs and GPUs that this process may use.

This module does not use torch: the agent's process never imports torch, and torch ignores a container's CPU limit.
Tests pass another ``root`` of /dev, /proc and /sys.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchelastic.errors import SettingsError
from torchelastic.store.api import split_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_UNREACHABLE_ADDRESS: Final = ("192.0.2.1", 9)
"""An address reserved for documentation: the route to it is the default route."""

_SIOCGIFADDR: Final = 0x8915
"""The request of ioctl(2) for the IPv4 address of an interface."""

_HOST_ID_LENGTH: Final = 12
"""Number of digits of the boot id (of 32) in the id of a host; enough to distinguish the hosts of one run."""

_MEMORY_FILES: Final = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""A control group's files with its limit and use, and the field of memory.stat with the cache that the kernel frees
first: in versions 2 and 1."""


def own_address(endpoints: Iterable[str]) -> str:
    """Return the address of the interface that routes to the first endpoint with a route, without connecting to it.

    Without such an endpoint, return the address of the interface with the default route, or else the loopback address.

    Args:
        endpoints: host:port of each server; an IPv6 address is in brackets.
    """
    for endpoint in endpoints:
        host, port = split_endpoint(endpoint)
        try:
            candidates = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except (OSError, UnicodeError):  # UnicodeError: not a valid host name
            continue
        for family, _, _, _, peer in candidates:
            if (address := _source_address(family, peer)) is not None:
                return address
    return _source_address(socket.AF_INET, _UNREACHABLE_ADDRESS) or "127.0.0.1"


def local_addresses(host: str) -> tuple[str, ...]:
    """Return the addresses of a host that are addresses of this machine, IPv4 first; empty for another machine.

    If the host is this machine's own name and has only a loopback address, as on Debian, the address of the interface
    with the default route precedes it, because other machines cannot reach the loopback address.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: not a valid host name
        return ()
    addresses = [str(address[0]) for family, *_, address in found if _is_local(family, address)]
    if host not in (*addresses, "localhost") and all(each == "::1" or each.startswith("127.") for each in addresses):
        addresses += [own_address(())] if addresses else []
    return tuple(sorted({*addresses}, key=lambda each: (":" in each, each.startswith("127."))))


def _is_local(family: int, address: tuple[str | int, ...] | tuple[int, bytes]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
            return True
    except OSError:
        return False


def _source_address(family: int, peer: tuple[str | int, ...] | tuple[int, bytes]) -> str | None:
    """Return this machine's address for a connection to the peer; None if there is no route."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(peer)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(host: str) -> str:
    """Return the network interface with a host's IPv4 address; empty for loopback or if no interface has it."""
    try:
        wanted = socket.inet_aton(socket.gethostbyname(host))
    except (OSError, UnicodeError):  # UnicodeError: not a valid host name
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no IPv4 address
                request = struct.pack("16sH2x4s232x", name.encode(), socket.AF_INET, wanted)
                found = fcntl.ioctl(probe, _SIOCGIFADDR, request)  # if there are several addresses, the requested one
                if found[20:24] == wanted and name != "lo":
                    return name
    return ""


def host_id(root: Path = Path("/")) -> str:
    """Return an id that all containers of a host share until the host restarts; empty if it is unknown."""
    return _read(root / "proc/sys/kernel/random/boot_id").strip().replace("-", "")[:_HOST_ID_LENGTH]


def cpu_count(root: Path = Path("/")) -> int:
    """Return how many CPUs this process may use, by its affinity and the limit of its control groups, rounded down."""
    available = len(os.sched_getaffinity(0))
    limits = [limit for folder in control_groups("cpu", root) for limit in _limits_in(folder)]
    return max(1, min([available, *map(int, limits)]))


def available_memory(root: Path = Path("/")) -> int:
    """Return how many bytes this process can still use, by the memory of the machine and of its control groups."""
    free = [_field(root / "proc/meminfo", "MemAvailable:") * 1024]
    for folder in control_groups("memory", root):
        for limit_file, used_file, cache in _MEMORY_FILES:
            limit, used = (_read(folder / name).strip() for name in (limit_file, used_file))
            if limit.isdigit() and used.isdigit():  # not "max"
                free.append(int(limit) - int(used) + _field(folder / "memory.stat", cache))
    return max(0, min(free))


def _field(path: Path, name: str) -> int:
    """Return a number from a file with a name and a number in each line; 0 if there is none."""
    return next((int(fields[1]) for line in _read(path).splitlines() if (fields := line.split())[0] == name), 0)


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of the control groups (version 1 and 2) that this process is in, the innermost first.

    ``controller`` is the name of a controller of version 1, such as cpu or memory.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if controllers:
            if controller not in controllers.split(","):
                continue
            # Version 1 mounts each controller separately; the name may be a link to a mount with other controllers.
            mount /= controller
        innermost = mount / group.strip("/")
        # A container often sees the host's path in /proc but only its own part of the tree in /sys.
        for folder in (innermost, *innermost.parents):
            yield folder
            if folder == mount:
                break


def _limits_in(folder: Path) -> list[float]:
    """Return a list of the CPU limit that is set on a control group; empty if there is none."""
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
    """Return how many NVIDIA GPUs a CUDA program finds on this machine with CUDA_VISIBLE_DEVICES."""
    # A container may see all GPUs of its host in /proc; on a host, the device files may not exist yet.
    present = sum(1 for device in (root / "dev").glob("nvidia[0-9]*") if device.name[6:].isdigit())
    if present == 0:
        present = sum(1 for _ in (root / "proc/driver/nvidia/gpus").glob("*"))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return present if visible is None else _visible(visible, present)


def xpu_count() -> int:
    """Return how many Intel GPUs torch finds, in a process of its own; 0 if torch cannot be imported."""
    command = [sys.executable, "-c", "import torch; print(torch.xpu.device_count())"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return int(done.stdout.strip() or 0)


def own_device(environ: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """Return the variables with which a worker sees only the GPU with the index of its local rank.

    Raises:
        SettingsError: the worker has no GPU.
    """
    variables = [name for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if name in environ]
    if not variables:
        return {"CUDA_VISIBLE_DEVICES": f"{local_rank}"}
    devices = environ[variables[0]].split(",")
    if local_rank >= len(devices):
        raise SettingsError(
            f"{variables[0]}={environ[variables[0]]} has no GPU for local rank {local_rank}: set --nproc-per-node to "
            f"{len(devices)} or less."
        )
    return dict.fromkeys(variables, devices[local_rank].strip())


def _visible(devices: str, present: int) -> int:
    """Return how many of the devices CUDA uses: those before the first invalid one, and none if one is listed twice."""
    names: list[str] = []
    for part in devices.split(","):
        name = part.strip()
        if not (name.isdecimal() and int(name) < present) and not name.startswith(("GPU-", "MIG-")):
            break
        names.append(name)
    if len(set(names)) < len(names):
        return 0
    # CUDA gives a process only one instance of a partitioned GPU.
    return min(len(names), 1 if any(name.startswith("MIG-") for name in names) else present)
