"""The leader's decisions, one situation at a time."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.views import SETTINGS, failure, node_id, peer, round, snapshot
from torchelastic.protocol import (
    PROTOCOL_VERSION,
    FailureKind,
    FailureRecord,
    NodePhase,
    OutcomeRecord,
    OutcomeState,
    ResumeRecord,
    RoundReason,
    RoundRecord,
    decode,
    encode,
)
from torchelastic.rendezvous.policy.plan import MAX_KEPT_MESSAGE, plan, root_cause
from torchelastic.rendezvous.policy.snapshot import Decision, EndRun, FormRound, GiveWay, Hold, Peer, Snapshot

if TYPE_CHECKING:
    from torchelastic.config.settings import RendezvousSettings

LATER = 1000.0


def members(decision: Decision) -> tuple[str, ...]:
    assert isinstance(decision, FormRound), decision
    return tuple(node.partition(".")[0] for node in decision.record.nodes)


def held(decision: Decision) -> Hold:
    assert isinstance(decision, Hold), decision
    return decision


def test_an_round_forms_at_once_when_all_wanted_nodes_are_there() -> None:
    decision = plan(snapshot(peer("a"), peer("b"), wanted=2), SETTINGS)
    assert members(decision) == ("a", "b")
    assert isinstance(decision, FormRound)
    assert decision.record.number == 1
    assert decision.record.store == "10.0.0.97:40000"


def test_the_first_round_waits_for_the_joining_window_when_wanted_nodes_are_missing() -> None:
    hold = held(plan(snapshot(peer("a", arrived=3.0), wanted=2, now=4.0), SETTINGS))
    assert hold.until == 3.0 + SETTINGS.last_call_timeout
    assert "1 node of 2 is there" in hold.why
    assert members(plan(snapshot(peer("a", arrived=3.0), wanted=2, now=13.0), SETTINGS)) == ("a",)


def test_the_first_round_waits_for_the_joining_window_when_no_size_is_wanted() -> None:
    held(plan(snapshot(peer("a"), peer("b"), now=9.9), SETTINGS))
    assert members(plan(snapshot(peer("a"), peer("b"), now=10.0), SETTINGS)) == ("a", "b")


def test_the_maximum_is_enough_when_no_size_is_wanted() -> None:
    assert members(plan(snapshot(peer("a"), peer("b"), high=2), SETTINGS)) == ("a", "b")


def test_below_the_minimum_it_says_who_is_there_and_fails_after_the_join_timeout() -> None:
    hold = held(plan(snapshot(peer("a"), low=2, wanted=2, now=LATER - 500), SETTINGS))
    assert hold.why == "1 node (a) of at least 2 is there; waiting for more"
    decision = plan(snapshot(peer("a"), low=2, wanted=2, now=LATER), SETTINGS)
    assert isinstance(decision, EndRun)
    assert decision.record.state is OutcomeState.FAILED
    assert "no more nodes came within 600 s" in decision.record.message


def test_a_node_that_speaks_another_protocol_takes_no_part_and_is_named() -> None:
    stranger = peer("b", protocol=PROTOCOL_VERSION + 1)
    hold = held(plan(snapshot(peer("a"), stranger, low=2, wanted=2), SETTINGS))
    assert "b cannot take part" in hold.why


def test_a_newcomer_joins_at_once_when_it_completes_the_wanted_size() -> None:
    here = (peer("a", round=1), peer("b", joined=5, arrived=7.0))
    assert members(plan(snapshot(*here, wanted=2, now=7.0, round=round(1, "a")), SETTINGS)) == ("a", "b")


def test_newcomers_that_arrive_together_join_in_one_change() -> None:
    here = (peer("a", round=1), peer("b", joined=5, arrived=7.0), peer("c", joined=6, arrived=7.02))
    hold = held(plan(snapshot(*here, now=7.03, round=round(1, "a")), SETTINGS))
    assert hold.until == pytest.approx(7.02 + SETTINGS.join_debounce)
    assert members(plan(snapshot(*here, now=7.08, round=round(1, "a")), SETTINGS)) == ("a", "b", "c")


def test_newcomers_that_come_one_after_the_other_do_not_hold_up_the_first_of_them_for_long() -> None:
    crowd = [peer(f"n{chr(97 + i)}", joined=9 + i, arrived=7.0 + i * 0.04) for i in range(14)]
    here = (peer("a", round=1), *crowd)
    until = 7.0 + 10 * SETTINGS.join_debounce
    assert held(plan(snapshot(*here, high=20, now=until - 0.01, round=round(1, "a")), SETTINGS)).until == until
    assert len(members(plan(snapshot(*here, high=20, now=until, round=round(1, "a")), SETTINGS))) == 15


def test_a_newcomer_that_has_not_answered_yet_is_waited_for_a_moment_by_those_that_came_with_it() -> None:
    late = peer("c", joined=6, arrived=7.01, answers=False)
    here = (peer("a", round=1), peer("b", joined=5, arrived=7.0), late)
    assert held(plan(snapshot(*here, now=7.2, round=round(1, "a")), SETTINGS)).until == 7.5
    assert members(plan(snapshot(*here, now=7.5, round=round(1, "a")), SETTINGS)) == ("a", "b")
    answers = (*here[:2], dataclasses.replace(late, answers=True))
    assert members(plan(snapshot(*answers, now=7.2, round=round(1, "a")), SETTINGS)) == ("a", "b", "c")


def test_newcomers_stand_beside_members_of_their_own_place_and_survivors_keep_their_order() -> None:
    here = (
        peer("a", round=1, topology_key="x"),
        peer("b", round=1, topology_key="y"),
        peer("c", round=1, topology_key="x"),
        peer("d", joined=5, topology_key="z"),
        peer("e", joined=6, topology_key="y"),
        peer("f", joined=7, topology_key="z"),
        peer("g", joined=8, topology_key="x"),
        peer("h", joined=9),
    )
    decision = plan(snapshot(*here, wanted=8, high=8, round=round(1, "a", "b", "c")), SETTINGS)
    assert members(decision) == ("a", "b", "e", "c", "g", "d", "f", "h")


def test_the_nodes_of_the_first_round_stand_together_by_place_whoever_came_first() -> None:
    here = [
        peer(name, joined=i, topology_key=place) for i, (name, place) in enumerate(zip("abcdef", "xyxyxy", strict=True))
    ]
    assert members(plan(snapshot(*here, wanted=6, high=6), SETTINGS)) == ("a", "c", "e", "b", "d", "f")
    turned = snapshot(*reversed(here), wanted=6, high=6)
    assert members(plan(turned, SETTINGS)) == ("a", "c", "e", "b", "d", "f")


def test_who_is_taken_goes_by_seniority_and_not_by_place() -> None:
    here = (
        peer("a", round=1, topology_key="x"),
        peer("b", joined=5, topology_key="y"),
        peer("c", joined=6, topology_key="x"),
    )
    assert members(plan(snapshot(*here, wanted=2, round=round(1, "a")), SETTINGS)) == ("a", "b")


def test_survivors_keep_their_ranks_and_newcomers_come_behind_them() -> None:
    here = (peer("d", joined=1, arrived=0.0), peer("c", round=4, joined=9), peer("a", round=4, joined=8))
    decision = plan(snapshot(*here, now=LATER, round=round(4, "c", "b", "a")), SETTINGS)
    assert members(decision) == ("c", "a", "d")


def test_nodes_beyond_the_wanted_size_wait_as_spares_and_cost_nobody_a_restart() -> None:
    here = (peer("a", round=1), peer("b", round=1), peer("c"))
    assert held(plan(snapshot(*here, wanted=2, now=LATER, round=round(1, "a", "b")), SETTINGS)) == Hold()


def test_a_spare_takes_the_place_of_a_lost_member_at_once() -> None:
    here = (peer("a", round=1), peer("c", round=1))
    decision = plan(snapshot(*here, wanted=2, round=round(1, "a", "b")), SETTINGS)
    assert members(decision) == ("a", "c")
    assert isinstance(decision, FormRound)
    assert (decision.record.restarts, decision.record.cause) == (0, "b is gone")


def test_a_spare_that_has_not_answered_a_new_leader_yet_is_waited_for_a_moment() -> None:
    spare = peer("c", round=1, arrived=7.0, answers=False)
    here = (peer("a", round=1, arrived=7.0), spare)
    assert held(plan(snapshot(*here, wanted=2, now=7.49, round=round(1, "a", "b")), SETTINGS)).until == 7.5
    assert members(plan(snapshot(*here, wanted=2, now=7.5, round=round(1, "a", "b")), SETTINGS)) == ("a",)
    answers = (here[0], dataclasses.replace(spare, answers=True))
    assert members(plan(snapshot(*answers, wanted=2, now=7.1, round=round(1, "a", "b")), SETTINGS)) == ("a", "c")


def test_a_loss_never_waits_for_a_replacement() -> None:
    here = (peer("a", round=1), peer("b", round=1, phase=NodePhase.LEAVING))
    decision = plan(snapshot(*here, wanted=2, round=round(1, "a", "b")), SETTINGS)
    assert members(decision) == ("a",)
    assert isinstance(decision, FormRound)
    assert decision.record.cause == "b left"


def test_a_lease_that_ended_while_its_node_answers_is_no_loss() -> None:
    situation = snapshot(peer("a", round=1), wanted=2, round=round(1, "a", "b"), silent=frozenset({node_id("b")}))
    assert held(plan(situation, SETTINGS)) == Hold()


@pytest.mark.parametrize("what", [{"dead": frozenset({node_id("a")})}, {"failed_since": 1.0}])
def test_after_an_absence_of_the_store_no_change_is_made_without_members_that_are_on_their_way_back(what: Any) -> None:
    broken = failure("a") if "failed_since" in what else None
    here = (peer("a", round=1, failure=broken), peer("b", round=1))
    silent = frozenset({node_id("c")})
    situation = snapshot(
        *here, wanted=3, now=2.0, round=round(1, "a", "b", "c"), silent=silent, patient_until=5.0, **what
    )
    assert held(plan(situation, SETTINGS)).until == 5.0
    assert "b" in members(plan(dataclasses.replace(situation, now=5.0), SETTINGS))


def test_a_dead_member_is_lost_though_its_key_still_stands() -> None:
    here = (peer("a", round=1), peer("b", round=1))
    decision = plan(snapshot(*here, wanted=2, round=round(1, "a", "b"), dead=frozenset({node_id("b")})), SETTINGS)
    assert members(decision) == ("a",)


def test_below_the_minimum_after_a_loss_everybody_stops_and_waits() -> None:
    decision = plan(snapshot(peer("a", round=1), low=2, wanted=2, round=round(1, "a", "b")), SETTINGS)
    assert members(decision) == ()
    assert isinstance(decision, FormRound)
    assert decision.record.cause == "b is gone; 1 node (a) of at least 2 is there; waiting for more"


def test_a_run_that_waits_says_who_is_missing_and_fails_with_that_sentence() -> None:
    waiting = snapshot(peer("a", round=2), low=2, wanted=2, round=round(2), changed_at=10.0, missing=(node_id("b"),))
    why = "1 node (a) of at least 2 is there; b is missing; waiting for more"
    assert held(plan(dataclasses.replace(waiting, now=20.0), SETTINGS)).why == why
    decision = plan(dataclasses.replace(waiting, now=610.0), SETTINGS)
    assert isinstance(decision, EndRun)
    assert decision.record.message == f"no more nodes came within 600 s: {why}"


def test_a_run_that_waits_says_who_has_not_answered_yet() -> None:
    hold = held(plan(snapshot(peer("a"), peer("b", answers=False), low=2, wanted=2), SETTINGS))
    assert hold.why == "1 node (a) of at least 2 is there; b has not answered yet; waiting for more"


def test_after_a_pause_that_nobody_has_waited_through_the_run_begins_as_at_the_start() -> None:
    here = (peer("c", joined=70, arrived=50.0, round=2), peer("d", joined=71, arrived=50.0, round=2))
    paused = snapshot(*here, low=2, wanted=3, now=55.0, round=round(2, restarts=9), since=60, changed_at=49.0)
    assert "last call" in held(plan(paused, SETTINGS)).why
    decision = plan(dataclasses.replace(paused, now=60.0), SETTINGS)
    assert isinstance(decision, FormRound)
    assert (members(decision), decision.record.restarts) == (("c", "d"), 0)
    unique = plan(dataclasses.replace(paused, now=60.0), dataclasses.replace(SETTINGS, unique_run=True))
    assert isinstance(unique, FormRound)
    assert unique.record.restarts == 9


def test_after_a_pause_an_round_forms_as_soon_as_there_are_enough() -> None:
    here = (peer("a", round=2), peer("c", joined=7, arrived=50.0))
    decision = plan(snapshot(*here, low=2, wanted=2, now=50.0, round=round(2), changed_at=10.0), SETTINGS)
    assert members(decision) == ("a", "c")


def test_a_failure_is_charged_and_the_same_nodes_go_on() -> None:
    here = (
        peer("a", round=1),
        peer("b", round=1, failure=failure("b", rank=1, message="ValueError: bad"), failed_at=9),
    )
    decision = plan(snapshot(*here, wanted=2, round=round(1, "a", "b", restarts=3), failed_since=0.0), SETTINGS)
    assert members(decision) == ("a", "b")
    assert isinstance(decision, FormRound)
    assert decision.record.restarts == 4
    assert decision.record.cause == "rank 1 on b: ValueError: bad"


def test_a_failure_of_a_past_round_is_none_of_this_one() -> None:
    here = (peer("a", round=2), peer("b", round=1, failure=failure("b", number=1)))
    assert held(plan(snapshot(*here, wanted=2, round=round(2, "a", "b")), SETTINGS)) == Hold()


def test_a_failure_that_a_lost_member_explains_is_free() -> None:
    broken = failure("a", kind=FailureKind.COMMUNICATION)
    decision = plan(snapshot(peer("a", round=1, failure=broken), wanted=2, round=round(1, "a", "b")), SETTINGS)
    assert isinstance(decision, FormRound)
    assert (decision.record.restarts, decision.record.cause) == (0, "b is gone")


def test_a_broken_collective_waits_a_moment_for_what_broke_it() -> None:
    here = (peer("a", round=1, failure=failure("a", kind=FailureKind.COMMUNICATION)), peer("b", round=1))
    situation = snapshot(*here, wanted=2, now=1.0, round=round(1, "a", "b"), failed_since=1.0)
    assert held(plan(situation, SETTINGS)).until == pytest.approx(1.1)
    assert members(plan(dataclasses.replace(situation, now=1.1), SETTINGS)) == ("a", "b")


def test_the_root_cause_goes_by_class_and_then_by_the_order_in_the_store() -> None:
    comm = failure("a", kind=FailureKind.COMMUNICATION, message="Connection reset")
    first = failure("b", message="first")
    second = failure("c", message="second")
    assert root_cause([(1, comm), (3, second), (2, first)]).message == "first"


def test_the_run_fails_with_the_root_cause_when_the_budget_is_used_up() -> None:
    here = (peer("a", round=9, failure=failure("a", number=9, message="ValueError: bad")),)
    situation = snapshot(*here, wanted=1, round=round(9, "a", restarts=100), failed_since=0.0)
    decision = plan(situation, SETTINGS)
    assert isinstance(decision, EndRun)
    assert decision.record.message == "rank 0 on a: ValueError: bad; no restart is left of the 100 that it may have"
    assert decision.record.failure is not None


def test_a_program_that_fails_at_once_again_and_again_is_stopped_long_before() -> None:
    here = (peer("a", round=3, failure=failure("a", number=3, uptime=0.4, message="ImportError: x")),)
    decision = plan(
        snapshot(*here, wanted=1, round=round(3, "a", restarts=2, early_failures=2), failed_since=0.0), SETTINGS
    )
    assert isinstance(decision, EndRun)
    assert decision.record.message == (
        "rank 0 on a: ImportError: x; its workers failed 3 times in a row within 10 s of their start"
    )


def test_a_failure_after_a_healthy_time_starts_the_count_of_early_failures_anew() -> None:
    here = (peer("a", round=3, failure=failure("a", number=3, uptime=11.0)),)
    decision = plan(
        snapshot(*here, wanted=1, round=round(3, "a", restarts=2, early_failures=2), failed_since=0.0), SETTINGS
    )
    assert isinstance(decision, FormRound)
    assert (decision.record.early_failures, decision.record.restarts) == (0, 3)


@pytest.mark.parametrize("lost", [False, True])
def test_a_failure_that_is_declared_final_ends_the_run_at_once_whatever_else_has_happened(lost: bool) -> None:
    final = failure("b", rank=1, message="NonRetryableException: no such data", final=True)
    here = (
        peer("a", round=1, failure=failure("a", kind=FailureKind.COMMUNICATION), failed_at=3),
        peer("b", round=1, failure=final, failed_at=9),
        peer("d", round=1),
        *([] if lost else [peer("c", round=1, failure=failure("c", message="RuntimeError: x"), failed_at=2)]),
    )
    names = ("a", "b", "c", "d")
    decision = plan(snapshot(*here, wanted=4, round=round(1, *names), failed_since=0.0), SETTINGS)
    assert isinstance(decision, EndRun)
    assert (decision.record.state, decision.record.failure) == (OutcomeState.FAILED, final)
    assert decision.record.message == (
        "rank 1 on b: NonRetryableException: no such data; "
        "this failure is declared final, so the run is not tried again, whatever is left of its restarts"
    )


def test_a_broken_collective_waits_for_a_final_failure_that_is_told_a_moment_later() -> None:
    here = (peer("a", round=1, failure=failure("a", kind=FailureKind.COMMUNICATION)), peer("b", round=1))
    situation = snapshot(*here, wanted=2, now=1.05, round=round(1, "a", "b"), failed_since=1.0)
    held(plan(situation, SETTINGS))
    told = peer("b", round=1, failure=failure("b", final=True))
    decision = plan(snapshot(here[0], told, wanted=2, now=1.05, round=round(1, "a", "b"), failed_since=1.0), SETTINGS)
    assert isinstance(decision, EndRun)
    assert decision.record.failure == told.record.failure


def test_an_exit_code_that_is_declared_final_is_not_when_something_else_explains_it() -> None:
    broken = failure("a", kind=FailureKind.COMMUNICATION, final=True)
    here = (peer("a", round=1, failure=broken), peer("b", round=1, failure=failure("b", message="killed by SIGKILL")))
    explained = plan(snapshot(*here, wanted=2, round=round(1, "a", "b"), failed_since=0.0), SETTINGS)
    assert isinstance(explained, FormRound)
    assert explained.record.cause == "rank 0 on b: killed by SIGKILL"
    assert isinstance(plan(snapshot(here[0], wanted=2, round=round(1, "a", "b")), SETTINGS), FormRound)

    alone = snapshot(here[0], peer("b", round=1), wanted=2, now=0.5, round=round(1, "a", "b"), failed_since=0.0)
    assert held(plan(alone, SETTINGS)).until == 1.0
    ended = plan(dataclasses.replace(alone, now=1.0), SETTINGS)
    assert isinstance(ended, EndRun)
    assert ended.record.failure == broken


def test_a_free_failure_is_charged_to_nobody_also_where_no_restart_is_left() -> None:
    settings = dataclasses.replace(SETTINGS, max_restarts=0)
    here = (peer("a", round=3, failure=failure("a", number=3, free=True)), peer("b", round=3))
    decision = plan(
        snapshot(*here, wanted=2, round=round(3, "a", "b", uncharged_restarts=4), failed_since=0.0), settings
    )
    assert members(decision) == ("a", "b")
    assert isinstance(decision, FormRound)
    assert (decision.record.restarts, decision.record.uncharged_restarts) == (0, 5)
    assert decision.record.reason is RoundReason.WORKER_FAILED


@pytest.mark.parametrize(("cause_is_free", "counted"), [(True, (2, 6)), (False, (3, 5))])
def test_the_root_cause_decides_whether_a_failure_is_free(cause_is_free: bool, counted: tuple[int, int]) -> None:
    cause = failure("a", number=3, free=cause_is_free)
    others = failure("b", number=3, kind=FailureKind.COMMUNICATION, free=not cause_is_free)
    here = (peer("a", round=3, failure=cause, failed_at=9), peer("b", round=3, failure=others, failed_at=4))
    standing = round(3, "a", "b", restarts=2, uncharged_restarts=5)
    decision = plan(snapshot(*here, wanted=2, round=standing, failed_since=0.0), SETTINGS)
    assert isinstance(decision, FormRound)
    assert (decision.record.restarts, decision.record.uncharged_restarts) == counted


def test_the_failure_that_was_charged_last_stands_in_every_round_until_the_next() -> None:
    long = failure("a", number=3, message="x" * 9000)
    here = (peer("a", round=3, failure=long), peer("b", round=3))
    failed = plan(snapshot(*here, wanted=2, round=round(3, "a", "b"), failed_since=0.0), SETTINGS)
    assert isinstance(failed, FormRound)
    kept = failed.record.failure
    assert kept is not None
    assert (kept.rank, kept.node, kept.exit_code, len(kept.message)) == (0, long.node, long.exit_code, MAX_KEPT_MESSAGE)

    standing = round(4, "a", "b", restarts=1, failure=kept)
    joined = plan(snapshot(peer("a", round=4), peer("b", round=4), peer("c"), wanted=3, round=standing), SETTINGS)
    free = (peer("a", round=4, failure=failure("a", number=4, free=True)), peer("b", round=4))
    ignored = plan(snapshot(*free, wanted=2, round=standing, failed_since=0.0), SETTINGS)
    alone = plan(snapshot(peer("a", round=4), wanted=2, low=2, round=standing), SETTINGS)
    for decision in (joined, ignored, alone):
        assert isinstance(decision, FormRound)
        assert decision.record.failure == kept


def test_free_failures_soon_after_the_start_end_the_run_as_others_do() -> None:
    early = failure("a", number=3, uptime=0.4, message="exit code 75", free=True)
    standing = round(3, "a", uncharged_restarts=2, early_failures=1)
    once_more = plan(snapshot(peer("a", round=3, failure=early), wanted=1, round=standing, failed_since=0.0), SETTINGS)
    assert isinstance(once_more, FormRound)
    assert (once_more.record.early_failures, once_more.record.uncharged_restarts) == (2, 3)
    standing = round(3, "a", uncharged_restarts=2, early_failures=2)
    ended = plan(snapshot(peer("a", round=3, failure=early), wanted=1, round=standing, failed_since=0.0), SETTINGS)
    assert isinstance(ended, EndRun)
    assert ended.record.message == (
        "rank 0 on a: exit code 75; its workers failed 3 times in a row within 10 s of their start"
    )


def free_after(situation: Snapshot, settings: RendezvousSettings = SETTINGS) -> int:
    """How often workers have started anew without a charge, once the leader has decided on the next round."""
    decision = plan(situation, settings)
    assert isinstance(decision, FormRound), decision
    return decision.record.uncharged_restarts


def test_each_change_of_membership_counts_as_a_free_start_and_the_first_round_does_not() -> None:
    here = (peer("a", round=1), peer("b", round=1))
    assert free_after(snapshot(peer("a"), peer("b"), wanted=2)) == 0
    assert free_after(snapshot(*here, wanted=2, round=round(1, "a"))) == 1
    assert free_after(snapshot(*here, wanted=2, round=round(1, "a", "c", uncharged_restarts=3))) == 4
    assert free_after(snapshot(*here, wanted=1, round=round(1, "a", "b", restarts=2, uncharged_restarts=3))) == 4
    charged = snapshot(
        peer("a", round=1, failure=failure("a")), wanted=1, round=round(1, "a", uncharged_restarts=3), failed_since=0.0
    )
    assert free_after(charged) == 3


def test_a_pause_and_the_round_after_it_count_once() -> None:
    lost = snapshot(peer("a", round=4), wanted=2, low=2, round=round(4, "a", "b", uncharged_restarts=1))
    assert free_after(lost) == 1
    here = (peer("a", round=5), peer("b", round=5, joined=9))
    assert (
        free_after(
            snapshot(
                *here, wanted=2, low=2, since=5, round=round(5, uncharged_restarts=1, reason=RoundReason.NODE_LOST)
            )
        )
        == 2
    )
    # What a failure costs was settled when it came.
    assert (
        free_after(
            snapshot(
                *here, wanted=2, low=2, since=5, round=round(5, uncharged_restarts=1, reason=RoundReason.WORKER_FAILED)
            )
        )
        == 1
    )


@pytest.mark.parametrize(("unique", "expected"), [(True, 4), (False, 0)])
def test_a_run_of_which_nobody_is_left_goes_on_counting_only_where_it_is_the_same_run(
    unique: bool, expected: int
) -> None:
    settings = dataclasses.replace(SETTINGS, unique_run=unique)
    assert (
        free_after(snapshot(peer("b", round=7), wanted=1, round=round(7, "a", uncharged_restarts=3)), settings)
        == expected
    )


def test_a_store_that_lost_an_round_is_told_what_was_counted() -> None:
    here = (peer("a", round=7, restarts=2, uncharged_restarts=5), peer("b", round=6, restarts=2, uncharged_restarts=4))
    for standing in (None, round(3, "a", "b", restarts=1, uncharged_restarts=1)):
        decision = plan(snapshot(*here, wanted=2, round=standing, gave_way=True), SETTINGS)
        assert isinstance(decision, FormRound)
        counted = (decision.record.number, decision.record.restarts, decision.record.uncharged_restarts)
        assert counted == (8, 2, 6)


def test_a_run_that_was_suspended_goes_on_from_what_its_nodes_were_told() -> None:
    settings = dataclasses.replace(SETTINGS, resume=ResumeRecord(round=7, restarts=2, uncharged_restarts=5))
    here = [peer(name, round=7, restarts=2, uncharged_restarts=5) for name in "ab"]
    decision = plan(snapshot(*here, wanted=2), settings)
    assert isinstance(decision, FormRound)
    assert (decision.record.number, decision.record.restarts, decision.record.uncharged_restarts) == (8, 2, 6)
    knows_more = peer("c", round=9, restarts=3, uncharged_restarts=6)
    assert isinstance(plan(snapshot(*here, knows_more, wanted=3), settings), GiveWay)


def test_a_run_that_may_not_restart_says_so() -> None:
    settings = dataclasses.replace(SETTINGS, max_restarts=0)
    here = (peer("a", round=1, failure=failure("a", message="exit code 3")),)
    decision = plan(snapshot(*here, wanted=1, round=round(1, "a"), failed_since=0.0), settings)
    assert isinstance(decision, EndRun)
    assert decision.record.message == "rank 0 on a: exit code 3; it may not restart"


def test_the_last_failure_waits_for_a_better_explanation_from_the_others() -> None:
    settings = dataclasses.replace(SETTINGS, max_restarts=0)
    here = (peer("a", round=1, failure=failure("a")), peer("b", round=1))
    situation = snapshot(*here, wanted=2, now=1.0, round=round(1, "a", "b"), failed_since=1.0)
    assert held(plan(situation, settings)).until == 2.0


def test_the_run_succeeds_when_all_members_are_done() -> None:
    situation = snapshot(peer("a"), round=round(7, "a", "b", restarts=2), done=frozenset({node_id("a"), node_id("b")}))
    decision = plan(situation, SETTINGS)
    assert isinstance(decision, EndRun)
    assert (decision.record.state, decision.record.round, decision.record.restarts) == (OutcomeState.SUCCEEDED, 7, 2)


@pytest.mark.parametrize("gone", [(), (peer("a", round=1, phase=NodePhase.LEAVING),)])
def test_a_node_that_is_done_can_go_without_a_loss_unless_it_may_serve_the_rounds_store(gone: tuple[Peer, ...]) -> None:
    done = frozenset({node_id("a")})
    rest = snapshot(*gone, peer("b", round=1), wanted=2, round=round(1, "a", "b", store="10.0.0.98:30000"), done=done)
    assert held(plan(rest, SETTINGS)) == Hold()
    serving = dataclasses.replace(rest, round=round(1, "a", "b", store="10.0.0.97:30000"))
    assert members(plan(serving, SETTINGS)) == ("b",)


def test_a_failure_after_a_node_was_done_restarts_the_whole_round() -> None:
    here = (peer("a", round=1, phase=NodePhase.DONE), peer("b", round=1, failure=failure("b")))
    situation = snapshot(*here, wanted=2, round=round(1, "a", "b"), done=frozenset({node_id("a")}), failed_since=0.0)
    decision = plan(situation, SETTINGS)
    assert isinstance(decision, FormRound)
    assert (members(decision), decision.record.reason) == (("a", "b"), RoundReason.WORKER_FAILED)


@pytest.mark.parametrize("phase", [NodePhase.FINISHING, NodePhase.DONE])
def test_newcomers_wait_when_the_run_is_about_to_finish(phase: NodePhase) -> None:
    here = (peer("a", round=1, phase=phase), peer("b", round=1), peer("c", arrived=5.0))
    assert "about to finish" in held(plan(snapshot(*here, wanted=3, now=LATER, round=round(1, "a", "b")), SETTINGS)).why


def test_a_minimum_that_was_raised_above_what_is_there_is_waited_for() -> None:
    here = (peer("a", round=1), peer("b", round=1), peer("c", arrived=LATER))
    decision = plan(snapshot(*here, low=4, high=4, wanted=4, now=LATER, round=round(1, "a", "b")), SETTINGS)
    assert members(decision) == ()
    assert isinstance(decision, FormRound)
    assert decision.record.cause == (
        "at least 4 nodes are wanted now; 3 nodes (a, b and c) of at least 4 are there; waiting for more"
    )


def test_but_not_while_a_members_key_is_on_its_way_back_or_the_run_is_about_to_finish() -> None:
    answers = snapshot(peer("a", round=1), low=2, wanted=2, round=round(1, "a", "b"), silent=frozenset({node_id("b")}))
    assert held(plan(answers, SETTINGS)) == Hold()
    done = snapshot(peer("a", round=1, phase=NodePhase.FINISHING), low=2, wanted=2, round=round(1, "a"))
    assert held(plan(done, SETTINGS)) == Hold()


def test_newcomers_wait_until_each_member_has_been_heard_of() -> None:
    silent = dataclasses.replace(peer("b", round=1), answers=False)
    here = (peer("a", round=1), peer("c", arrived=5.0))
    waiting = snapshot(*here, silent, wanted=3, now=LATER, round=round(1, "a", "b"))
    assert "has not connected" in held(plan(waiting, SETTINGS)).why
    gone = snapshot(*here, wanted=3, now=LATER, round=round(1, "a", "b"))
    assert members(plan(gone, SETTINGS)) == ("a", "c")


def test_newcomers_wait_for_a_member_whose_key_is_on_its_way_back_and_do_not_take_its_place() -> None:
    here = (peer("a", round=1), peer("c", joined=9))
    waiting = snapshot(*here, wanted=3, round=round(1, "a", "b"), silent=frozenset([node_id("b")]))
    assert "on its way back" in held(plan(waiting, SETTINGS)).why


def test_nothing_happens_after_the_outcome() -> None:
    ended = OutcomeRecord(state=OutcomeState.SUCCEEDED)
    assert held(plan(snapshot(peer("a"), round=round(1, "b"), outcome=ended), SETTINGS)) == Hold()


def test_a_smaller_wanted_size_takes_the_named_nodes_away() -> None:
    here = (peer("a", round=1), peer("b", round=1), peer("c", round=1))
    situation = snapshot(*here, wanted=2, going=("a",), round=round(1, "a", "b", "c"))
    assert members(plan(situation, SETTINGS)) == ("b", "c")


def test_a_node_that_is_taken_away_stops_though_all_others_are_lost() -> None:
    decision = plan(snapshot(peer("a", round=1), wanted=1, going=("a",), round=round(1, "a", "b")), SETTINGS)
    assert members(decision) == ()


def test_a_smaller_wanted_size_without_names_takes_the_last_ranks_away() -> None:
    here = (peer("a", round=1), peer("b", round=1), peer("c", round=1))
    assert members(plan(snapshot(*here, wanted=2, round=round(1, "a", "b", "c")), SETTINGS)) == ("a", "b")


def test_an_empty_store_is_given_its_round_back_and_nobody_notices() -> None:
    here = (peer("a", round=5), peer("b", round=5))
    decision = plan(snapshot(*here, wanted=2, remembered=round(5, "a", "b", restarts=2)), SETTINGS)
    assert decision == FormRound(round(5, "a", "b", restarts=2))


def test_a_newcomer_in_an_empty_store_gives_way_to_nodes_that_know_the_round_and_else_goes_on_from_its_number() -> None:
    here = (peer("n"), peer("a", round=5, restarts=2))
    assert isinstance(plan(snapshot(*here, wanted=2), SETTINGS), GiveWay)
    decision = plan(snapshot(*here, wanted=2, gave_way=True), SETTINGS)
    assert isinstance(decision, FormRound)
    assert (decision.record.number, decision.record.restarts) == (6, 2)


def test_an_rounds_store_is_never_served_on_a_port_that_the_round_before_used() -> None:
    here = (peer("a", round=1), peer("b", round=2))
    decision = plan(snapshot(*here, wanted=3, round=round(2, "a", "b", "c")), SETTINGS)
    assert isinstance(decision, FormRound)
    assert decision.record.store == "10.0.0.98:40000"
    late = (peer("a", round=1), peer("b", round=1))
    assert "can serve" in held(plan(snapshot(*late, wanted=3, round=round(2, "a", "b", "c")), SETTINGS)).why


def test_a_node_that_was_cut_off_has_lost_its_round_and_is_taken_into_the_next() -> None:
    here = (peer("a", round=1), peer("b", round=1, phase=NodePhase.PARTITIONED))
    decision = plan(snapshot(*here, wanted=2, round=round(1, "a", "b")), SETTINGS)
    assert members(decision) == ("a", "b")
    assert isinstance(decision, FormRound)
    assert (decision.record.cause, decision.record.restarts) == ("b was cut off", 0)


def test_a_node_that_was_cut_off_in_an_round_before_and_has_not_heard_of_this_one_yet_is_no_loss() -> None:
    here = (peer("a", round=2), peer("b", round=1, phase=NodePhase.PARTITIONED))
    assert plan(snapshot(*here, wanted=2, round=round(2, "a", "b")), SETTINGS) == Hold()


def test_a_leader_gives_way_to_nodes_that_know_more_than_the_store_and_else_forms_an_round_that_is_later_still() -> (
    None
):
    here = (peer("a", round=1, restarts=1), peer("b", round=3, restarts=2))
    situation = snapshot(*here, wanted=2, round=round(1, "a", "b", restarts=1))
    assert isinstance(plan(situation, SETTINGS), GiveWay)
    decision = plan(dataclasses.replace(situation, gave_way=True), SETTINGS)
    assert members(decision) == ("a", "b")
    assert isinstance(decision, FormRound)
    assert (decision.record.number, decision.record.restarts) == (4, 2)


def test_early_failures_of_long_ago_are_no_part_of_a_row() -> None:
    here = (peer("a", round=3), peer("b", joined=9, arrived=3600.0))
    healthy = snapshot(*here, wanted=2, now=3600.0, changed_at=0.0, round=round(3, "a", early_failures=2))
    decision = plan(healthy, SETTINGS)
    assert isinstance(decision, FormRound)
    assert decision.record.early_failures == 0


@pytest.mark.parametrize(("unique", "restarts"), [(True, 7), (False, 0)])
def test_a_run_of_which_nobody_is_left_has_its_whole_budget_again_where_its_id_may_be_used_again(
    unique: bool, restarts: int
) -> None:
    settings = dataclasses.replace(SETTINGS, unique_run=unique)
    decision = plan(snapshot(peer("n", round=4), wanted=1, round=round(4, "a", restarts=7, early_failures=2)), settings)
    assert isinstance(decision, FormRound)
    assert (decision.record.number, decision.record.restarts, decision.record.early_failures) == (5, restarts, 0)


def test_a_cause_can_always_be_read_however_many_nodes_are_lost_and_however_long_the_texts_are() -> None:
    crowd = [f"{'x' * 200}{i:03}{chr(97 + i % 20)}" for i in range(1000)]
    lost = plan(snapshot(peer("a", round=1), high=1000, round=round(1, "a", *crowd)), SETTINGS)
    assert isinstance(lost, FormRound)
    assert decode(encode(lost.record), RoundRecord).cause == "1000 nodes are gone"
    long = failure("a", message="x" * 16384)
    failed = plan(snapshot(peer("a", round=1, failure=long), wanted=1, round=round(1, "a")), SETTINGS)
    assert isinstance(failed, FormRound)
    assert decode(encode(failed.record), RoundRecord).restarts == 1


def test_who_failed_is_whoever_reports_it_and_not_whom_the_report_names() -> None:
    of_another = FailureRecord(round=1, rank=0, local_rank=0, node="nobody.0000", exit_code=1)
    decision = plan(snapshot(peer("a", round=1, failure=of_another), wanted=1, round=round(1, "a")), SETTINGS)
    assert isinstance(decision, FormRound)
    assert decision.record.restarts == 1


def test_nodes_that_know_of_rounds_by_hearsay_only_can_begin_anew() -> None:
    here = (peer("a"), peer("b", round=7, phase=NodePhase.LEAVING))
    decision = plan(snapshot(*here, wanted=1, gave_way=True), SETTINGS)
    assert isinstance(decision, FormRound)
    assert (members(decision), decision.record.number) == (("a",), 8)
    afterwards = plan(snapshot(peer("a"), wanted=1, gave_way=True, highest_round_seen=7), SETTINGS)
    assert isinstance(afterwards, FormRound)
    assert afterwards.record.number == 8
