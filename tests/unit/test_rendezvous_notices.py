"""A planned change waits for workers that asked for a notice; nothing else does."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from tests.support.views import SETTINGS, failure, members, next_round, node_id, peer, round, snapshot
from torchelastic.protocol import FailureKind, NodePhase, NoticeRecord, RoundReason, RoundRecord
from torchelastic.rendezvous.policy.plan import plan
from torchelastic.rendezvous.policy.snapshot import Decision, GiveNotice, Hold, Peer, Snapshot

NOTICE = NoticeRecord(round=1, serial=4, seconds=20.0, reason=RoundReason.NODE_LEFT, cause="b left")


def trains(name: str, **changes: Any) -> Peer:
    return peer(name, **{"round": 1, "notice": 20.0, **changes})


def leaves(name: str, **changes: Any) -> Peer:
    return trains(name, phase=NodePhase.LEAVING, **changes)


def noticed(*peers: Peer, **changes: Any) -> Snapshot:
    """A moment in which that notice stands, given at 100 s, for a round of a and b."""
    return snapshot(
        *peers, **{"now": 101.0, "round": round(1, "a", "b"), "notice": NOTICE, "noticed_at": 100.0, **changes}
    )


def formed(record: RoundRecord) -> tuple[int, list[str]]:
    return record.number, list(members(record))


def given(decision: Decision) -> NoticeRecord:
    assert isinstance(decision, GiveNotice), decision
    return decision.record


def test_a_departure_is_announced_to_workers_that_asked_for_notice() -> None:
    here = (trains("a", notice=5.0), leaves("b", notice=20.0))
    notice = given(plan(snapshot(*here, wanted=2, round=round(1, "a", "b")), SETTINGS))
    assert notice == NoticeRecord(round=1, serial=1, seconds=20.0, reason=RoundReason.NODE_LEFT, cause="b left")


def test_a_change_of_size_is_announced_to_workers_that_asked_for_notice() -> None:
    here = (trains("a"), trains("b"))
    notice = given(plan(snapshot(*here, wanted=1, going=("b",), round=round(1, "a", "b")), SETTINGS))
    assert (notice.reason, notice.cause) == (RoundReason.RESIZED, "b is taken away")
    raised = snapshot(*here, wanted=4, low=3, round=round(1, "a", "b"))
    assert given(plan(raised, SETTINGS)).reason is RoundReason.RESIZED


@pytest.mark.parametrize(
    "who",
    [
        pytest.param(trains("a", notice=0.0), id="nobody asked"),
        pytest.param(trains("a", round=0), id="what was asked belongs to a round of the past"),
        pytest.param(trains("a", phase=NodePhase.DONE), id="whoever asked has ended"),
    ],
)
def test_a_change_happens_at_once_if_no_worker_asks_for_notice(who: Peer) -> None:
    here = (who, leaves("b", notice=0.0, store=40001))
    situation = snapshot(*here, wanted=1, round=round(1, "a", "b"))
    decision = plan(situation, SETTINGS)
    assert not isinstance(decision, GiveNotice)


def test_the_change_waits_for_the_last_answer() -> None:
    waiting = plan(noticed(trains("a", saved=4), leaves("b", saved=3), wanted=2), SETTINGS)
    assert isinstance(waiting, Hold)
    assert waiting.until == 120.0
    assert waiting.why == "b left: the workers have 20 s to save before the round changes"
    answered = noticed(trains("a", saved=4), leaves("b", saved=4), wanted=2)
    assert formed(next_round(answered)) == (2, ["a"])


def test_the_change_waits_for_an_answer_that_is_on_its_way_back() -> None:
    away = noticed(trains("a", saved=4), peer("c"), wanted=1, going=("a",), silent=frozenset({node_id("b")}))
    assert isinstance(plan(away, SETTINGS), Hold)


def test_the_change_happens_when_the_time_is_over_without_an_answer() -> None:
    assert formed(next_round(noticed(trains("a"), leaves("b"), wanted=2, now=120.0))) == (2, ["a"])


def test_a_node_that_joins_meanwhile_is_in_the_next_round_and_a_departure_does_not_extend_the_time() -> None:
    here = (trains("a"), leaves("b"), peer("c", joined=9, arrived=50.0))
    assert formed(next_round(noticed(*here, now=120.0))) == (2, ["a", "c"])
    both = noticed(leaves("a"), leaves("b"), peer("c", joined=9, arrived=50.0), wanted=1)
    assert plan(both, SETTINGS) == Hold(120.0, "b left: the workers have 20 s to save before the round changes")


def test_a_loss_ends_the_waiting() -> None:
    lost = noticed(trains("a"), leaves("b"), wanted=3, round=round(1, "a", "b", "c"))
    decision = next_round(lost)
    assert formed(decision) == (2, ["a"])
    assert decision.cause == "c is gone and b left"


def test_a_failure_ends_the_waiting_and_is_charged_unless_a_departure_explains_it() -> None:
    failed = trains("a", failure=failure("a", message="ValueError: bad"))
    decision = next_round(noticed(failed, leaves("b"), wanted=2, failed_since=101.0))
    assert (decision.restarts, decision.reason) == (1, RoundReason.WORKER_FAILED)

    broken = trains("a", failure=failure("a", kind=FailureKind.COMMUNICATION))
    decision = next_round(noticed(broken, leaves("b"), wanted=2, failed_since=101.0))
    assert (decision.restarts, decision.reason) == (0, RoundReason.NODE_LEFT)

    own = leaves("b", failure=failure("b", message="stopped"))
    decision = next_round(noticed(trains("a"), own, wanted=2, failed_since=101.0))
    assert (decision.restarts, decision.reason) == (0, RoundReason.NODE_LEFT)


def test_a_change_that_is_called_off_is_taken_back_once() -> None:
    here = (trains("a"), trains("b"))
    taken_back = given(plan(noticed(*here, wanted=2), SETTINGS))
    assert (taken_back.round, taken_back.serial, taken_back.seconds) == (1, 4, 0.0)
    assert plan(noticed(*here, wanted=2, notice=taken_back), SETTINGS) == Hold()


def test_the_notice_after_one_that_was_taken_back_has_a_higher_serial_than_any_answer() -> None:
    here = (trains("a", saved=7), leaves("b"))
    assert given(plan(noticed(*here, wanted=2, notice=None), SETTINGS)).serial == 8
    taken_back = msgspec.structs.replace(NOTICE, serial=9, seconds=0.0)
    assert given(plan(noticed(*here, wanted=2, notice=taken_back), SETTINGS)).serial == 10


def test_a_run_about_to_finish_takes_back_the_notice_of_a_join() -> None:
    here = (trains("a", phase=NodePhase.FINISHING), trains("b"), peer("c", joined=9))
    assert given(plan(noticed(*here, wanted=3), SETTINGS)).seconds == 0.0


def test_if_all_leave_the_round_ends_when_they_have_saved_and_the_next_run_begins_as_at_the_start() -> None:
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
