"""Starting and ending an agent: environment, exit codes, termination message."""

from __future__ import annotations

import enum
from typing import Annotated, Final

import msgspec

from torchelastic.protocol.records import Count, FailureRecord, Number, Sentence, encode, own_version, shorten


class Env:
    """Environment variables that the operator sets in an agent's container, beside torchrun's PET_* variables.

    Command-line flags override PET_* variables.
    """

    NODE_NAME: Final = "TORCHELASTIC_NODE_NAME"
    """The pod's name."""
    NODE_ADDRESS: Final = "TORCHELASTIC_NODE_ADDRESS"
    """The address at which peers reach it (the pod's IP)."""
    SIZE: Final = "TORCHELASTIC_SIZE"
    """The first :class:`SizeRecord`, as JSON."""
    RESUME: Final = "TORCHELASTIC_RESUME"
    """A :class:`ResumeRecord`, as JSON; unset if the run was never suspended."""
    JOB: Final = "TORCHELASTIC_JOB"
    """The job's namespace and name, separated by a slash; labels of the agent's metrics."""
    JOB_CREATED: Final = "TORCHELASTIC_JOB_CREATED"
    """When the job was created, in seconds since the Unix epoch: the start of its time breakdown."""
    UNIQUE_RUN: Final = "TORCHELASTIC_UNIQUE_RUN"
    """"1": the run id is never reused, so an outcome in the store belongs to this run."""
    CHECKPOINT_DIR: Final = "TORCHELASTIC_CHECKPOINT_DIR"
    """The program's checkpoint directory; the agent only passes it on."""
    TERMINATION_LOG: Final = "TORCHELASTIC_TERMINATION_LOG"
    """The file for the :class:`TerminationMessage`."""
    METRICS_PORT: Final = "TORCHELASTIC_METRICS_PORT"
    """Port of /metrics; 0 for any free port; unset for none."""
    PROTOCOL: Final = "TORCHELASTIC_PROTOCOL"
    """The operator's protocol version."""


class ExitCode(enum.IntEnum):
    """The agent's exit codes. A signal that ends the agent gives 128 + n, as in a shell."""

    SUCCEEDED = 0
    """The run succeeded, whether or not this node's workers took part to the end."""
    FAILED = 1
    """The run failed; the termination message has the root cause."""
    BAD_INPUT = 2
    """The command line or the environment is invalid; nothing was started."""
    STORE = 3
    """The store could not be reached within the join timeout, or its data was lost: not a failure of the node."""
    NO_PORT = 4
    """No port of the configured range is free on this host; a retry may find one."""
    BROKEN = 5
    """The store refused the agent (credentials, version), or the agent itself failed; a retry may succeed."""
    INTERRUPTED = 130
    """The agent left on SIGINT."""
    LEFT = 143
    """The agent left on SIGTERM: not a failure of the job."""


class TerminationMessage(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The agent's last message, for the operator and for people: JSON of at most 4,096 bytes.

    Attributes:
        reason: one word in CamelCase: Succeeded, WorkerFailed, RestartsExhausted, Left, BadInput, StoreUnavailable…
        message: a sentence.
        protocol: the agent's protocol version.
        round: the last round that the agent knew.
        failure: the failed worker, if any.
    """

    reason: Annotated[str, msgspec.Meta(max_length=64)]
    message: Sentence = ""
    protocol: Count = msgspec.field(default_factory=own_version)
    round: Number = 0
    failure: FailureRecord | None = None


TERMINATION_MESSAGE_LIMIT: Final = 4096
"""Bytes that the kubelet keeps of /dev/termination-log."""


def encode_termination_message(message: TerminationMessage) -> bytes:
    """Return the message as JSON within the kubelet's limit; long texts are shortened in the middle."""
    encoded = encode(message)
    budget = TERMINATION_MESSAGE_LIMIT
    while len(encoded) > TERMINATION_MESSAGE_LIMIT:
        budget = budget * 3 // 4
        failure = message.failure
        if failure is not None:
            failure = msgspec.structs.replace(failure, message=shorten(failure.message, budget // 2))
        encoded = encode(
            msgspec.structs.replace(message, message=shorten(message.message, budget // 2), failure=failure)
        )
    return encoded
