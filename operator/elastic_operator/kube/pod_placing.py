"""Where a pod may run, beside what the template says of it: who schedules it, and which nodes it is kept from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from elastic_operator.kube.pod_group import scheduler_of
from elastic_operator.kube.pod_template import extended
from elastic_operator.unchecked import listing, mappings, text

if TYPE_CHECKING:
    from collections.abc import Collection

    from elastic_operator.spec import ElasticJobSpec

_SILENT: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""The taints of a node that is not heard of."""
_NO_EXECUTE: Final = "NoExecute"
_NAME: Final = "metadata.name"
"""The field by which a node is known; its label with its host's name may say otherwise."""


def place(pod: dict[str, Any], spec: ElasticJobSpec, *, excluded: Collection[str] = ()) -> None:
    """Say in a worker's pod where it may run.

    Args:
        pod: the pod's spec as far as it stands; it is changed.
        spec: of the job.
        excluded: nodes that it is kept from.
    """
    endure(pod, spec.node_loss)
    scheduler = scheduler_of(spec.scheduling)
    for field, value in (("schedulerName", scheduler), ("priorityClassName", spec.scheduling.priority_class)):
        if value and pod.get(field) is None:
            pod[field] = value
    if excluded:
        _exclude(pod, excluded)


def endure(pod: dict[str, Any], seconds: int) -> None:
    """Have a pod given up so many seconds after its node fell silent, and not only after the cluster's five minutes.

    What the user says of such a taint, or of all taints, holds.
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
    """Keep a pod from some nodes, whatever else it asks of its node."""
    # The API server takes one value each.
    demands = [{"key": _NAME, "operator": "NotIn", "values": [node]} for node in sorted(nodes)]
    place: Any = pod
    for step in ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"):
        if place.get(step) is None:
            place[step] = {}
        place = place[step]
        if not isinstance(place, dict):
            return  # the API server has a word for it
    terms = place.get("nodeSelectorTerms")
    if terms is None:
        place["nodeSelectorTerms"] = [{"matchFields": demands}]
    for term in listing(terms):
        # A term without any demand fits no node; with one it would fit all others.
        if isinstance(term, dict) and (term.get("matchExpressions") or term.get("matchFields")):
            term["matchFields"] = extended(term.get("matchFields"), demands)
