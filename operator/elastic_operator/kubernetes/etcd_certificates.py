"""The certificates of the etcds that the operator creates, and the operator's secret, from which they derive."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import logging
import math
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import MANAGED_BY
from elastic_operator.api.json_values import get_str, get_time, rfc3339
from elastic_operator.certificates import SECRET_BYTES, JobAuthority
from elastic_operator.errors import ClusterError
from elastic_operator.kubernetes.client import SECRETS, Api, ApiError

if TYPE_CHECKING:
    from collections.abc import Iterable

_KEY: Final = "secret"

logger: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EtcdCertificates:
    """Issues the certificates of all jobs.

    Attributes:
        secret: the operator's secret.
        lifetime: how long a certificate is valid. It is renewed after half of this time, so the operator may be away
            for the other half.
    """

    secret: bytes = field(repr=False)
    lifetime: dt.timedelta = dt.timedelta(days=365)

    def issue(self, uid: str, hosts: Iterable[str] = ()) -> dict[str, bytes]:
        """Issue a certificate as :meth:`elastic_operator.certificates.JobAuthority.issue` does."""
        return JobAuthority(self.secret, uid).issue(hosts, self.lifetime)

    def note(self, address: str) -> str:
        """Return the annotation for a certificate that is issued now for etcd at an address."""
        return f"{address} {rfc3339(time.time() + self.lifetime.total_seconds() / 2)} {self._fingerprint}"

    def renewal(self, note: str, address: str) -> float:
        """Return the seconds until the certificate with this annotation is renewed; 0 for now, infinity for never.

        etcd does not accept certificates from another secret before it starts again.
        """
        host, due, fingerprint = (*note.split(), "", "", "")[:3]
        if fingerprint not in ("", self._fingerprint):
            return math.inf
        at = get_time(due)
        return max(at - time.time(), 0.0) if at is not None and host == address else 0.0

    @property
    def _fingerprint(self) -> str:
        return hashlib.blake2b(self.secret, digest_size=4, person=b"fingerprint").hexdigest()


async def operator_secret(api: Api, namespace: str, name: str) -> bytes:
    """Return the operator's secret from a Secret of its own namespace, which is created if it is missing.

    Raises:
        ClusterError: the Secret cannot be read or created, or has another content.
    """
    try:
        found = await api.get(SECRETS, namespace, name)
    except ApiError as error:
        if not error.not_found:
            raise
        value = base64.b64encode(os.urandom(SECRET_BYTES)).decode()
        labels = {"app.kubernetes.io/managed-by": MANAGED_BY}
        metadata = {"name": name, "namespace": namespace, "labels": labels}
        made = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "immutable": True, "data": {_KEY: value}}
        try:
            found = await api.create(SECRETS, namespace, made)
            logger.info("created the Secret %s in the namespace %s for the certificates of etcds", name, namespace)
        except ApiError as raced:
            if raced.reason != "AlreadyExists":
                raise
            found = await api.get(SECRETS, namespace, name)
    try:
        secret = base64.b64decode(get_str(found, "data", _KEY), validate=True)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ClusterError(
            f"the Secret {name} in the namespace {namespace} does not have the operator's secret: delete this Secret, "
            "and suspend and resume the running jobs"
        )
    return secret
