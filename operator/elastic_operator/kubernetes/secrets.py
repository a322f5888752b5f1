"""Credentials for external etcds, from the Secrets that jobs name in ``spec.etcd.tlsSecret``.

They are never written to disk. TLS needs file names, so they are in files in memory.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elastic_operator.api.json_access import mapping, text
from elastic_operator.errors import ClusterError
from elastic_operator.kubernetes.client import ApiError
from elastic_operator.kubernetes.kinds import SECRETS
from torchelastic.errors import StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Collection

    from elastic_operator.api.spec import Json
    from elastic_operator.kubernetes.client import Api

AUTHORITY: Final = "ca.crt"
CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"


@dataclass(slots=True)
class Credentials:
    """Paths of credentials, in files that vanish with this process.

    Attributes:
        authority: the CA certificate of the server; None for the system's.
        certificate: the client's certificate.
        key: its private key.
    """

    authority: str | None = None
    certificate: str | None = None
    key: str | None = None
    _files: list[int] = field(default_factory=list, repr=False)

    @classmethod
    def of(cls, secret: Json) -> Credentials:
        """Read a Secret.

        Raises:
            StoreRefused: it has no usable credentials.
        """
        credentials = cls()
        try:
            credentials.authority = credentials._file(secret, AUTHORITY)
            credentials.certificate = credentials._file(secret, CERTIFICATE)
            credentials.key = credentials._file(secret, KEY)
            credentials._check(text(secret, "metadata", "name"))
        except BaseException:
            credentials.close()
            raise
        return credentials

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.pop())

    def _file(self, secret: Json, name: str) -> str | None:
        encoded = mapping(secret, "data").get(name)
        if not encoded:
            return None
        try:
            content = base64.b64decode(str(encoded), validate=True)
        except (binascii.Error, ValueError):
            raise StoreRefused(f"{name} of the Secret {text(secret, 'metadata', 'name')} is not base64") from None
        number = os.memfd_create(name, os.MFD_CLOEXEC)
        self._files.append(number)
        with open(number, "wb", closefd=False) as file:
            file.write(content)
        return f"/proc/self/fd/{number}"

    def _check(self, name: str) -> None:
        """Raise an error that names the Secret's keys, before TLS does that names the files."""
        secret = f"the Secret {name}, which spec.etcd.tlsSecret names,"
        if self.authority is None and self.certificate is None:
            raise StoreRefused(
                f"{secret} has neither {AUTHORITY} nor {CERTIFICATE}: put the certificates for etcd under these names"
            )
        if (self.certificate is None) is not (self.key is None):
            raise StoreRefused(
                f"{secret} has one of {CERTIFICATE} and {KEY} and not the other: who identifies himself needs both"
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.authority is not None:
                context.load_verify_locations(self.authority)
        except (OSError, ValueError):
            raise StoreRefused(f"{secret} has a {AUTHORITY} that holds no certificate in PEM form") from None
        try:
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError):
            raise StoreRefused(
                f"{secret} has a {CERTIFICATE} and a {KEY} that are no pair in PEM form without a password"
            ) from None


class EtcdSecrets:
    """Reads Secrets.

    Args:
        api: the connection.
        namespaces: where the operator may read Secrets.
    """

    def __init__(self, api: Api, namespaces: Collection[str]) -> None:
        self._api = api
        self._namespaces = frozenset(namespaces)

    def forbidden(self, namespace: str, name: str) -> str | None:
        """Why a Secret is not read; None if it may be."""
        if namespace in self._namespaces:
            return None
        return (
            f"the operator may not read the Secret {name} in the namespace {namespace}, so it knows of the training "
            "only what pods say when they end: name the namespace in the chart's value etcd.secretNamespaces"
        )

    async def read(self, namespace: str, name: str) -> Credentials:
        """Read the credentials in a Secret; the caller closes them.

        Raises:
            StoreRefused: there is no such Secret, or it has no usable credentials.
            StoreUnavailable: it cannot be read now.
        """
        try:
            secret = await self._api.get(SECRETS, namespace, name)
        except ClusterError as error:
            status = error.status if isinstance(error, ApiError) else 0
            if status == 404:
                raise StoreRefused(
                    f"there is no Secret {name} in the namespace {namespace}, which spec.etcd.tlsSecret names: make it"
                ) from None
            if status == 403:
                raise StoreRefused(
                    f"the operator may not read the Secret {name} in the namespace {namespace}: the right to get "
                    "secrets there comes with the chart's value etcd.secretNamespaces"
                ) from None
            raise StoreUnavailable(f"the Secret {name} with the credentials for etcd cannot be read: {error}") from None
        return Credentials.of(secret)
