"""Sentences for conditions, events and reports: why pods and workers ended, lists and numbers."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

from elastic_operator.controller.model import TerminationCause
from torchelastic.protocol import ExitCode, TerminationMessage, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_operator.controller.model import Pod
    from torchelastic.protocol import FailureRecord, OutcomeRecord

MESSAGE_LIMIT: Final = 8192
"""Characters of a condition's message; the CRD allows a few more."""

SIGNAL_BASE: Final = 128
"""An exit code of 128 + n stands for the signal n."""

_NAMES_SHOWN: Final = 5
_LAST_LINE_LIMIT: Final = 512
_QUOTE_LIMIT: Final = 2048


def pod_death(pod: Pod) -> str:
    """How a pod ended, to follow its name: "was killed by SIGKILL"."""
    if pod.termination_cause is not None:
        return pod_disruption(pod)
    if (name := signal_name(pod.exit_code)) is not None:
        return f"was killed by {name}"
    said = last_message(pod)
    if pod.exit_code is None and pod.init_exit_code is not None:
        return f"did not start: {said}"
    if pod.exit_code is None:
        how = "came to an unknown end"
    elif pod.exit_code == ExitCode.STORE:
        how = "gave up on the store"
    else:
        how = f"exited with code {pod.exit_code}"
    return f"{how}: {said}" if said else how


def pod_disruption(pod: Pod) -> str:
    """How a pod with a termination cause ended, to follow its name: "was evicted: …"."""
    node = f" {pod.node}" if pod.node else ""
    if pod.termination_cause is TerminationCause.NODE_LOST:
        return f"was lost with its node{node}"
    if pod.termination_cause is TerminationCause.OUT_OF_MEMORY:
        return "ran out of memory"
    said = last_message(pod)
    if pod.termination_cause is TerminationCause.NOT_ADMITTED:
        return f"was turned away by its node{node}{f': {clause(said)}' if said else ''}"
    for reason in pod.reasons:  # the cluster may repeat it before its message
        said = said.removeprefix(f"{reason}: ")
    preempted = any(reason.startswith("Preempt") for reason in pod.reasons)
    return f"was {'preempted' if preempted else 'evicted'}{f': {clause(said)}' if said else ''}"


def last_message(pod: Pod) -> str:
    """A pod's termination message, or else the last line of its output."""
    message = pod.message
    if isinstance(message, TerminationMessage):
        return message.message or (worker_failure(message.failure) if message.failure else message.reason)
    lines = [line.strip() for line in str(message or "").splitlines() if line.strip()]
    return shorten(lines[-1], _LAST_LINE_LIMIT) if lines else ""


def run_failure(outcome: OutcomeRecord) -> str:
    """Why a run failed."""
    if outcome.message:
        return outcome.message
    return worker_failure(outcome.failure) if outcome.failure else "the agents gave no reason"


def worker_failure(failure: FailureRecord) -> str:
    """A worker's failure: "rank 3 on digits-2 exited with ValueError: …"."""
    who = f"rank {failure.rank} on {node_name(failure)}"
    if failure.message.startswith("killed by "):  # such as "killed by SIGKILL: out of memory"
        return f"{who} was {failure.message}"
    if failure.message.startswith("the process that "):  # a process of the agent, on which its workers depend
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


def clause(quoted: str) -> str:
    """A quoted message as part of a sentence: on one line, without a full stop, and not too long."""
    return shorten(" ".join(quoted.split()).rstrip("."), _QUOTE_LIMIT)


def clauses(*parts: str) -> str:
    """The parts that are not empty, as one sentence."""
    return "; ".join(part for part in parts if part)


def listed(things: Sequence[str]) -> str:
    """A list: "a, b and c"; the beginning of a long one."""
    shown = list(things)
    if len(shown) > _NAMES_SHOWN:
        shown = [*shown[: _NAMES_SHOWN - 1], f"{len(shown) - _NAMES_SHOWN + 1} more"]
    if len(shown) <= 1:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def signal_name(exit_code: int | None) -> str | None:
    """The signal that an exit code stands for, such as SIGKILL for 137; None if it stands for none."""
    if exit_code is None or exit_code <= SIGNAL_BASE:
        return None
    try:
        return signal.Signals(exit_code - SIGNAL_BASE).name
    except ValueError:
        return None
