"""NetworkPolicies that take effect on a node: kube-router's firewall, without its routes and services.

The node's own network plug-in ignores NetworkPolicies. kube-router translates them into rules of iptables and sets of
ipset, in the node's network namespace.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from testbed import node_config, packages
from testbed.binaries import binary

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from testbed.node import Node

_REMOVE = """
iptables-save --table filter | grep -v -e KUBE-ROUTER- -e KUBE-POD-FW- -e KUBE-NWPLCY- | iptables-restore --table=filter
ipset destroy
"""
"""A command that removes the rules, because kube-router leaves them in effect when it ends."""


@contextlib.asynccontextmanager
async def enforced(node: Node) -> AsyncIterator[None]:
    """Enforce the NetworkPolicies of the node's pods within ``async with``, from some seconds after its beginning."""
    environ = _environ()
    log = node.folder / "kube-router.log"
    with log.open("wb") as file:
        firewall = await node.popen(
            str(binary("kube-router")),
            "--run-firewall=true",
            "--run-router=false",
            "--run-service-proxy=false",
            "--enable-ipv6=false",
            "--metrics-port=0",
            f"--kubeconfig={node.control_plane.kubeconfig}",
            f"--hostname-override={node_config.NAME}",
            f"--service-cluster-ip-range={node_config.SERVICES}",
            env=environ,
            stderr=file.fileno(),
        )
    try:
        yield
        if firewall.returncode is not None:
            raise RuntimeError(f"kube-router has ended by itself: {log.read_text()[-4000:]}")
    finally:
        if firewall.returncode is None:
            firewall.terminate()
        await firewall.wait()
        await node.run("sh", "-ec", _REMOVE, env=environ)


def _environ() -> dict[str, str]:
    """Return variables with which the programs find those of both sets of packages."""
    node, more = (packages.environment(packages.unpacked(name)) for name in ("node", "network_policies"))
    joined = ("PATH", "LD_LIBRARY_PATH")
    return node | {name: os.pathsep.join((node[name], more[name])) for name in joined}
