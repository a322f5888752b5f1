"""The records of a run in the store; :mod:`torchelastic.protocol.keys` lists their keys."""

from __future__ import annotations

import enum
import itertools
from typing import Annotated, Final

import msgspec

from torchelastic.protocol.log_format import DEFAULT_ROLE

PROTOCOL_VERSION: Final = 1
"""The version of the records and rules, the same in all nodes of a round. Each incompatible change increments it."""

MAX_IMPORTS: Final = 256
"""Maximum number of modules that a node learns from its workers or from the run."""

COUNT_LIMIT: Final = 1_000_000
"""Counters saturate at this value."""

NUMBER_STEP: Final = 1_000_000
"""The generation of a size and the numbers of a round and a notice exceed those that the reader knows by at most this.

No run has as many changes, so a false record cannot use up the numbers."""

_Name = Annotated[str, msgspec.Meta(max_length=253)]
_Address = Annotated[str, msgspec.Meta(max_length=263)]
Sentence = Annotated[str, msgspec.Meta(max_length=16384)]
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_LIMIT)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_KnownNumber = Annotated[int, msgspec.Meta(ge=0, le=2**52)]  # leaves room to increment a number from a node's record
_PeerKey = Annotated[str, msgspec.Meta(max_length=64, pattern="^[0-9a-f]*$")]
_NodeCount = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class _Record(msgspec.Struct, frozen=True, omit_defaults=True):
    pass


class VersionedRecord(_Record, frozen=True, kw_only=True):
    """A record with the writer's protocol version. The version is always written, because its default has a factory."""

    protocol: Count = msgspec.field(default_factory=lambda: PROTOCOL_VERSION)


class SizeRecord(VersionedRecord, frozen=True):
    """The size of a job in nodes; the record with the highest generation is valid.

    Attributes:
        generation: the number of changes of the size so far; 0 without an operator.
        min: the minimum number of nodes that train.
        max: the maximum number of nodes that train.
        desired: the number of nodes with which a round forms without further waiting; None if unknown.
        draining: names of the nodes that are about to be removed; the next round excludes them.
    """

    min: _NodeCount
    max: _NodeCount
    generation: Number = 0
    desired: Count | None = None
    draining: tuple[_Name, ...] = ()

    @property
    def target(self) -> int:
        """The maximum number of nodes that a round includes."""
        return self.max if self.desired is None else min(max(self.desired, self.min), self.max)


class RunState(enum.StrEnum):
    """The state of a run; from the creation of its job to its end, a run is always in exactly one state."""

    WAITING = "waiting"
    """Too few nodes are present to train."""
    RENDEZVOUS = "rendezvous"
    """Enough nodes are present, but they have not agreed on a round yet."""
    STARTING = "starting"
    """The worker processes are being started."""
    RESTORING = "restoring"
    """The workers run, but the program has not begun its first step; known only if its steps are reported."""
    TRAINING = "training"
    STOPPING = "stopping"
    """Workers are being stopped: after a failure, for another round, or because the run has ended."""
    SUSPENDED = "suspended"


class DepartureReason(enum.StrEnum):
    """Why a member of one round is not in the next one."""

    LEFT = "left"
    """The node announced that it leaves the run."""
    DIED = "died"
    """The node failed, or its connection was lost."""
    NOT_NEEDED = "not_needed"
    """The node is present, but the size of the run was reduced."""


class TimeBreakdown(_Record, frozen=True):
    """How a run has spent its time since the creation of its job.

    Attributes:
        until: the time of this record, in seconds since the Unix epoch.
        state: the run's state at that time.
        seconds: time spent in each state; the values add up to the time from the creation of the job to ``until``.
        lost: seconds of training after the last checkpoint of each ended round; None if no checkpoint was reported.
        round: the number of the round at that time.
        first_step_at: when the program began its first step in that round; 0 if unknown.
        last_checkpoint_at: when the write of the last checkpoint of that round began; 0 if unknown.
        nodes_joined: number of nodes that joined a round, including the first one.
        departures: number of members of a round that were not in the next round, by reason.
        present: in a round without members, the members of the previous round that are still present.
    """

    until: Time = 0.0
    state: RunState = RunState.WAITING
    seconds: dict[RunState, Time] = msgspec.field(default_factory=dict)
    lost: Time | None = None
    round: Number = 0
    first_step_at: Time = 0.0
    last_checkpoint_at: Time = 0.0
    nodes_joined: Count = 0
    departures: dict[DepartureReason, Count] = msgspec.field(default_factory=dict)
    present: tuple[_Name, ...] = ()


