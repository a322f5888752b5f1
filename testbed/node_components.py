"""Start the parts of a node in order, and report their readiness, or the failed part with its log."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from testbed import node_config
from testbed.daemons import Daemon, DaemonDied, probing, until_ready

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from testbed.node_config import NodeConfig


def main(config: NodeConfig) -> int:
    """Start all parts, report when a part is not ready in time or exits, and return the exit code."""
    try:
        asyncio.run(_run(config))
    except DaemonDied as error:
        say("failed", words=str(error))
    return 1


def say(event: str, **more: object) -> None:
    """Report to the tests."""
    print(json.dumps({"event": event, **more}), flush=True)


async def _run(config: NodeConfig) -> None:
    async with probing(config.authority, config.token) as get:
        parts = _Parts(config, get)
        await parts.start()
        say("ready")
        await parts.until_one_ends()


class _Parts:
    """The parts of one node, which are killed when this process exits."""

    def __init__(self, config: NodeConfig, get: Callable[[str], Awaitable[str]]) -> None:
        self._config = config
        self._get = get
        self._daemons: dict[str, Daemon] = {}

    async def start(self) -> None:
        """Start all parts.

        Raises:
            DaemonDied: a part was not ready in time, or exited.
        """
        await asyncio.gather(self._start_control_plane(), self._start_containerd())
        kubelet = self._start("kubelet")
        await self._until(kubelet, self._api_answers(f"/api/v1/nodes/{node_config.NAME}"))
        proxy = self._start("kube-proxy")  # not earlier, because without a node it would wait for a second
        await self._until(kubelet, self._node_takes_pods)
        dns = self._daemons["coredns"]
        await self._until(proxy, self._answers(f"http://127.0.0.1:{node_config.PROXY_HEALTH}/healthz"))
        await self._until(dns, self._answers(f"http://127.0.0.1:{node_config.DNS_READY}/ready"))
        # Pods are forbidden in a namespace without this service account.
        controllers = self._daemons["kube-controller-manager"]
        await self._until(controllers, self._api_answers("/api/v1/namespaces/default/serviceaccounts/default"))

    async def until_one_ends(self) -> None:
        """Wait until a part exits.

        Raises:
            DaemonDied: a part has exited.
        """
        ended = asyncio.Event()
        for daemon in self._daemons.values():
            asyncio.get_running_loop().add_reader(os.pidfd_open(daemon.pid), ended.set)
        await ended.wait()
        for daemon in self._daemons.values():
            daemon.check()

    async def _start_control_plane(self) -> None:
        self._start("etcd")
        api_server = self._start("kube-apiserver")  # it waits for etcd
        await self._until(api_server, self._api_answers("/readyz"))
        for name in ("kube-controller-manager", "kube-scheduler", "coredns"):
            self._start(name)

    async def _start_containerd(self) -> None:
        tidying = self._daemon(
            [word.replace(".toml", "-without-pods.toml") for word in self._config.commands["containerd"]]
        )
        tidying.start()
        await self._until(tidying, _containerd_answers)
        await asyncio.to_thread(self._remove_containers)
        tidying.kill()
        node_config.SOCKET.unlink()
        await self._until(self._start("containerd"), _containerd_answers)

    def _remove_containers(self) -> None:
        """Remove the containers of earlier runs with their files."""
        control = ["ctr", "--namespace=k8s.io", "containers"]
        listed = self._output([*control, "list", "--quiet"]).split()
        if listed:
            self._output([*control, "delete", *listed])

    def _output(self, command: list[str]) -> str:
        return subprocess.run(command, env=self._config.environ, check=True, stdout=subprocess.PIPE, text=True).stdout

    def _daemon(self, command: list[str]) -> Daemon:
        return Daemon(command, folder=Path(self._config.folder), environ=self._config.environ)

    def _start(self, name: str) -> Daemon:
        daemon = self._daemons[name] = self._daemon(self._config.commands[name])
        daemon.start()
        return daemon

    async def _until(self, daemon: Daemon, probe: Callable[[], Awaitable[bool]]) -> None:
        """Wait until the probe succeeds; raise an error about the part if it does not."""
        await until_ready(probe, *self._daemons.values(), daemon)

    def _api_answers(self, path: str) -> Callable[[], Awaitable[bool]]:
        return self._answers(self._config.server + path)

    def _answers(self, url: str) -> Callable[[], Awaitable[bool]]:
        async def probe() -> bool:
            return bool(await self._get(url))

        return probe

    async def _node_takes_pods(self) -> bool:
        """Return whether the node is ready, and the controller manager has removed its taints."""
        text = await self._get(f"{self._config.server}/api/v1/nodes/{node_config.NAME}")
        node = json.loads(text or "{}")
        conditions = {each["type"]: each["status"] for each in node.get("status", {}).get("conditions", ())}
        return conditions.get("Ready") == "True" and not node["spec"].get("taints")


async def _containerd_answers() -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(str(node_config.SOCKET))
    except OSError:
        return False
    writer.close()
    return True
