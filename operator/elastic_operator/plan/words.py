"""What the plan says to people: causes, deaths, lists and numbers, in words."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

from elastic_operator.model import Fate
from torchelastic.contract import ExitCode, TerminationMessage, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_operator.model import Pod
    from torchelastic.contract import FailureRecord, OutcomeRecord

MESSAGE_LIMIT: Final = 8192
"""Characters; no condition says more, whatever it quotes. The object's schema draws the line above this."""

SIGNAL_BASE: Final = 128
"""An exit code of so much more than a signal's number stands for that signal."""

_NAMES_SHOWN: Final = 5
_LAST_LINE_LIMIT: Final = 512
_SAID_LIMIT: Final = 2048


def death(pod: Pod) -> str:
    """How a pod came to its end, to be read behind its name: "was killed by SIGKILL"."""
    if pod.fate is not None:
        return fate(pod)
    if (name := signal_name(pod.exit_code)) is not None:
        return f"was killed by {name}"
    said = last_words(pod)
    if pod.exit_code is None and pod.init_exit_code is not None:
        return f"did not start: {said}"
    if pod.exit_code is None:
        return f"came to an unknown end{f': {said}' if said else ''}"
    if pod.exit_code == ExitCode.STORE:
        return f"gave up on the store{f': {said}' if said else ''}"
    return f"exited with code {pod.exit_code}{f': {said}' if said else ''}"


def fate(pod: Pod) -> str:
    """What became of a pod by no fault of its own, to be read behind its name: "was evicted: …"."""
    if pod.fate is Fate.NODE_LOST:
        return f"was lost with its node{f' {pod.node}' if pod.node else ''}"
    if pod.fate is Fate.OUT_OF_MEMORY:
        return "ran out of memory"
    said = last_words(pod)
    if pod.fate is Fate.NOT_ADMITTED:
        return f"was turned away by its node{f' {pod.node}' if pod.node else ''}{f': {clause(said)}' if said else ''}"
    for reason in pod.reasons:  # in which the cluster says the same in one word
        said = said.removeprefix(f"{reason}: ")
    because = f": {clause(said)}" if said else ""
    preempted = any(reason.startswith("Preempt") for reason in pod.reasons)
    return f"was {'preempted' if preempted else 'evicted'}{because}"


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
    who = f"rank {failure.rank} on {node_name(failure)}"
    if failure.message.startswith("killed by "):  # a signal, and perhaps for what: "killed by SIGKILL: out of memory"
        return f"{who} was {failure.message}"
    if failure.message.startswith("the process that "):  # one of the agent's own, on which its workers depend
        return f"on {node_name(failure)} {failure.message}"
    if (name := signal_name(SIGNAL_BASE - failure.exit_code if failure.exit_code < 0 else None)) is not None:
        return f"{who} was killed by {name}"
    return f"{who} exited with {failure.message or f'code {failure.exit_code}'}"


def node_name(failure: FailureRecord) -> str:
    """The pod where a worker failed."""
    return failure.node.rpartition(".")[0] or failure.node


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


def signal_name(exit_code: int | None) -> str | None:
    """The signal that an exit code stands for, such as SIGKILL for 137; None where it stands for none."""
    if exit_code is None or exit_code <= SIGNAL_BASE:
        return None
    try:
        return signal.Signals(exit_code - SIGNAL_BASE).name
    except ValueError:
        return None
