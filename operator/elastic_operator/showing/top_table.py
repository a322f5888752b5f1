"""What ``elasticjob top`` says of several jobs: a line for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_operator.showing import quantities, words
from elastic_operator.showing.columns import columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_operator.showing.top_lines import Reading


def table(readings: Sequence[Reading], *, namespaces: bool = False) -> list[str]:
    """The jobs in columns, with what is told of each by the agent that leads it.

    Args:
        readings: in the order in which to list them.
        namespaces: say the namespace of each.
    """
    first = ["NAMESPACE"] if namespaces else []
    rows = [[*first, "NAME", "STATE", "READY", "EPOCH", "WORLD", "GOODPUT", "LOST", "RESTARTS", "STEP", "AGE"]]
    for reading in readings:
        shown, told, status = reading.shown, reading.figures, reading.shown.status
        lost = reading.split[1]
        charged = status.restarts if told.restarts is None else told.restarts
        free = status.free_restarts if told.free is None else told.free
        size = status.world_size if told.world_size is None else told.world_size
        created = shown.created
        rows.append(
            [
                *([shown.namespace] if namespaces else []),
                shown.name,
                shown.state,
                f"{status.ready}/{status.desired}",
                str(told.epoch or status.epoch or "-"),
                str(size),
                "-" if reading.goodput is None else quantities.share(reading.goodput),
                "-" if lost is None else quantities.span(lost),
                f"{charged}+{free}" if free else str(charged),
                quantities.span(max(reading.pace.steps.values())) if reading.pace.steps else "-",
                "-" if created is None else words.duration(reading.now - created),
            ]
        )
    return columns(rows)
