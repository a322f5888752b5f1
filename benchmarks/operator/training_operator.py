"""The baseline of the operator benchmark: Kubeflow's training-operator with PyTorchJobs, on the same API server.

The baseline is measured if its binary is given; otherwise the report has values of an earlier measurement and says so.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from elastic_operator.errors import BadInput
from elastic_operator.kubernetes.client import SECRETS, Resource
from elastic_operator.local.processes import free_ports
from testbed.daemons import Daemon

if TYPE_CHECKING:
    from types import TracebackType

    from benchmarks.operator.cluster import OperatedCluster

TRAINING_OPERATOR: Final = "training-operator"
CREATED_ONCE: Final = {9: 0.25, 101: 6.5, 300: 21.3}
"""Seconds from apply until all pods of a PyTorchJob existed, by number of pods; measured once with version 1.9.3."""
REPLACED_ONCE: Final = 15.1
"""Seconds until a deleted pod of a PyTorchJob was replaced; measured once with version 1.9.3."""
ONCE: Final = f"{TRAINING_OPERATOR} 1.9.3, as measured once on another day"

_JOBS: Final = Resource("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob")
_NAMESPACE: Final = "kubeflow"
_SECRET: Final = "training-operator-webhook-cert"
_WEBHOOK: Final = "validator.training-operator.kubeflow.org"
_CERTIFICATES: Final = Path("/tmp/k8s-webhook-server/serving-certs")
"""The folder from which the binary reads its certificates; in a cluster, the Secret is mounted at this path."""
_LIMIT: Final = 120.0
_REST: Final = 1.0


class TrainingOperator:
    """A training-operator; an async context manager that runs it. Raises BadInput if it cannot run.

    Args:
        cluster: the cluster.
        binary: the operator's binary.
        definition: the file with the CustomResourceDefinition of the PyTorchJob.
        folder: the folder for the operator's log.
    """

    def __init__(self, cluster: OperatedCluster, binary: Path, definition: Path, folder: Path) -> None:
        self._cluster = cluster
        self._definition = definition
        webhook, health = free_ports(2)
        self._daemon = Daemon(
            [
                str(binary),
                "--enable-scheme=pytorchjob",
                "--metrics-bind-address=0",
                f"--health-probe-bind-address=127.0.0.1:{health}",
                f"--webhook-server-port={webhook}",
            ],
            folder=folder,
            environ={**cluster.control_plane.environ, "MY_POD_NAMESPACE": _NAMESPACE},
        )

    async def __aenter__(self) -> Self:
        if _CERTIFICATES.parent.exists():
            raise BadInput(f"{_CERTIFICATES.parent} exists already, and the baseline needs this folder; remove it")
        kubectl = self._cluster.control_plane.kubectl
        await kubectl("apply", "--server-side", "--filename", str(self._definition))
        await kubectl("create", "namespace", _NAMESPACE)
        await kubectl("create", "secret", "generic", _SECRET, "--namespace", _NAMESPACE)
        hook = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": _WEBHOOK},
        }
        await kubectl("apply", "--filename=-", stdin=json.dumps(hook))
        self._daemon.start()
        try:
            await self._mount_certificates()
            await self._works()
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    async def created(self, pods: int) -> float:
        """Return the seconds from apply until all pods of a job exist."""
        cluster = self._cluster
        async with cluster.namespace(_JOBS) as namespace:
            begun = await cluster.apply(namespace, _manifest("one", pods), _JOBS)
            return await cluster.pods.until(lambda: cluster.pods.count(namespace) >= pods) - begun

    async def replaced(self, samples: int) -> list[float]:
        """Delete pods of a job with ten pods, one after the other; return the seconds until each is replaced."""
        cluster, taken = self._cluster, []
        async with cluster.namespace(_JOBS) as namespace:
            await cluster.apply(namespace, _manifest("one", 10), _JOBS)
            await cluster.pods.until(lambda: cluster.pods.count(namespace) >= 10)
            for _ in range(samples):
                await cluster.pods.until_running(namespace, 10)
                await asyncio.sleep(_REST)
                oldest = min(cluster.pods.live(namespace).values(), key=lambda pod: pod.seen_at)
                taken.append(await cluster.replace(namespace, oldest))
        return taken

    def _end(self) -> None:
        self._daemon.kill()
        shutil.rmtree(_CERTIFICATES.parent, ignore_errors=True)

    async def _mount_certificates(self) -> None:
        """Write the Secret to the folder, like a kubelet."""
        async with asyncio.timeout(_LIMIT):
            while True:
                self._daemon.check()
                secret = await self._cluster.api.get(SECRETS, _NAMESPACE, _SECRET)
                if "tls.crt" in (data := secret.get("data") or {}):
                    break
                await asyncio.sleep(0.2)
        _CERTIFICATES.mkdir(parents=True, exist_ok=True)
        for name, content in data.items():
            (_CERTIFICATES / name).write_bytes(base64.b64decode(content))

    async def _works(self) -> None:
        """Wait until the operator has created the pod of a first job."""
        await self.created(1)


def _manifest(name: str, replicas: int) -> dict[str, Any]:
    container = {"name": "pytorch", "image": "elastic-agent:dev", "command": ["torchrun", "train.py"]}
    return {
        "apiVersion": _JOBS.api_version,
        "kind": _JOBS.kind,
        "metadata": {"name": name},
        "spec": {
            "elasticPolicy": {"rdzvBackend": "c10d", "minReplicas": 1, "maxReplicas": replicas},
            "pytorchReplicaSpecs": {
                "Worker": {
                    "replicas": replicas,
                    "restartPolicy": "OnFailure",
                    "template": {"spec": {"containers": [container]}},
                }
            },
        },
    }
