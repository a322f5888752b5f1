"""The leader's decision, as a pure function of the membership.

The leader calls :func:`plan` after every change and carries out the result. The rules, in order:

1. A run that has an outcome is over.
2. A store that lost data is restored.
3. All workers of all members exited with 0: the run has succeeded.
4. A worker failed in a way that is configured as non-retryable: the run has failed.
5. A member is lost, or a worker failed: the next round forms at once with the nodes that are present. A failure is
   charged to the run's restarts; a change of membership is free, and so is a failure that a lost member explains or
   whose exit code is configured as uncharged.
6. A member leaves, the size has changed, or a node joins: the next round forms when the newcomers have been gathered
   and those who asked for notice have had it. It takes the desired number of nodes; others wait as spares.
7. Too few nodes are left: a round without members says so, and all wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from torchelastic.protocol import (
    FailureKind,
    FailureRecord,
    Member,
    NodePhase,
    NoticeRecord,
    OutcomeRecord,
    OutcomeState,
    RoundReason,
    RoundRecord,
    bracketed,
    shorten,
)
from torchelastic.rendezvous.policy.membership import Candidates, Membership, Peer, candidates, may_join
from torchelastic.rendezvous.policy.messages import (
    are,
    count,
    departures,
    describe,
    joined,
    named,
    times,
    waiting_for,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torchelastic.config.settings import RendezvousSettings

CAUSE_WINDOW: Final = 0.1
"""Seconds that a failure that looks like a consequence waits for its cause: a peer's death may be reported a few
milliseconds after the broken collective that it causes."""

REPORT_WINDOW: Final = 1.0
"""Seconds that a run that is about to fail waits for members that have not reported their failure yet."""

MAX_KEPT_MESSAGE: Final = 1024
"""Characters of a failure's message that later rounds carry."""

MAX_SENTENCE: Final = 12_000
"""Characters of a cause or an outcome's message."""

MAX_DEBOUNCE_FACTOR: Final = 10
"""Upper bound on join debouncing, as a multiple of ``join_debounce``."""

STORE_LOST_ROUND: Final = "the store had lost a round that nodes still know"


@dataclass(frozen=True, slots=True)
class Hold:
    """Do nothing until something changes.

    Attributes:
        until: when to decide again even without a change; None for never.
        why: the reason, for the log; empty if all is well.
    """

    until: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class FormRound:
    """Commit this round as the current one."""

    record: RoundRecord


@dataclass(frozen=True, slots=True)
class GiveNotice:
    """Give notice that the current round is about to change, or (with 0 seconds) withdraw the notice."""

    record: NoticeRecord


@dataclass(frozen=True, slots=True)
class EndRun:
    """Commit this outcome."""

    record: OutcomeRecord


@dataclass(frozen=True, slots=True)
class GiveWay:
    """Give up the lead for one lease, in favour of nodes that know a later round.

    Attributes:
        why: the reason, for the log.
    """

    why: str


Decision = Hold | FormRound | GiveNotice | EndRun | GiveWay


def plan(membership: Membership, settings: RendezvousSettings) -> Decision:
    """Return what the leader should do now."""
    if membership.outcome is not None:
        return Hold()
    round = _recover(membership, settings)
    if not isinstance(round, RoundRecord):
        return round
    if membership.round is None:
        return _form_first(membership, round, settings)
    if round.number > membership.number:
        # No node has restored the lost round, so form a later one with all nodes.
        return _form_or_pause(membership, round, candidates(membership), RoundReason.NODE_LOST, STORE_LOST_ROUND)
    if membership.now - membership.changed_at >= settings.crash_loop_seconds:
        round = msgspec.structs.replace(round, early_failures=0)
    if not round.members:
        return _leave_pause(membership, round, settings)
    if all(node in membership.done for node in membership.ranks):
        return EndRun(OutcomeRecord(OutcomeState.SUCCEEDED, round.number, round.restarts))
    return _continue(membership, round, settings)


def _recover(membership: Membership, settings: RendezvousSettings) -> Decision | RoundRecord:
    """Return the round from which the run continues, or the decision that restores a round that the store has lost.

    A node's key holds the highest round number and the restart counts that it knows. A leader that remembers the lost
    round commits it again. A leader that does not yields for one lease to a node that may remember it. If no node does,
    the leader continues from the highest number and counts that any node knows.
    """
    round, remembered, highest = membership.round, membership.remembered, membership.highest_round_seen
    if remembered is not None and remembered.number > membership.number and remembered.number >= highest:
        return FormRound(remembered)
    if round is not None and highest <= round.number:
        return round
    if highest > settings.resume.round and not membership.gave_way:
        return GiveWay("the store has lost a round; yielding the lead to a node that can restore it")
    resume = settings.resume
    known = round or RoundRecord(resume.round, restarts=resume.restarts, uncharged_restarts=resume.uncharged_restarts)
    records = [peer.record for peer in membership.peers.values()]
    return msgspec.structs.replace(
        known,
        number=max(known.number, highest),
        restarts=max([known.restarts, *(record.restarts for record in records)]),
        uncharged_restarts=max([known.uncharged_restarts, *(record.uncharged_restarts for record in records)]),
    )


