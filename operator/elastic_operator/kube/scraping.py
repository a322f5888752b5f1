"""Where the agents of worker pods serve /metrics, as annotations of the pods say it.

An agent that serves on any free port tells that port to nobody but the store. So it is noted on its pod, once, where
Prometheus and the commands look for it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.errors import ClusterError
from elastic_operator.kube.ledger import Ledger
from elastic_operator.kube.observation import LAST_PORT
from elastic_operator.kube.resources import PODS
from elastic_operator.kube.writer import raise_first
from elastic_operator.model import PodPhase
from elastic_operator.names import ANNOTATION_METRICS_PORT
from elastic_operator.unchecked import mapping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from elastic_operator.kube.writer import Writer
    from elastic_operator.model import Job, Pod
    from torchelastic.contract import NodeRecord

_log: Final = logging.getLogger(__name__)

_AT_ONCE: Final = 64


def for_prometheus(port: int) -> dict[str, str]:
    """What a Prometheus that goes by annotations wants to read on a pod."""
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(port), "prometheus.io/path": "/metrics"}


def metrics_notes(job: Job, port: int) -> dict[str, Any]:
    """The annotations of one of the job's pods whose agent serves on this port; what its template says holds."""
    said = mapping(job.spec.template, "metadata", "annotations")
    missing = {name: value for name, value in for_prometheus(port).items() if name not in said}
    return {**missing, ANNOTATION_METRICS_PORT: str(port)}


class FoundPorts:
    """Notes on pods the ports that their agents have found.

    Args:
        writer: writes to the API server.
        wake: called with a job and the seconds after which it is to be looked at once more.
    """

    def __init__(self, writer: Writer, wake: Callable[[Job, float], None]) -> None:
        self._writer = writer
        self._wake = wake
        self._ledger = Ledger()

    async def note(self, job: Job, pods: Iterable[Pod], nodes: Iterable[NodeRecord]) -> None:
        """Have the job's pods say what their agents say; where that can't be done, it is tried again later.

        Args:
            job: whose pods they are.
            pods: as they are now.
            nodes: what the agents say.
        """
        ports = {node.name: node.metrics for node in nodes if 0 < node.metrics <= LAST_PORT}
        serving = (pod for pod in pods if pod.phase is PodPhase.RUNNING and not pod.terminating)
        found = [(pod, port) for pod in serving if (port := ports.get(pod.name, pod.metrics_port)) != pod.metrics_port]
        try:
            if found and self._ledger.wait(job) <= 0:
                await self._write(job, found)
                self._ledger.clear(job)
        except ClusterError as error:
            if str(error) != self._ledger.hindrance(job):
                _log.warning("%s/%s: no pod says on which port its metrics are: %s", job.namespace, job.name, error)
            self._ledger.hinder(job, str(error))
        if (wait := self._ledger.wait(job)) > 0:
            self._wake(job, wait)

    async def _write(self, job: Job, found: Sequence[tuple[Pod, int]]) -> None:
        for done in range(0, len(found), _AT_ONCE):
            notes = [(pod, metrics_notes(job, port)) for pod, port in found[done : done + _AT_ONCE]]
            writes = (self._writer.annotate(PODS, job.namespace, pod.name, pod.uid, note) for pod, note in notes)
            raise_first(await asyncio.gather(*writes, return_exceptions=True))

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self._ledger.forget(uid)
