"""Simulated nodes: kwok reports thousands of pods as running without running them.

The scheduler binds pods to these nodes; then kwok writes the status that a kubelet would write, as
``nodes.yaml`` in this folder defines. So the API server, the controllers and the operator have the same work
as with real nodes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from testbed.binaries import binary
from testbed.daemons import Daemon, kill_all

if TYPE_CHECKING:
    from testbed.control_plane import ControlPlane

LINGERS: Final = "testbed/lingers"
"""The annotation of pods that stay Terminating when they are deleted."""

MARK: Final = "testbed/node"
"""The annotation of the nodes that kwok manages."""

STAGES: Final = Path(__file__).with_name("nodes.yaml")


class SimulatedNodes:
    """Simulated nodes of a control plane; within ``async with``, kwok runs and the nodes are ready.

    Args:
        cluster: a running control plane.
        folder: the folder for kwok's log.
        nodes: the number of nodes; each has room for ten thousand pods.
    """

    def __init__(self, cluster: ControlPlane, folder: Path, *, nodes: int = 10) -> None:
        self._cluster = cluster
        self._names = tuple(f"simulated-{number}" for number in range(nodes))
        self._kwok = Daemon(
            [
                str(binary("kwok")),
                f"--kubeconfig={cluster.kubeconfig}",
                f"--config={STAGES}",
                f"--manage-nodes-with-annotation-selector={MARK}=kwok",
                "--node-port=0",
                "--v=WARN",
            ],
            folder=folder,
            environ=cluster.environ,
        )

    async def __aenter__(self) -> Self:
        self._kwok.start()
        nodes = {"apiVersion": "v1", "kind": "List", "items": [_node(name) for name in self._names]}
        try:
            await self._cluster.kubectl("apply", "--filename=-", stdin=json.dumps(nodes))
            await self._cluster.kubectl("wait", "--for=condition=Ready", *self._resources, "--timeout=60s")
        except BaseException:
            kill_all([self._kwok])
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        kill_all([self._kwok])

    @property
    def pid(self) -> int:
        """The id of kwok's process."""
        return self._kwok.pid

    def check(self) -> None:
        """Check that kwok runs.

        Raises:
            DaemonDied: kwok has exited.
        """
        self._kwok.check()

    @property
    def _resources(self) -> tuple[str, ...]:
        return tuple(f"node/{name}" for name in self._names)


def _node(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {MARK: "kwok"},
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"},
        },
    }
