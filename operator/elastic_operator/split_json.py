"""Where a run's time went, as JSON for people: in a job's status and in its report.

Its moments are written in milliseconds, unlike all others in a status: the seconds add up to what has passed since the
job was made, and should do so when they are read again.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from torchelastic.contract import NodeEnd, RunState, TimeSplit

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST: Final = 253_402_300_799_999
"""The last millisecond that a calendar has."""


class SplitJson(msgspec.Struct, frozen=True, rename="camel"):
    """What stands in the JSON; see :class:`torchelastic.contract.TimeSplit`.

    Attributes:
        as_of: up to when the time is split.
        seconds: by state.
        lost_seconds: None where no checkpoint was ever told of.
        joined: nodes that came.
        gone: nodes that went, by what became of them.
    """

    as_of: datetime
    seconds: dict[RunState, float] = msgspec.field(default_factory=dict)
    lost_seconds: float | None = None
    joined: int = 0
    gone: dict[NodeEnd, int] = msgspec.field(default_factory=dict)

    def split(self) -> TimeSplit:
        """The same as a record of the contract.

        Raises:
            msgspec.ValidationError: a number is out of bounds.
        """
        split = TimeSplit(
            until=seconds_of(self.as_of),
            seconds=self.seconds,
            lost=self.lost_seconds,
            joined=self.joined,
            gone=self.gone,
        )
        return msgspec.convert(msgspec.to_builtins(split), TimeSplit)


def split_to_json(split: TimeSplit) -> dict[str, Any]:
    """The JSON; what the run did at that very moment is not in it."""
    document: dict[str, Any] = {
        "asOf": moment(split.until),
        "seconds": {state.value: round(split.seconds[state], 3) for state in RunState if state in split.seconds},
        "joined": split.joined,
        "gone": {end.value: split.gone[end] for end in NodeEnd if end in split.gone},
    }
    if split.lost is not None:
        document["lostSeconds"] = round(split.lost, 3)
    return document


def moment(seconds: float) -> str:
    """A time in milliseconds; one that no calendar has becomes the nearest that one has.

    Args:
        seconds: since the Unix epoch.
    """
    if not math.isfinite(seconds):
        seconds = float(_LAST) if seconds > 0 else 0.0
    milliseconds = round(min(max(seconds * 1000, 0.0), float(_LAST)))
    time = _EPOCH + timedelta(milliseconds=min(milliseconds, _LAST))
    return f"{time:%Y-%m-%dT%H:%M:%S}.{time.microsecond // 1000:03d}Z"


def seconds_of(time: datetime) -> float:
    """Seconds since the Unix epoch; a time that names no zone is in UTC."""
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
