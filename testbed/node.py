"""A real Kubernetes with one real node, which runs pods, in its own namespaces.

The node runs etcd, API server, controller manager, scheduler, containerd, kubelet, kube-proxy and CoreDNS, and is ready
in seconds. It needs root on Linux, and changes nothing on the machine: the node has its own network, mounts, processes
and control groups, nothing is installed, and files are written only to the node's folder and to the cache folder.

Two effects reach the machine: the kernel may load modules for containers (overlay, veth, netfilter), and keeps them;
and a privileged container can change the machine, as on any node.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from testbed import control_plane_config, images, node_cgroups, node_config, packages
from testbed.binaries import binary
from testbed.cache import Missing, cache_folder
from testbed.cluster import DEFAULT_TIMEOUT, Cluster
from testbed.control_plane_config import ControlPlaneConfig
from testbed.images import Kept, full_name, listed
from testbed.node_config import NodeConfig
from testbed.node_exec import command_prefix

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

_RIGHTS = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}

_IMPORT_LIMIT = 600.0
"""The limit in seconds of the import of an image; an image with torch takes more than a minute."""
_START_LIMIT = 300.0
"""The limit in seconds of a node's start; a late part is reported long before this."""
_END_LIMIT = 60.0
_POLL = 0.02
"""Seconds between two checks for an image; there is no event to wait for."""
_TAIL = 4000
_ROOT = Path(__file__).parents[1]


class NodeFailed(RuntimeError):  # noqa: N818 - the name is the reason
    """A node did not start, failed, or could not be removed completely."""


