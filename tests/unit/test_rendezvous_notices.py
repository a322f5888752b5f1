"""Only a planned change waits, for workers that asked for a notice."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.support.views import SETTINGS, failure, members, next_round, node_id, peer, round, snapshot
from torchelastic.protocol import FailureKind, NodePhase, NoticeRecord, RoundReason, RoundRecord
from torchelastic.rendezvous.policy.plan import Decision, Hold, plan

if TYPE_CHECKING:
    from torchelastic.rendezvous.policy.membership import Membership, Peer

NOTICE = NoticeRecord(round=1, serial=4, seconds=20.0, reason=RoundReason.NODE_LEFT, cause="b left")


def trains(name: str, **changes: Any) -> Peer:
    return peer(name, **{"round": 1, "notice": 20.0, **changes})


def leaves(name: str, **changes: Any) -> Peer:
    return trains(name, phase=NodePhase.LEAVING, **changes)


def noticed(*peers: Peer, **changes: Any) -> Membership:
    """A snapshot at 101 s of a round of a and b, with NOTICE given at 100 s."""
    return snapshot(
        *peers, **{"now": 101.0, "round": round(1, "a", "b"), "notice": NOTICE, "noticed_at": 100.0, **changes}
    )


def formed(record: RoundRecord) -> tuple[int, list[str]]:
    return record.number, list(members(record))


def given(decision: Decision) -> NoticeRecord:
    assert isinstance(decision, NoticeRecord), decision
    return decision


@pytest.mark.parametrize(("asked", "given_seconds"), [(5.0, 20.0), (500.0, SETTINGS.notice)])
def test_a_departure_gives_the_longest_notice_up_to_the_limit_of_the_run(asked: float, given_seconds: float) -> None:
    here = (trains("a", notice=asked), leaves("b", notice=20.0))
    notice = given(plan(snapshot(*here, wanted=2, round=round(1, "a", "b")), SETTINGS))
    expected = NoticeRecord(round=1, serial=1, seconds=given_seconds, reason=RoundReason.NODE_LEFT, cause="b left")
    assert notice == expected


def test_a_resize_gives_notice_to_workers_that_asked() -> None:
    here = (trains("a"), trains("b"))
    notice = given(plan(snapshot(*here, wanted=1, going=("b",), round=round(1, "a", "b")), SETTINGS))
    assert (notice.reason, notice.cause) == (RoundReason.RESIZED, "b is taken away")
    raised = snapshot(*here, wanted=4, low=3, round=round(1, "a", "b"))
    assert given(plan(raised, SETTINGS)).reason is RoundReason.RESIZED


@pytest.mark.parametrize(
    "who",
    [
        pytest.param(trains("a", notice=0.0), id="no request"),
        pytest.param(trains("a", round=0), id="a request of an earlier round"),
        pytest.param(trains("a", phase=NodePhase.DONE), id="the requesting workers have exited"),
    ],
)
def test_without_a_request_the_round_changes_at_once(who: Peer) -> None:
    here = (who, leaves("b", notice=0.0, store=40001))
    assert not isinstance(plan(snapshot(*here, wanted=1, round=round(1, "a", "b")), SETTINGS), NoticeRecord)


def test_the_change_waits_for_the_last_answer_or_the_deadline() -> None:
    here = (trains("a", saved=4), leaves("b", saved=3))
    why = "b left: the workers have 20 s to save before the round changes"
    assert plan(noticed(*here, wanted=2), SETTINGS) == Hold(120.0, why)
    assert formed(next_round(noticed(*here, wanted=2, now=120.0))) == (2, ["a"])
    answered = noticed(trains("a", saved=4), leaves("b", saved=4), wanted=2)
    assert formed(next_round(answered)) == (2, ["a"])
    silent = noticed(trains("a", saved=4), peer("c"), wanted=1, going=("a",), silent={node_id("b"): peer("b")})
    assert isinstance(plan(silent, SETTINGS), Hold)


def test_a_node_that_joins_during_a_notice_is_in_the_next_round_and_does_not_extend_it() -> None:
    here = (trains("a"), leaves("b"), peer("c", joined=9, arrived=50.0))
    assert formed(next_round(noticed(*here, now=120.0))) == (2, ["a", "c"])
    both = noticed(leaves("a"), leaves("b"), peer("c", joined=9, arrived=50.0), wanted=1)
    assert plan(both, SETTINGS) == Hold(120.0, "b left: the workers have 20 s to save before the round changes")


def test_a_lost_node_ends_the_notice() -> None:
    lost = noticed(trains("a"), leaves("b"), wanted=3, round=round(1, "a", "b", "c"))
    decision = next_round(lost)
    assert formed(decision) == (2, ["a"])
    assert decision.cause == "c is gone and b left"


def test_a_failure_ends_the_notice_and_is_charged_unless_a_departure_explains_it() -> None:
    failed = trains("a", failure=failure("a", message="ValueError: bad"))
    decision = next_round(noticed(failed, leaves("b"), wanted=2, failed_since=101.0))
    assert (decision.restarts, decision.reason) == (1, RoundReason.WORKER_FAILED)

    broken = trains("a", failure=failure("a", kind=FailureKind.COMMUNICATION))
    decision = next_round(noticed(broken, leaves("b"), wanted=2, failed_since=101.0))
    assert (decision.restarts, decision.reason) == (0, RoundReason.NODE_LEFT)

    own = leaves("b", failure=failure("b", message="stopped"))
    decision = next_round(noticed(trains("a"), own, wanted=2, failed_since=101.0))
    assert (decision.restarts, decision.reason) == (0, RoundReason.NODE_LEFT)


def test_a_notice_without_a_planned_change_is_withdrawn_once() -> None:
    here = (trains("a"), trains("b"))
    withdrawn = given(plan(noticed(*here, wanted=2), SETTINGS))
    assert (withdrawn.round, withdrawn.serial, withdrawn.seconds) == (1, 4, 0.0)
    assert plan(noticed(*here, wanted=2, notice=withdrawn), SETTINGS) == Hold()


def test_a_notice_after_a_withdrawn_one_has_a_higher_serial_than_any_answer() -> None:
    here = (trains("a", saved=7), leaves("b"))
    assert given(plan(noticed(*here, wanted=2, notice=None), SETTINGS)).serial == 8
    withdrawn = msgspec.structs.replace(NOTICE, serial=9, seconds=0.0)
    assert given(plan(noticed(*here, wanted=2, notice=withdrawn), SETTINGS)).serial == 10


def test_a_finishing_run_withdraws_the_notice_of_a_join() -> None:
    here = (trains("a", phase=NodePhase.FINISHING), trains("b"), peer("c", joined=9))
    assert given(plan(noticed(*here, wanted=3), SETTINGS)).seconds == 0.0


def test_if_all_nodes_leave_the_round_ends_when_they_have_saved() -> None:
    waiting = noticed(leaves("a", saved=4), leaves("b"), wanted=2)
    assert isinstance(plan(waiting, SETTINGS), Hold)
    saved = noticed(leaves("a", saved=4), leaves("b", saved=4), wanted=2, round=round(1, "a", "b", restarts=3))
    pause = next_round(saved)
    assert formed(pause) == (2, [])
    assert pause.cause.startswith("a and b left")

    late = snapshot(peer("n", joined=90, round=2), wanted=2, round=pause, since=80, now=5.0)
    assert isinstance(plan(late, SETTINGS), Hold)
    first = next_round(dataclasses.replace(late, now=10.0))
    assert (formed(first), first.restarts) == ((3, ["n"]), 0)
