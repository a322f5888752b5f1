"""The discovery answers of an API server, as kopf requests them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_operator.kubernetes.client import (
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    ELASTIC_JOBS,
    PODS,
    SERVICES,
    Resource,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

WATCHED: Sequence[Resource] = (PODS, SERVICES, DEPLOYMENTS, DISRUPTION_BUDGETS, ELASTIC_JOBS)
"""The kinds that the operator watches."""

_NAMESPACES = Resource("", "v1", "namespaces", "Namespace")


def discovered(path: str) -> dict[str, Any] | None:
    """The answer for a path; None if it is not one of discovery."""
    groups = {resource.group: resource.version for resource in WATCHED if resource.group}
    if path == "/api":
        return {"versions": ["v1"]}
    if path == "/apis":
        return {"groups": [_group(group, version) for group, version in groups.items()]}
    kinds = [each for each in (*WATCHED, _NAMESPACES) if path == each.path().rpartition("/")[0]]
    if not kinds:
        return None
    resources = [{"name": each.plural, "kind": each.kind, "singularName": ""} for each in kinds]
    return {"resources": [{**each, "namespaced": True, "verbs": ["list", "watch"]} for each in resources]}


def _group(group: str, version: str) -> dict[str, Any]:
    this = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [this], "preferredVersion": this}
