"""The operator's process: its parts, and the order in which they start and end.

Every copy lists and watches objects, so that it can take over at once. Only the leader has a reconciler.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING, Final

from elastic_operator.controller.reconciler import Reconciler
from elastic_operator.errors import ClusterError
from elastic_operator.kubernetes.backend import KubernetesBackend
from elastic_operator.kubernetes.client import ELASTIC_JOBS, PODS, Api, backoff, with_hint
from elastic_operator.kubernetes.etcd_certificates import EtcdCertificates, operator_secret
from elastic_operator.kubernetes.etcd_endpoints import EtcdEndpoints
from elastic_operator.kubernetes.executor import Executor
from elastic_operator.kubernetes.http_server import http_server
from elastic_operator.kubernetes.informer import Informer
from elastic_operator.kubernetes.job_store import JobStores
from elastic_operator.kubernetes.leader_election import LeaderElector, until_one_ends
from elastic_operator.kubernetes.metrics import JobCollector, OperatorMetrics
from elastic_operator.kubernetes.object_cache import ObjectCache
from elastic_operator.kubernetes.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_operator.api.json_values import Json
    from elastic_operator.controller.model import Pod
    from elastic_operator.kubernetes.settings import OperatorSettings


_FIRST_RETRY: Final = 0.5
_LAST_RETRY: Final = 30.0

logger: Final = logging.getLogger(__name__)


class Manager:
    """One copy of the operator."""

    def __init__(self, settings: OperatorSettings, api: Api) -> None:
        self._settings = settings
        self._api = api
        self._metrics = OperatorMetrics()
        self._cache = ObjectCache(changed=self._on_change, pod_deleted=self._on_pod_deleted)
        self._informer = Informer(api, self._cache, namespaces=settings.namespaces)
        self._problem = ""
        self._reconciler: Reconciler | None = None
        self._backend: KubernetesBackend | None = None
        api.on_request = self._metrics.requested

    async def run(self, stop: asyncio.Event) -> None:
        """Run until ``stop`` is set.

        Raises:
            BadInput: a setting is invalid.
        """
        self._register_metrics()
        server = http_server(self._settings.listen, metrics=self._metrics.page, unready=self._unready)
        async with server as port:
            namespaces = ", ".join(self._settings.namespaces) or "all namespaces"
            logger.info("managing the ElasticJobs of %s; /metrics on port %d", namespaces, port)
            await until_one_ends(stop.wait(), self._informer.run(), self._lead())
        logger.info("ended")

    async def _lead(self) -> None:
        await self._informer.synced.wait()
        settings = self._settings
        if not settings.leader_elect:
            await self._reconcile()
            return
        # The elector has its own connections, so that the lease does not wait for other writes.
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
        certificates = EtcdCertificates(await self._secret())
        async with (
            Writer(self._api, self._cache, settings.identity, self._metrics.created) as writer,
            JobStores(
                self._api,
                self._on_change,
                certificates,
                secret_namespaces=settings.etcd_secrets_namespaces,
                endpoints=EtcdEndpoints(settings.etcd_endpoints),
            ) as stores,
        ):
            self._backend = KubernetesBackend(
                api=self._api,
                cache=self._cache,
                stores=stores,
                executor=Executor(
                    cache=self._cache,
                    writer=writer,
                    stores=stores,
                    certificates=certificates,
                    settings=settings.pods,
                    status_written=self._metrics.status_written,
                ),
            )
            self._reconciler = Reconciler(
                self._backend,
                list_keys=lambda: self._cache.keys,
                waited=self._metrics.waits.observe,
                reconciled=self._metrics.reconciled,
            )
            try:
                await self._reconciler.run()
            finally:
                self._reconciler = self._backend = None

    async def _secret(self) -> bytes:
        """Return the operator's secret, as soon as it can be read or created."""
        namespace, name = self._settings.lease_namespace or self._api.namespace, f"{self._settings.lease_name}-etcd"
        for delay in backoff(_FIRST_RETRY, _LAST_RETRY):
            try:
                secret = await operator_secret(self._api, namespace, name)
            except ClusterError as error:
                self._problem = f"no job is managed without the operator's secret: {with_hint(str(error))}"
                logger.warning("%s", self._problem)
            else:
                self._problem = ""
                return secret
            await asyncio.sleep(delay)
        raise AssertionError("the delays never end")

    def _unready(self) -> str:
        return self._informer.problem or self._problem

    def _on_change(self, key: str) -> None:
        if self._reconciler is not None:  # a new leader reconciles all jobs
            self._reconciler.wake(key)

    def _on_pod_deleted(self, body: Json, last: Pod) -> None:
        if self._backend is not None:
            self._backend.pod_deleted(body, last)

    def _register_metrics(self) -> None:
        metrics, cache = self._metrics, self._cache
        metrics.gauge("elastic_operator_leader", "Whether this copy is the leader.", lambda: float(self._is_leader()))
        metrics.gauge(
            "elastic_operator_queue_depth",
            "Jobs in the queue.",
            lambda: self._reconciler.depth if self._reconciler else 0,
        )
        for resource in (ELASTIC_JOBS, PODS):
            count = functools.partial(cache.count, resource)
            metrics.gauge(f"elastic_operator_{resource.plural}", f"Known {resource.kind} objects.", count)
        jobs = JobCollector(lambda: filter(None, map(cache.job, cache.keys)), self._is_leader, self._expiries)
        metrics.registry.register(jobs)

    def _expiries(self) -> Mapping[str, float]:
        return {} if self._backend is None else self._backend.stores.expiries()

    def _is_leader(self) -> bool:
        return self._reconciler is not None
