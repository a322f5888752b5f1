"""Command lines, files and environment of a node's parts. Nothing here changes the machine.

In the node, its own files are below one folder (:data:`INSIDE`); the folder that
tests give for logs and configuration has the same path inside and outside.

The network, in its own namespace:

==================  =========================================================
10.88.255.1         the node, on ``lo``: API server, kubelet, CoreDNS
10.88.0.0/16        pods, each on a link to the node (CNI plug-in ``ptp``)
10.96.0.0/16        services
==================  =========================================================

Pods are not on a bridge, because traffic between pods on a bridge passes iptables, which services need, only on
machines with ``br_netfilter``. CoreDNS is a process of the node and not a pod: it is ready sooner, and needs no image.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from testbed import control_plane_config, packages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from testbed.control_plane_config import ControlPlaneConfig

NAME: Final = "node1"
ADDRESS: Final = "10.88.255.1"
PODS: Final = "10.88.0.0/16"
SERVICES: Final = "10.96.0.0/16"
DOMAIN: Final = "cluster.local"
API_PORT, ETCD_PORT, PEER_PORT = 6443, 2379, 2380
KUBELET_HEALTH, PROXY_HEALTH, DNS_READY = 10248, 10256, 8181

INSIDE: Final = Path("/run/elastic-operator-node")
CONTAINERD: Final = INSIDE / "containerd"
"""containerd's root, which is on a disk and kept between runs."""
KUBELET: Final = INSIDE / "kubelet"
"""The kubelet's root with the pods' volumes, on the same disk."""
BIN: Final = INSIDE / "bin"
"""The folder with programs that replace those of the packages."""
SOCKET: Final = Path("/run/containerd/containerd.sock")

KERNEL_VALUES: Final[Mapping[str, str]] = {
    "kernel/keys/root_maxbytes": "25000000",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
}
"""The kubelet's values of /proc/sys, which belongs to the machine; the node sees files with these values instead."""


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """The settings of the processes that create and run a node.

    Attributes:
        folder: the folder of logs and configuration.
        cache: the cache folder.
        shown: folders that keep their paths inside.
        tools: the root of the unpacked packages.
        commands: the command line of each part, by its name.
        server: the API server's URL.
        token: the token of an administrator.
        authority: the certificate of the API server's authority.
    """

    folder: str
    cache: str
    shown: list[str]
    tools: str
    commands: Mapping[str, list[str]]
    server: str
    token: str
    authority: str

    def written(self) -> str:
        """Return a text from which :meth:`read` restores the settings."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> NodeConfig:
        """Return the settings from the text of :meth:`written`."""
        return cls(**json.loads(text))

    @property
    def environ(self) -> dict[str, str]:
        """The complete environment of the node's parts."""
        found = packages.environment(Path(self.tools))
        return found | {
            "PATH": f"{BIN}:{found['PATH']}",
            "HOME": str(INSIDE / "home"),
            "TMPDIR": str(INSIDE / "tmp"),
            "LC_ALL": "C.UTF-8",
        }


def commands(control_plane: ControlPlaneConfig, programs: Mapping[str, Path], tools: Path) -> dict[str, list[str]]:
    """Return the command lines of all parts, by name.

    Args:
        control_plane: the files and addresses of the control plane.
        programs: the paths of kubelet, kube-proxy and coredns.
        tools: the root of the unpacked packages.
    """
    config = control_plane.folder / "config"
    return {
        "etcd": control_plane_config.etcd_command(control_plane),
        "kube-apiserver": [
            *control_plane_config.api_server_command(control_plane),
            "--kubelet-preferred-address-types=InternalIP",
        ],
        "kube-controller-manager": [
            *control_plane_config.controller_manager_command(control_plane),
            "--node-monitor-grace-period=25s",  # half of the default: tests wait until a silent node is noticed
        ],
        "kube-scheduler": control_plane_config.scheduler_command(control_plane),
        "containerd": [str(tools / "usr/bin/containerd"), f"--config={config / 'containerd.toml'}"],
        "kubelet": [
            str(programs["kubelet"]),
            f"--config={config / 'kubelet.json'}",
            f"--kubeconfig={control_plane.kubeconfig}",
            f"--root-dir={KUBELET}",
            f"--cert-dir={KUBELET / 'pki'}",
            f"--node-ip={ADDRESS}",
            f"--hostname-override={NAME}",
        ],
        "kube-proxy": [str(programs["kube-proxy"]), f"--config={config / 'proxy.json'}"],
        "coredns": [str(programs["coredns"]), "-conf", str(config / "Corefile")],
    }


