"""The setup of a control plane: keys, kubeconfig, and the command line of each part.

Each control plane has its own certificate authority, so a client with its kubeconfig rejects another
server on the same port.
"""

from __future__ import annotations

import ipaddress
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trustme

from testbed.binaries import binary

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ControlPlaneConfig:
    """The files and addresses of a control plane.

    Attributes:
        folder: the folder of its files.
        address: the IP address that the API server listens on and advertises.
        port: the port of the API server.
        etcd_port: etcd's client port, on loopback.
        peer_port: etcd's peer port.
        services: the range of service addresses.
        token: the token of an administrator.
    """

    folder: Path
    address: str = "127.0.0.1"
    port: int
    etcd_port: int
    peer_port: int
    services: str = "10.96.0.0/16"
    token: str

    @property
    def server(self) -> str:
        """The API server's URL."""
        return f"https://{self.address}:{self.port}"

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig of an administrator."""
        return self.folder / "kubeconfig"

    @property
    def authority(self) -> Path:
        """The certificate of the authority."""
        return self.folder / "pki" / "ca.crt"


def write_credentials(config: ControlPlaneConfig) -> None:
    """Create the keys, certificates, tokens and the kubeconfig of a control plane."""
    pki = config.folder / "pki"
    pki.mkdir(exist_ok=True)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(pki / "ca.crt")
    inside = str(ipaddress.ip_network(config.services)[1])  # the API server's address for pods
    server = authority.issue_cert(config.address, inside, "localhost", "kubernetes.default.svc")
    server.private_key_pem.write_to_path(pki / "server.key")
    server.cert_chain_pems[0].write_to_path(pki / "server.crt")
    trustme.CA().private_key_pem.write_to_path(pki / "service-accounts.key")
    (pki / "tokens.csv").write_text(f'{config.token},admin,admin,"system:masters"\n')
    config.kubeconfig.write_text(kubeconfig(config.server, token=config.token, authority=config.authority))


def kubeconfig(server: str, *, token: str, namespace: str = "default", authority: Path | None = None) -> str:
    """Return a kubeconfig for a server, whose certificate this authority has signed."""
    trusted = {} if authority is None else {"certificate-authority": str(authority)}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
            "clusters": [{"name": "test", "cluster": {"server": server, **trusted}}],
            "users": [{"name": "test", "user": {"token": token}}],
        }
    )


def etcd_command(config: ControlPlaneConfig) -> list[str]:
    """Return the command line of etcd."""
    clients, peers = (f"http://127.0.0.1:{port}" for port in (config.etcd_port, config.peer_port))
    return [
        str(binary("etcd")),
        f"--data-dir={config.folder / 'etcd-data'}",
        "--unsafe-no-fsync",
        f"--listen-client-urls={clients}",
        f"--advertise-client-urls={clients}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=default={peers}",
        "--log-level=warn",
    ]


def api_server_command(config: ControlPlaneConfig) -> list[str]:
    """Return the command line of the API server."""
    pki = config.folder / "pki"
    return [
        str(binary("kube-apiserver")),
        f"--etcd-servers=http://127.0.0.1:{config.etcd_port}",
        f"--bind-address={config.address}",
        f"--advertise-address={config.address}",
        f"--secure-port={config.port}",
        f"--tls-cert-file={pki / 'server.crt'}",
        f"--tls-private-key-file={pki / 'server.key'}",
        f"--token-auth-file={pki / 'tokens.csv'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki / 'service-accounts.key'}",
        f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
        f"--service-cluster-ip-range={config.services}",
        "--authorization-mode=Node,RBAC",
        "--allow-privileged",
        # A service cannot have a loopback address.
        *(["--endpoint-reconciler-type=none"] if config.address.startswith("127.") else []),
    ]


def controller_manager_command(config: ControlPlaneConfig) -> list[str]:
    """Return the command line of the controller manager."""
    return [
        str(binary("kube-controller-manager")),
        f"--kubeconfig={config.kubeconfig}",
        "--use-service-account-credentials",
        f"--service-account-private-key-file={config.folder / 'pki' / 'service-accounts.key'}",
        f"--root-ca-file={config.authority}",
        "--leader-elect=false",
        "--secure-port=0",
        # With the default limits, creating service accounts takes seconds, and pods are forbidden until then.
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
    ]


def scheduler_command(config: ControlPlaneConfig) -> list[str]:
    """Return the command line of the scheduler."""
    return [
        str(binary("kube-scheduler")),
        f"--kubeconfig={config.kubeconfig}",
        "--leader-elect=false",
        "--secure-port=0",
    ]


def environment(config: ControlPlaneConfig, *, programs: Sequence[str]) -> dict[str, str]:
    """Return an environment with these programs for commands on a cluster, without the user's own files and proxies."""
    inherited = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    path = [*(str(binary(name).parent) for name in programs), os.environ.get("PATH", os.defpath)]
    return {
        **inherited,
        "KUBECONFIG": str(config.kubeconfig),
        "KUBECACHEDIR": str(config.folder / "kubectl-cache"),
        "KUBERC": "off",
        "HELM_CACHE_HOME": str(config.folder / "helm" / "cache"),
        "HELM_CONFIG_HOME": str(config.folder / "helm" / "config"),
        "HELM_DATA_HOME": str(config.folder / "helm" / "data"),
        "PATH": os.pathsep.join(path),
    }