class Node(Cluster):
    """A node with its control plane; it runs within ``async with``.

    It is independent of event loops: a fixture may start it in one loop, and a test may use it in another. A separate
    process removes it, even if the tests are killed.

    Args:
        folder: an existing folder for its logs, its configuration, and the logs of its pods.

    Raises:
        Missing: a node cannot run on this machine.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.control_plane = ControlPlaneConfig(
            folder=self.folder,
            address=node_config.ADDRESS,
            port=node_config.API_PORT,
            etcd_port=node_config.ETCD_PORT,
            peer_port=node_config.PEER_PORT,
            services=node_config.SERVICES,
            token=secrets.token_hex(16),
        )
        self._node_config: NodeConfig | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._place = Path()

    async def __aenter__(self) -> Self:
        check_machine()
        try:
            await asyncio.to_thread(self._start)
            await self.load_image(images.IMAGES["pause"], images.archive("pause"))
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        left = await asyncio.to_thread(self._end)
        if left and kind is None:
            raise NodeFailed(left)

    @property
    def pid(self) -> int:
        """The id that the node's first process has on this machine."""
        return self._pid

    @property
    def supervisor_pid(self) -> int:
        """The id of the process that removes the node."""
        return self._running().pid

    def check(self) -> None:
        """Check that all parts of the node run.

        Raises:
            NodeFailed: a part has exited.
        """
        stdout = self._running().stdout
        assert stdout is not None
        if select.select([stdout], [], [], 0)[0]:
            self._expect("nothing more")

    def command_prefix(self) -> tuple[str, ...]:
        """Return the prefix of a command line that runs a command of this machine in the node.

        The command sees the node's network and processes, and this machine's files.
        """
        self._running()
        return command_prefix(self._pid, os.getcwd())  # noqa: PTH109 - a word of a command line

    async def popen(
        self,
        *argv: str,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stderr: int = subprocess.PIPE,
    ) -> asyncio.subprocess.Process:
        """Start a command in the node, such as ``kubectl wait``, without waiting for its exit.

        Args:
            argv: the program and its arguments.
            env: more variables.
            stdin: the standard input, as in subprocess.
            stderr: the standard error, as in subprocess; the standard output is a pipe.

        Returns:
            A process that forwards signals, and exits like the command.
        """
        return await asyncio.create_subprocess_exec(
            *self.command_prefix(),
            *argv,
            env={**self.environ, **(env or {})},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )

    async def load_image(self, name: str, archive: Path) -> None:
        """Import an image, like ``kind load``, unless the node has it from an earlier run.

        Args:
            name: the name of the image in the archive.
            archive: an OCI or docker archive. The next import removes the images of archives that no longer exist.
        """
        name = full_name(name)
        kept = Kept(self._place / "imported.json")
        there = await self.images()
        if kept.has(name, archive, there):
            return
        if name in there:  # the CRI does not notice that a name has a new image
            await self._containerd("images", "delete", name)
        await self._containerd("images", "import", str(archive.resolve()), limit=_IMPORT_LIMIT)
        async with asyncio.timeout(DEFAULT_TIMEOUT):
            while not _can_run(name, there := await self.images()):  # noqa: ASYNC110 - containerd has no event for this
                await asyncio.sleep(_POLL)
        kept.add(name, archive, there)
        if unwanted := kept.unwanted(there):
            await self._containerd("images", "delete", "--sync", *unwanted)

    @contextlib.asynccontextmanager
    async def image_called(self, name: str, image: str) -> AsyncIterator[None]:
        """Give an image an additional name within ``async with``."""
        await self._containerd("images", "tag", full_name(image), full_name(name))
        try:
            yield
        finally:
            await self._containerd("images", "delete", full_name(name))

    async def images(self) -> dict[str, str]:
        """Return the digests of the node's images by name."""
        return listed(await self._containerd("images", "list"))

    def processes(self, pod_uid: str) -> dict[int, str]:
        """Return the command lines of a pod's processes, by their ids on this machine."""
        found = {}
        for process in Path("/proc").iterdir():
            try:
                if f"/pod{pod_uid}/" in (process / "cgroup").read_text():
                    found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except (OSError, ValueError):  # not a process, or it has exited
                continue
        return found

    def _start(self) -> None:
        """Start the node, and wait until it is ready."""
        tools = packages.unpacked("node")
        programs = {name: binary(name) for name in ("kubelet", "kube-proxy", "coredns")}
        control_plane_config.write_credentials(self.control_plane)
        for name, text in node_config.files(self.control_plane, tools, images.IMAGES["pause"]).items():
            file = self.folder / "config" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        cache = cache_folder().resolve()
        self._node_config = NodeConfig(
            folder=str(self.folder),
            cache=str(cache),
            shown=sorted({str(path) for path in (cache, self.folder, _ROOT, Path(tempfile.gettempdir()).resolve())}),
            tools=str(tools),
            commands=node_config.commands(self.control_plane, programs, tools),
            server=self.control_plane.server,
            token=self.control_plane.token,
            authority=str(self.control_plane.authority),
        )
        (self.folder / "node.json").write_text(self._node_config.written())
        with (self.folder / "supervisor.log").open("wb") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-m", "testbed.node_supervisor", str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                cwd=_ROOT,
                start_new_session=True,
            )
        started = self._expect("started")
        self._pid, self._place = started["pid"], Path(started["place"])
        self._expect("ready")

    def _expect(self, event: str) -> dict[str, Any]:
        """Read the next event and check its kind."""
        stdout = self._running().stdout
        assert stdout is not None
        if not select.select([stdout], [], [], _START_LIMIT)[0]:
            raise NodeFailed(f"the node is not ready after {_START_LIMIT:.0f} s\nLogs: {self.folder}")
        line = stdout.readline()
        said: dict[str, Any] = json.loads(line) if line else {}
        if said.get("event") != event:
            raise NodeFailed(f"the node has failed: {said.get('words') or self._supervisor_log()}\nLogs: {self.folder}")
        return said

    def _end(self) -> str:
        """Have the supervisor remove the node, and return what it could not remove."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return ""
        with supervisor:
            assert supervisor.stdin is not None
            supervisor.stdin.close()
            code = supervisor.wait(_END_LIMIT)
        shutil.rmtree(self.folder / "etcd-data", ignore_errors=True)  # it is preallocated and large
        return self._supervisor_log() if code else ""

    def _supervisor_log(self) -> str:
        return (self.folder / "supervisor.log").read_text()[-_TAIL:] or "its supervisor was killed"

    def _running(self) -> subprocess.Popen[bytes]:
        if self._supervisor is None:
            raise RuntimeError("this node does not run")
        return self._supervisor

    async def _containerd(self, *arguments: str, limit: float = DEFAULT_TIMEOUT) -> str:
        assert self._node_config is not None
        control = ("ctr", "--namespace=k8s.io", *arguments)
        return (await self.run(*control, env=self._node_config.environ, timeout=limit)).stdout


def _can_run(name: str, there: Mapping[str, str]) -> bool:
    """Return whether the kubelet finds an image; the image then has a second name, which is a digest."""
    return name in there and any(
        other.startswith("sha256:") and digest == there[name] for other, digest in there.items()
    )


def check_machine() -> None:
    """Check whether a node can run on this machine.

    Raises:
        Missing: a node cannot run.
    """
    if not sys.platform.startswith("linux"):
        raise Missing("Linux", "run the tests on a Linux machine; a virtual machine is sufficient")
    if os.geteuid() != 0:
        raise Missing("root", "a kubelet creates namespaces, mounts and control groups: run `make test` as root")
    held = int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
    if lacking := [name for name, number in _RIGHTS.items() if not held >> number & 1]:
        raise Missing(
            f"root's right {' and '.join(lacking)}",
            "a container must be privileged: run the tests on the machine itself",
        )
    node_cgroups.check(node_cgroups.of_this_machine())
    cache = cache_folder().resolve()
    asked = ["stat", "--file-system", "--format=%T", str(cache)]
    if subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip() == "overlayfs":
        raise Missing(
            f"a disk below {cache}",
            "the file system of a container cannot store containers: set XDG_CACHE_HOME to a folder on a disk",
        )
