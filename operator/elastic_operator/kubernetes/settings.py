"""The settings of the operator's process."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_operator.resources.owned_objects import PodSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """The settings of the operator's process.

    Attributes:
        namespaces: the namespaces of the jobs; empty for all.
        etcd_secrets_namespaces: the namespaces in which the operator may read Secrets with credentials for etcd.
        etcd_endpoints: the allowed endpoints of etcds that jobs name; see
            :class:`~elastic_operator.kubernetes.etcd_endpoints.EtcdEndpoints`.
        pods: defaults for the pods of all jobs.
        listen: the host and the port of /healthz, /readyz and /metrics; without a host, all addresses.
        leader_elect: whether this copy acts only while it holds the lease, so that several copies may run.
        lease_namespace: the namespace of the lease and the operator's Secret; None for the operator's own namespace.
        kubeconfig: the path of a kubeconfig; None for the pod's service account or, with a context, the default path.
        context: the context in the kubeconfig; None for its current one.
        log_format: the format of each line: ``text`` or ``json``.
        log_level: the lowest level of the messages that are logged: ``debug``, ``info``, ``warning`` or ``error``.
        identity: the unique name of this copy in the lease and in events.
        in_pod: whether to use the service account of the pod in which the operator runs.
    """

    namespaces: tuple[str, ...] = ()
    etcd_secrets_namespaces: tuple[str, ...] = ()
    etcd_endpoints: tuple[str, ...] = ()
    pods: PodSettings = field(default_factory=PodSettings)
    listen: tuple[str, int] = ("0.0.0.0", 8080)  # noqa: S104 - probes and Prometheus come from other hosts
    leader_elect: bool = True
    lease_namespace: str | None = None
    lease_name: str = "elastic-operator"
    kubeconfig: str | None = None
    context: str | None = None
    log_format: str = "text"
    log_level: str = "info"
    identity: str = "elastic-operator"
    in_pod: bool = False
