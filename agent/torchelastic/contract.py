"""What the operator and the agents say to each other, in one place.

They meet in three places only: the environment that a pod starts with, a few keys in the store, and the exit code with
the termination message. This module names all of that for both sides; it does no I/O and imports nothing of the rest.

Keys of a run, all below ``/torchelastic/<run id>/``:

=============== ============================ ==================================================================
key             written by                   what it says
=============== ============================ ==================================================================
``c/leader``    the leading node (leased)    who leads and where its link listens (:class:`LeaderRecord`)
``c/epoch``     the leader, compare-and-swap who trains together now (:class:`EpochRecord`)
``c/outcome``   the leader, compare-and-swap how the run ended (:class:`OutcomeRecord`)
``c/notice``    the leader                   that the epoch is about to change (:class:`NoticeRecord`)
``c/size``      the operator                 how many nodes there should be (:class:`SizeRecord`)
``n/<node id>`` each node (leased)           who it is and what it knows (:class:`NodeRecord`)
``t/split``     the leader                   where the run's time went (:class:`TimeSplit`)
``t/history``   the leader                   the epochs of the run (:class:`HistoryRecord`)
=============== ============================ ==================================================================

A node watches ``c/`` alone; only the leader watches ``n/``. So a change of membership costs O(N) messages. What stands
below ``t/`` is for people: no node watches it, and a new leader reads it once.

What a node says of itself hangs on that node's own lease. The epoch, the outcome, the size, the word of a leader that
has resigned, and what is told of the past, outlive whoever wrote them: they hang on the run's lease
(:func:`run_lease`), which the leader and the operator renew. So of a run that was abandoned nothing is left a day
later.

The records are JSON, decoded into typed structures with bounds on every field: nothing that is read from a store is
trusted. Field names on the wire are short because an epoch's record goes to every node of it.

Every record but the outcome says which version of the contract its writer speaks, also where that is the reader's own:
a field that was left out would be read as whatever version the reader takes for granted. Two things keep their place
and their meaning in all versions, so that nodes of different ones at least stop in order: the number and the version of
an epoch (:func:`decode_epoch`), and the whole outcome.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec

from torchelastic.errors import MalformedRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

CONTRACT_VERSION: Final = 1
"""Raised when a record or a rule changes so that two agents, or an agent and an operator, would not understand each
other. Nodes share an epoch only if theirs is equal."""

RUN_LEASE_TTL: Final = 86_400.0
"""Seconds after which the keys of a run that nobody renews are gone."""

RUN_LEASE_RENEWALS: Final = 24
"""So often is the run's lease renewed within its time: every hour."""

MAX_RECORD_BYTES: Final = 1 << 20
"""No record is larger; etcd itself refuses requests above 1.5 MiB by default."""

KEY_ROOT: Final = "/torchelastic"

_Name = Annotated[str, msgspec.Meta(max_length=253)]
_Address = Annotated[str, msgspec.Meta(max_length=263)]
_Sentence = Annotated[str, msgspec.Meta(max_length=16384)]
COUNT_LIMIT: Final = 1_000_000
"""What is counted in a run, and was counted so often, is counted no further."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_LIMIT)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=1e11)]


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys of one run.

    Attributes:
        root: the prefix below which all of them stand, ending in a slash.
    """

    root: str

    @classmethod
    def of(cls, run_id: str, key_root: str = KEY_ROOT) -> RunKeys:
        """The keys of the run with this id; a slash in the id is kept from meaning anything."""
        return cls(f"{key_root}/{run_id.replace('%', '%25').replace('/', '%2F')}/")

    @property
    def control(self) -> str:
        """The prefix that every node watches."""
        return f"{self.root}c/"

    @property
    def leader(self) -> str:
        """Where the leading node says that it leads."""
        return f"{self.root}c/leader"

    @property
    def epoch(self) -> str:
        """Where the current epoch stands."""
        return f"{self.root}c/epoch"

    @property
    def outcome(self) -> str:
        """Where the end of the run stands."""
        return f"{self.root}c/outcome"

    @property
    def notice(self) -> str:
        """Where the leader says that the epoch is about to change."""
        return f"{self.root}c/notice"

    @property
    def size(self) -> str:
        """Where the operator says how many nodes there should be."""
        return f"{self.root}c/size"

    @property
    def nodes(self) -> str:
        """The prefix that the leader watches."""
        return f"{self.root}n/"

    def node(self, node_id: str) -> str:
        """The key of one node."""
        return f"{self.nodes}{node_id}"

    @property
    def split(self) -> str:
        """Where it stands where the run's time went."""
        return f"{self.root}t/split"

    @property
    def history(self) -> str:
        """Where the run's epochs stand, the past ones too."""
        return f"{self.root}t/history"