class ResumeRecord(_Record, frozen=True):
    """The state of a run before it was suspended, for the agents that resume it with an empty store.

    Attributes:
        round: the last round's number.
        restarts: number of worker failures charged to the job so far.
        uncharged_restarts: number of restarts so far that were not charged; see :class:`RoundRecord`.
        time_breakdown: the time until the resumption, including the suspension; None if unknown.
    """

    round: Number = 0
    restarts: Count = 0
    uncharged_restarts: Count = 0
    time_breakdown: TimeBreakdown | None = None


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One node of a round: its id, the address at which peers reach it, and its number of workers."""

    node: _Name
    address: _Address
    workers: Count


class RoundReason(enum.StrEnum):
    """Why a round replaced the previous one, in one word; ``RoundRecord.cause`` explains it in a sentence."""

    NODE_JOINED = "node_joined"
    NODE_LOST = "node_lost"
    NODE_LEFT = "node_left"
    RESIZED = "resized"
    WORKER_FAILED = "worker_failed"


class RoundRecord(VersionedRecord, frozen=True):
    """A rendezvous round: its members, and everything that a node needs to start its workers.

    Attributes:
        number: the number of the round, from 1; never decreases.
        nonce: a random string that distinguishes two rounds with the same number if the store has lost the first one.
        members: the nodes in rank order; empty while too few are present (``cause`` contains the reason).
        tcp_store: host:port of the TCPStore of this round.
        restarts: number of worker failures charged to the job so far.
        early_failures: number of consecutive failures soon after the start of a worker.
        failures_without_step: number of consecutive failures in rounds that completed no step; None if the program has
            not reported a complete step or a checkpoint so far.
        uncharged_restarts: number of restarts so far that were not charged: after a change of membership or an
            uncharged failure, or when enough nodes were present again.
        desired: the desired size when this round was committed; None if unknown.
        reason: why this round replaced the previous one.
        cause: the reason as a sentence.
        failure: the last worker failure that was charged, if any; its message may be shortened.
        time_breakdown: the time breakdown up to this round, for the next leader if the store loses its own copy.
        roles: the role of each member's workers; empty if all workers have the same role.
        staying: the number of workers that continue from the round before.
        starting: the ranks of the other workers; empty if none stays.
    """

    number: Number
    nonce: Annotated[str, msgspec.Meta(max_length=32)] = ""
    members: tuple[Member, ...] = ()
    tcp_store: _Address = ""
    restarts: Count = 0
    early_failures: Count = 0
    failures_without_step: Count | None = None
    uncharged_restarts: Count = 0
    desired: Count | None = None
    reason: RoundReason = RoundReason.NODE_JOINED
    cause: Sentence = ""
    failure: FailureRecord | None = None
    time_breakdown: TimeBreakdown | None = None
    roles: tuple[_Name, ...] = ()
    staying: Count = 0
    starting: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        if self.roles and len(self.roles) != len(self.members):
            raise ValueError("each member needs a role")

    @property
    def world_size(self) -> int:
        """The number of workers that train together."""
        return sum(member.workers for member in self.members)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The ids of the members, in rank order."""
        return tuple(member.node for member in self.members)

    def first_rank(self, node: str) -> int:
        """Return the rank of the first worker of a member.

        Raises:
            ValueError: the node is not a member.
        """
        return sum(member.workers for member in self.members[: self.nodes.index(node)])

    def with_role_of(self, node: str) -> tuple[Member, ...]:
        """Return the members whose workers have the same role as those of one member, in rank order.

        Raises:
            ValueError: the node is not a member.
        """
        if not self.roles:
            return self.members
        role = self.roles[self.nodes.index(node)]
        return tuple(member for member, each in zip(self.members, self.roles, strict=True) if each == role)


class FailureKind(enum.StrEnum):
    """Classes of failures, from the most likely root cause to the least likely."""

    PROGRAM = "program"
    """An exception or exit of the program, a signal from another process, or the out-of-memory killer."""
    UNKNOWN = "unknown"
    """An exit or a crash of a worker whose error the agent does not know, because the worker inherits its streams."""
    COMMUNICATION = "communication"
    """A failed collective operation, usually because another worker has failed."""


