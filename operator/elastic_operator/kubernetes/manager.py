"""The operator's process: its parts, and the order in which they start and end.

Every copy lists and watches, so that it can take over at once. The leader has a reconciler as long as it leads.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Final

from aiohttp import web

from elastic_operator.controller.reconciler import Reconciler
from elastic_operator.errors import BadInput
from elastic_operator.kubernetes.backend import KubernetesBackend
from elastic_operator.kubernetes.client import ELASTIC_JOBS, PODS
from elastic_operator.kubernetes.informer import Informer
from elastic_operator.kubernetes.job_store import JobStores
from elastic_operator.kubernetes.leaderelection import LeaderElector, until_one_ends
from elastic_operator.kubernetes.metrics import JobCollector, OperatorMetrics
from elastic_operator.kubernetes.store import Store
from elastic_operator.kubernetes.writer import Writer

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, Callable, Iterator

    from elastic_operator.api.spec import Json
    from elastic_operator.controller.model import Pod
    from elastic_operator.kubernetes.client import Api
    from elastic_operator.kubernetes.main import Address, OperatorSettings


@contextlib.asynccontextmanager
async def http_server(
    listen: Address,
    *,
    metrics: Callable[[str], tuple[bytes, str]],
    unready: Callable[[], str],
) -> AsyncGenerator[int, None]:
    """Serve /healthz, /readyz and /metrics; yield the port.

    Args:
        listen: the address; without a host, all IPv4 and IPv6 addresses.
        metrics: returns the page and its content type for an Accept header.
        unready: returns why the operator is not ready, as a sentence.

    Raises:
        BadInput: the address is not available.
    """

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/metrics":
            page, content_type = metrics(request.headers.get("Accept", ""))
            return web.Response(body=page, headers={"Content-Type": content_type})
        wrong = unready() if request.path == "/readyz" else ""
        return web.Response(text=f"{wrong or 'ok'}\n", status=503 if wrong else 200)

    app = web.Application()
    app.add_routes([web.get(path, answer) for path in ("/healthz", "/readyz", "/metrics")])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, listen.host or None, listen.port).start()
        except OSError as error:
            raise BadInput(
                f"nothing can be served on {listen.host}:{listen.port}: {error.strerror or error}; choose another "
                "address with --listen"
            ) from None
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


_log: Final = logging.getLogger(__name__)


class Manager:
    """One copy of the operator.

    Args:
        settings: the settings of the process.
        api: the open connection.
        handle_signals: called after kopf has set its own signal handlers.
    """

    def __init__(self, settings: OperatorSettings, api: Api, handle_signals: Callable[[], None] = lambda: None) -> None:
        self._settings = settings
        self._api = api
        self._metrics = OperatorMetrics()
        self._store = Store(changed=self._on_change, pod_deleted=self._on_pod_deleted)
        self._informer = Informer(api, self._store, namespaces=settings.namespaces, handle_signals=handle_signals)
        self._reconciler: Reconciler | None = None
        self._backend: KubernetesBackend | None = None
        api.on_request = self._metrics.requested

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop`` is set.

        Raises:
            BadInput: a setting is invalid.
        """
        self._register_metrics()
        server = http_server(self._settings.listen, metrics=self._metrics.page, unready=lambda: self._informer.problem)
        async with server as port:
            namespaces = ", ".join(self._settings.namespaces) or "all namespaces"
            _log.info("managing the ElasticJobs of %s; /metrics on port %d", namespaces, port)
            await until_one_ends(stop.wait(), self._informer.run(), self._lead())
        _log.info("ended")

    async def _lead(self) -> None:
        """Reconcile whenever this copy leads."""
        await self._informer.synced.wait()
        settings = self._settings
        if not settings.leader_elect:
            await self._reconcile()
            return
        # With its own connections, so that the lease does not wait for many other writes.
        async with self._api.another() as api:
            api.on_request = self._metrics.requested
            elector = LeaderElector(
                api=api,
                namespace=settings.lease_namespace or api.namespace,
                name=settings.lease_name,
                identity=settings.identity,
            )
            await elector.run(self._reconcile)

    async def _reconcile(self) -> None:
        settings = self._settings
        async with (
            Writer(self._api, self._store, settings.identity, self._metrics.created) as writer,
            JobStores(self._api, self._on_change, secret_namespaces=settings.etcd_secrets_namespaces) as stores,
        ):
            self._backend = KubernetesBackend(
                api=self._api,
                store=self._store,
                writer=writer,
                stores=stores,
                settings=settings.pods,
                status_written=self._metrics.status_written,
            )
            self._reconciler = Reconciler(
                self._backend,
                list_keys=lambda: self._store.keys,
                waited=self._metrics.waited,
                reconciled=self._metrics.reconciled,
            )
            try:
                await self._reconciler.run()
            finally:
                self._reconciler = self._backend = None

    def _jobs(self) -> Iterator[Json]:
        return (body for key in self._store.keys if (body := self._store.job(key)) is not None)

    def _on_change(self, key: str) -> None:
        if self._reconciler is not None:  # a new leader reconciles all jobs
            self._reconciler.wake(key)

    def _on_pod_deleted(self, body: Json, last: Pod) -> None:
        if self._backend is not None:
            self._backend.pod_deleted(body, last)

    def _register_metrics(self) -> None:
        metrics = self._metrics
        metrics.gauge("elastic_operator_leader", "Whether this copy is the leader.", lambda: float(self._is_leader()))
        metrics.gauge("elastic_operator_queue_depth", "Jobs in the queue.", self._queue_depth)
        for resource in (ELASTIC_JOBS, PODS):
            count = functools.partial(self._store.count, resource)
            metrics.gauge(f"elastic_operator_{resource.plural}", "How many of them the operator knows.", count)
        metrics.registry.register(JobCollector(self._jobs, self._is_leader))

    def _queue_depth(self) -> float:
        return 0 if self._reconciler is None else self._reconciler.depth

    def _is_leader(self) -> bool:
        return self._reconciler is not None
