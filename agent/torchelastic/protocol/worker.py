"""The protocol between a worker and its agent: variables of the worker's environment, and lines of JSON on a socket.

A process of a worker connects to the agent's Unix socket and sends a :class:`Hello`. With ``check_timeout``,
the agent answers with a :class:`RoundAnswer` and closes the connection. Otherwise, the process sends any number of
:class:`WorkerMessage`, and the agent sends a :class:`NoticeMessage` for each notice. To a process that stays when the
round changes, it sends a :class:`WorldMessage` for each change.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from torchelastic.protocol.records import Number, Seconds, Time

if TYPE_CHECKING:
    from collections.abc import Sequence

WORKER_SOCKET: Final = "TORCHELASTIC_WORKER_SOCKET"
"""The environment variable with the path of the agent's socket, which only the agent's user can open."""

HEARTBEAT_FILE: Final = "TORCHELASTIC_HEARTBEAT_FILE"
"""The environment variable with the path of the file whose modification time is the worker's last heartbeat."""

METRICS_FILE: Final = "TORCHELASTIC_METRICS_FILE"
"""The environment variable with the path of the file to which the worker writes its metrics."""

ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
"""The environment variable with the path of the file to which the worker writes its uncaught exception."""

STARTING_RANKS: Final = "TORCHELASTIC_STARTING_RANKS"
"""The environment variable with the ranks of the round whose workers start, such as ``3,8-15``. The other workers train
without them until they are ready. Without the variable, all start, or none does, or they are too many to name."""

SPARE: Final = "TORCHELASTIC_SPARE"
"""The environment variable that is set for a worker of a spare node, which has no rank in the round.

For the first worker of the node, it is host:port of the round's TCPStore; for the others, it is empty."""

RANK_IN_ROUND: Final = "TORCHELASTIC_RANK_IN_ROUND"
"""The environment variable with the worker's rank in the round, while its world lacks the ranks that start."""

MEMORY: Final = "memory"
"""The name of a link to a folder in memory, if there is one, in the folder of the agent's socket."""

LINE_LIMIT: Final = 4096
"""Maximum length of a line in bytes, in either direction."""

own_pid = os.getpid()
"""The id of the process that imported this module. A forked worker replaces it with its own id; other forks do not."""


def is_worker() -> bool:
    """Return whether this process is a worker of an agent; a child of a worker is not."""
    if os.getpid() != own_pid or not os.environ.get(WORKER_SOCKET):
        return False
    processes = sys.modules.get("multiprocessing.process")
    return processes is None or not (
        processes.parent_process() is not None
        # While a spawned process imports the program's main module, its parent is not set yet.
        or getattr(processes.current_process(), "_inheriting", False)
    )


_RANKS_LIMIT: Final = 1024
"""Maximum length of the value of :data:`STARTING_RANKS`, so that the environment fits into a line."""


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks as text such as ``3,8-15``; empty if the text is too long."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    text = ",".join("-".join(map(str, run)) for run in runs)
    return text if len(text) <= _RANKS_LIMIT else ""


def parse_ranks(text: str) -> set[int]:
    """Return the ranks in a text of :func:`format_ranks`."""
    runs = [[int(number) for number in run.split("-")] for run in text.split(",") if run]
    return {rank for run in runs for rank in range(run[0], run[-1] + 1)}


class _Message(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Hello(_Message, frozen=True):
    """The first message of a process.

    Attributes:
        round: the number of the worker's round.
        rank: the worker's rank.
        check_timeout: seconds within which the agent answers whether the round is current; None to send messages.
    """

    round: Number
    rank: Number
    check_timeout: Seconds | None = None


class RoundAnswer(_Message, frozen=True):
    """Whether the round of a process is current."""

    is_current: bool = False


class WorkerMessage(_Message, frozen=True):
    """A message of a process to its agent. All times are in seconds since the Unix epoch.

    Attributes:
        requested_notice: seconds of notice for which the process asks; 0 withdraws the request.
        answered_notice: the number of the notice that the process has answered.
        first_step_at: when the program began its first training step.
        second_step_at: when it began the second one.
        last_checkpoint_at: when it began to write its last checkpoint.
        imported: an installed module that the program imports.
        changed: hashes of the environment variables that the program had changed before that, by name.
        stays: whether the process continues in the next round; None for no change.
        has_state: whether the process has the state of the training, so that it can train before others start.
        waits: whether the process has left its world, and waits for the next one.
        left_for: the number of the next round, for which the process has left its world.
        step: the number of steps that are complete when the program begins its first one in the round.
    """

    requested_notice: Seconds | None = None
    answered_notice: Number | None = None
    first_step_at: Time = 0.0
    second_step_at: Time = 0.0
    last_checkpoint_at: Time = 0.0
    imported: str = ""
    changed: dict[str, int] = {}
    stays: bool | None = None
    has_state: bool = False
    waits: bool = False
    left_for: Number = 0
    step: Number | None = None


class NoticeMessage(_Message, frozen=True, tag="notice"):
    """A notice of the agent to a process.

    Attributes:
        number: the number of the notice.
        seconds: seconds until the change; 0 withdraws the notice.
        reason: ``node_joined``, ``node_left`` or ``resized``.
        cause: the reason as a sentence.
    """

    number: Number
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    reason: str = ""
    cause: str = ""


class WorldMessage(_Message, frozen=True, tag="world"):
    """The world of a process that stays is broken, or has a successor.

    Attributes:
        environment: the variables of the process in the next round; empty until that round has begun.
        planned: whether the ranks of the world still run, so that the process may first complete its step.
    """

    environment: dict[str, str] = {}
    planned: bool = False


def encode_lines(*messages: msgspec.Struct) -> bytes:
    """Return messages as lines of JSON."""
    return b"".join(msgspec.json.encode(message) + b"\n" for message in messages)