def _continue(membership: Membership, round: RoundRecord, settings: RendezvousSettings) -> Decision:
    """Decide about a round that trains, or trained until just now."""
    failures = _failures(membership, membership.ranks)
    if any(failure.non_retryable and failure.kind is FailureKind.PROGRAM for _, failure in failures):
        return _after_failure(membership, round, failures, settings)
    needed = [node for node in membership.ranks if not _is_dispensable(node, membership, round)]
    lost = [node for node in needed if _is_lost(node, membership)]
    leaving = [node for node in needed if membership.is_present(node) and membership.is_leaving(node)]
    if (lost or leaving or failures) and membership.incomplete and membership.now < membership.patient_until:
        # Without them the round would lose live members that may know a later round than the store.
        return Hold(membership.patient_until, "the store was away; waiting for the members to come back to it")
    if lost:
        return _continue_without(membership, round, [*lost, *leaving], settings)
    if leaving:
        staying = _failures(membership, set(membership.ranks).difference(leaving))
        if staying and current_notice(membership) is not None and root_cause(staying).kind is FailureKind.PROGRAM:
            return _after_failure(membership, round, staying, settings)  # the leaving members had not stopped yet
        if failures:
            return _continue_without(membership, round, leaving, settings)
        return _after_departure(membership, round, leaving, settings)
    if failures:
        return _after_failure(membership, round, failures, settings)
    return _change_membership(membership, round, settings)


def root_cause(failures: Iterable[tuple[int, FailureRecord]]) -> FailureRecord:
    """Return the failure that explains the others: by kind, then non-retryable first, then by the store's order.

    Args:
        failures: at least one, each with the revision at which it was reported.
    """
    kinds = list(FailureKind)
    return min(failures, key=lambda each: (kinds.index(each[1].kind), not each[1].non_retryable, each[0]))[1]


def _is_dispensable(node: str, membership: Membership, round: RoundRecord) -> bool:
    """Return whether a member may leave without a loss: its workers have exited and it does not serve the TCPStore."""
    host = round.store.rpartition(":")[0]
    return node in membership.done and host != bracketed(round.members[membership.ranks[node]].address)


def _is_lost(node: str, membership: Membership) -> bool:
    """Return whether a member cannot go on. A lease that expired while its node answers is not a loss."""
    if node in membership.dead or membership.is_partitioned(node):
        return True
    return node not in membership.peers and not membership.is_silent(node)


def _failures(membership: Membership, members: Iterable[str]) -> list[tuple[int, FailureRecord]]:
    """Return these members' failures in this round, each with its position in the store's order."""
    peers = (membership.peers[node] for node in members if node in membership.peers)
    return [
        (peer.failed_at, peer.record.failure)
        for peer in peers
        if peer.record.failure is not None and peer.record.failure.round == membership.number
    ]


# -- beginnings


def _form_first(membership: Membership, before: RoundRecord, settings: RendezvousSettings) -> Decision:
    """Form a round without survivors: of all desired nodes, or after the last call of those that are present."""
    them = candidates(membership)
    since = min((peer.arrived for peer in them.ordered), default=membership.now)
    here = len(them.ordered)
    if here >= them.target:
        return _form(membership, before, them, RoundReason.NODE_JOINED, joined(them.chosen))
    # Nodes that know a round that the store has lost may be on their way back for one lease.
    window = settings.last_call_timeout if membership.round else max(settings.last_call_timeout, settings.lease)
    if here < membership.size.min:
        is_lost = membership.round is None and membership.highest_round_seen > settings.resume.round
        if not is_lost or not here:
            return _too_few(membership, before, them, since, settings)
        if membership.now < since + window:
            return Hold(since + window, waiting_for(membership, them))
        # Workers of an older round than the lost one may still run.
        return _pause(membership, before, them, RoundReason.NODE_LOST, STORE_LOST_ROUND)
    if membership.now >= since + window:
        return _form(membership, before, them, RoundReason.NODE_JOINED, joined(them.chosen))
    return Hold(
        since + window,
        f"{count(here, 'node')} of {them.target} {are(here)} there; waiting for more until the last call ends",
    )


