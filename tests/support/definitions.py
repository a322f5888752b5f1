"""CRDs of kinds whose controllers do not run in tests, with the fields that the operator writes."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.kubernetes.client import SCHEDULER_PLUGINS_GROUPS, VOLCANO_GROUPS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from elastic_operator.kubernetes.client import Resource
    from testbed.cluster import Cluster

_GROUPS: Final[dict[Resource, dict[str, Any]]] = {
    SCHEDULER_PLUGINS_GROUPS: {
        "minMember": {"type": "integer", "minimum": 1},
        "scheduleTimeoutSeconds": {"type": "integer"},
    },
    VOLCANO_GROUPS: {
        "minMember": {"type": "integer"},
        "minTaskMember": {"type": "object", "additionalProperties": {"type": "integer"}},
        "queue": {"type": "string", "default": "default"},
        "priorityClassName": {"type": "string"},
    },
}


@contextlib.asynccontextmanager
async def pod_groups_defined(cluster: Cluster, resource: Resource) -> AsyncIterator[None]:
    """Create the CRD of a kind of PodGroups."""
    schema = {
        "type": "object",
        "properties": {"spec": {"type": "object", "properties": _GROUPS[resource]}, "status": {"type": "object"}},
    }
    version = {"name": resource.version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{resource.plural}.{resource.group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": resource.group,
            "scope": "Namespaced",
            "names": {"plural": resource.plural, "singular": resource.kind.lower(), "kind": resource.kind},
            "versions": [version],
        },
    }
    text = json.dumps(definition)
    try:
        await cluster.apply_crd(text)
        yield
    finally:
        await cluster.kubectl("delete", "-f", "-", stdin=text)