class FailureRecord(_Record, frozen=True):
    """A failed worker.

    Attributes:
        round: the number of the worker's round.
        rank: the global rank.
        local_rank: the rank on the node.
        node: the node's id.
        host: the node's address.
        pid: the process id on that node.
        exit_code: the exit code, or the negative number of the signal that killed the worker.
        kind: the class of the failure.
        message: the exception, the signal, or the exit code with the end of the worker's output.
        uptime: seconds from the start of the worker to its exit.
        non_retryable: whether the program or ``--non-retryable-exit-codes`` declares that a retry is useless.
        uncharged: whether ``--uncharged-exit-codes`` exempts the failure from the restart budget.
    """

    round: Number
    rank: Count
    local_rank: Count
    node: _Name
    exit_code: Annotated[int, msgspec.Meta(ge=-255, le=255)]
    kind: FailureKind = FailureKind.PROGRAM
    host: _Address = ""
    pid: Number = 0
    message: Sentence = ""
    uptime: float = 0.0
    non_retryable: bool = False
    uncharged: bool = False


class NoticeRecord(VersionedRecord, frozen=True):
    """The round is about to be replaced; the next one waits until the workers that asked for notice have answered it.

    Attributes:
        round: the number of the round that ends.
        number: the number of the notice in the run, from 1; never decreases.
        seconds: the maximum time that the next round waits; 0 withdraws the notice.
        reason: why the round is replaced, in one word.
        cause: the reason as a sentence.
    """

    round: Number
    number: Number
    seconds: Seconds = 0.0
    reason: RoundReason = RoundReason.RESIZED
    cause: Sentence = ""


class OutcomeState(enum.StrEnum):
    """The result of a run."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"


class OutcomeRecord(_Record, frozen=True):
    """How the run ended; written once. Nodes of all versions read this record, so its fields never change.

    Attributes:
        state: succeeded or failed.
        round: the number of the last round.
        restarts: number of worker failures charged to the job.
        message: why the run failed; empty if it succeeded.
        failure: the worker failure that is the root cause, if any.
    """

    state: OutcomeState
    round: Number = 0
    restarts: Count = 0
    message: Sentence = ""
    failure: FailureRecord | None = None


class StateRecord(_Record, frozen=True):
    """The run's state: the current round, and the outcome after the end of the run.

    The round and the outcome share one key, so a compare-and-swap by a leader that has been replaced always fails.
    """

    round: RoundRecord | None = None
    outcome: OutcomeRecord | None = None


class NodePhase(enum.StrEnum):
    """A node's progress in its current round."""

    READY = "ready"
    """The node waits for a round, or trains in one."""
    FINISHING = "finishing"
    """At least one of the node's workers has exited with 0; others still run."""
    DONE = "done"
    """All workers of the node have exited with 0; the node stays until the outcome is committed."""
    PARTITIONED = "partitioned"
    """The node stopped its workers because it reached neither the store nor a peer; it is ready for the next round."""
    LEAVING = "leaving"
    """The node is about to leave; the next round excludes it."""