def _start_over(membership: Membership, round: RoundRecord, settings: RendezvousSettings) -> Decision:
    """Form a round as at the start of the run, because no member is left.

    If the run id may be reused, this is another run with its whole budget; the round numbers continue.
    """
    round = msgspec.structs.replace(round, early_failures=0)
    if settings.unique_run:
        return _form_first(membership, round, settings)
    change = _form_first(membership, msgspec.structs.replace(round, restarts=0, failure=None), settings)
    if isinstance(change, FormRound):
        return FormRound(msgspec.structs.replace(change.record, uncharged_restarts=0))
    return change


def _leave_pause(membership: Membership, round: RoundRecord, settings: RendezvousSettings) -> Decision:
    """Form a round with members as soon as enough nodes are present."""
    them = candidates(membership)
    if all(peer.joined > membership.since for peer in them.ordered):
        return _start_over(membership, round, settings)  # the waiting nodes are gone
    if len(them.ordered) < membership.size.min:
        return _too_few(membership, round, them, membership.changed_at, settings)
    return _debounced(membership, round, them, them.ordered, settings)


# -- losses and failures


def _continue_without(
    membership: Membership, round: RoundRecord, going: Sequence[str], settings: RendezvousSettings
) -> Decision:
    """Continue with the present nodes after members are lost or leave, without waiting for a replacement."""
    them = candidates(membership)
    if _nobody_stays(membership):
        return _start_over(membership, round, settings)
    if membership.now < (until := _wait_for_spares(membership, round, them, settings)):
        return Hold(until)
    reason = RoundReason.NODE_LEFT if all(map(membership.is_leaving, going)) else RoundReason.NODE_LOST
    return _form_or_pause(membership, round, them, reason, departures(going, membership))


def _wait_for_spares(
    membership: Membership, round: RoundRecord, them: Candidates, settings: RendezvousSettings
) -> float:
    """Return how long to wait for spares that have not connected to a new leader yet, which avoids a second change."""
    if len(them.ordered) >= them.target:
        return 0.0
    mute = (peer for peer in membership.peers.values() if not peer.answers and peer.id not in membership.ranks)
    known = [peer.arrived for peer in mute if peer.record.round == round.number and may_join(peer, membership)]
    return max(known) + MAX_DEBOUNCE_FACTOR * settings.join_debounce if known else 0.0


def _nobody_stays(membership: Membership) -> bool:
    """Return whether no member of the round is present any more, except those that leave."""
    return not any(
        membership.is_silent(node) or (membership.is_present(node) and not membership.is_leaving(node))
        for node in membership.ranks
    )


def _after_failure(
    membership: Membership,
    round: RoundRecord,
    failures: Sequence[tuple[int, FailureRecord]],
    settings: RendezvousSettings,
) -> Decision:
    """Charge a worker's failure unless it is uncharged, and restart the workers or end the run."""
    failure = root_cause(failures)
    since = membership.now if membership.failed_since is None else membership.failed_since
    all_reported = len(failures) == len(round.members)
    if failure.kind is not FailureKind.PROGRAM and membership.now < since + CAUSE_WINDOW and not all_reported:
        return Hold(since + CAUSE_WINDOW)
    early = round.early_failures + 1 if failure.uptime < settings.crash_loop_seconds else 0
    if why := _why_run_ends(failure, round, early, settings):
        explained = failure.non_retryable and failure.kind is FailureKind.PROGRAM
        if not explained and not all_reported and membership.now < since + REPORT_WINDOW:
            return Hold(since + REPORT_WINDOW)
        message = shorten(f"{describe(failure)}; {why}", MAX_SENTENCE)
        return EndRun(OutcomeRecord(OutcomeState.FAILED, round.number, round.restarts, message, failure))
    kept = msgspec.structs.replace(failure, message=shorten(failure.message, MAX_KEPT_MESSAGE))
    charged = msgspec.structs.replace(
        round,
        restarts=round.restarts + (not failure.uncharged),
        early_failures=early,
        uncharged_restarts=round.uncharged_restarts + failure.uncharged,
        failure=round.failure if failure.uncharged else kept,
    )
    return _form_or_pause(membership, charged, candidates(membership), RoundReason.WORKER_FAILED, describe(failure))


