"""A job that this operator cannot read, stored under an older or a newer definition: at least that is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from elastic_operator.errors import BadInput
from elastic_operator.model import Condition
from elastic_operator.names import ConditionType, Reason
from elastic_operator.status_json import status_from_json
from elastic_operator.unchecked import integer

if TYPE_CHECKING:
    from elastic_operator.model import JobStatus
    from elastic_operator.spec import Json


def called_invalid(body: Json, why: str, now: float) -> JobStatus | None:
    """The status that says so; all else in it stays as it was.

    Args:
        body: the job's object.
        why: what cannot be read, in a sentence.
        now: seconds since the Unix epoch.

    Returns:
        None where it says so already, or where it is the status that cannot be read: nothing of that may be lost.
    """
    try:
        before = status_from_json(body.get("status"))
    except BadInput:
        return None
    others = tuple(each for each in before.conditions if each.type != ConditionType.INVALID)
    former = next((each for each in before.conditions if each.type == ConditionType.INVALID), None)
    since = former.since if former is not None and former.status else now
    said = Condition(type=ConditionType.INVALID, status=True, reason=Reason.BAD_SPEC, message=why, since=since)
    after = replace(
        before, observed_generation=integer(body, "metadata", "generation") or 0, conditions=(*others, said)
    )
    # Where it stands among the others says nothing.
    unchanged = former == said and after.observed_generation == before.observed_generation
    return None if unchanged else after
