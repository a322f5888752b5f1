"""CPUs and GPUs, read from a fake file system, and this machine's own address."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from torchelastic.config.machine import (
    available_memory,
    cpu_count,
    gpu_count,
    host_id,
    interface_of,
    local_addresses,
    own_address,
)

if TYPE_CHECKING:
    from pathlib import Path

CPUS = len(os.sched_getaffinity(0))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        pytest.param({}, None, id="no control groups"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None, id="v2 unlimited"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1, id="v2 container"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/cpu.max": "100000 100000\n",
            },
            1,
            id="the limit of a parent",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/docker/1\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            1,
            id="v1 container with the path of its host",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{CPUS + 3}00000 100000\n"}, None, id="too large"
        ),
    ],
)
def test_cpus_are_limited_by_affinity_and_cgroups(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    assert cpu_count(write(tmp_path, files)) == (CPUS if limit is None else limit)


@pytest.mark.parametrize(
    ("files", "available"),
    [
        pytest.param({}, 5120, id="machine"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "3000\n",
                "sys/fs/cgroup/a/memory.max": "4000\n",
                "sys/fs/cgroup/a/memory.current": "3500\n",
                "sys/fs/cgroup/a/memory.stat": "anon 2500\ninactive_file 1000\n",
            },
            1500,
            id="the limit of a parent, without the cache",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/x\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "4000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "4100\n",
            },
            0,
            id="v1, full",
        ),
    ],
)
def test_memory_is_limited_by_the_machine_and_cgroups(tmp_path: Path, files: dict[str, str], available: int) -> None:
    meminfo = {"proc/meminfo": "MemTotal:       9 kB\nMemAvailable:       5 kB\n"}
    assert available_memory(write(tmp_path, meminfo | files)) == available


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("0,1", 2),
        (" 3 , 2 ", 2),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("0,9,1", 1),
        ("NoDevFiles", 0),
        ("0,0", 0),
        ("GPU-3f1c,GPU-77aa", 2),
        ("MIG-1,MIG-2", 1),
    ],
)
def test_gpus_are_limited_by_cuda_visible_devices(tmp_path: Path, visible: str | None, count: int) -> None:
    names = ["nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-caps"]
    root = write(tmp_path, {f"dev/{name}": "" for name in names})
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_count(environ, root) == count


def test_gpus_are_counted_by_device_files_or_without_any_by_the_driver(tmp_path: Path) -> None:
    root = write(tmp_path, {f"proc/driver/nvidia/gpus/0000:0{bus}:00.0/information": "" for bus in (1, 2)})
    assert gpu_count({}, root) == 2
    assert gpu_count({}, write(root, {"dev/nvidia5": ""})) == 1


def test_the_address_is_that_of_the_interface_towards_the_first_store_whose_name_resolves() -> None:
    assert own_address(["no-such-host.invalid:2379", f"{'x' * 64}:2379", "127.0.0.1:2379"]) == "127.0.0.1"
    assert own_address(["localhost:2379"]) in {"127.0.0.1", "::1"}


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        pytest.param("127.0.0.2", ("127.0.0.2",), id="an address of this machine"),
        pytest.param("192.0.2.77", (), id="another machine"),
        pytest.param("no-such-host.invalid", (), id="an unknown name"),
    ],
)
def test_the_local_addresses_of_a_host(host: str, addresses: tuple[str, ...]) -> None:
    assert local_addresses(host) == addresses


def test_a_name_with_a_loopback_address_also_has_an_address_for_other_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr("torchelastic.config.machine.own_address", lambda _: "10.0.0.7")
    assert local_addresses("node-1") == ("10.0.0.7", "127.0.1.1")
    assert local_addresses("localhost") == ("127.0.1.1",)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "::1", "localhost", "192.0.2.77", "no-such-host.invalid", "fe80::1%lo", "x" * 64]
)
def test_loopback_and_foreign_addresses_have_no_interface(host: str) -> None:
    assert interface_of(host) == ""


def test_the_host_id_is_short(tmp_path: Path) -> None:
    path = "proc/sys/kernel/random/boot_id"
    assert host_id(write(tmp_path, {path: "6689fc4e-1b95-417a-ab25-c17f951d50f4\n"})) == "6689fc4e1b95"
    assert host_id(tmp_path / "nowhere") == ""
