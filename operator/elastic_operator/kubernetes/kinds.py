"""The kinds of objects that the operator and ``elasticjob`` deal with, and where the API server has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elastic_operator.api.spec import GROUP, VERSION, GangScheduler

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object.

    Attributes:
        group: of the API; empty for the core group.
        version: of the API.
        plural: its name in a path.
        kind: its name in an object.
    """

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        """As it stands in an object."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str = "") -> str:
        """Where the API server has the objects of a namespace (None: of all), one of them, or a part of it."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name is not None:
            parts.append(name)
        if subresource:
            parts.append(subresource)
        return "/".join(parts)


ELASTIC_JOBS: Final = Resource(GROUP, VERSION, "elasticjobs", "ElasticJob")
PODS: Final = Resource("", "v1", "pods", "Pod")
SERVICES: Final = Resource("", "v1", "services", "Service")
DEPLOYMENTS: Final = Resource("apps", "v1", "deployments", "Deployment")
CONFIG_MAPS: Final = Resource("", "v1", "configmaps", "ConfigMap")
EVENTS: Final = Resource("", "v1", "events", "Event")
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease")
SECRETS: Final = Resource("", "v1", "secrets", "Secret")
DISRUPTION_BUDGETS: Final = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
SCHEDULER_PLUGINS_GROUPS: Final = Resource("scheduling.x-k8s.io", "v1alpha1", "podgroups", "PodGroup")
VOLCANO_GROUPS: Final = Resource("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup")
POD_GROUPS: Final[Mapping[GangScheduler, Resource]] = {
    GangScheduler.SCHEDULER_PLUGINS: SCHEDULER_PLUGINS_GROUPS,
    GangScheduler.VOLCANO: VOLCANO_GROUPS,
}
