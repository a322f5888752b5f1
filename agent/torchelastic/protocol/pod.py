"""What a pod's specification and its end say: the agent's environment, exit codes and termination message."""

from __future__ import annotations

import enum
import signal
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from torchelastic.protocol.codec import encode, shorten
from torchelastic.protocol.records import FailureRecord, Number, Sentence, VersionedRecord

if TYPE_CHECKING:
    from collections.abc import Mapping


CALLS_MODULE: Final = "torchelastic.launcher.pod"
"""The module that is the program of a pod whose agent takes calls from a launcher."""


class Env:
    """Environment variables that the operator sets in an agent's container, in addition to torchrun's PET_* variables.

    Command-line flags override PET_* variables.
    """

    NODE_NAME: Final = "TORCHELASTIC_NODE_NAME"
    """The pod's name."""
    NODE_ADDRESS: Final = "TORCHELASTIC_NODE_ADDRESS"
    """The address at which peers reach the pod: its IP."""
    SIZE: Final = "TORCHELASTIC_SIZE"
    """The initial :class:`~torchelastic.protocol.records.SizeRecord`, as JSON."""
    RESUME: Final = "TORCHELASTIC_RESUME"
    """A :class:`~torchelastic.protocol.records.ResumeRecord`, as JSON; unset if the run was never suspended."""
    JOB: Final = "TORCHELASTIC_JOB"
    """The job's namespace and name, separated by a slash, for the labels of the agent's metrics."""
    JOB_CREATED: Final = "TORCHELASTIC_JOB_CREATED"
    """When the job was created, in seconds since the Unix epoch: the start of its time breakdown."""
    UNIQUE_RUN: Final = "TORCHELASTIC_UNIQUE_RUN"
    """"1": the run id is never reused, so an outcome in the store belongs to this run."""
    COMBINED_OUTPUT: Final = "TORCHELASTIC_COMBINED_OUTPUT"
    """"1": both streams of a worker go only to one file, ``output.log``, below ``--log-dir``."""
    CHECKPOINT_DIR: Final = "TORCHELASTIC_CHECKPOINT_DIR"
    """The program's checkpoint directory; the agent passes it to the program unchanged."""
    TERMINATION_LOG: Final = "TORCHELASTIC_TERMINATION_LOG"
    """The file for the :class:`TerminationMessage`."""
    METRICS_PORT: Final = "TORCHELASTIC_METRICS_PORT"
    """Port of /metrics; 0 for any free port; unset for none."""
    ETCD_TLS: Final = "TORCHELASTIC_ETCD_TLS"
    """The folder with the certificates for etcd; unset for etcd without TLS."""
    PROTOCOL: Final = "TORCHELASTIC_PROTOCOL"
    """The operator's protocol version."""


class ExitCode(enum.IntEnum):
    """The agent's exit codes. If signal n kills the agent, the exit code is 128 + n, as in a shell."""

    SUCCEEDED = 0
    """The run succeeded, even if this node's workers stopped before the end."""
    FAILED = 1
    """The run failed (the termination message has the root cause), or the agent could not start its own processes."""
    BAD_INPUT = 2
    """A setting is invalid or does not work on this machine; for example, torch cannot be imported."""
    STORE_UNAVAILABLE = 3
    """The store could not be reached within the join timeout; the node itself did not fail."""
    NO_PORT = 4
    """No port of the configured range is free on this host; a retry may find one."""
    AGENT_ERROR = 5
    """The store refused the agent (credentials, version), or the agent itself failed; a retry may succeed."""
    # The agent left the run on a signal: see LEAVING_SIGNALS.
    HUNG_UP = 129
    INTERRUPTED = 130
    QUIT = 131
    USER_SIGNAL_1 = 138
    USER_SIGNAL_2 = 140
    LEFT = 143


LEAVING_SIGNALS: Final[Mapping[signal.Signals, ExitCode]] = {
    signal.SIGTERM: ExitCode.LEFT,
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGHUP: ExitCode.HUNG_UP,
    signal.SIGQUIT: ExitCode.QUIT,
    signal.SIGUSR1: ExitCode.USER_SIGNAL_1,
    signal.SIGUSR2: ExitCode.USER_SIGNAL_2,
}
"""The signals that can ask an agent to leave, with the agent's exit codes; SIGUSR1 and SIGUSR2 only on request."""

LEFT_CODES: Final = frozenset(LEAVING_SIGNALS.values())
"""The exit codes of an agent that left the run on a signal, which is not a failure of the job."""


class TerminationMessage(VersionedRecord, frozen=True, rename="camel"):
    """The agent's last message, for the operator and for users: JSON of at most 4,096 bytes.

    Attributes:
        reason: one word in CamelCase: Succeeded, WorkerFailed, TooFewNodes, Left, BadInput, StoreUnavailable…
        message: a sentence.
        round: the number of the last round that the agent has received; 0 for none.
        failure: the failed worker that is the root cause, if any.
    """

    reason: Annotated[str, msgspec.Meta(max_length=64)]
    message: Sentence = ""
    round: Number = 0
    failure: FailureRecord | None = None


TERMINATION_MESSAGE_LIMIT: Final = 4096
"""Number of bytes of /dev/termination-log that the kubelet keeps."""


def encode_termination_message(message: TerminationMessage) -> bytes:
    """Return the message as JSON within the kubelet's limit; long messages are shortened in the middle."""
    limit = TERMINATION_MESSAGE_LIMIT
    while len(encoded := encode(message)) > TERMINATION_MESSAGE_LIMIT:
        limit = limit * 3 // 4
        failure = message.failure
        if failure is not None:
            failure = msgspec.structs.replace(failure, message=shorten(failure.message, limit))
        message = msgspec.structs.replace(message, message=shorten(message.message, limit), failure=failure)
    return encoded
