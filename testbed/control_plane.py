"""A real Kubernetes without nodes: etcd, API server, controller manager and scheduler, on loopback, without root.

It starts in seconds. Objects are validated, stored, watched, garbage-collected and given service accounts as in any
cluster; pods stay Pending, because there is no kubelet.

All files of the control plane are in one folder: certificates, kubeconfig, logs. The user's kubeconfig is neither read
nor written. At the end, the data are removed, so etcd does not need ``fsync``, and all processes are killed, even if
the tests end with ``kill -9`` (:mod:`elastic_operator.local.pdeathsig`).
"""

from __future__ import annotations

import os
import secrets
import shutil
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Self

from elastic_operator.local.processes import free_ports
from testbed.cluster import Cluster
from testbed.control_plane_config import (
    ControlPlaneConfig,
    api_server_command,
    controller_manager_command,
    etcd_command,
    scheduler_command,
    write_credentials,
)
from testbed.daemons import Daemon, DaemonDied, kill_all, probing, until_ready

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_ATTEMPTS = 5
"""The number of attempts to choose ports; another process may take a chosen port."""


class ControlPlane(Cluster):
    """A control plane; it runs within ``async with``.

    It is independent of event loops: a fixture may start it in one loop, and a test may use it in another.

    Args:
        folder: an existing folder for all its files.
        flags: more flags of the parts, by the names in :attr:`daemons`.
    """

    def __init__(self, folder: Path, *, flags: Mapping[str, Sequence[str]] | None = None) -> None:
        self._folder = folder
        self._flags = dict(flags or {})
        self.daemons: dict[str, Daemon] = {}
        """Its parts by name: etcd, kube-apiserver, kube-scheduler, kube-controller-manager."""

    async def __aenter__(self) -> Self:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                await self._start()
                return self
            except DaemonDied as error:
                if "address already in use" not in error.log or attempt == _ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    async def __aexit__(self, *_: object) -> None:
        self._end()

    @property
    def etcd_endpoint(self) -> str:
        """The client address of its etcd, host:port; also an external etcd for jobs."""
        return f"127.0.0.1:{self.control_plane.etcd_port}"

    def check(self) -> None:
        """Check that all its parts run.

        Raises:
            DaemonDied: a part has exited by itself.
        """
        for daemon in self.daemons.values():
            daemon.check()

    async def _start(self) -> None:
        port, etcd_port, peer_port = free_ports(3)
        config = self.control_plane = ControlPlaneConfig(
            folder=self._folder, port=port, etcd_port=etcd_port, peer_port=peer_port, token=secrets.token_hex(16)
        )
        write_credentials(config)
        commands = (etcd_command, api_server_command, scheduler_command, controller_manager_command)
        self.daemons = {daemon.name: daemon for daemon in (self._daemon(command(config)) for command in commands)}
        etcd, api_server, scheduler, controller_manager = self.daemons.values()
        try:
            async with probing(config.authority, config.token) as get:
                etcd.start()
                await until_ready(partial(get, f"http://{self.etcd_endpoint}/readyz"), etcd)
                api_server.start()
                await until_ready(partial(get, f"{config.server}/readyz"), etcd, api_server)
                scheduler.start()
                controller_manager.start()
                # Pods are forbidden in a namespace without this service account.
                account = f"{config.server}/api/v1/namespaces/default/serviceaccounts/default"
                await until_ready(partial(get, account), *self.daemons.values())
        except BaseException:
            self._end()
            raise

    def _daemon(self, command: list[str]) -> Daemon:
        flags = self._flags.get(PurePath(command[0]).name, ())
        return Daemon([*command, *flags], folder=self._folder, environ=os.environ)

    def _end(self) -> None:
        kill_all(self.daemons.values())
        shutil.rmtree(self._folder / "etcd-data", ignore_errors=True)  # it is preallocated and large
