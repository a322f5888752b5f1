"""The definitions of PodGroups, of which a cluster without those schedulers knows nothing.

Neither kind of scheduler runs in tests: of them there are the definitions, with as much in them as the operator writes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.kubernetes.client import SCHEDULER_PLUGINS_GROUPS, VOLCANO_GROUPS
from tests.support.definitions import defined

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from elastic_operator.kubernetes.client import Resource
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


@contextlib.asynccontextmanager
async def installed(cluster: Cluster, resource: Resource) -> AsyncIterator[None]:
    """A cluster that knows a kind of PodGroups."""
    schema = {
        "type": "object",
        "properties": {"spec": {"type": "object", "properties": _GROUPS[resource]}, "status": {"type": "object"}},
    }
    async with defined(cluster, resource, schema):
        yield