def run_lease(run_id: str) -> int:
    """The id of the lease on which the run's lasting keys hang: whoever grants it first, all others find the same one.

    etcd's own ids are as long, so that a run meets one of them, or another run's, no more often than those meet.

    Args:
        run_id: the run's id.

    Returns:
        A positive number of at most 63 bits.
    """
    name = f"{RunKeys.of(run_id).root}lease".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1 or 1


def _ours() -> int:
    """What a record says of its version by default. A function and no constant: constants are left out on the wire."""
    return CONTRACT_VERSION


class SizeRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """How many nodes the job should have; the highest generation wins, also over what a pod was started with.

    Attributes:
        generation: counts the changes of size; 0 is what a launcher without an operator gives.
        min: fewer than this never train.
        max: more than this never train.
        wanted: an epoch forms as soon as so many are there; None where nobody knows how many are coming.
        going: names of the nodes that are about to be taken away: the next epoch does without them.
        contract: the version of the contract that its writer speaks; a reader of another one leaves it alone.
    """

    min: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = msgspec.field(name="n")
    max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = msgspec.field(name="x")
    generation: _Number = msgspec.field(name="g", default=0)
    wanted: _Count | None = msgspec.field(name="w", default=None)
    going: tuple[_Name, ...] = msgspec.field(name="go", default=())
    contract: _Count = msgspec.field(name="v", default_factory=_ours)

    @property
    def target(self) -> int:
        """As many nodes as an epoch takes."""
        return self.max if self.wanted is None else min(max(self.wanted, self.min), self.max)


class RunState(enum.StrEnum):
    """What a run does at a moment. It is in exactly one of these at each, from the making of its job to its end."""

    WAITING = "waiting"
    """For pods: fewer nodes are there than are to train."""
    RENDEZVOUS = "rendezvous"
    """Enough nodes are there, and agree on who trains together."""
    STARTING = "starting"
    """The workers' processes are started."""
    RESTORING = "restoring"
    """The workers run, and the program has not begun its first step; known only where the program says so."""
    TRAINING = "training"
    STOPPING = "stopping"
    """Workers are ended, after a failure, for another epoch, or because the run is over."""
    SUSPENDED = "suspended"


