"""The time that a pod has to end, and how its agent spends it: notice to the workers, then grace, then what is around.

An agent that is asked to go gives the workers that want it *notice*, so that they save; then they have the *grace* time
between SIGTERM and SIGKILL. Both together stay below the pod's own period, after which all of it is killed.

The rule: where the template does not give the period, it is the notice and the grace, as the user says or as the agent
has them by itself, and :data:`AROUND`. Where it gives one, a quarter of that (at most :data:`AROUND`) is for what is
around; of the rest the grace gets what the agent has by itself, but no more than half, and the notice gets all else.
What the user says of notice or grace, in variables, flags or ``spec.gracePeriodSeconds``, stands in any case (of the
last, :func:`least_period` says what it needs). So a longer period is longer for saving.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from elastic_operator.spec import Json

NOTICE: Final = 30.0
"""Seconds that an agent gives its workers to save where nobody says otherwise."""

GRACE: Final = 5.0
"""Seconds that it gives them between SIGTERM and SIGKILL where nobody says otherwise."""

AROUND: Final = 25.0
"""Seconds that a pod has beyond that: for saying goodbye, for a store that is slow, for last words."""

_LONGEST_NOTICE: Final = 24 * 3600.0
"""Seconds; an agent takes no more."""

_LONGEST: Final = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class PodEnding:
    """How a pod ends.

    Attributes:
        period: seconds from SIGTERM to SIGKILL of the whole pod.
        env: what its agent is told of that, in its environment.
    """

    period: int
    env: Mapping[str, str] = field(default_factory=dict)


def pod_ending(*, period: int | None, env: Iterable[Json], flags: Sequence[str], grace: int | None = None) -> PodEnding:
    """How a pod ends.

    Args:
        period: the template's terminationGracePeriodSeconds; None where it gives none.
        grace: the spec's gracePeriodSeconds; None where it gives none.
        env: the user's variables, each as in a container's spec.
        flags: what may be flags of the agent, among the program and its arguments.
    """
    entries = tuple(env)
    notice = _said("notice", NOTICE, entries, flags)
    told = {} if grace is None else {_variable("stop-grace"): f"{grace}"}
    said = _said("stop-grace", GRACE, entries, flags) if grace is None else float(grace)
    if period is None or period < 0:
        # Not below what the agent has by itself: a flag may be the program's own, which is only called the same.
        return PodEnding(math.ceil(max(notice or 0.0, NOTICE) + max(said or 0.0, GRACE) + AROUND), told)
    left = period - _around(period)
    if said is None:
        said = min(GRACE, left / 2 if notice is None else max(left - notice, 0.0))
        told[_variable("stop-grace")] = f"{said:g}"
    if notice is None:
        told[_variable("notice")] = f"{min(max(left - said, 0.0), _LONGEST_NOTICE):g}"
    return PodEnding(period, told)


def least_period(grace: int) -> int:
    """The shortest period of a pod, in seconds, in which its workers have this grace."""
    return math.ceil(min(grace * 4 / 3, grace + AROUND))


def _around(period: float) -> float:
    return min(AROUND, period / 4)


def _said(flag: str, own: float, env: Iterable[Json], flags: Sequence[str]) -> float | None:
    """The longest such time that the user may be asking for; None where nothing is said of it.

    Args:
        flag: of the agent.
        own: what the agent has by itself; stands for a value that only the cluster knows.
        env: see :func:`pod_ending`.
        flags: likewise.
    """
    said = [
        f"{own}" if "valueFrom" in entry else str(entry.get("value"))
        for entry in env
        if entry.get("name") == _variable(flag)
    ]
    pattern = re.compile(rf"--?{flag.replace('-', '[-_]')}(?:=(?P<value>.*))?")
    for word, following in itertools.pairwise((*flags, "")):
        if (match := pattern.fullmatch(word)) is not None:
            said.append(following if match["value"] is None else match["value"])
    return max((seconds for text in said if (seconds := _seconds(text)) is not None), default=None)


def _seconds(text: str) -> float | None:
    """The time; None where it is none, which the agent will refuse in its own words."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return min(max(seconds, 0.0), _LONGEST) if math.isfinite(seconds) else None


def _variable(flag: str) -> str:
    return "PET_" + flag.upper().replace("-", "_")
