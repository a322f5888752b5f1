"""An external etcd as the operator sees it: reachable, refused, with another API, behind TLS."""

from __future__ import annotations

import asyncio
import base64
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from elastic_operator.kubernetes.client import Api
from elastic_operator.kubernetes.job_store import JobStores
from tests.support.answering import answering
from tests.support.certificates import Certificates, make_certificates
from tests.support.etcd import EtcdServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.real

PATIENCE = 90.0
KEY = "team/digits"


class Watcher:
    """Follows a job's store and waits for messages about it."""

    def __init__(self, api: Api | None = None) -> None:
        self._happened = asyncio.Event()
        api = api or Api(Configuration())
        self.stores = JobStores(api, lambda _: self._happened.set(), secret_namespaces=["team"], patience=0.0)

    async def error(self, run_id: str) -> str:
        """The first message about the store."""
        async with asyncio.timeout(PATIENCE):
            while (said := self.stores.error(run_id)) is None:
                self._happened.clear()
                await self._happened.wait()
        return said

    async def readable(self, run_id: str) -> None:
        """Return when the store can be read and there is no message about it."""
        mirror = self.stores.of(run_id)
        assert mirror is not None
        async with asyncio.timeout(PATIENCE):
            while not mirror.readable:
                self._happened.clear()
                await self._happened.wait()
        assert self.stores.error(run_id) is None


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
async def tls_etcd(tmp_path: Path, files: Certificates) -> AsyncIterator[EtcdServer]:
    """An etcd that requires client certificates."""
    async with EtcdServer(tmp_path, args=files.etcd_flags_for_clients, protocol="https") as server:
        yield server


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def secret() -> dict[str, Any]:
    """The Secret ``hub`` of the API server; a test changes it."""
    return {"metadata": {"name": "hub", "namespace": "team"}, "data": {}}


@pytest.fixture
async def api(secret: dict[str, Any]) -> AsyncIterator[Api]:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        assert request.path == "/api/v1/namespaces/team/secrets/hub"
        return web.json_response(secret)

    async with answering(answer) as configuration, Api(configuration) as api:
        yield api


def data(**files: str) -> dict[str, str]:
    """The data of a Secret with these files."""
    return {name.replace("_", "."): base64.b64encode(Path(path).read_bytes()).decode() for name, path in files.items()}


async def test_an_etcd_with_client_certificates_is_reached_with_the_current_secret(
    tls_etcd: EtcdServer, files: Certificates, api: Api, secret: dict[str, Any], run_id: str
) -> None:
    watcher = Watcher(api)
    async with watcher.stores as stores:
        stores.follow(run_id, KEY, tls_etcd.url, lasts=True, up=True, secret="hub")
        assert "the Secret hub, which spec.etcd.tlsSecret names, has neither ca.crt nor tls.crt" in (
            await watcher.error(run_id)
        )
        secret["data"] = data(ca_crt=files.authority, tls_crt=files.client, tls_key=files.client_key)
        await watcher.readable(run_id)


async def test_an_untrusted_etcd_tls_connection_is_reported(
    tls_etcd: EtcdServer, tmp_path: Path, api: Api, secret: dict[str, Any], files: Certificates, run_id: str
) -> None:
    watcher = Watcher(api)
    async with watcher.stores as stores:
        stores.follow(run_id, KEY, tls_etcd.url, lasts=True, up=True)
        assert f"the certificate of etcd at {tls_etcd.endpoint} cannot be trusted" in await watcher.error(run_id)
    (tmp_path / "others").mkdir()
    other = make_certificates(tmp_path / "others")
    secret["data"] = data(ca_crt=files.authority, tls_crt=other.client, tls_key=other.client_key)
    watcher = Watcher(api)
    async with watcher.stores as stores:
        stores.follow(run_id, KEY, tls_etcd.url, lasts=True, up=True, secret="hub")
        assert tls_etcd.endpoint in await watcher.error(run_id)


async def test_a_non_etcd_server_and_a_missing_server_get_different_messages(own_etcd: EtcdServer, run_id: str) -> None:
    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"etcdserver": "2.2.1"}, status=404)

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    other = f"127.0.0.1:{runner.addresses[0][1]}"
    await own_etcd.kill()
    watcher = Watcher()
    async with watcher.stores as stores:
        stores.follow(run_id, KEY, own_etcd.endpoint, lasts=True, up=True)
        stores.follow("another", KEY, other, lasts=True, up=True)
        assert f"etcd at {own_etcd.endpoint} does not answer: connection refused" in await watcher.error(run_id)
        assert f"what listens at {other} is not etcd, or etcd without its JSON gateway" in await watcher.error(
            "another"
        )
    await runner.cleanup()