class TimeSplit(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the time of a run went, from the making of its job up to a moment.

    Attributes:
        until: that moment, in seconds since the Unix epoch.
        state: what the run did then.
        seconds: how long it was in each state; they add up to the time since the job was made.
        lost: seconds of training that no checkpoint held when they ended; None where no checkpoint was ever told of.
        epoch: the epoch that stood then.
        stepped: when the program began its first step in that epoch; 0 where it has not said so.
        kept: when the last checkpoint of that epoch was begun; 0 where none was told of.
        joined: nodes that came, those of the first epoch included.
        gone: nodes that an epoch had and its successor had not, by what became of them (:class:`NodeEnd`).
        there: in an epoch without members, the nodes of the one before that are still there.
    """

    until: _Time = msgspec.field(name="u", default=0.0)
    state: RunState = msgspec.field(name="k", default=RunState.WAITING)
    seconds: dict[RunState, _Time] = msgspec.field(name="s", default_factory=dict)
    lost: _Time | None = msgspec.field(name="l", default=None)
    epoch: _Number = msgspec.field(name="e", default=0)
    stepped: _Time = msgspec.field(name="st", default=0.0)
    kept: _Time = msgspec.field(name="c", default=0.0)
    joined: _Count = msgspec.field(name="j", default=0)
    gone: dict[NodeEnd, _Count] = msgspec.field(name="g", default_factory=dict)
    there: tuple[_Name, ...] = msgspec.field(name="n", default=())

    def __hash__(self) -> int:
        return hash((self.until, self.epoch))


class NodeEnd(enum.StrEnum):
    """What became of a node that an epoch had and its successor has not."""

    LEFT = "left"
    """It said that it goes."""
    DIED = "died"
    """It, or its connection, broke."""
    NOT_NEEDED = "not_needed"
    """It is there, but the run has become smaller."""


class ResumeRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an agent knows of its run from the start: the run was suspended, and the store that knew it is gone.

    Attributes:
        epoch: the last epoch's number.
        restarts: failures of workers charged to the job so far.
        free: how often workers started anew without a charge.
        split: where the time went up to the resumption, the suspension included; None where nobody knows.
    """

    epoch: _Number = msgspec.field(name="e", default=0)
    restarts: _Count = msgspec.field(name="r", default=0)
    free: _Count = msgspec.field(name="f", default=0)
    split: TimeSplit | None = msgspec.field(name="t", default=None)


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One node of an epoch, in rank order.

    Attributes:
        node: its id.
        address: the address under which its peers reach it.
        workers: how many workers it runs.
    """

    node: _Name
    address: _Address
    workers: _Count


class EpochReason(enum.StrEnum):
    """Why an epoch took the place of the one before, in one word; ``EpochRecord.cause`` has the sentence."""

    NODE_JOINED = "node_joined"
    NODE_LOST = "node_lost"
    NODE_LEFT = "node_left"
    RESIZED = "resized"
    WORKER_FAILED = "worker_failed"


class EpochRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who trains together: everything that a node needs to start its workers without asking anybody.

    Attributes:
        number: counts the epochs of the run, from 1; never falls.
        members: the nodes in rank order; none while too few are there (then nobody trains, and ``cause`` says why).
        store: host:port of the TCPStore that is served for this epoch alone.
        restarts: failures of workers charged to the job so far.
        early: failures in a row that came soon after the start of their epoch.
        free: how often workers started anew without a charge: for a change of membership, a free failure, or because
            there were enough nodes again.
        wanted: the size that was wanted when this epoch was made, None where none was known.
        reason: in one word, why this epoch took the place of the one before.
        cause: the same in a sentence.
        failure: the worker's failure that was charged last, None where none was; its text may be shortened.
        split: where the run's time went up to this epoch, for whoever leads next where the store has lost it.
        contract: the version of the contract that its leader speaks.
    """

    number: _Number = msgspec.field(name="e")
    members: tuple[Member, ...] = msgspec.field(name="m", default=())
    store: _Address = msgspec.field(name="s", default="")
    restarts: _Count = msgspec.field(name="r", default=0)
    early: _Count = msgspec.field(name="y", default=0)
    free: _Count = msgspec.field(name="f", default=0)
    wanted: _Count | None = msgspec.field(name="w", default=None)
    reason: EpochReason = msgspec.field(name="k", default=EpochReason.NODE_JOINED)
    cause: _Sentence = msgspec.field(name="c", default="")
    failure: FailureRecord | None = msgspec.field(name="x", default=None)
    split: TimeSplit | None = msgspec.field(name="t", default=None)
    contract: _Count = msgspec.field(name="v", default_factory=_ours)

    @property
    def world_size(self) -> int:
        """How many workers train together."""
        return sum(member.workers for member in self.members)

    def first_rank(self, node: str) -> int:
        """The rank of the first worker of a member.

        Args:
            node: its id.

        Raises:
            ValueError: the node is no member.
        """
        return sum(member.workers for member in self.members[: self.nodes.index(node)])

    @property
    def nodes(self) -> tuple[str, ...]:
        """The ids of the members, in rank order."""
        return tuple(member.node for member in self.members)


class FailureKind(enum.StrEnum):
    """Classes of failures, from the one that explains most to the one that explains least."""

    PROGRAM = "program"
    """A signal from outside, the out-of-memory killer, or an exception of the program's own."""
    COMMUNICATION = "communication"
    """A collective that broke: most often because something else died."""
    ENDED = "ended"
    """Ended by the agent itself, because something else had failed."""


class FailureRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a worker that failed.

    Attributes:
        epoch: in which epoch.
        rank: its global rank there.
        local_rank: its rank on its node.
        node: the node's id.
        host: the node's address.
        pid: its process id on that node.
        exit_code: what it returned, or the negative number of the signal that ended it.
        kind: how much of an explanation it is.
        message: the exception, or the end of what it printed; in words.
        uptime: seconds from its start to its end.
        final: whether trying again is no use: the program says so, or its exit code is one that was declared so.
        free: whether it is charged to nobody: its exit code is one that was declared so.
    """

    epoch: _Number = msgspec.field(name="e")
    rank: _Count = msgspec.field(name="r")
    local_rank: _Count = msgspec.field(name="l")
    node: _Name = msgspec.field(name="n")
    exit_code: Annotated[int, msgspec.Meta(ge=-255, le=255)] = msgspec.field(name="x")
    kind: FailureKind = msgspec.field(name="k", default=FailureKind.PROGRAM)
    host: _Address = msgspec.field(name="h", default="")
    pid: _Number = msgspec.field(name="p", default=0)
    message: _Sentence = msgspec.field(name="t", default="")
    uptime: float = msgspec.field(name="u", default=0.0)
    final: bool = msgspec.field(name="z", default=False)
    free: bool = msgspec.field(name="q", default=False)


class NoticeRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """That an epoch is about to give way to another one, which waits until the workers that asked for it have saved.

    Attributes:
        epoch: the epoch that ends.
        serial: counts the notices of a run, from 1; never falls.
        seconds: how long the next epoch waits for them at most; 0 takes the notice back: the epoch goes on.
        reason: in one word, why.
        cause: the same in a sentence.
        contract: the version of the contract that its leader speaks.
    """

    epoch: _Number = msgspec.field(name="e")
    serial: _Number = msgspec.field(name="i")
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = msgspec.field(name="s", default=0.0)
    reason: EpochReason = msgspec.field(name="k", default=EpochReason.RESIZED)
    cause: _Sentence = msgspec.field(name="c", default="")
    contract: _Count = msgspec.field(name="v", default_factory=_ours)


class OutcomeState(enum.StrEnum):
    """How a run can end."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"


class OutcomeRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the run ended; written once. For nodes of every version the run is over then, so its fields never change.

    Attributes:
        state: succeeded or failed.
        epoch: the last epoch.
        restarts: failures of workers charged to the job.
        message: in words, why; empty where it succeeded.
        failure: the root cause, where a worker was it.
    """

    state: OutcomeState = msgspec.field(name="o")
    epoch: _Number = msgspec.field(name="e", default=0)
    restarts: _Count = msgspec.field(name="r", default=0)
    message: _Sentence = msgspec.field(name="t", default="")
    failure: FailureRecord | None = msgspec.field(name="f", default=None)


class NodePhase(enum.StrEnum):
    """Where a node stands in its current epoch."""

    READY = "ready"
    """Waiting for an epoch, or training in one."""
    FINISHING = "finishing"
    """At least one of its workers has ended with 0, others still run."""
    DONE = "done"
    """All its workers have ended with 0; it stays until the outcome is committed."""
    CUT_OFF = "cut-off"
    """Its workers were stopped because it reached neither store nor peers; it is ready for the next epoch."""
    LEAVING = "leaving"
    """On its way out: the next epoch does without it."""


class NodeRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a node says of itself, under its lease. With it an empty store is filled again.

    Attributes:
        name: the pod's or host's name, as the operator knows it.
        address: where peers reach it.
        workers: how many workers it would run.
        link: port of its link server (see :mod:`torchelastic.rendezvous.link`).
        store: port on which it can serve the TCPStore of the next epoch; never used before.
        joined: when it first came, as the store's revision: what decides on seniority. 0 until it is known.
        contract: the version of the contract that it speaks.
        phase: where it stands.
        epoch: the highest epoch number that it knows.
        restarts: the highest count of charged restarts that it knows.
        free: the highest count of free ones that it knows.
        failure: its first worker that failed in ``epoch``.
        size: the wanted size that it was started with.
        metrics: port of its /metrics, 0 where there is none.
        place: nodes with the same one are neighbours, and get neighbouring ranks; empty for none.
        notice: seconds that its workers in ``epoch`` have asked for before a planned change; 0 for none.
        saved: the serial of the last notice that all of them have answered.
        stepped: when the program began its first step in ``epoch``, in seconds since the Unix epoch, as the worker of
            rank 0 has told it; 0 where it has not.
        kept: when the program's last checkpoint in ``epoch`` was begun, told likewise; what was trained before is kept.
    """

    name: _Name = msgspec.field(name="nm")
    address: _Address = msgspec.field(name="a")
    workers: _Count = msgspec.field(name="w")
    size: SizeRecord = msgspec.field(name="z")
    link: _Count = msgspec.field(name="l", default=0)
    store: _Count = msgspec.field(name="s", default=0)
    joined: _Number = msgspec.field(name="j", default=0)
    contract: _Count = msgspec.field(name="v", default_factory=_ours)
    phase: NodePhase = msgspec.field(name="p", default=NodePhase.READY)
    epoch: _Number = msgspec.field(name="e", default=0)
    restarts: _Count = msgspec.field(name="r", default=0)
    free: _Count = msgspec.field(name="q", default=0)
    failure: FailureRecord | None = msgspec.field(name="f", default=None)
    metrics: _Count = msgspec.field(name="m", default=0)
    place: _Name = msgspec.field(name="h", default="")
    notice: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = msgspec.field(name="o", default=0.0)
    saved: _Number = msgspec.field(name="d", default=0)
    stepped: _Time = msgspec.field(name="st", default=0.0)
    kept: _Time = msgspec.field(name="kp", default=0.0)


class PastEpoch(msgspec.Struct, frozen=True, omit_defaults=True):
    """One epoch in the history of a run.

    Attributes:
        number: its number.
        began: when it was committed, in seconds since the Unix epoch.
        nodes: how many nodes it has; 0 while too few are there to train.
        workers: how many workers.
        reason: in one word, why it took the place of the one before.
        cause: the same in a sentence, perhaps shortened.
        failure: the worker's failure for which the epoch before had to end; None where it ended for another reason.
        lost: seconds of training of the epoch before that no checkpoint held when it ended; None where nobody knows.
        ended: when its workers ran no more; 0 where they do, or where nobody knows.
    """

    number: _Number = msgspec.field(name="e")
    began: _Time = msgspec.field(name="b")
    nodes: _Count = msgspec.field(name="n", default=0)
    workers: _Count = msgspec.field(name="w", default=0)
    reason: EpochReason = msgspec.field(name="k", default=EpochReason.NODE_JOINED)
    cause: _Sentence = msgspec.field(name="c", default="")
    failure: FailureRecord | None = msgspec.field(name="x", default=None)
    lost: _Time | None = msgspec.field(name="l", default=None)
    ended: _Time = msgspec.field(name="z", default=0.0)


HISTORY_LIMIT: Final = 200
"""Epochs that the history of a run keeps: the first of them, and the last ones."""


class HistoryRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The epochs of a run.

    Attributes:
        created: when the job was made, in seconds since the Unix epoch.
        epochs: the first half of those that are kept, and the last ones.
        omitted: how many are missing between the two.
    """

    created: _Time = msgspec.field(name="t", default=0.0)
    epochs: tuple[PastEpoch, ...] = msgspec.field(name="p", default=())
    omitted: _Count = msgspec.field(name="o", default=0)


def missing_between(epochs: Iterable[PastEpoch]) -> int:
    """How many epochs are missing between these, which are in order: they are numbered without gaps."""
    missing = sum(max(after.number - before.number - 1, 0) for before, after in itertools.pairwise(epochs))
    return min(missing, COUNT_LIMIT)


class LeaderRecord(msgspec.Struct, frozen=True):
    """Who leads.

    Attributes:
        node: the leader's id; empty where it has resigned, so that nobody waits for it to come back.
        address: host:port of its link server.
        contract: the version of the contract that it speaks.
    """

    node: _Name = msgspec.field(name="n")
    address: _Address = msgspec.field(name="a")
    contract: _Count = msgspec.field(name="v", default_factory=_ours)


def bracketed(host: str) -> str:
    """A host as it stands before a colon and a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


Record = TypeVar("Record", bound=msgspec.Struct)


def encode(record: msgspec.Struct) -> bytes:
    """A record as the bytes that stand in the store."""
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        # A name or an exception's text with bytes that are no characters, which Python has kept as lone surrogates.
        return msgspec.json.encode(_writable(msgspec.to_builtins(record)))


def _writable(value: Any) -> Any:  # noqa: ANN401 - what JSON is made of
    """The same, with a question mark for each half of a character; so no text becomes longer than it may be."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {key: _writable(each) for key, each in value.items()}
    return [_writable(each) for each in value] if isinstance(value, (list, tuple)) else value


def decode(data: bytes, kind: type[Record]) -> Record:
    """A record from the bytes that stand in the store.

    Raises:
        MalformedRecord: they are not such a record, or larger than any may be.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise MalformedRecord(f"a {kind.__name__} of {len(data)} bytes is larger than any may be ({MAX_RECORD_BYTES})")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRecord(f"not a {kind.__name__}: {error}") from None


class _AnyEpoch(msgspec.Struct, frozen=True):
    """What every version can read of every other one's epoch."""

    number: _Number = msgspec.field(name="e")
    contract: _Count = msgspec.field(name="v", default=CONTRACT_VERSION)


def decode_epoch(data: bytes) -> EpochRecord:
    """An epoch from the bytes that stand in the store, also from one that a leader of another version has committed.

    Of that one only the number is believed. It has no members, for nobody of ours is in it; and the cause says so.

    Raises:
        MalformedRecord: it is no epoch.
    """
    header = decode(data, _AnyEpoch)
    if header.contract == CONTRACT_VERSION:
        return decode(data, EpochRecord)
    cause = f"this node cannot train with those that lead the run: {other_version(header.contract)}"
    return EpochRecord(number=header.number, cause=cause, contract=header.contract)


def decode_size(data: bytes) -> SizeRecord:
    """A wanted size from the bytes that stand in the store.

    Raises:
        MalformedRecord: it is none, or whoever wrote it speaks another version of the contract.
    """
    size = decode(data, SizeRecord)
    if size.contract != CONTRACT_VERSION:
        raise MalformedRecord(f"not a SizeRecord for us: {other_version(size.contract)}")
    return size


def other_version(theirs: int) -> str:
    """That another version of the contract is spoken elsewhere, and what to do about it."""
    return (
        f"another version of torchelastic's protocol is installed there ({theirs}, and {CONTRACT_VERSION} here); "
        "use the same release everywhere"
    )


class Env:
    """Environment variables with which the operator starts an agent, beside torchrun's PET_* ones.

    Flags on the agent's command line win over PET_* variables.
    """

    NODE_NAME: Final = "TORCHELASTIC_NODE_NAME"
    """The pod's name."""
    NODE_ADDRESS: Final = "TORCHELASTIC_NODE_ADDRESS"
    """The address under which peers reach it (the pod's IP)."""
    SIZE: Final = "TORCHELASTIC_SIZE"
    """The first :class:`SizeRecord`, as JSON."""
    RESUME: Final = "TORCHELASTIC_RESUME"
    """A :class:`ResumeRecord`, as JSON; unset for a run that was never suspended."""
    JOB: Final = "TORCHELASTIC_JOB"
    """The job's namespace and name, with a slash between them; labels of all that /metrics shows."""
    JOB_CREATED: Final = "TORCHELASTIC_JOB_CREATED"
    """When the job was made, in seconds since the Unix epoch: its time is accounted for from then on."""
    UNIQUE_RUN: Final = "TORCHELASTIC_UNIQUE_RUN"
    """"1": the run id is never used again, so an outcome found in the store is this run's."""
    CHECKPOINT_DIR: Final = "TORCHELASTIC_CHECKPOINT_DIR"
    """Where the program keeps its checkpoints; the agent only hands it on."""
    TERMINATION_LOG: Final = "TORCHELASTIC_TERMINATION_LOG"
    """The file that gets the :class:`TerminationMessage`."""
    METRICS_PORT: Final = "TORCHELASTIC_METRICS_PORT"
    """Port of /metrics; 0 for any free one; unset for none."""
    CONTRACT: Final = "TORCHELASTIC_CONTRACT"
    """The version of the contract that the operator speaks."""


class ExitCode(enum.IntEnum):
    """What the agent's own exit code means. Signals that end it give 128 + n, as in a shell."""

    SUCCEEDED = 0
    """The run succeeded, whether this node's workers took part to the end or not."""
    FAILED = 1
    """The run failed; the termination message has the root cause."""
    BAD_INPUT = 2
    """The command line or the environment cannot be honoured; nothing was started."""
    STORE = 3
    """The store could not be reached within the join timeout, or what stood there was lost: no failure of the node."""
    NO_PORT = 4
    """None of the ports on which it may listen is free on this host; another try may find one."""
    BROKEN = 5
    """The store refused the agent (credentials, version), or the agent itself broke: another try may well, too."""
    INTERRUPTED = 130
    """It left on SIGINT."""
    LEFT = 143
    """It left on SIGTERM: no failure of the job."""


class TerminationMessage(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The agent's last words, for the operator and for people: JSON, at most 4,096 bytes.

    Attributes:
        contract: the version of the contract that it speaks.
        reason: one word in CamelCase: Succeeded, WorkerFailed, RestartsExhausted, Left, BadInput, StoreUnavailable…
        message: a sentence.
        epoch: the last epoch that it knew.
        failure: the worker that failed, where one did.
    """

    reason: Annotated[str, msgspec.Meta(max_length=64)]
    message: _Sentence = ""
    contract: _Count = msgspec.field(default_factory=_ours)
    epoch: _Number = 0
    failure: FailureRecord | None = None


TERMINATION_MESSAGE_LIMIT: Final = 4096
"""Bytes; what the kubelet keeps of /dev/termination-log."""


def encode_termination_message(message: TerminationMessage) -> bytes:
    """The message within the kubelet's limit: texts are shortened, in the middle, so that the JSON stays whole."""
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


def shorten(text: str, limit: int) -> str:
    """Text of at most ``limit`` characters: its beginning and its end, where most is told, around an ellipsis."""
    if len(text) <= limit:
        return text
    head = limit // 3
    tail = max(limit - head - 3, 0)
    return f"{text[:head]} … {text[len(text) - tail :]}"[:limit] if limit > 3 else text[:limit]
