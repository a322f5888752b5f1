"""What became of a pod that its agent did not bring about: out of memory, disrupted, not admitted, its node lost.

Kubernetes says it in four places: the reason of the pod's status, the condition DisruptionTarget, the reason of the
container's end, and, of a pod on a silent node, only in a condition Ready that no longer follows from the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from elastic_operator.kube.container_state import is_over
from elastic_operator.model import Fate
from elastic_operator.unchecked import listing, mapping, mappings, text
from torchelastic.contract import TerminationMessage

if TYPE_CHECKING:
    from elastic_operator.kube.container_state import ContainerState
    from elastic_operator.spec import Json

DISRUPTION: Final = "DisruptionTarget"
"""The condition of pods that somebody is about to remove for reasons that lie outside of them."""

OUT_OF_MEMORY: Final = "OOMKilled"

_NODE_LOST: Final = "NodeLost"
_NODE_IS_GONE: Final = "DeletionByPodGC"
_ENDED_BY_ITS_NODE: Final = frozenset({"Evicted", "Preempting", "Terminated", "Shutdown"})
"""What kubelets call it when they end a pod: short of something, for the sake of a critical pod, on their shutdown."""

_OWN_LIMITS: Final = ("exceeds the limit", "exceeds the total limit", "exceeded its local ephemeral storage limit")
"""How a kubelet says that it evicts a pod for what that pod itself did: it wrote more than it may."""

_NOT_ADMITTED: Final = frozenset(
    {
        "InvalidNodeInfo",
        "NodeAffinity",
        "NodePorts",
        "NodeShutdown",
        "TaintToleration",
        "TopologyAffinityError",
        "UnexpectedAdmissionError",
    }
)
"""Why kubelets send a pod back that the scheduler gave to them, beside ``OutOf<resource>``. Others than these, such as
SysctlForbidden, are no bad luck: the next node would say the same."""
_OUT_OF: Final = "OutOf"


def fate_of(pod: Json, worker: ContainerState, message: TerminationMessage | str | None) -> Fate | None:
    """What became of a pod that has ended or is going; None where that was its own doing, or nothing has.

    Args:
        pod: the pod.
        worker: its worker container.
        message: the last words of that.
    """
    if worker.exit_code == 0:
        return None
    if worker.terminated is None and not is_over(pod) and not _is_going(pod):
        return None
    disruption = _disruption(pod)
    reason = text(pod, "status", "reason")
    if reason == _NODE_LOST or text(disruption, "reason") == _NODE_IS_GONE or node_is_silent(pod, worker):
        return Fate.NODE_LOST
    if disruption is not None:
        return Fate.DISRUPTED
    if is_over(pod) and worker.started is None and (reason in _NOT_ADMITTED or reason.startswith(_OUT_OF)):
        return Fate.NOT_ADMITTED
    if reason in _ENDED_BY_ITS_NODE:
        return Fate.OVER_LIMIT if is_over_its_limit(pod) else Fate.DISRUPTED
    # On an old kernel a single process is killed, and the agent makes that good or says what it was.
    if text(worker.terminated, "reason") == OUT_OF_MEMORY and not isinstance(message, TerminationMessage):
        return Fate.OUT_OF_MEMORY
    return None


def reasons_of(pod: Json, worker: ContainerState) -> frozenset[str]:
    """Why a pod ended, each in one word; why it is to be removed, where somebody has said so."""
    ended = text(worker.terminated, "reason")
    told = {text(pod, "status", "reason"), text(_disruption(pod), "reason")}
    if not (worker.exit_code == 0 and ended == OUT_OF_MEMORY):
        told.add(ended)
    return frozenset(told - {""})


def conditions_of(pod: Json) -> dict[str, str]:
    """By type: True, False or Unknown."""
    return {text(entry, "type"): text(entry, "status") for entry in mappings(pod, "status", "conditions")}


def is_over_its_limit(pod: Json) -> bool:
    """Whether a pod was evicted because it wrote more than it may."""
    return any(words in text(pod, "status", "message") for words in _OWN_LIMITS)


def node_is_silent(pod: Json, worker: ContainerState) -> bool:
    """Whether a pod's node is not heard of any more: its containers were ready when it was, and yet the pod is not.

    So Kubernetes marks all pods of such a node. Nothing else of them changes, for that is their kubelet's to say.
    """
    if worker.running is None or listing(pod, "spec", "readinessGates"):
        return False
    conditions = conditions_of(pod)
    return conditions.get("Ready") == "False" and conditions.get("ContainersReady") == "True"


def _disruption(pod: Json) -> Json | None:
    for condition in mappings(pod, "status", "conditions"):
        if condition.get("type") == DISRUPTION and condition.get("status") == "True":
            return condition
    return None


def _is_going(pod: Json) -> bool:
    return bool(mapping(pod, "metadata").get("deletionTimestamp"))
