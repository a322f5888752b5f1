"""What this machine is: which host, its own address, and how many CPUs and GPUs this process may use.

Torch could tell the number of GPUs, but the agent's process never imports it; and it counts CPUs that the container's
limit takes away again, so that ``--nproc-per-node auto`` would start one worker for each core of a large host.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchelastic.endpoints import split_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_ELSEWHERE: Final = ("192.0.2.1", 9)
"""An address reserved for documentation: the route to it is the default route."""

_LOOPBACK: Final = "lo"

_MESSAGE: Final = struct.Struct("=IHHII")
_ATTRIBUTE: Final = struct.Struct("=HH")
_GET_ADDRESSES, _ADDRESS, _DUMP, _ANY_ADDRESS, _OWN_ADDRESS = 22, 20, 0x301, 1, 2
"""Netlink's numbers: RTM_GETADDR, RTM_NEWADDR, NLM_F_REQUEST with NLM_F_DUMP, IFA_ADDRESS and IFA_LOCAL."""

_HOST_ID_LENGTH: Final = 12
"""Of 32 digits: it stands in every node's key, and need only tell the hosts of one run apart."""


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
        except (OSError, UnicodeError):  # the latter where it can be no name at all
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


def interface_of(host: str) -> str:
    """The network interface that carries an address of this machine, given as that address or as a name of it.

    Args:
        host: a host name or an IP address, without brackets.

    Returns:
        The interface's name; empty for the loopback interface, and where the address is no interface's.
    """
    try:
        found = socket.getaddrinfo(host.partition("%")[0], None, type=socket.SOCK_STREAM)
        wanted = {socket.inet_pton(family, str(address[0]).partition("%")[0]) for family, _, _, _, address in found}
        carried = _interface_addresses()
    except (OSError, UnicodeError):  # the latter where it can be no name at all
        return ""
    return next((name for name, address in carried if address in wanted and name != _LOOPBACK), "")


def interface_variables(interface: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What has gloo and NCCL use an interface, as far as the user has not said which.

    Args:
        interface: its name; empty where that is theirs to find out.
        environ: what the user has said.
    """
    # NCCL takes a name as the beginning of one unless it is told otherwise: eth1 would stand for eth10, too.
    variables = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}
    return {name: value for name, value in variables.items() if name not in environ}


def _interface_addresses() -> list[tuple[str, bytes]]:
    """The addresses of all interfaces as the kernel tells them over netlink: in 4 bytes, or 16 for IPv6."""
    found: list[tuple[str, bytes]] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(1.0)
        body = struct.pack("=BBBBi", socket.AF_UNSPEC, 0, 0, 0, 0)
        kernel.send(_MESSAGE.pack(_MESSAGE.size + len(body), _GET_ADDRESSES, _DUMP, 1, 0) + body)
        while True:
            data = kernel.recv(1 << 16)
            while data:
                length, kind, _, _, _ = _MESSAGE.unpack_from(data)
                if kind != _ADDRESS:  # the end, or an error
                    return found
                index = struct.unpack_from("=i", data, _MESSAGE.size + 4)[0]
                attributes = _attributes(data[_MESSAGE.size + 8 : length])
                # Of a point-to-point interface the first one is the peer's.
                address = attributes.get(_OWN_ADDRESS, attributes.get(_ANY_ADDRESS))
                if address is not None:
                    found.append((socket.if_indextoname(index), address))
                data = data[_aligned(length) :]


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        found[kind] = data[_ATTRIBUTE.size : length]
        data = data[_aligned(max(length, _ATTRIBUTE.size)) :]
    return found


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def host_id(root: Path = Path("/")) -> str:
    """What all containers of one host have in common, and no two hosts; empty where it cannot be told.

    It changes when the host is started again, which ends all that runs there.

    Args:
        root: where /proc is looked up.
    """
    return _read(root / "proc/sys/kernel/random/boot_id").strip().replace("-", "")[:_HOST_ID_LENGTH]


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
