"""The credentials for an etcd that is not of our making, from the Secret that the job names, where it may be read.

They are never on a disk. TLS wants the names of files, so it gets those of files that are in memory alone.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elastic_operator.errors import ClusterError
from elastic_operator.kube.api import ApiError
from elastic_operator.kube.resources import SECRETS
from elastic_operator.unchecked import mapping, text
from torchelastic.errors import StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Collection

    from elastic_operator.kube.api import Api
    from elastic_operator.spec import Json

AUTHORITY: Final = "ca.crt"
CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"


@dataclass(slots=True)
class Credentials:
    """Whom to trust and how to identify oneself, as files that vanish with this process.

    Attributes:
        authority: file with the certificate authority of the server; None for what the system trusts.
        certificate: file with the client's certificate; None where it has none.
        key: file with its private key; None where it has none.
    """

    authority: str | None = None
    certificate: str | None = None
    key: str | None = None
    _files: list[int] = field(default_factory=list, repr=False)

    @classmethod
    def of(cls, secret: Json) -> Credentials:
        """Those of a Secret.

        Raises:
            StoreRefused: it has none, or they cannot be read.
        """
        credentials = cls()
        try:
            credentials.authority = credentials._file(secret, AUTHORITY)
            credentials.certificate = credentials._file(secret, CERTIFICATE)
            credentials.key = credentials._file(secret, KEY)
            credentials._check(_name(secret))
        except BaseException:
            credentials.close()
            raise
        return credentials

    def close(self) -> None:
        """Let go of the files."""
        while self._files:
            os.close(self._files.pop())

    def _file(self, secret: Json, name: str) -> str | None:
        encoded = mapping(secret, "data").get(name)
        if not encoded:
            return None
        try:
            content = base64.b64decode(str(encoded), validate=True)
        except (binascii.Error, ValueError):
            raise StoreRefused(f"{name} of the Secret {_name(secret)} is not base64") from None
        number = os.memfd_create(name, os.MFD_CLOEXEC)
        self._files.append(number)
        with open(number, "wb", closefd=False) as file:
            file.write(content)
        return f"/proc/self/fd/{number}"

    def _check(self, name: str) -> None:
        """Say what is wrong in the words of the Secret, before TLS does in those of the files."""
        whose = f"the Secret {name}, which spec.etcd.tlsSecret names,"
        if self.authority is None and self.certificate is None:
            raise StoreRefused(
                f"{whose} has neither {AUTHORITY} nor {CERTIFICATE}: put the certificates for etcd under these names"
            )
        if (self.certificate is None) is not (self.key is None):
            raise StoreRefused(
                f"{whose} has one of {CERTIFICATE} and {KEY} and not the other: who identifies himself needs both"
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.authority is not None:
                context.load_verify_locations(self.authority)
        except (OSError, ValueError):
            raise StoreRefused(f"{whose} has a {AUTHORITY} that holds no certificate in PEM form") from None
        try:
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError):
            raise StoreRefused(
                f"{whose} has a {CERTIFICATE} and a {KEY} that are no pair in PEM form without a password"
            ) from None


class EtcdSecrets:
    """Reads the Secrets of the namespaces where the operator may.

    Args:
        api: the connection.
        namespaces: where it may.
    """

    def __init__(self, api: Api, namespaces: Collection[str]) -> None:
        self._api = api
        self._namespaces = frozenset(namespaces)

    def closed(self, namespace: str, name: str) -> str | None:
        """Why a Secret of a namespace is not even asked for, in words; None where it may be read."""
        if namespace in self._namespaces:
            return None
        return (
            f"the operator may not read the Secret {name} in the namespace {namespace}, so it knows of the training "
            "only what pods say when they end: name the namespace in the chart's value etcd.secretNamespaces"
        )

    async def read(self, namespace: str, name: str) -> Credentials:
        """The credentials in a Secret, as they are now; whoever asks closes them.

        Raises:
            StoreRefused: there is no such Secret, or none of use.
            StoreUnavailable: it cannot be read now.
        """
        try:
            secret = await self._api.get(SECRETS, namespace, name)
        except ApiError as error:
            if error.not_found:
                raise StoreRefused(
                    f"there is no Secret {name} in the namespace {namespace}, which spec.etcd.tlsSecret names: make it"
                ) from None
            if error.status == 403:
                raise StoreRefused(
                    f"the operator may not read the Secret {name} in the namespace {namespace}: the right to get "
                    "secrets there comes with the chart's value etcd.secretNamespaces"
                ) from None
            raise StoreUnavailable(f"the Secret {name} with the credentials for etcd cannot be read: {error}") from None
        except ClusterError as error:
            raise StoreUnavailable(f"the Secret {name} with the credentials for etcd cannot be read: {error}") from None
        return Credentials.of(secret)


def _name(secret: Json) -> str:
    return text(secret, "metadata", "name")
