"""The protocol between the operator and the agents: environment, store keys and records, exit codes.

The keys of a run, below ``/torchelastic/<run id>/``:

=============== ============================ =====================================================
key             written by                   record
=============== ============================ =====================================================
``c/leader``    the leader (leased)          :class:`LeaderRecord`: who leads
``c/state``     the leader, compare-and-swap :class:`StateRecord`: the current round, the outcome
``c/notice``    the leader                   :class:`NoticeRecord`: the round is about to change
``c/size``      the operator                 :class:`SizeRecord`: how many nodes there should be
``n/<node id>`` each node (leased)           :class:`NodeRecord`: the node itself
``t/breakdown`` the leader                   :class:`TimeBreakdown`: where the run's time went
``t/history``   the leader                   :class:`HistoryRecord`: the rounds of the run
=============== ============================ =====================================================

Every node watches ``c/``; only the leader watches ``n/``. So a change of membership costs O(N) messages. No node
watches ``t/``; a new leader reads it once.

A node's record hangs on the node's own lease, all others on the run's lease (:func:`run_lease`), which the leader and
the operator renew: an abandoned run leaves nothing behind a day later. Every record except the outcome has the
writer's protocol version. Two things keep their place and meaning in all versions, so that mixed versions stop in
order: the number and version of a round, and the outcome (:func:`decode_state`).
"""

from __future__ import annotations

from torchelastic.protocol.keys import KEY_ROOT, RUN_LEASE_RENEWALS, RUN_LEASE_TTL, RunKeys, run_lease
from torchelastic.protocol.process import (
    TERMINATION_MESSAGE_LIMIT,
    Env,
    ExitCode,
    TerminationMessage,
    encode_termination_message,
)
from torchelastic.protocol.records import (
    COUNT_LIMIT,
    HISTORY_LIMIT,
    MAX_RECORD_BYTES,
    PROTOCOL_VERSION,
    FailureKind,
    FailureRecord,
    HistoryRecord,
    LeaderRecord,
    Member,
    NodeEnd,
    NodePhase,
    NodeRecord,
    NoticeRecord,
    OutcomeRecord,
    OutcomeState,
    PastRound,
    Record,
    ResumeRecord,
    RoundReason,
    RoundRecord,
    RunState,
    SizeRecord,
    StateRecord,
    TimeBreakdown,
    bracketed,
    decode,
    decode_notice,
    decode_size,
    decode_state,
    encode,
    missing_between,
    other_version,
    shorten,
)

__all__ = [
    "COUNT_LIMIT",
    "HISTORY_LIMIT",
    "KEY_ROOT",
    "MAX_RECORD_BYTES",
    "PROTOCOL_VERSION",
    "RUN_LEASE_RENEWALS",
    "RUN_LEASE_TTL",
    "TERMINATION_MESSAGE_LIMIT",
    "Env",
    "ExitCode",
    "FailureKind",
    "FailureRecord",
    "HistoryRecord",
    "LeaderRecord",
    "Member",
    "NodeEnd",
    "NodePhase",
    "NodeRecord",
    "NoticeRecord",
    "OutcomeRecord",
    "OutcomeState",
    "PastRound",
    "Record",
    "ResumeRecord",
    "RoundReason",
    "RoundRecord",
    "RunKeys",
    "RunState",
    "SizeRecord",
    "StateRecord",
    "TerminationMessage",
    "TimeBreakdown",
    "bracketed",
    "decode",
    "decode_notice",
    "decode_size",
    "decode_state",
    "encode",
    "encode_termination_message",
    "missing_between",
    "other_version",
    "run_lease",
    "shorten",
]