class NodeRecord(VersionedRecord, frozen=True):
    """A node's own record, under its lease. An empty store is restored from these records.

    Attributes:
        name: the name of the pod or host.
        address: the address at which peers reach the node.
        workers: the number of workers that the node runs in a round.
        role: the role of these workers.
        size: the size with which the node was started.
        peer_port: port of the node's peer server (see :mod:`torchelastic.rendezvous.peer_connection`).
        peer_key: the key that a connection to the peer server needs.
        tcp_store_port: port on which the node can serve the next round's TCPStore; not the port of an earlier round.
        joined_revision: the store's revision when the node first joined, which defines its seniority; 0 if unknown.
        phase: the node's progress in ``round``.
        round: the highest round number that the node has seen.
        restarts: the highest number of charged failures that the node has seen.
        uncharged_restarts: the highest number of uncharged restarts that the node has seen.
        failure: the worker failure in ``round`` that the node considers the root cause; None if there is none.
        metrics: port of the node's /metrics; 0 for none.
        topology_key: nodes with the same key, such as a host, get consecutive ranks; empty for none.
        node_rank: the node's place among the nodes of a round (``--node-rank``); None for a place after them.
        notice: seconds of notice that the workers in ``round`` ask for before a planned change; 0 for none.
        answered_notice: the number of the last notice that all workers have answered.
        first_step_at: when the program began its first step in ``round``, in seconds since the Unix epoch; 0 if
            unknown. Reported by rank 0.
        has_stepped: whether the program has completed a step in ``round``. Reported by rank 0.
        last_checkpoint_at: when the write of the last checkpoint in ``round`` began; 0 if unknown. Reported by rank 0.
        starting: whether the node cannot start workers yet; it is not in a round before it can.
        staying: the local ranks of the workers in ``round`` that continue in the next round.
        has_state: whether one of these workers has the state of the training.
        first_steps: the lowest and the highest number of complete steps with which workers began ``round``; empty if
            the program does not report them.
    """

    name: _Name
    address: _Address
    workers: Count
    size: SizeRecord
    peer_port: Count = 0
    peer_key: _PeerKey = ""
    tcp_store_port: Count = 0
    joined_revision: Number = 0
    phase: NodePhase = NodePhase.READY
    round: _KnownNumber = 0
    restarts: Count = 0
    uncharged_restarts: Count = 0
    failure: FailureRecord | None = None
    metrics: Count = 0
    topology_key: _Name = ""
    role: _Name = DEFAULT_ROLE
    node_rank: Count | None = None
    notice: Seconds = 0.0
    answered_notice: _KnownNumber = 0
    first_step_at: Time = 0.0
    has_stepped: bool = False
    last_checkpoint_at: Time = 0.0
    starting: bool = False
    staying: tuple[Count, ...] = ()
    has_state: bool = False
    first_steps: tuple[Number, ...] = ()


class PastRound(_Record, frozen=True):
    """One round in the history of a run.

    Attributes:
        number: the number of the round.
        began: when the round was committed, in seconds since the Unix epoch.
        nodes: the number of nodes; 0 if too few were present to train.
        workers: the number of workers.
        reason: why the round replaced the previous one.
        cause: the reason as a sentence, perhaps shortened.
        failure: the worker failure that ended the previous round, if any.
        lost: seconds of training of the previous round that no checkpoint contained when it ended; None if unknown.
        ended: when the round's workers stopped; 0 while they run, or if unknown.
        started_at: when the round's workers were started; 0 if unknown.
        first_step_at: when the program began its first step in the round; 0 if unknown.
        staying: the number of workers that continued from the round before.
        first_steps: the lowest and the highest number of complete steps with which workers began the round, if they
            differ, so that the workers do not train the same model; else empty.
    """

    number: Number
    began: Time
    nodes: Count = 0
    workers: Count = 0
    reason: RoundReason = RoundReason.NODE_JOINED
    cause: Sentence = ""
    failure: FailureRecord | None = None
    lost: Time | None = None
    ended: Time = 0.0
    started_at: Time = 0.0
    first_step_at: Time = 0.0
    staying: Count = 0
    first_steps: tuple[Number, ...] = ()


HISTORY_LIMIT: Final = 200
"""Maximum number of rounds in a history: half of them are the first rounds, and half are the last ones."""


class HistoryRecord(_Record, frozen=True):
    """The history of a run.

    Attributes:
        created: when the run's job was created, in seconds since the Unix epoch.
        rounds: the first and the last rounds.
        imports: the installed modules that workers import; a new node imports them before it joins a round.
    """

    created: Time = 0.0
    rounds: tuple[PastRound, ...] = ()
    imports: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MAX_IMPORTS)] = ()

    @property
    def omitted(self) -> int:
        """The number of rounds that are missing between the first and the last ones."""
        return sum(max(after.number - before.number - 1, 0) for before, after in itertools.pairwise(self.rounds))


class LeaderRecord(VersionedRecord, frozen=True):
    """The leader of a run: its node id (empty after it has resigned), and host:port and key of its peer server."""

    node: _Name
    address: _Address
    peer_key: _PeerKey = ""


def name_of(node: str) -> str:
    """Return the name with which a node's id begins: the name of the pod or host."""
    return node.rpartition(".")[0] or node


def bracketed(host: str) -> str:
    """Return the host for use before ``:port``: an IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host else host