def files(control_plane: ControlPlaneConfig, tools: Path, pause_image: str) -> dict[str, str]:
    """Return the files that the parts read, by their path below the folder ``config``.

    Args:
        control_plane: the files and addresses of the control plane.
        tools: the root of the unpacked packages.
        pause_image: the name of the pause image, which keeps a pod's namespaces.
    """
    containerd = _containerd(control_plane, tools, pause_image)
    return {
        "kubelet.json": json.dumps(_kubelet(control_plane)),
        "proxy.json": json.dumps(_proxy(control_plane)),
        "cni/node.conflist": json.dumps(_CNI),
        "containerd.toml": containerd,
        # The containers of an earlier run must not restart while they are removed.
        "containerd-without-pods.toml": f'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n{containerd}',
        "Corefile": _corefile(control_plane),
    }


def _kubelet(control_plane: ControlPlaneConfig) -> Mapping[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "address": ADDRESS,
        "healthzPort": KUBELET_HEALTH,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "clusterDNS": [ADDRESS],
        "clusterDomain": DOMAIN,
        "resolvConf": "",
        "podLogsDir": str(control_plane.folder / "pods"),
        "volumePluginDir": str(INSIDE / "volume-plugins"),
        # The machine may have swap or cgroup v1, and may not permit changes of kernel limits.
        "cgroupDriver": "cgroupfs",
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "volumeStatsAggPeriod": "5s",  # not a minute: a test waits for the eviction of a pod with a full volume
        "featureGates": {"KubeletInUserNamespace": True},
        "oomScoreAdj": 0,
        # The machine's disk may be nearly full, which must not evict pods or images.
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
    }


def _proxy(control_plane: ControlPlaneConfig) -> Mapping[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "bindAddress": ADDRESS,
        "clientConnection": {"kubeconfig": str(control_plane.kubeconfig)},
        "clusterCIDR": PODS,
        "conntrack": {"maxPerCore": 0},  # do not change the limit, which is machine-wide
        "healthzBindAddress": f"127.0.0.1:{PROXY_HEALTH}",
        "hostnameOverride": NAME,
    }


_CNI: Final[Mapping[str, Any]] = {
    "cniVersion": "1.0.0",
    "name": "pods",
    "plugins": [
        {
            "type": "ptp",
            "ipMasq": True,
            "ipam": {
                "type": "host-local",
                "dataDir": str(INSIDE / "addresses"),
                "ranges": [[{"subnet": PODS, "rangeStart": "10.88.0.2", "rangeEnd": "10.88.250.254"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ],
}


def _containerd(control_plane: ControlPlaneConfig, tools: Path, pause_image: str) -> str:
    return f"""\
version = 2
root = "{CONTAINERD}"
state = "{SOCKET.parent}"
oom_score = 0
[grpc]
  address = "{SOCKET}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{INSIDE}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause_image}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{tools}/usr/lib/cni"
    conf_dir = "{control_plane.folder}/config/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


def _corefile(control_plane: ControlPlaneConfig) -> str:
    # There are two blocks, because in one block the answer for all other names precedes that for services.
    return f"""\
{DOMAIN}:53 in-addr.arpa:53 {{
  bind {ADDRESS}
  errors
  ready 127.0.0.1:{DNS_READY}
  kubernetes {DOMAIN} in-addr.arpa {{
    kubeconfig {control_plane.kubeconfig}
  }}
}}
.:53 {{
  bind {ADDRESS}
  template ANY ANY . {{
    rcode NXDOMAIN
  }}
}}
"""
