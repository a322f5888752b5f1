"""The NetworkPolicy of a job: which pods may connect to its workers and to its etcd.

Policies add up: another NetworkPolicy may open further ports of the same pods, for example those of a sidecar.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from elastic_operator.api import constants
from elastic_operator.resources.owned_objects import PodSettings, own_labels, own_metadata
from elastic_operator.resources.worker_pod import metrics_port, on_the_host
from torchelastic.store.api import DEFAULT_PORT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_operator.api.json_values import Json
    from elastic_operator.controller.model import Job

_ETCD_METRICS_PORT: Final = 2381
_NAMESPACE: Final = "kubernetes.io/metadata.name"
"""The label with which Kubernetes marks each namespace."""


def network_policy(job: Job, settings: PodSettings) -> dict[str, Any] | None:
    """Return the NetworkPolicy object; None if the job gets none.

    A job on its nodes' network gets none, because its connections come from the addresses of nodes, which no selector
    matches. A job whose agents choose the port of their metrics gets none, because a policy would close that port.
    """
    port = metrics_port(job, settings)
    if not settings.network_policies or not port or on_the_host(job):
        return None
    workers = [{"podSelector": {"matchLabels": own_labels(job, constants.ROLE_WORKER)}}]
    operator = _pods_of(settings.operator_namespace)
    scrapers = [{"namespaceSelector": {"matchLabels": {_NAMESPACE: each}}} for each in settings.metrics_namespaces]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": own_metadata(job, f"{job.name}-ingress", constants.ROLE_WORKER),
        "spec": {
            "podSelector": {"matchLabels": {constants.LABEL_JOB: job.name}},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": workers}, _rule(operator, DEFAULT_PORT), _rule(scrapers, port, _ETCD_METRICS_PORT)],
        },
    }


def _pods_of(namespace: str | None) -> Sequence[Json]:
    """Return the peers that match the operator's pods in its namespace; none for an operator that runs in no pod."""
    if namespace is None:
        return ()
    labels = {"app.kubernetes.io/name": constants.MANAGED_BY}
    return ({"namespaceSelector": {"matchLabels": {_NAMESPACE: namespace}}, "podSelector": {"matchLabels": labels}},)


def _rule(peers: Sequence[Json], *ports: int) -> Json:
    """Return the rule that opens these ports to these peers; without peers, to everyone."""
    return {**({"from": [*peers]} if peers else {}), "ports": [{"protocol": "TCP", "port": port} for port in ports]}
