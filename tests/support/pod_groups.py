"""The definitions of PodGroups, of which a cluster without those schedulers knows nothing.

Neither kind of scheduler runs in tests: of them there are the definitions, with as much in them as the operator writes.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.kube.resources import SCHEDULER_PLUGINS_GROUPS, VOLCANO_GROUPS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from elastic_operator.kube.resources import Resource
    from tests.support.testbed.cluster import Cluster

Json = dict[str, Any]

_QUANTITIES: Final = {"type": "object", "additionalProperties": {"x-kubernetes-int-or-string": True}}
_GROUPS: Final[dict[Resource, Json]] = {
    SCHEDULER_PLUGINS_GROUPS: {
        "minMember": {"type": "integer", "minimum": 1},
        "minResources": _QUANTITIES,
        "scheduleTimeoutSeconds": {"type": "integer"},
    },
    VOLCANO_GROUPS: {
        "minMember": {"type": "integer"},
        "minResources": _QUANTITIES,
        "minTaskMember": {"type": "object", "additionalProperties": {"type": "integer"}},
        "queue": {"type": "string", "default": "default"},
        "priorityClassName": {"type": "string"},
    },
}


def _definition(resource: Resource) -> Json:
    """The definition of a kind of PodGroups."""
    schema = {
        "type": "object",
        "properties": {"spec": {"type": "object", "properties": _GROUPS[resource]}, "status": {"type": "object"}},
    }
    version = {"name": resource.version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{resource.plural}.{resource.group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": resource.group,
            "scope": "Namespaced",
            "names": {"plural": resource.plural, "singular": "podgroup", "kind": resource.kind},
            "versions": [version],
        },
    }


@contextlib.asynccontextmanager
async def installed(cluster: Cluster, resource: Resource) -> AsyncIterator[None]:
    """A cluster that knows a kind of PodGroups."""
    text = json.dumps(_definition(resource))
    try:
        await cluster.define(text)
        yield
    finally:
        await cluster.kubectl("delete", "-f", "-", stdin=text)
