"""The node of the test bed: it behaves as a Kubernetes node, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from testbed import images, node_supervisor, packages
from testbed.cache import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from testbed.node import Node

pytestmark = [pytest.mark.node, pytest.mark.asyncio(loop_scope="session")]

ROOT = Path(__file__).parents[2]
A_NODE = """\
import asyncio, json, pathlib, sys
from testbed.node import Node

async def main(folder, image, end):
    async with Node(folder) as node:
        await node.kubectl("run", "one", f"--image={image}", "--image-pull-policy=Never")
        await node.kubectl("wait", "pod/one", "--for=condition=Ready", "--timeout=60s")
        print(json.dumps({"pid": node.pid, "supervisor": node.supervisor_pid}), flush=True)
        sys.stdin.readline()
        if end == "a killed part":
            await node.kubectl("get", "nodes")

asyncio.run(main(pathlib.Path(sys.argv[1]), *sys.argv[2:]))
"""
"""A program that runs a node with a pod until it reads a line."""


Traces = dict[str, set[str]]

_CHANGES_BY_ITSELF = re.compile(
    r"fs/(dentry-state|file-nr|inode-|aio-nr|quota/)|ns_last_pid|random/|conntrack_count|/pty/nr"
)
_NETWORK = ("link", "address", "route show table all", "-6 route show table all", "rule")
_TABLES = ("iptables-nft-save", "iptables-legacy-save", "ip6tables-nft-save", "ip6tables-legacy-save")


def traces(tools: Mapping[str, str]) -> Traces:
    """Return the traces on this machine by kind.

    Args:
        tools: an environment in which ``ip`` and ``iptables-save`` are on the PATH.
    """
    return {
        "mount": set(Path("/proc/self/mountinfo").read_text().splitlines()),
        "control group": {str(folder) for folder in _control_groups()},
        "value of the kernel's": set(_kernel_values()),
        **{f"ip {what}": _output(["ip", "-oneline", *what.split()], tools) for what in _NETWORK},
        **{table: _output([table], tools) for table in _TABLES},
    }


def added(before: Traces, after: Traces) -> dict[str, list[str]]:
    """Return the added traces by kind."""
    new = {kind: sorted(after[kind] - before[kind]) for kind in before}
    return {kind: lines for kind, lines in new.items() if lines}


def processes_that_name(*words: str) -> dict[int, str]:
    """Return the processes that have one of these words in their command line, environment or control groups."""
    found = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            files = [(process / name).read_bytes() for name in ("cmdline", "environ", "cgroup")]
            line, *others = (content.decode(errors="replace") for content in files)
            if any(word in text for word in words for text in (line, *others)):
                found[int(process.name)] = line.replace("\0", " ")
    return found


def _control_groups() -> Iterator[Path]:
    """Yield the control groups that a node may have created, without the groups below them."""
    for folder, children, _ in os.walk("/sys/fs/cgroup"):
        ours = [name for name in children if re.search(r"elastic-operator|kubepods", name)]
        yield from (Path(folder, name) for name in ours)
        children[:] = [name for name in children if name not in ours]


def _kernel_values() -> Iterator[str]:
    for folder, _, files in os.walk("/proc/sys"):
        for path in (Path(folder, file) for file in files):
            if not _CHANGES_BY_ITSELF.search(str(path)):
                with contextlib.suppress(OSError):
                    yield f"{path}: {path.read_bytes()!r}"


def _output(command: list[str], environ: Mapping[str, str]) -> set[str]:
    text = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False).stdout
    counters = re.compile(r"\[\d+:\d+\]|expires \d+sec|(valid|preferred)_lft \S+")
    return {counters.sub("", line) for line in text.splitlines() if not line.startswith("#")}


async def test_a_command_in_the_node_exits_like_a_command_on_the_host(node: Node) -> None:
    assert (await node.run("sh", "-c", "exit 3", check=False)).returncode == 3
    assert (await node.run("cat", stdin="text")).stdout == "text"
    assert (await node.run("sh", "-c", "pwd; hostname")).stdout.split() == [str(Path.cwd()), "node1"]
    for program, code in (
        ("echo begun; exec sleep 60", -signal.SIGTERM),
        ("trap 'exit 7' TERM; echo begun; while :; do sleep 0.01; done", 7),
    ):
        process = await node.popen("sh", "-c", program)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"begun\n"
        process.terminate()
        assert await process.wait() == code


async def test_a_command_in_the_node_sees_no_host_process(node: Node) -> None:
    seen = (await node.run("ps", "-A", "-o", "args")).stdout
    assert "kubelet" in seen
    assert " ".join(sys.orig_argv) not in seen


async def test_a_rebuilt_image_replaces_the_old_one(node: Node, tmp_path: Path) -> None:
    name = "localhost/changing:1"
    archive = tmp_path / "image.tar"
    digests = []
    for content in ("one", "two"):
        write_image(archive, name, content)
        await node.load_image(name, archive)
        digests.append((await node.images())[name])
        await node.load_image(name, archive)
        assert (await node.images())[name] == digests[-1]
    assert digests[0] != digests[1]
    assert digests[0] not in (await node.images()).values()


@pytest.mark.parametrize("end", ["the end", "a killed part", "SIGKILL", "SIGKILL of all"])
async def test_a_node_leaves_nothing_behind_after(end: str, tmp_path: Path) -> None:
    tools = packages.environment(packages.unpacked("node"))
    before = traces(tools)
    files = files_of_nodes()
    user = await asyncio.create_subprocess_exec(
        sys.executable, "-c", A_NODE, str(tmp_path), images.IMAGES["pause"], end,
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert user.stdin is not None
    assert user.stdout is not None
    assert user.stderr is not None
    line = await user.stdout.readline()
    assert line, (await user.stderr.read()).decode()
    report = json.loads(line)
    running = traces(tools)
    groups = set(re.findall(r"elastic-operator-node-\w+", str(added(before, running))))
    assert len(groups) == 1, "the running node is not visible in the traces"
    supervisor = os.pidfd_open(report["supervisor"])

    if end == "a killed part":
        parts = processes_that_name(str(tmp_path))
        (scheduler,) = [pid for pid, line in parts.items() if "/kube-scheduler " in line]
        os.kill(scheduler, signal.SIGKILL)
        assert await asyncio.to_thread(ended, supervisor)
    if end == "SIGKILL of all":
        os.kill(report["supervisor"], signal.SIGKILL)
    if end.startswith("SIGKILL"):
        user.kill()
    said = (await user.communicate(b"\n"))[1].decode()
    assert await asyncio.to_thread(ended, supervisor)
    if end == "SIGKILL of all":
        node_supervisor.sweep(cache_folder().resolve())  # as the next node does at its start

    assert ("Traceback" in said) == (end == "a killed part")
    assert ("NodeFailed: the node has failed: kube-scheduler ended by itself with -9" in said) == (
        end == "a killed part"
    )
    assert added(before, traces(tools)) == {}
    assert processes_that_name(str(tmp_path), groups.pop()) == {}
    assert files_of_nodes() == files


def write_image(archive: Path, name: str, content: str) -> None:
    """Write a docker archive of an image with one file."""
    layer = packed({"file": content.encode()})
    diff_ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    config = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": diff_ids}}
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    files = {
        "config.json": json.dumps(config).encode(),
        "layer.tar": layer,
        "manifest.json": json.dumps(manifest).encode(),
    }
    archive.write_bytes(packed(files))


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def files_of_nodes() -> set[Path]:
    """Return the cache entries of running nodes."""
    return {path for name in ("kubelet", "groups.json") for path in (cache_folder() / "nodes").glob(f"*/{name}")}


def ended(process: int) -> bool:
    """Wait until the process of this descriptor has exited, and return whether it did in time."""
    return bool(select.select([process], [], [], 60)[0])
