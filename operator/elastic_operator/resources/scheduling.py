"""Where a pod may run: its scheduler, its tolerations, and the nodes that are excluded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from elastic_operator.api.json_access import listing, mappings, text
from elastic_operator.resources.pod_template import extended
from elastic_operator.resources.podgroup import scheduler_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from elastic_operator.api.spec import ElasticJobSpec

_SILENT: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""The taints of a node that is not heard of."""
_NO_EXECUTE: Final = "NoExecute"
_NAME: Final = "metadata.name"
"""The field by which a node is known; its label with its host's name may say otherwise."""


def schedule(pod: dict[str, Any], spec: ElasticJobSpec, *, excluded: Collection[str] = ()) -> None:
    """Complete the spec of a worker's pod; the template's own values stay."""
    tolerate_silent_node(pod, spec.node_loss)
    scheduler = scheduler_of(spec.scheduling)
    for field, value in (("schedulerName", scheduler), ("priorityClassName", spec.scheduling.priority_class)):
        if value and pod.get(field) is None:
            pod[field] = value
    if excluded:
        _exclude(pod, excluded)


def tolerate_silent_node(pod: dict[str, Any], seconds: int) -> None:
    """Evict a pod so many seconds after its node became silent, rather than after the cluster's five minutes.

    The user's own tolerations of these taints stay.
    """
    there = mappings(pod, "tolerations")
    ours = [
        {"key": taint, "operator": "Exists", "effect": _NO_EXECUTE, "tolerationSeconds": seconds}
        for taint in _SILENT
        if not any(text(each, "key") in ("", taint) and text(each, "effect") in ("", _NO_EXECUTE) for each in there)
    ]
    if ours:
        pod["tolerations"] = extended(pod.get("tolerations"), ours)


def _exclude(pod: dict[str, Any], nodes: Collection[str]) -> None:
    """Exclude nodes, beside the node affinity that the pod has."""
    # The API server takes one value each.
    demands = [{"key": _NAME, "operator": "NotIn", "values": [node]} for node in sorted(nodes)]
    part: Any = pod
    for step in ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"):
        if part.get(step) is None:
            part[step] = {}
        part = part[step]
        if not isinstance(part, dict):
            return  # the API server has a word for it
    terms = part.get("nodeSelectorTerms")
    if terms is None:
        part["nodeSelectorTerms"] = [{"matchFields": demands}]
    for term in listing(terms):
        # A term without any demand fits no node; with one it would fit all others.
        if isinstance(term, dict) and (term.get("matchExpressions") or term.get("matchFields")):
            term["matchFields"] = extended(term.get("matchFields"), demands)