def _why_run_ends(failure: FailureRecord, round: RoundRecord, early: int, settings: RendezvousSettings) -> str:
    """Return why the run ends with this failure; empty if it restarts."""
    if failure.non_retryable:
        return "this failure is declared final, so the run is not tried again, whatever is left of its restarts"
    spent = round.restarts >= settings.max_restarts and not failure.uncharged
    if spent and settings.max_restarts == 0:
        return "it may not restart"
    if early >= settings.crash_loop_limit:
        return f"its workers failed {times(early)} in a row within {settings.crash_loop_seconds:g} s of their start"
    return f"no restart is left of the {settings.max_restarts} that it may have" if spent else ""


# -- planned changes


def _after_departure(
    membership: Membership, round: RoundRecord, leaving: Sequence[str], settings: RendezvousSettings
) -> Decision:
    """Continue without the leaving members, after all members that asked for notice had it."""
    change = _continue_without(membership, round, leaving, settings)
    noticed = current_notice(membership) is not None or requested_seconds(membership, settings) > 0
    if not isinstance(change, FormRound) and noticed and _nobody_stays(membership):
        # No node needs another round, but the leaving nodes wait for the end of this one.
        change = _pause(
            membership, round, candidates(membership), RoundReason.NODE_LEFT, departures(leaving, membership)
        )
    return after_notice(membership, change, settings)


def _change_membership(membership: Membership, round: RoundRecord, settings: RendezvousSettings) -> Decision:
    """Change the members of a healthy round if the size or the present nodes have changed."""
    them = candidates(membership)
    chosen = {peer.id for peer in them.chosen}
    # A member without a key stays, and so does a finished member that has left; a smaller size removes them.
    staying = [
        node for node in membership.ranks if node in chosen or membership.is_silent(node) or node in membership.done
    ]
    joining = [peer for peer in them.chosen if peer.id not in membership.ranks]
    finishing = any(map(membership.is_finishing, membership.ranks))
    if len(staying) < len(membership.ranks):
        away = [node for node in membership.ranks if node not in staying]
        cause = f"{named(away)} {are(len(away))} taken away"
        return after_notice(membership, _form_or_pause(membership, round, them, RoundReason.RESIZED, cause), settings)
    if len({peer.id for peer in them.ordered}.union(staying)) < membership.size.min and not finishing:
        cause = f"at least {count(membership.size.min, 'node')} {are(membership.size.min)} wanted now"
        return after_notice(membership, _pause(membership, round, them, RoundReason.RESIZED, cause), settings)
    if not joining or them.target <= len(membership.ranks):
        return withdraw_notice(membership, Hold())
    if finishing:
        return withdraw_notice(membership, Hold(why="the run is about to finish; new nodes wait"))
    if membership.incomplete:
        return Hold(why="a member's key is on its way back; new nodes wait")
    if any(not membership.peers[node].answers for node in membership.ranks if node in membership.peers):
        return Hold(why="a member has not connected to its new leader yet; new nodes wait")
    return after_notice(membership, _debounced(membership, round, them, joining, settings), settings)


def _debounced(
    membership: Membership, round: RoundRecord, them: Candidates, joining: Sequence[Peer], settings: RendezvousSettings
) -> Decision:
    """Add new nodes: at once if all desired nodes are present, otherwise after ``join_debounce`` without new ones."""
    if len(them.ordered) < them.target:
        until = _debounce_until(membership, joining, settings.join_debounce)
        if membership.now < until:
            return Hold(until)
    newcomers = [peer for peer in them.chosen if peer.id not in membership.ranks]
    return _form(membership, round, them, RoundReason.NODE_JOINED, joined(newcomers or them.chosen))


def _debounce_until(membership: Membership, joining: Sequence[Peer], debounce: float) -> float:
    """Return the time until which new nodes wait for more new nodes."""
    limit = MAX_DEBOUNCE_FACTOR * debounce
    # A new node may not have connected yet; a dead node never will.
    mute = [peer.arrived for peer in membership.peers.values() if not peer.answers and may_join(peer, membership)]
    arrivals = sorted([peer.arrived for peer in joining] + mute)
    first = last = arrivals[-1]
    for arrived in reversed(arrivals):
        if first - arrived > debounce:
            break
        first = arrived
    return first + limit if any(arrived >= first for arrived in mute) else min(last + debounce, first + limit)


# -- notice of a planned change


def current_notice(membership: Membership) -> NoticeRecord | None:
    """Return the notice of the current round, if one was given and not withdrawn."""
    notice = membership.notice
    if notice is None or membership.round is None or notice.round != membership.number or notice.seconds <= 0:
        return None
    return notice


def requested_seconds(membership: Membership, settings: RendezvousSettings) -> float:
    """Return the seconds of notice that the members ask for; 0 if none asks."""
    return min(max((peer.record.notice for peer in _asking(membership)), default=0.0), settings.notice)


