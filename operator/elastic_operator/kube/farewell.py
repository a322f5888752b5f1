"""What a deleted pod said last: told as an event of its job, for its log is gone with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_operator.kube.container_state import seconds
from elastic_operator.kube.observation import pod_of
from elastic_operator.model import JobEvent
from elastic_operator.names import EventReason
from elastic_operator.plan import words
from elastic_operator.unchecked import integer, mapping
from torchelastic.contract import ExitCode

if TYPE_CHECKING:
    from elastic_operator.model import Pod
    from elastic_operator.spec import Json


def farewell(body: Json) -> JobEvent | None:
    """The event for a pod that is gone; None where it said nothing, or where that was told already.

    Of a pod that had ended before somebody deleted it, the plan has told.

    Args:
        body: its last state.
    """
    pod = pod_of(body)
    asked = _asked_to_go(body)
    if not pod.phase.ended or asked is None or (pod.ended is not None and pod.ended < asked):
        return None
    said = _said(pod)
    return JobEvent(EventReason.POD_DELETED, f"{pod.name}, which was deleted, {said}") if said else None


def _said(pod: Pod) -> str:
    if pod.exit_code in (ExitCode.LEFT, ExitCode.INTERRUPTED, ExitCode.SUCCEEDED):
        last = words.last_words(pod)
        return f"said last: {last}" if last else ""
    return words.death(pod)


def _asked_to_go(body: Json) -> float | None:
    """When its deletion was asked for; the object says by when it is to be gone."""
    about = mapping(body, "metadata")
    deadline = seconds(about.get("deletionTimestamp"))
    return None if deadline is None else deadline - (integer(about, "deletionGracePeriodSeconds") or 0)
