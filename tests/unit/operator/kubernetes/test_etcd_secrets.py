"""TLS credentials for etcd in a Secret."""

from __future__ import annotations

import base64
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elastic_operator.kubernetes.client import Api, Resource
from elastic_operator.kubernetes.job_store import JobStores, SecretError, tls_context
from tests.support.certificates import CERTIFICATES, Certificates, make_certificates
from tests.support.object_server import ObjectServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def a_secret(**data: str | bytes) -> dict[str, Any]:
    """Return a Secret; each value is a path or the content of a file."""
    contents = {
        name.replace("_", "."): value if isinstance(value, bytes) else Path(value).read_bytes()
        for name, value in data.items()
    }
    encoded = {name: base64.b64encode(content).decode() for name, content in contents.items()}
    return {"metadata": {"name": "hub", "namespace": "team"}, "data": encoded}


def test_a_secret_may_have_an_authority_a_client_certificate_or_both(files: Certificates) -> None:
    pair = {"tls_crt": files.client, "tls_key": files.client_key}
    for data in ({"ca_crt": files.authority, **pair}, {"ca_crt": files.authority}):
        assert len(tls_context(a_secret(**data)).get_ca_certs()) == 1
    assert tls_context(a_secret(**pair)).verify_mode is ssl.CERT_REQUIRED


def test_an_invalid_secret_is_explained(files: Certificates) -> None:
    for secret, words in (
        (a_secret(), "has neither ca.crt nor tls.crt: put the certificates for etcd under these names"),
        ({"metadata": {"name": "hub"}}, "has neither ca.crt nor tls.crt"),
        (a_secret(tls_crt=files.client), "has a tls.crt and a tls.key that are not a pair in PEM form"),
        (a_secret(ca_crt=files.authority, tls_key=files.client_key), "tls.crt and a tls.key that are not a pair"),
        (a_secret(ca_crt=b"nonsense"), "has a ca.crt that holds no certificate in PEM form"),
        (a_secret(tls_crt=files.client, tls_key=files.server_key), "tls.crt and a tls.key that are not a pair in PEM"),
        ({"metadata": {"name": "hub"}, "data": {"ca.crt": "#"}}, "ca.crt of the Secret hub is not base64"),
    ):
        with pytest.raises(SecretError, match=words) as refused:
            tls_context(secret)
        assert "hub" in str(refused.value)
        assert "/proc/" not in str(refused.value)


SECRETS = Resource("", "v1", "secrets", "Secret")


@pytest.fixture
async def server() -> AsyncIterator[ObjectServer]:
    async with ObjectServer() as server:
        yield server


@pytest.fixture
async def stores(server: ObjectServer) -> AsyncIterator[JobStores]:
    async with Api(server.configuration) as api:
        yield JobStores(api, lambda _key: None, CERTIFICATES, secret_namespaces=["team"])


async def test_a_secret_is_read_on_every_call(server: ObjectServer, stores: JobStores, files: Certificates) -> None:
    server.put(SECRETS, "hub", **a_secret(ca_crt=files.authority))
    for _ in range(2):
        assert (await stores.read_secret("team", "hub"))["data"]
    assert server.requests == [("GET", "/api/v1/namespaces/team/secrets/hub")] * 2
    assert stores.forbidden("team", "hub") is None
    assert "the Secret hub in the namespace other" in (stores.forbidden("other", "hub") or "")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (404, "the Secret hub of spec.etcd.tlsSecret does not exist in the namespace team: create it"),
        (403, "the chart grants this right in the namespaces of its value etcd.secretNamespaces"),
        (500, "the Secret hub with the credentials for etcd cannot be read: .*words"),
    ],
)
async def test_a_secret_that_cannot_be_read_is_reported(
    server: ObjectServer, stores: JobStores, status: int, words: str
) -> None:
    server.fault = lambda _method, _path: (status, "X", "words")
    with pytest.raises(SecretError, match=words):
        await stores.read_secret("team", "hub")
