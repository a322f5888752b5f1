"""Builders for the records of a run, as a leader has them."""

from __future__ import annotations

from typing import Any

import msgspec

from torchelastic.config.settings import RendezvousSettings
from torchelastic.protocol.records import (
    FailureKind,
    FailureRecord,
    Member,
    NodeRecord,
    OutcomeRecord,
    RoundRecord,
    SizeRecord,
)
from torchelastic.rendezvous.policy.membership import Membership, Peer
from torchelastic.rendezvous.policy.plan import plan

SETTINGS = RendezvousSettings(run_id="run", size=SizeRecord(min=1, max=4), max_restarts=100)


def node_id(name: str) -> str:
    return f"{name}.0000"


def record(name: str, **changes: Any) -> NodeRecord:
    base = NodeRecord(
        name=name, address=f"10.0.0.{ord(name[-1])}", workers=1, size=SizeRecord(min=1, max=4), tcp_store_port=40000
    )
    return msgspec.structs.replace(base, **changes)


def peer(
    name: str, *, joined: int = 1, arrived: float = 0.0, answers: bool = True, failed_at: int = 0, **changes: Any
) -> Peer:
    return Peer(node_id(name), record(name, **changes), joined, arrived, answers, failed_at)


def round(number: int, *names: str, **changes: Any) -> RoundRecord:
    members = tuple(Member(node_id(name), f"10.0.0.{ord(name[-1])}", 1) for name in names)
    store = f"10.0.0.{ord(names[0][-1])}:30000" if names else ""
    return msgspec.structs.replace(RoundRecord(number=number, members=members, tcp_store=store), **changes)


def snapshot(*peers: Peer, wanted: int | None = None, low: int = 1, high: int = 4, **changes: Any) -> Membership:
    size = SizeRecord(min=low, max=high, desired=wanted, draining=changes.pop("draining", ()))
    highest = max((one.record.round for one in peers), default=0)
    return Membership(peers={one.id: one for one in peers}, size=size, **{"highest_round_seen": highest, **changes})


def failure(
    name: str,
    *,
    rank: int = 0,
    number: int = 1,
    kind: FailureKind = FailureKind.PROGRAM,
    uptime: float = 60.0,
    message: str = "",
    final: bool = False,
    free: bool = False,
) -> FailureRecord:
    return FailureRecord(
        round=number,
        rank=rank,
        local_rank=0,
        node=node_id(name),
        exit_code=1,
        kind=kind,
        uptime=uptime,
        message=message,
        non_retryable=final,
        uncharged=free,
    )


def next_round(situation: Membership, settings: RendezvousSettings = SETTINGS) -> RoundRecord:
    """Return the round that the leader forms at once."""
    decision = plan(situation, settings)
    assert isinstance(decision, RoundRecord), decision
    return decision


def outcome_of(situation: Membership, settings: RendezvousSettings = SETTINGS) -> OutcomeRecord:
    """Return the outcome that the leader commits at once."""
    decision = plan(situation, settings)
    assert isinstance(decision, OutcomeRecord), decision
    return decision


def members(record: RoundRecord) -> tuple[str, ...]:
    """Return the names of a round's members, in rank order."""
    return tuple(node.partition(".")[0] for node in record.nodes)
