"""Certificates for tests of TLS; one authority signs all of them."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trustme

from elastic_operator.kubernetes.etcd_certificates import EtcdCertificates

if TYPE_CHECKING:
    from pathlib import Path


CERTIFICATES = EtcdCertificates(bytes(32), dt.timedelta(days=1))
"""The certificates of the jobs' own etcds, from an operator's secret that is not random."""


@dataclass(frozen=True)
class Certificates:
    """Files with certificates.

    Attributes:
        authority: the certificate of the authority.
        server: the certificate for 127.0.0.1.
        server_key: the private key of that certificate.
        client: the certificate for client.test.
        client_key: the private key of that certificate.
    """

    authority: str
    server: str
    server_key: str
    client: str
    client_key: str

    @property
    def etcd_flags(self) -> list[str]:
        """The etcd flags for a server certificate."""
        return [f"--cert-file={self.server}", f"--key-file={self.server_key}"]

    @property
    def etcd_flags_for_clients(self) -> list[str]:
        """The etcd flags for a server certificate and required client certificates."""
        return [*self.etcd_flags, f"--trusted-ca-file={self.authority}", "--client-cert-auth"]


def make_certificates(folder: Path) -> Certificates:
    """Create new certificates below a folder."""

    def written(name: str, blob: trustme.Blob) -> str:
        blob.write_to_path(folder / name)
        return str(folder / name)

    authority = trustme.CA()
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("client.test")
    return Certificates(
        authority=written("ca.pem", authority.cert_pem),
        server=written("server.pem", server.cert_chain_pems[0]),
        server_key=written("server.key", server.private_key_pem),
        client=written("client.pem", client.cert_chain_pems[0]),
        client_key=written("client.key", client.private_key_pem),
    )
