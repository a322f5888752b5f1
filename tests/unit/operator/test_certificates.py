"""The certificates of the jobs' own etcds: who is accepted by whom."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import math
import ssl
from typing import TYPE_CHECKING

import pytest

from elastic_operator.certificates import JobAuthority, client_context
from elastic_operator.errors import ClusterError
from elastic_operator.kubernetes.client import SECRETS, Api
from elastic_operator.kubernetes.etcd_certificates import EtcdCertificates, operator_secret
from tests.support.object_server import NAMESPACE, ObjectServer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SECRET = bytes(range(32))
DAY = dt.timedelta(days=1)


def server_context(files: Mapping[str, bytes], folder: Path) -> ssl.SSLContext:
    """Return the context of a server that requires certificates, like etcd."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.load_verify_locations(folder / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


async def greeting(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> bytes:
    """Return what a server of this machine, which the client expects at a host, sends after the handshake."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    client.verify_flags |= ssl.VERIFY_X509_STRICT  # the default of Python 3.13
    async with await asyncio.start_server(greet, "127.0.0.1", 0, ssl=server) as serving:
        port = serving.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname=host)
        try:
            return await reader.read()
        finally:
            writer.close()


async def test_etcd_and_its_clients_trust_only_certificates_of_their_job(tmp_path: Path) -> None:
    hosts = ("10.96.0.7", "digits-etcd.team")
    etcd = server_context(JobAuthority(SECRET, "a").issue(hosts, DAY), tmp_path)
    for host in hosts:  # the operator has restarted, and issues another certificate from the same secret
        assert await greeting(etcd, client_context(JobAuthority(SECRET, "a").issue((), DAY)), host) == b"hello"
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        await greeting(etcd, client_context(JobAuthority(SECRET, "a").issue((), DAY)), "10.96.0.8")
    for secret, uid in ((SECRET, "b"), (bytes(32), "a")):
        other = JobAuthority(secret, uid).issue((), DAY)
        with pytest.raises(ssl.SSLCertVerificationError):
            await greeting(etcd, client_context(other), hosts[0])
        ours = JobAuthority(SECRET, "a").issue((), DAY)
        with contextlib.suppress(ssl.SSLError, ConnectionError):  # etcd refuses the client, after its own handshake
            assert await greeting(etcd, client_context({**other, "ca.crt": ours["ca.crt"]}), hosts[0]) == b""


def test_a_certificate_is_renewed_at_another_address_and_after_half_of_its_lifetime() -> None:
    certificates = EtcdCertificates(SECRET, dt.timedelta(seconds=200))
    note = certificates.note("10.96.0.7")
    assert 90 < certificates.renewal(note, "10.96.0.7") <= 100
    assert certificates.renewal(note, "10.96.0.8") == 0
    assert certificates.renewal("", "10.96.0.7") == 0
    other = EtcdCertificates(bytes(32), dt.timedelta(seconds=200))
    assert other.renewal(note, "10.96.0.7") == math.inf, "etcd does not accept certificates from another secret"
    assert certificates.renewal("10.96.0.7 2026-01-01T00:00:00Z", "10.96.0.7") == 0


async def test_the_secret_of_the_operator_is_created_once() -> None:
    async with ObjectServer() as server, Api(server.configuration) as api:
        secret = await operator_secret(api, NAMESPACE, "own")
        assert len(secret) == 32
        assert await operator_secret(api, NAMESPACE, "own") == secret
        server.put(SECRETS, "own", data={"secret": "aaaa"})
        with pytest.raises(ClusterError, match=r"the Secret own .* does not have the operator's secret: delete"):
            await operator_secret(api, NAMESPACE, "own")
