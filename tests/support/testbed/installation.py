"""How a control plane is set up: its keys and kubeconfig, and the command line of each of its parts.

Each control plane has an authority of its own, made for it alone, so whoever has its kubeconfig talks to it and to
nobody else who may have taken its port.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trustme

from tests.support.testbed.binaries import binary

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a control plane stands, and how it is reached.

    Attributes:
        folder: where all its files go.
        address: the IP address that the API server listens on and names as its own.
        port: its port.
        etcd_port: where etcd serves the API server, on loopback.
        peer_port: where etcd would serve its peers.
        services: the range of the addresses of services.
        token: whoever shows it may do everything.
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
        """Of somebody who may do everything."""
        return self.folder / "kubeconfig"

    @property
    def authority(self) -> Path:
        """The certificate of who has signed the API server's."""
        return self.folder / "pki" / "ca.crt"


def write_credentials(site: Site) -> None:
    """Make the keys, certificates, tokens and the kubeconfig of a control plane."""
    pki = site.folder / "pki"
    pki.mkdir(exist_ok=True)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(pki / "ca.crt")
    inside = str(ipaddress.ip_network(site.services)[1])  # where pods reach it
    server = authority.issue_cert(site.address, inside, "localhost", "kubernetes.default.svc")
    server.private_key_pem.write_to_path(pki / "server.key")
    server.cert_chain_pems[0].write_to_path(pki / "server.crt")
    trustme.CA().private_key_pem.write_to_path(pki / "service-accounts.key")
    (pki / "tokens.csv").write_text(f'{site.token},admin,admin,"system:masters"\n')
    site.kubeconfig.write_text(kubeconfig(site, token=site.token))


def kubeconfig(site: Site, *, token: str, namespace: str = "default") -> str:
    """A kubeconfig that needs no other file."""
    authority = base64.b64encode(site.authority.read_bytes()).decode()
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
            "clusters": [{"name": "test", "cluster": {"server": site.server, "certificate-authority-data": authority}}],
            "users": [{"name": "test", "user": {"token": token}}],
        }
    )


def etcd_command(site: Site) -> list[str]:
    """How etcd is started."""
    clients, peers = (f"http://127.0.0.1:{port}" for port in (site.etcd_port, site.peer_port))
    return [
        str(binary("etcd")),
        f"--data-dir={site.folder / 'etcd-data'}",
        "--unsafe-no-fsync",
        f"--listen-client-urls={clients}",
        f"--advertise-client-urls={clients}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=default={peers}",
        "--log-level=warn",
    ]


def api_server_command(site: Site) -> list[str]:
    """How the API server is started."""
    pki = site.folder / "pki"
    return [
        str(binary("kube-apiserver")),
        f"--etcd-servers=http://127.0.0.1:{site.etcd_port}",
        f"--bind-address={site.address}",
        f"--advertise-address={site.address}",
        f"--secure-port={site.port}",
        f"--tls-cert-file={pki / 'server.crt'}",
        f"--tls-private-key-file={pki / 'server.key'}",
        f"--token-auth-file={pki / 'tokens.csv'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki / 'service-accounts.key'}",
        f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
        f"--service-cluster-ip-range={site.services}",
        "--authorization-mode=Node,RBAC",
        "--allow-privileged",
        # A loopback address cannot be the address of a service.
        *(["--endpoint-reconciler-type=none"] if site.address.startswith("127.") else []),
    ]


def controller_manager_command(site: Site) -> list[str]:
    """How the controller manager is started."""
    return [
        str(binary("kube-controller-manager")),
        f"--kubeconfig={site.kubeconfig}",
        "--use-service-account-credentials",
        f"--service-account-private-key-file={site.folder / 'pki' / 'service-accounts.key'}",
        f"--root-ca-file={site.authority}",
        "--leader-elect=false",
        "--secure-port=0",
        # With the usual limits its many service accounts take seconds, and pods are forbidden until then.
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
    ]


def scheduler_command(site: Site) -> list[str]:
    """How the scheduler is started."""
    return [
        str(binary("kube-scheduler")),
        f"--kubeconfig={site.kubeconfig}",
        "--leader-elect=false",
        "--secure-port=0",
    ]


def environment(folder: Path, kubeconfig_file: Path, *, programs: Sequence[str]) -> dict[str, str]:
    """An environment in which a user's commands reach a cluster, and no file of the user's own is read or written.

    Args:
        folder: where caches and settings go instead.
        kubeconfig_file: says which cluster.
        programs: what must be found on the PATH.
    """
    own = {
        "KUBECONFIG": str(kubeconfig_file),
        "KUBECACHEDIR": str(folder / "kubectl-cache"),
        "KUBERC": "off",
        "HELM_CACHE_HOME": str(folder / "helm" / "cache"),
        "HELM_CONFIG_HOME": str(folder / "helm" / "config"),
        "HELM_DATA_HOME": str(folder / "helm" / "data"),
    }
    path = [*(str(binary(name).parent) for name in programs), os.environ.get("PATH", os.defpath)]
    return {**os.environ, **own, "PATH": os.pathsep.join(path)}