def after_notice(membership: Membership, change: Decision, settings: RendezvousSettings) -> Decision:
    """Return a planned change after the requested notice; until then, the decision that gives the notice or waits."""
    if not isinstance(change, FormRound) or membership.round is None:
        return change
    notice = current_notice(membership)
    if notice is None:
        seconds = requested_seconds(membership, settings)
        if seconds <= 0:
            return change
        serial = _last_serial(membership) + 1
        return GiveNotice(
            NoticeRecord(membership.number, serial, seconds, reason=change.record.reason, cause=change.record.cause)
        )
    until = membership.noticed_at + notice.seconds
    # A member without a key may still have to answer.
    awaits = membership.incomplete or any(peer.record.saved < notice.serial for peer in _asking(membership))
    if membership.now >= until or not awaits:
        return change
    return Hold(until, f"{notice.cause}: the workers have {notice.seconds:g} s to save before the round changes")


def withdraw_notice(membership: Membership, otherwise: Hold) -> Decision:
    """Withdraw the notice of a change that is no longer needed; without a notice, return ``otherwise``."""
    notice = current_notice(membership)
    return otherwise if notice is None else GiveNotice(msgspec.structs.replace(notice, seconds=0.0))


def _asking(membership: Membership) -> Iterator[Peer]:
    """Yield the members whose workers have asked for notice in this round and have not ended."""
    for node in membership.ranks:
        peer = membership.peers.get(node)
        if peer is None or peer.record.round != membership.number:
            continue
        if peer.record.notice > 0 and peer.record.phase is not NodePhase.DONE:
            yield peer


def _last_serial(membership: Membership) -> int:
    """Return the highest serial that any node knows, also if the store lost the last notice."""
    answered = max((peer.record.saved for peer in membership.peers.values()), default=0)
    return max(answered, membership.notice.serial if membership.notice is not None else 0)


# -- round building


def _too_few(
    membership: Membership, before: RoundRecord, them: Candidates, since: float, settings: RendezvousSettings
) -> Decision:
    """Wait for more nodes; after the join timeout, end the run."""
    why = waiting_for(membership, them, membership.missing)
    if membership.now < since + settings.join_timeout:
        return Hold(since + settings.join_timeout, why)
    message = f"no more nodes came within {settings.join_timeout:g} s: {why}"
    return EndRun(OutcomeRecord(OutcomeState.FAILED, before.number, before.restarts, message))


def _form_or_pause(
    membership: Membership, before: RoundRecord, them: Candidates, reason: RoundReason, cause: str
) -> Decision:
    """Return the next round with the present nodes, or without members if there are too few nodes."""
    return (_pause if len(them.ordered) < membership.size.min else _form)(membership, before, them, reason, cause)


def _pause(membership: Membership, before: RoundRecord, them: Candidates, reason: RoundReason, cause: str) -> Decision:
    """Form a round without members: the remaining nodes stop their workers and wait."""
    cause = f"{cause}; {waiting_for(membership, them)}"
    return FormRound(_next_round(membership, before, reason, cause, before.uncharged_restarts))


def _form(membership: Membership, before: RoundRecord, them: Candidates, reason: RoundReason, cause: str) -> Decision:
    """Return the next round with these nodes; its TCPStore is on a node with an unused port."""
    # A node that knows the current round has offered another port since.
    host = next((peer for peer in them.chosen if peer.record.store and peer.record.round >= membership.number), None)
    if host is None:
        return Hold(why="waiting for a node that can serve the next round's TCPStore")
    failed = reason is RoundReason.WORKER_FAILED or (
        before.reason is RoundReason.WORKER_FAILED
        and not before.members  # too few nodes were left for an immediate restart
    )
    uncharged = before.uncharged_restarts + (before.number > 0 and not failed)
    return FormRound(
        msgspec.structs.replace(
            _next_round(membership, before, reason, cause, uncharged),
            members=tuple(Member(peer.id, peer.record.address, peer.record.workers) for peer in them.chosen),
            store=f"{bracketed(host.record.address)}:{host.record.store}",
        )
    )


def _next_round(
    membership: Membership, before: RoundRecord, reason: RoundReason, cause: str, uncharged_restarts: int
) -> RoundRecord:
    return RoundRecord(
        number=max(before.number, membership.highest_round_seen) + 1,
        restarts=before.restarts,
        early_failures=before.early_failures,
        uncharged_restarts=uncharged_restarts,
        desired=membership.size.desired,
        reason=reason,
        cause=shorten(cause, MAX_SENTENCE),
        failure=before.failure,
    )
