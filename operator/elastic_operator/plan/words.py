"""What the plan says to people: causes, deaths, lists and numbers, in words."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

from torchelastic.contract import ExitCode, TerminationMessage, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_operator.model import Pod
    from torchelastic.contract import FailureRecord, OutcomeRecord

_SIGNAL_BASE: Final = 128
_NAMES_SHOWN: Final = 5
_LAST_LINE_LIMIT: Final = 512
_SAID_LIMIT: Final = 2048


def death(pod: Pod) -> str:
    """How a pod came to its end, to be read behind its name: "was killed by SIGKILL"."""
    if (name := _signal_name(pod.exit_code)) is not None:
        return f"was killed by {name}"
    said = last_words(pod)
    if pod.exit_code is None:
        return f"came to an unknown end{f': {said}' if said else ''}"
    if pod.exit_code == ExitCode.STORE:
        return f"gave up on the store{f': {said}' if said else ''}"
    return f"exited with code {pod.exit_code}{f': {said}' if said else ''}"


def last_words(pod: Pod) -> str:
    """What a pod said last: the agent's own sentence, or else the last line that it left."""
    message = pod.message
    if isinstance(message, TerminationMessage):
        return message.message or (describe(message.failure) if message.failure else message.reason)
    lines = [line.strip() for line in str(message or "").splitlines() if line.strip()]
    return shorten(lines[-1], _LAST_LINE_LIMIT) if lines else ""


def root_cause(outcome: OutcomeRecord) -> str:
    """Why a run failed."""
    if outcome.message:
        return outcome.message
    return describe(outcome.failure) if outcome.failure else "the agents gave no reason"


def describe(failure: FailureRecord) -> str:
    """A worker's failure: "rank 3 on digits-2 exited with ValueError: …"."""
    who = f"rank {failure.rank} on {failure.node.rpartition('.')[0] or failure.node}"
    if (name := _signal_name(_SIGNAL_BASE - failure.exit_code if failure.exit_code < 0 else None)) is not None:
        return f"{who} was killed by {name}"
    return f"{who} exited with {failure.message or f'code {failure.exit_code}'}"


def count(number: int, thing: str) -> str:
    """A number of things: "1 pod", "3 pods"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def clause(said: str) -> str:
    """What somebody else said, as a part of a sentence of ours: on one line, without a full stop, and not too long."""
    return shorten(" ".join(said.split()).rstrip("."), _SAID_LIMIT)


def listed(things: Sequence[str]) -> str:
    """A list: "a, b and c"; of a long one, the beginning."""
    shown = list(things)
    if len(shown) > _NAMES_SHOWN:
        shown = [*shown[: _NAMES_SHOWN - 1], f"{len(shown) - _NAMES_SHOWN + 1} more"]
    if len(shown) <= 1:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def _signal_name(exit_code: int | None) -> str | None:
    if exit_code is None or exit_code <= _SIGNAL_BASE:
        return None
    try:
        return signal.Signals(exit_code - _SIGNAL_BASE).name
    except ValueError:
        return None
