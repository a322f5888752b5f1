"""The three-way merge of ``kubectl apply``: how a saved file changes a job that others change too.

What the file names is set; what it named before and no longer names is removed; what it never named stays, such as the
``replicas`` that ``elasticjob scale`` has set. Mappings merge field by field. Lists are replaced as a whole: so does
``kubectl apply`` for custom resources.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_operator.spec import Json


def three_way_merge(last_applied: Json, live: Json, new: Json) -> dict[str, Any]:
    """The object that ``live`` becomes.

    A null in ``new`` names a field in order to have it removed; but where ``last_applied`` had that null already, it
    removes nothing again.

    Args:
        last_applied: what the file said when it was applied last.
        live: the object as it is now.
        new: what the file says now.

    Returns:
        The merged object; nothing of it is shared with the arguments.
    """
    merged = dict(copy.deepcopy(live))
    for key in last_applied:
        if key not in new:
            merged.pop(key, None)
    for key, value in new.items():
        before = last_applied.get(key)
        if value is None:
            if key not in last_applied or before is not None:
                merged.pop(key, None)
        elif isinstance(value, Mapping):
            current = merged.get(key)
            merged[key] = three_way_merge(
                before if isinstance(before, Mapping) else {}, current if isinstance(current, Mapping) else {}, value
            )
        else:
            merged[key] = copy.deepcopy(value)
    return merged
