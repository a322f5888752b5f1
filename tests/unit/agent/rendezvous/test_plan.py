"""The leader's decisions."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.views import (
    SETTINGS,
    failure,
    members,
    next_round,
    node_id,
    outcome_of,
    peer,
    record,
    round,
    snapshot,
)
from torchelastic.protocol.codec import decode, encode
from torchelastic.protocol.records import (
    FailureKind,
    NodePhase,
    NoticeRecord,
    OutcomeRecord,
    OutcomeState,
    RoundReason,
    RoundRecord,
)
from torchelastic.rendezvous.policy.plan import MAX_KEPT_MESSAGE, RECONNECT_TIME, Decision, Hold, Resign, plan
from torchelastic.store.api import Entry

if TYPE_CHECKING:
    from torchelastic.config.settings import RendezvousSettings
    from torchelastic.rendezvous.policy.membership import Membership, Peer


def number_and_members(record: RoundRecord) -> tuple[int, list[str]]:
    return record.number, list(members(record))


def hold_of(decision: Decision) -> Hold:
    assert isinstance(decision, Hold), decision
    return decision


EXPIRED_B = frozenset({node_id("b")})
PARTITIONED = NodePhase.PARTITIONED
AB = round(1, "a", "b")
OF_TWO_RACKS = [peer(name, joined=i, topology_key="xy"[i % 2]) for i, name in enumerate("abcdef")]


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        pytest.param(snapshot(peer("a"), peer("b"), wanted=2), "ab", id="all desired nodes are present"),
        pytest.param(snapshot(peer("a"), peer("b"), high=2), "ab", id="the maximum is present"),
        pytest.param(snapshot(*OF_TWO_RACKS, wanted=6, high=6), "acebdf", id="grouped by topology key"),
        pytest.param(snapshot(*reversed(OF_TWO_RACKS), wanted=6, high=6), "acebdf", id="grouped in any order"),
        pytest.param(
            snapshot(peer("a"), peer("b", node_rank=1), peer("c", node_rank=1), peer("d", node_rank=0), wanted=4),
            "dbca",
            id="by node rank",
        ),
        pytest.param(
            snapshot(peer("a", round=1, node_rank=1), peer("b", node_rank=0), wanted=2, round=round(1, "a")),
            "ba",
            id="a new node with a lower node rank",
        ),
        pytest.param(
            snapshot(peer("a", round=1), *OF_TWO_RACKS[1:3], wanted=2, round=round(1, "a")),
            "ab",
            id="arrival precedes the topology key",
        ),
        pytest.param(
            snapshot(peer("a", round=1), peer("b", joined=5, arrived=7.0), wanted=2, now=7.0, round=round(1, "a")),
            "ab",
            id="a new node completes the desired size",
        ),
        pytest.param(snapshot(peer("a", arrived=3.0), wanted=2, now=13.0), "a", id="after the last call"),
        pytest.param(snapshot(peer("a"), peer("b"), now=10.0), "ab", id="after the last call, no desired size"),
        pytest.param(
            snapshot(peer("a", arrived=2.0), peer("b", arrived=2.1), high=3, appeared_at=0.5, now=2.1),
            "ab",
            id="nodes that appeared a second ago and have just started",
        ),
        pytest.param(snapshot(peer("a", round=1), wanted=2, round=AB), "a", id="a loss waits for no replacement"),
        pytest.param(
            snapshot(peer("a", round=1), peer("b", round=1), wanted=2, round=AB, dead=EXPIRED_B),
            "a",
            id="a dead member",
        ),
        pytest.param(snapshot(peer("a", round=1), peer("c", round=1), wanted=2, round=AB), "ac", id="a spare"),
        pytest.param(
            snapshot(peer("a", round=1), peer("b", round=1, phase=PARTITIONED), wanted=2, round=AB),
            "ab",
            id="a member that was partitioned",
        ),
        pytest.param(
            snapshot(peer("a", round=1), peer("b", round=1), wanted=1, draining=("a",), round=AB), "b", id="draining"
        ),
        pytest.param(snapshot(peer("a", round=1), peer("b", round=1), wanted=1, round=AB), "a", id="a smaller size"),
        pytest.param(snapshot(peer("a", round=1), wanted=1, draining=("a",), round=AB), "", id="only a draining node"),
        pytest.param(
            snapshot(peer("a", round=2), peer("c", joined=7), low=2, wanted=2, round=round(2)), "ac", id="after a pause"
        ),
    ],
)
def test_the_next_round_has_the_expected_members_without_a_charge(situation: Membership, expected: str) -> None:
    record = next_round(situation)
    assert members(record) == tuple(expected)
    assert (record.number, record.restarts) == (1 if situation.round is None else situation.round.number + 1, 0)


@pytest.mark.parametrize(
    ("situation", "hold"),
    [
        pytest.param(
            snapshot(peer("a", arrived=3.0), wanted=2, appeared_at=3.0, now=4.0),
            Hold(13.0, "1 node of 2 is present; waiting for more until the last call ends"),
            id="the last call",
        ),
        pytest.param(
            snapshot(peer("a"), peer("b", arrived=0.8), appeared_at=0.8, high=3, now=1.7),
            Hold(1.8, "2 nodes of 3 are present; waiting for more until the last call ends"),
            id="one second after the last new node, without a desired size",
        ),
        pytest.param(
            snapshot(peer("a", arrived=1.0), peer("b", starting=True), appeared_at=2.0, high=3, now=9.0),
            Hold(11.0, "1 node of 3 is present; waiting for more until the last call ends"),
            id="a node that is starting",
        ),
        pytest.param(snapshot(peer("a", starting=True)), Hold(600.0), id="all nodes are starting"),
        pytest.param(
            snapshot(
                peer("a"), *(peer(f"b{i}", arrived=0.9 * i) for i in range(12)), high=99, appeared_at=9.9, now=9.9
            ),
            Hold(10.0, "13 nodes of 99 are present; waiting for more until the last call ends"),
            id="a stream of new nodes",
        ),
        pytest.param(
            snapshot(peer("a", round=4), resigned=True, now=4.0),
            Hold(5.0, "1 node of 4 is present; waiting for more until the last call ends"),
            id="one lease for the members of a lost round",
        ),
        pytest.param(
            snapshot(peer("a"), peer("b", answers=False), low=2, wanted=2),
            Hold(600.0, "1 node (a) of at least 2 is present; b has not answered yet; waiting for more"),
            id="a node that has not answered",
        ),
        pytest.param(
            snapshot(peer("a", round=1), peer("b", round=1), peer("c"), wanted=2, round=AB), Hold(), id="a spare"
        ),
        pytest.param(snapshot(peer("a", round=1), wanted=2, round=AB, expired=EXPIRED_B), Hold(), id="a lease expired"),
        pytest.param(
            snapshot(peer("a", round=1), low=2, wanted=2, round=AB, expired=EXPIRED_B), Hold(), id="at the minimum"
        ),
        pytest.param(
            snapshot(peer("a", round=2), peer("b", round=1, failure=failure("b")), wanted=2, round=round(2, "a", "b")),
            Hold(),
            id="a failure of a past round",
        ),
        pytest.param(
            snapshot(peer("a", round=2), peer("b", round=1, phase=PARTITIONED), wanted=2, round=round(2, "a", "b")),
            Hold(),
            id="partitioned in a past round",
        ),
        pytest.param(
            snapshot(peer("a"), round=round(1, "b"), outcome=OutcomeRecord(state=OutcomeState.SUCCEEDED)),
            Hold(),
            id="the run has ended",
        ),
        pytest.param(
            snapshot(peer("a", round=1, phase=NodePhase.DONE), peer("b", round=1), peer("c"), wanted=3, round=AB),
            Hold(why="the run is about to finish; new nodes wait"),
            id="about to finish",
        ),
        pytest.param(
            snapshot(peer("a", round=1), peer("b", round=1, answers=False), peer("c"), wanted=3, round=AB),
            Hold(why="a member has not connected to its new leader yet; new nodes wait"),
            id="a member that has not connected",
        ),
        pytest.param(
            snapshot(peer("a", round=1), peer("c"), wanted=3, round=AB, expired=EXPIRED_B),
            Hold(why="a member without a key may return; new nodes wait"),
            id="a member whose lease expired",
        ),
    ],
)
def test_no_round_forms_yet(situation: Membership, hold: Hold) -> None:
    assert plan(situation, SETTINGS) == hold


FAILED_A: dict[str, Any] = {"round": 1, "failure": failure("a")}
STAYS_A = FAILED_A | {"staying": (0,), "has_state": True}


@pytest.mark.parametrize(
    ("nodes", "staying", "starting"),
    [
        pytest.param([peer("a", **FAILED_A), peer("b", round=1)], 0, (), id="none stays"),
        pytest.param(
            [
                peer("a", workers=2, staying=(0, 1), has_state=True, **FAILED_A),
                peer("b", round=1, workers=2, staying=(1,)),
            ],
            *(3, (2,)),
            id="one worker failed",
        ),
        pytest.param([peer("a", **STAYS_A), peer("c", workers=2)], 1, (1, 2), id="a node joins"),
        pytest.param([peer("a", **STAYS_A)], 1, (), id="the other node is lost"),
        pytest.param([peer("a", **STAYS_A), peer("c", round=1, staying=(0,))], 2, (), id="a spare stands by"),
        pytest.param([peer("a", **FAILED_A), peer("c", round=1, staying=(0,))], 0, (), id="only a spare stays"),
        pytest.param([peer("a", staying=(0,), **FAILED_A), peer("b", round=1)], 0, (), id="before the training"),
        pytest.param([peer("a", **STAYS_A), peer("c", staying=(0,))], 1, (1,), id="of another round"),
    ],
)
def test_a_round_names_the_workers_that_start_while_others_stay(
    nodes: list[Peer], staying: int, starting: tuple[int, ...]
) -> None:
    found = next_round(snapshot(*nodes, high=2, round=AB))
    assert (found.staying, found.starting) == (staying, starting)


def test_new_nodes_that_arrive_together_join_in_one_round() -> None:
    here = (peer("a", round=1), peer("b", joined=5, arrived=7.0), peer("c", joined=6, arrived=7.02))
    hold = hold_of(plan(snapshot(*here, now=7.03, round=round(1, "a")), SETTINGS))
    assert hold.until == pytest.approx(7.02 + SETTINGS.join_debounce)
    assert members(next_round(snapshot(*here, now=7.08, round=round(1, "a")))) == ("a", "b", "c")


def test_a_stream_of_new_nodes_delays_the_first_one_for_a_limited_time() -> None:
    crowd = [peer(f"n{chr(97 + i)}", joined=9 + i, arrived=7.0 + i * 0.04) for i in range(14)]
    here = (peer("a", round=1), *crowd)
    until = 7.0 + 10 * SETTINGS.join_debounce
    assert hold_of(plan(snapshot(*here, high=20, now=until - 0.01, round=round(1, "a")), SETTINGS)).until == until
    assert len(members(next_round(snapshot(*here, high=20, now=until, round=round(1, "a"))))) == 15


def test_new_nodes_wait_briefly_for_another_new_node_that_has_not_answered() -> None:
    late = peer("c", joined=6, arrived=7.01, answers=False)
    here = (peer("a", round=1), peer("b", joined=5, arrived=7.0), late)
    assert hold_of(plan(snapshot(*here, now=7.2, round=round(1, "a")), SETTINGS)).until == 7.5
    assert members(next_round(snapshot(*here, now=7.5, round=round(1, "a")))) == ("a", "b")
    answers = (*here[:2], dataclasses.replace(late, answers=True))
    assert members(next_round(snapshot(*answers, now=7.2, round=round(1, "a")))) == ("a", "b", "c")


def test_a_new_leader_waits_briefly_for_a_spare_that_has_not_answered() -> None:
    spare = peer("c", round=1, arrived=7.0, answers=False)
    here = (peer("a", round=1, arrived=7.0), spare)
    assert hold_of(plan(snapshot(*here, wanted=2, now=7.49, round=round(1, "a", "b")), SETTINGS)).until == 7.5
    assert members(next_round(snapshot(*here, wanted=2, now=7.5, round=round(1, "a", "b")))) == ("a",)
    answers = (here[0], dataclasses.replace(spare, answers=True))
    assert members(next_round(snapshot(*answers, wanted=2, now=7.1, round=round(1, "a", "b")))) == ("a", "c")


@pytest.mark.parametrize("what", [{"dead": frozenset({node_id("a")})}, {"failed_since": 1.0}])
def test_after_a_store_outage_the_leader_waits_for_members_that_reconnect(what: Any) -> None:
    broken = failure("a") if "failed_since" in what else None
    here = (peer("a", round=1, failure=broken), peer("b", round=1))
    expired = frozenset({node_id("c")})
    situation = snapshot(
        *here, wanted=3, now=2.0, round=round(1, "a", "b", "c"), expired=expired, wait_until=5.0, **what
    )
    assert hold_of(plan(situation, SETTINGS)).until == 5.0
    assert "b" in members(next_round(dataclasses.replace(situation, now=5.0)))


def test_a_loss_below_the_minimum_pauses_the_run() -> None:
    decision = next_round(snapshot(peer("a", round=1), low=2, wanted=2, round=round(1, "a", "b")))
    assert members(decision) == ()
    assert decision.cause == "b is gone; 1 node (a) of at least 2 is present; waiting for more"


def test_a_paused_run_names_the_missing_nodes_and_fails_with_that_message() -> None:
    waiting = snapshot(
        peer("a", round=2), low=2, wanted=2, round=round(2), changed_at=10.0, last_members=(node_id("b"),)
    )
    why = "1 node (a) of at least 2 is present; b is missing; waiting for more"
    assert hold_of(plan(dataclasses.replace(waiting, now=20.0), SETTINGS)).why == why
    decision = outcome_of(dataclasses.replace(waiting, now=610.0))
    assert decision.message == f"no more nodes joined within 600 s: {why}"


def test_a_run_without_its_nodes_starts_again_with_a_full_budget_unless_its_id_is_unique() -> None:
    here = (peer("c", joined=70, arrived=50.0, round=2), peer("d", joined=71, arrived=50.0, round=2))
    paused = snapshot(*here, low=2, wanted=3, now=55.0, round=round(2, restarts=9), since=60, appeared_at=50.0)
    assert "last call" in hold_of(plan(paused, SETTINGS)).why
    decision = next_round(dataclasses.replace(paused, now=60.0))
    assert (members(decision), decision.restarts) == (("c", "d"), 0)
    unique = dataclasses.replace(SETTINGS, unique_run=True)
    assert next_round(dataclasses.replace(paused, now=60.0), unique).restarts == 9
    lost = snapshot(peer("n", round=4), wanted=1, round=round(4, "a", restarts=7, early_failures=2))
    for settings, restarts in ((SETTINGS, 0), (unique, 7)):
        decision = next_round(lost, settings)
        assert (decision.number, decision.restarts, decision.early_failures) == (5, restarts, 0)


@pytest.mark.parametrize("reporter", ["a", "b"])
def test_a_failure_is_charged_and_named_whichever_node_reports_it(reporter: str) -> None:
    broken = failure("b", rank=1, message="ValueError: bad")
    here = [peer(name, round=1, failure=broken if name == reporter else None, failed_at=9) for name in "ab"]
    decision = next_round(snapshot(*here, wanted=2, round=round(1, "a", "b", restarts=3), failed_since=0.0))
    assert (members(decision), decision.restarts) == (("a", "b"), 4)
    assert (decision.cause, decision.failure) == ("rank 1 on b: ValueError: bad", broken)


@pytest.mark.parametrize("kind", [FailureKind.UNKNOWN, FailureKind.COMMUNICATION])
def test_a_failure_that_another_may_explain_waits_briefly_for_it(kind: FailureKind) -> None:
    here = (peer("a", round=1, failure=failure("a", kind=kind)), peer("b", round=1))
    situation = snapshot(*here, wanted=2, now=1.0, round=round(1, "a", "b"), failed_since=1.0)
    assert hold_of(plan(situation, SETTINGS)).until == pytest.approx(1.1)
    assert members(next_round(dataclasses.replace(situation, now=1.1))) == ("a", "b")


def crashed(early_failures: int, *, uptime: float = 0.4, free: bool = False) -> Membership:
    """Return a membership after `early_failures` early failures, in which a worker failed after `uptime` seconds."""
    broken = failure("a", number=3, uptime=uptime, message="ImportError: x", free=free)
    before = round(3, "a", restarts=2, early_failures=early_failures)
    return snapshot(peer("a", round=3, failure=broken), wanted=1, round=before, failed_since=0.0)


@pytest.mark.parametrize("free", [False, True])
def test_a_crash_loop_ends_the_run_early(free: bool) -> None:
    assert outcome_of(crashed(2, free=free)).message == (
        "rank 0 on a: ImportError: x; its workers failed 3 times in a row within 10 s of their start"
    )
    after_training = next_round(crashed(2, uptime=11.0, free=free))
    assert (after_training.early_failures, after_training.restarts) == (0, 2 if free else 3)
    again = next_round(crashed(1, free=free))
    assert (again.early_failures, again.uncharged_restarts) == (2, 1 if free else 0)


@pytest.mark.parametrize(
    ("before", "progress", "after"),
    [
        pytest.param(None, {}, None, id="the program reports nothing"),
        pytest.param(None, {"has_stepped": True}, 0, id="the first step"),
        pytest.param(2, {"has_stepped": True}, 0, id="a step"),
        pytest.param(2, {"last_checkpoint_at": 7.0}, 0, id="a checkpoint"),
        pytest.param(1, {"first_step_at": 7.0}, 2, id="an incomplete step"),
        pytest.param(2, {"first_step_at": 7.0}, "end", id="the limit"),
    ],
)
def test_failures_without_a_complete_step_end_the_run(
    before: int | None, progress: dict[str, Any], after: int | str | None
) -> None:
    failed = peer("a", round=1, failure=failure("a", uptime=60.0, message="ValueError: x"), **progress)
    situation = snapshot(failed, wanted=1, round=round(1, "a", failures_without_step=before), failed_since=0.0)
    if after == "end":
        assert outcome_of(situation).message == (
            "rank 0 on a: ValueError: x; its workers failed 3 times in a row before they had completed a step"
        )
    else:
        assert next_round(situation).failures_without_step == after


@pytest.mark.parametrize("lost", [False, True])
def test_a_non_retryable_failure_ends_the_run_despite_other_failures(lost: bool) -> None:
    final = failure("b", rank=1, message="NonRetryableException: no such data", final=True)
    here = (
        peer("a", round=1, failure=failure("a", kind=FailureKind.COMMUNICATION), failed_at=3),
        peer("b", round=1, failure=final, failed_at=9),
        peer("d", round=1),
        *([] if lost else [peer("c", round=1, failure=failure("c", message="RuntimeError: x"), failed_at=2)]),
    )
    names = ("a", "b", "c", "d")
    decision = outcome_of(snapshot(*here, wanted=4, round=round(1, *names), failed_since=0.0))
    assert (decision.state, decision.failure) == (OutcomeState.FAILED, final)
    assert decision.message == (
        "rank 1 on b: NonRetryableException: no such data; "
        "this failure is non-retryable, so the run ends even if restarts are left"
    )


def test_a_final_exit_code_does_not_end_the_run_if_another_failure_explains_it() -> None:
    broken = failure("a", kind=FailureKind.COMMUNICATION, final=True)
    here = (peer("a", round=1, failure=broken), peer("b", round=1, failure=failure("b", message="killed by SIGKILL")))
    explained = next_round(snapshot(*here, wanted=2, round=round(1, "a", "b"), failed_since=0.0))
    assert explained.cause == "rank 0 on b: killed by SIGKILL"
    assert isinstance(plan(snapshot(here[0], wanted=2, round=round(1, "a", "b")), SETTINGS), RoundRecord)

    alone = snapshot(here[0], peer("b", round=1), wanted=2, now=0.5, round=round(1, "a", "b"), failed_since=0.0)
    assert hold_of(plan(alone, SETTINGS)).until == 1.0
    ended = outcome_of(dataclasses.replace(alone, now=1.0))
    assert ended.failure == broken


@pytest.mark.parametrize(("cause_is_free", "counted"), [(True, (2, 6)), (False, (3, 5))])
def test_the_root_cause_decides_whether_a_restart_is_charged(cause_is_free: bool, counted: tuple[int, int]) -> None:
    cause = failure("a", number=3, free=cause_is_free)
    others = failure("b", number=3, kind=FailureKind.COMMUNICATION, free=not cause_is_free)
    here = (peer("a", round=3, failure=cause, failed_at=9), peer("b", round=3, failure=others, failed_at=4))
    standing = round(3, "a", "b", restarts=2, uncharged_restarts=5)
    decision = next_round(snapshot(*here, wanted=2, round=standing, failed_since=0.0))
    assert (decision.restarts, decision.uncharged_restarts) == counted


def test_every_round_keeps_the_failure_that_was_charged_last() -> None:
    long = failure("a", number=3, message="x" * 9000)
    here = (peer("a", round=3, failure=long), peer("b", round=3))
    failed = next_round(snapshot(*here, wanted=2, round=round(3, "a", "b"), failed_since=0.0))
    kept = failed.failure
    assert kept is not None
    assert (kept.rank, kept.node, kept.exit_code, len(kept.message)) == (0, long.node, long.exit_code, MAX_KEPT_MESSAGE)

    standing = round(4, "a", "b", restarts=1, failure=kept)
    joined = plan(snapshot(peer("a", round=4), peer("b", round=4), peer("c"), wanted=3, round=standing), SETTINGS)
    free = (peer("a", round=4, failure=failure("a", number=4, free=True)), peer("b", round=4))
    ignored = plan(snapshot(*free, wanted=2, round=standing, failed_since=0.0), SETTINGS)
    alone = plan(snapshot(peer("a", round=4), wanted=2, low=2, round=standing), SETTINGS)
    for decision in (joined, ignored, alone):
        assert isinstance(decision, RoundRecord)
        assert decision.failure == kept


def uncharged_after(situation: Membership, settings: RendezvousSettings = SETTINGS) -> int:
    """Return the uncharged restarts of the next round."""
    return next_round(situation, settings).uncharged_restarts


def test_each_membership_change_after_the_first_round_is_an_uncharged_restart() -> None:
    here = (peer("a", round=1), peer("b", round=1))
    assert uncharged_after(snapshot(peer("a"), peer("b"), wanted=2)) == 0
    assert uncharged_after(snapshot(*here, wanted=2, round=round(1, "a"))) == 1
    assert uncharged_after(snapshot(*here, wanted=2, round=round(1, "a", "c", uncharged_restarts=3))) == 4
    assert uncharged_after(snapshot(*here, wanted=1, round=round(1, "a", "b", restarts=2, uncharged_restarts=3))) == 4
    charged = snapshot(
        peer("a", round=1, failure=failure("a")), wanted=1, round=round(1, "a", uncharged_restarts=3), failed_since=0.0
    )
    assert uncharged_after(charged) == 3


def test_a_pause_and_the_round_after_it_are_one_uncharged_restart() -> None:
    lost = snapshot(peer("a", round=4), wanted=2, low=2, round=round(4, "a", "b", uncharged_restarts=1))
    assert uncharged_after(lost) == 1
    here = (peer("a", round=5), peer("b", round=5, joined=9))
    # A failure is charged when it happens.
    for reason, count in ((RoundReason.NODE_LOST, 2), (RoundReason.WORKER_FAILED, 1)):
        paused = round(5, uncharged_restarts=1, reason=reason)
        assert uncharged_after(snapshot(*here, wanted=2, low=2, since=5, round=paused)) == count


@pytest.mark.parametrize("gone", [(), (peer("a", round=1, phase=NodePhase.LEAVING),)])
def test_a_finished_node_can_leave_unless_it_serves_the_rounds_store(gone: tuple[Peer, ...]) -> None:
    done = frozenset({node_id("a")})
    rest = snapshot(
        *gone, peer("b", round=1), wanted=2, round=round(1, "a", "b", tcp_store="10.0.0.98:30000"), done=done
    )
    assert hold_of(plan(rest, SETTINGS)) == Hold()
    serving = dataclasses.replace(rest, round=round(1, "a", "b", tcp_store="10.0.0.97:30000"))
    assert members(next_round(serving)) == ("b",)


@pytest.mark.parametrize("stored", [None, round(1, "a", "b", restarts=1)])
def test_a_leader_gives_way_once_to_nodes_that_know_a_later_round_than_the_store(
    stored: RoundRecord | None,
) -> None:
    here = (peer("a", round=1, restarts=1), peer("b", round=3, restarts=2))
    situation = snapshot(*here, wanted=2, round=stored)
    assert isinstance(plan(situation, SETTINGS), Resign)
    decision = next_round(dataclasses.replace(situation, resigned=True))
    assert members(decision) == ("a", "b")
    assert (decision.number, decision.restarts) == (4, 2)


def test_early_failures_are_forgotten_after_healthy_training() -> None:
    here = (peer("a", round=3), peer("b", joined=9, arrived=3600.0))
    healthy = snapshot(*here, wanted=2, now=3600.0, changed_at=0.0, round=round(3, "a", early_failures=2))
    assert next_round(healthy).early_failures == 0


def test_a_cause_with_many_nodes_or_long_texts_stays_decodable() -> None:
    crowd = [f"{'x' * 200}{i:03}{chr(97 + i % 20)}" for i in range(1000)]
    lost = next_round(snapshot(peer("a", round=1), high=1000, round=round(1, "a", *crowd)))
    assert decode(encode(lost), RoundRecord).cause == "1000 nodes are gone"
    long = failure("a", message="x" * 16384)
    failed = next_round(snapshot(peer("a", round=1, failure=long), wanted=1, round=round(1, "a")))
    assert decode(encode(failed), RoundRecord).restarts == 1


# -- notices: only planned changes wait for workers that asked for notice

NOTICE = NoticeRecord(round=1, number=4, seconds=20.0, reason=RoundReason.NODE_LEFT, cause="b left")


def trains(name: str, **changes: Any) -> Peer:
    return peer(name, **{"round": 1, "notice": 20.0, **changes})


def leaves(name: str, **changes: Any) -> Peer:
    return trains(name, phase=NodePhase.LEAVING, **changes)


def noticed(*peers: Peer, **changes: Any) -> Membership:
    """Return a snapshot at 101 s of a round of a and b, with NOTICE given at 100 s."""
    return snapshot(
        *peers, **{"now": 101.0, "round": round(1, "a", "b"), "notice": NOTICE, "noticed_at": 100.0, **changes}
    )


def notice_of(decision: Decision) -> NoticeRecord:
    assert isinstance(decision, NoticeRecord), decision
    return decision


@pytest.mark.parametrize(("asked", "given_seconds"), [(5.0, 20.0), (500.0, SETTINGS.notice)])
def test_a_departure_gives_the_longest_notice_up_to_the_limit_of_the_run(asked: float, given_seconds: float) -> None:
    here = (trains("a", notice=asked), leaves("b", notice=20.0))
    notice = notice_of(plan(snapshot(*here, wanted=2, round=round(1, "a", "b")), SETTINGS))
    expected = NoticeRecord(round=1, number=1, seconds=given_seconds, reason=RoundReason.NODE_LEFT, cause="b left")
    assert notice == expected


def test_a_resize_gives_notice_to_workers_that_asked() -> None:
    here = (trains("a"), trains("b"))
    notice = notice_of(plan(snapshot(*here, wanted=1, draining=("b",), round=round(1, "a", "b")), SETTINGS))
    assert (notice.reason, notice.cause) == (RoundReason.RESIZED, "b is removed")
    raised = snapshot(*here, wanted=4, low=3, round=round(1, "a", "b"))
    assert notice_of(plan(raised, SETTINGS)).reason is RoundReason.RESIZED


@pytest.mark.parametrize(
    "who",
    [
        pytest.param(trains("a", notice=0.0), id="no request"),
        pytest.param(trains("a", round=0), id="a request of an earlier round"),
        pytest.param(trains("a", phase=NodePhase.DONE), id="the requesting workers have exited"),
    ],
)
def test_without_a_request_the_round_changes_at_once(who: Peer) -> None:
    here = (who, leaves("b", notice=0.0, tcp_store_port=40001))
    assert not isinstance(plan(snapshot(*here, wanted=1, round=round(1, "a", "b")), SETTINGS), NoticeRecord)


def test_the_change_waits_for_the_last_answer_or_the_deadline() -> None:
    here = (trains("a", answered_notice=4), leaves("b", answered_notice=3))
    why = "b left: the workers have 20 s to save a checkpoint before the round changes"
    assert plan(noticed(*here, wanted=2), SETTINGS) == Hold(120.0, why)
    assert number_and_members(next_round(noticed(*here, wanted=2, now=120.0))) == (2, ["a"])
    answered = noticed(trains("a", answered_notice=4), leaves("b", answered_notice=4), wanted=2)
    assert number_and_members(next_round(answered)) == (2, ["a"])
    expired = noticed(
        trains("a", answered_notice=4), peer("c"), wanted=1, draining=("a",), expired={node_id("b"): peer("b")}
    )
    assert isinstance(plan(expired, SETTINGS), Hold)


def test_a_node_that_joins_during_a_notice_is_in_the_next_round_and_does_not_extend_it() -> None:
    here = (trains("a"), leaves("b"), peer("c", joined=9, arrived=50.0))
    assert number_and_members(next_round(noticed(*here, now=120.0))) == (2, ["a", "c"])
    both = noticed(leaves("a"), leaves("b"), peer("c", joined=9, arrived=50.0), wanted=1)
    assert plan(both, SETTINGS) == Hold(
        120.0, "b left: the workers have 20 s to save a checkpoint before the round changes"
    )


def test_a_lost_node_ends_the_notice() -> None:
    lost = noticed(trains("a"), leaves("b"), wanted=3, round=round(1, "a", "b", "c"))
    decision = next_round(lost)
    assert number_and_members(decision) == (2, ["a"])
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
    withdrawn = notice_of(plan(noticed(*here, wanted=2), SETTINGS))
    assert (withdrawn.round, withdrawn.number, withdrawn.seconds) == (1, 4, 0.0)
    assert plan(noticed(*here, wanted=2, notice=withdrawn), SETTINGS) == Hold()


def test_a_finishing_run_withdraws_the_notice_of_a_join() -> None:
    here = (trains("a", phase=NodePhase.FINISHING), trains("b"), peer("c", joined=9))
    assert notice_of(plan(noticed(*here, wanted=3), SETTINGS)).seconds == 0.0


def test_if_all_nodes_leave_the_round_ends_when_they_have_saved() -> None:
    waiting = noticed(leaves("a", answered_notice=4), leaves("b"), wanted=2)
    assert isinstance(plan(waiting, SETTINGS), Hold)
    saved = noticed(
        leaves("a", answered_notice=4), leaves("b", answered_notice=4), wanted=2, round=round(1, "a", "b", restarts=3)
    )
    pause = next_round(saved)
    assert number_and_members(pause) == (2, [])
    assert pause.cause.startswith("a and b left")

    late = snapshot(peer("n", joined=90, round=2), wanted=2, round=pause, since=80, now=5.0)
    assert isinstance(plan(late, SETTINGS), Hold)
    first = next_round(dataclasses.replace(late, now=10.0))
    assert (number_and_members(first), first.restarts) == ((3, ["n"]), 0)


def test_without_a_last_call_a_new_run_waits_only_until_a_training_node_would_have_returned() -> None:
    settings = dataclasses.replace(SETTINGS, last_call_timeout=0.0)
    assert hold_of(plan(snapshot(peer("a"), changed_at=1.0, now=1.0), settings)).until == 1.0 + RECONNECT_TIME
    assert members(next_round(snapshot(peer("a"), peer("b", starting=True), now=RECONNECT_TIME), settings)) == ("a",)
    assert members(next_round(snapshot(peer("a", round=1), round=round(1), now=0.0), settings)) == ("a",)


def test_a_node_arrives_when_it_can_start_workers() -> None:
    membership = snapshot()
    for now, starting in ((1.0, True), (4.0, False), (5.0, False)):
        membership.now = now
        membership.note_key("a.0000", Entry("a", encode(record("a", starting=starting)), 1, 1), answers=True)
    assert (membership.peers["a.0000"].arrived, membership.appeared_at) == (4.0, 1.0)
