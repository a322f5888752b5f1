"""What the leader decides, as a pure function of what it knows.

``decide(view, settings)`` reads no clock and does no I/O: the leader calls it after every change and carries out what
comes back. The rules, in the order in which they are asked:

1. A run that has an outcome is over.
2. A store that lost the epoch is given it back; nobody notices.
3. All workers of all members ended with 0: the run has succeeded.
4. A worker failed in a way that is declared final: the run has failed.
5. A member is lost, or a worker failed: the next epoch forms at once with whoever is there. A failure is charged to the
   run's budget; a change of membership is free, and so is a failure that a lost member explains, or one whose exit
   code was declared free.
6. A member leaves, the size has changed, or somebody joins: the next epoch forms as soon as the newcomers are gathered
   and those who asked for a notice have had it. It takes as many nodes as are wanted; whoever is beyond that waits as a
   spare.
7. Too few are left: an epoch without members says so, and everybody waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from torchelastic.contract import (
    EpochReason,
    EpochRecord,
    FailureKind,
    FailureRecord,
    OutcomeRecord,
    OutcomeState,
    bracketed,
    shorten,
)
from torchelastic.rendezvous import notices
from torchelastic.rendezvous.forming import LONGEST_SENTENCE, form, pause, too_few
from torchelastic.rendezvous.placing import Candidates, candidates, may_join
from torchelastic.rendezvous.view import Decision, EndRun, FormEpoch, GiveWay, Hold, Peer, View
from torchelastic.rendezvous.words import are, count, departures, greeting, name_of, named, times

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchelastic.settings import RendezvousSettings

CAUSE_WINDOW: Final = 0.1
"""Seconds for which a failure that looks like a consequence waits for its cause: the death of a peer's worker or agent
reaches the leader a few milliseconds before or after the broken collective that it causes."""

LAST_WORD_WINDOW: Final = 1.0
"""Seconds for which a run that is about to fail waits for the members that have not told their failure yet."""

LONGEST_KEPT: Final = 1024
"""Characters of a failure's text that each epoch after it carries to all nodes."""

LONGEST_GATHERING: Final = 10
"""So many times the time for which joins are gathered is waited at most, however many more come one after the other."""


def decide(view: View, settings: RendezvousSettings) -> Decision:
    """What the leader should do now."""
    if view.outcome is not None:
        return Hold()
    if view.epoch is None:
        return _begin(view, settings)
    epoch = view.epoch
    if view.remembered is not None and view.remembered.number > epoch.number:
        return FormEpoch(view.remembered)  # the store went back to an earlier state of itself
    if view.known > epoch.number:
        return _catch_up(view, epoch, settings)
    if view.now - view.changed_at >= settings.early_seconds:
        # It has been healthy: what failed before is no part of a row any more.
        epoch = msgspec.structs.replace(epoch, early=0)
    if not epoch.members:
        return _resume(view, epoch, settings)
    if all(node in view.done for node in view.ranks):
        return EndRun(OutcomeRecord(state=OutcomeState.SUCCEEDED, epoch=epoch.number, restarts=epoch.restarts))
    return _go_on(view, epoch, settings)


def _go_on(view: View, epoch: EpochRecord, settings: RendezvousSettings) -> Decision:
    """The epoch trains, or trained until a moment ago."""
    failures = _failures(view, view.ranks)
    if any(failure.final and failure.kind is FailureKind.PROGRAM for _, failure in failures):
        return _after_failure(view, epoch, failures, settings)
    needed = [node for node in view.ranks if not _has_done_its_part(node, view, epoch)]
    lost = [node for node in needed if _is_lost(node, view)]
    leaving = [node for node in needed if node in view.peers and node not in view.dead and view.leaves(node)]
    if (lost or leaving or failures) and view.incomplete and view.now < view.patient_until:
        # They would be missing in the next epoch, and may know of a later one than a store that has lost its data.
        return Hold(view.patient_until, "the store was away; waiting for the members to come back to it")
    if lost:
        return _continue_without(view, epoch, [*lost, *leaving], settings)
    if leaving:
        own = _failures(view, set(view.ranks).difference(leaving))
        if own and notices.standing(view) is not None and root_cause(own).kind is FailureKind.PROGRAM:
            return _after_failure(view, epoch, own, settings)  # those who leave had not stopped yet
        if failures:
            return _continue_without(view, epoch, leaving, settings)
        return _let_go(view, epoch, leaving, settings)
    if failures:
        return _after_failure(view, epoch, failures, settings)
    return _change_membership(view, epoch, settings)


def root_cause(failures: Iterable[tuple[int, FailureRecord]]) -> FailureRecord:
    """The failure that explains the others: by class, and within a class by the store's order, not by any clock.

    One that is declared final comes first in its class: what else failed there changes nothing any more.

    Args:
        failures: at least one, each with the revision at which it was reported.
    """
    return min(failures, key=lambda failure: (_KIND_ORDER[failure[1].kind], not failure[1].final, failure[0]))[1]


_KIND_ORDER: Final = {FailureKind.PROGRAM: 0, FailureKind.COMMUNICATION: 1, FailureKind.ENDED: 2}


def _has_done_its_part(node: str, view: View, epoch: EpochRecord) -> bool:
    """Whether a member can go without a loss: all its workers have ended, and it does not serve the epoch's store."""
    return node in view.done and epoch.store.rpartition(":")[0] != bracketed(epoch.members[view.ranks[node]].address)


def _is_lost(node: str, view: View) -> bool:
    """Whether a member can't go on. A lease that ended while its node answers is no loss."""
    return node in view.dead or view.cut_off(node) or (node not in view.peers and node not in view.silent)


def _failures(view: View, members: Iterable[str]) -> list[tuple[int, FailureRecord]]:
    """What these members say of workers of theirs that failed in this epoch, each with its place in the order."""
    number = 0 if view.epoch is None else view.epoch.number
    peers = (view.peers[node] for node in members if node in view.peers)
    return [
        (peer.failed_at, peer.record.failure)
        for peer in peers
        if peer.record.failure is not None and peer.record.failure.epoch == number
    ]


# -- stores that have lost something, and beginnings


def _catch_up(view: View, epoch: EpochRecord, settings: RendezvousSettings) -> Decision:
    """Nodes know a later epoch than the store, which lost it, or has begun a history of its own."""
    if _should_give_way(view, settings):
        return GiveWay("nodes know a later epoch than the store; leaving the lead to one that can give it back")
    # None of them has taken it: an epoch that is later still brings all together again.
    before = _refilled(view, epoch)
    them = candidates(view)
    cause = "the store had lost an epoch that nodes still know"
    return _with_enough(view, before, them, EpochReason.NODE_LOST, cause)


def _begin(view: View, settings: RendezvousSettings) -> Decision:
    """No epoch stands in the store: the run is new, or the store lost its data."""
    if view.remembered is not None and view.remembered.number >= view.known:
        return FormEpoch(view.remembered)
    resume = settings.resume
    before = _refilled(view, EpochRecord(number=resume.epoch, restarts=resume.restarts, free=resume.free))
    if _should_give_way(view, settings):
        return GiveWay("the store has lost the epoch; leaving the lead to a node that knows it")
    # Where somebody knows one, nobody has taken the lead who could give it back: its number is all that is left.
    return _first(view, before, settings)


def _should_give_way(view: View, settings: RendezvousSettings) -> bool:
    """Whether a node may know an epoch of which this leader does not even know the number."""
    return view.known > settings.resume.epoch and not view.gave_way


def _refilled(view: View, epoch: EpochRecord) -> EpochRecord:
    """The same with what nodes know better: its number, and what was counted in the run."""
    peers = [peer.record for peer in view.peers.values()]
    return msgspec.structs.replace(
        epoch,
        number=max(epoch.number, view.known),
        restarts=max(epoch.restarts, *(peer.restarts for peer in peers), 0),
        free=max(epoch.free, *(peer.free for peer in peers), 0),
    )


def _first(view: View, before: EpochRecord, settings: RendezvousSettings) -> Decision:
    """Form an epoch with nobody to carry on: all that are wanted, or after the joining window whoever has come."""
    them = candidates(view)
    since = min((peer.arrived for peer in them.ordered), default=view.now)
    here = len(them.ordered)
    if here >= them.target:
        return form(view, before, them, EpochReason.NODE_JOINED, greeting(them.chosen))
    if here < view.size.min:
        return too_few(view, before, them, since, settings)
    # In a store without an epoch there may be nodes that know one, and whose keys are on their way back.
    window = settings.joining_window if view.epoch is not None else max(settings.joining_window, settings.lease)
    if view.now >= since + window:
        return form(view, before, them, EpochReason.NODE_JOINED, greeting(them.chosen))
    return Hold(
        since + window,
        f"{count(here, 'node')} of {them.target} {are(here)} there; waiting for more until the joining window closes",
    )


def _anew(view: View, epoch: EpochRecord, settings: RendezvousSettings) -> Decision:
    """Nobody of the epoch is left, so nothing is being held up: begin as at the start.

    Where the id may be used again, this is another run, which has its whole budget; the numbers go on all the same.
    """
    if settings.unique_run:
        return _first(view, msgspec.structs.replace(epoch, early=0), settings)
    change = _first(view, msgspec.structs.replace(epoch, early=0, restarts=0, failure=None), settings)
    return FormEpoch(msgspec.structs.replace(change.record, free=0)) if isinstance(change, FormEpoch) else change


def _resume(view: View, epoch: EpochRecord, settings: RendezvousSettings) -> Decision:
    """The standing epoch has no members: form one as soon as there are enough again."""
    them = candidates(view)
    if all(peer.joined > view.since for peer in them.ordered):
        return _anew(view, epoch, settings)  # whoever waited for more nodes has gone
    if len(them.ordered) < view.size.min:
        return too_few(view, epoch, them, view.changed_at, settings)
    return _gathered(view, epoch, them, them.ordered, settings)


# -- losses and failures


def _continue_without(view: View, epoch: EpochRecord, going: Sequence[str], settings: RendezvousSettings) -> Decision:
    """Members are gone, or go: continue with whoever is there; never wait for a replacement."""
    them = candidates(view)
    if _nobody_stays(view):
        return _anew(view, epoch, settings)
    if view.now < (until := _spares_come(view, epoch, them, settings)):
        return Hold(until)
    cause = departures(going, view)
    reason = EpochReason.NODE_LEFT if all(map(view.leaves, going)) else EpochReason.NODE_LOST
    return _with_enough(view, epoch, them, reason, cause)


def _spares_come(view: View, epoch: EpochRecord, them: Candidates, settings: RendezvousSettings) -> float:
    """Until when spares are waited for that have not answered a leader who is new: they link to it in a moment.

    Without them there would be two changes in the place of one. On a busy machine a moment is longer than joins are
    gathered for.
    """
    if len(them.ordered) >= them.target:
        return 0.0
    mute = (peer for peer in view.peers.values() if not peer.answers and peer.id not in view.ranks)
    known = [peer.arrived for peer in mute if peer.record.epoch == epoch.number and may_join(peer, view)]
    return max(known) + LONGEST_GATHERING * settings.gather if known else 0.0


def _nobody_stays(view: View) -> bool:
    """Whether no member of the epoch is there any more, but for those that leave."""
    return not any(
        node in view.silent or (node in view.peers and node not in view.dead and not view.leaves(node))
        for node in view.ranks
    )


def _after_failure(
    view: View, epoch: EpochRecord, failures: Sequence[tuple[int, FailureRecord]], settings: RendezvousSettings
) -> Decision:
    """A worker failed: charge it, unless it is free, and begin anew or end the run."""
    failure = root_cause(failures)
    since = view.now if view.failed_since is None else view.failed_since
    all_told = len(failures) == len(epoch.members)
    if failure.kind is not FailureKind.PROGRAM and view.now < since + CAUSE_WINDOW and not all_told:
        return Hold(since + CAUSE_WINDOW)
    early = epoch.early + 1 if failure.uptime < settings.early_seconds else 0
    if end := _why_not_again(failure, epoch, early, settings):
        # Nothing explains a failure that is final but what explains any failure: a cause of another class.
        explained = failure.final and failure.kind is FailureKind.PROGRAM
        if not explained and not all_told and view.now < since + LAST_WORD_WINDOW:
            return Hold(since + LAST_WORD_WINDOW)
        return EndRun(
            OutcomeRecord(
                state=OutcomeState.FAILED,
                epoch=epoch.number,
                restarts=epoch.restarts,
                message=shorten(f"{describe(failure)}; {end}", LONGEST_SENTENCE),
                failure=failure,
            )
        )
    charged = EpochRecord(
        number=epoch.number,
        restarts=epoch.restarts + (not failure.free),
        early=early,
        free=epoch.free + failure.free,
        store=epoch.store,
        failure=epoch.failure if failure.free else _kept(failure),
    )
    return _with_enough(view, charged, candidates(view), EpochReason.WORKER_FAILED, describe(failure))


def _kept(failure: FailureRecord) -> FailureRecord:
    """A failure as the epochs after it carry it."""
    return msgspec.structs.replace(failure, message=shorten(failure.message, LONGEST_KEPT))


def _with_enough(view: View, before: EpochRecord, them: Candidates, reason: EpochReason, cause: str) -> Decision:
    """The next epoch with those who are there, or none to train in where they are too few."""
    return (pause if len(them.ordered) < view.size.min else form)(view, before, them, reason, cause)


def _why_not_again(failure: FailureRecord, epoch: EpochRecord, early: int, settings: RendezvousSettings) -> str:
    """Why the run ends with this failure; empty where it goes on."""
    if failure.final:
        return "this failure is declared final, so the run is not tried again, whatever is left of its restarts"
    spent = epoch.restarts >= settings.max_restarts and not failure.free
    if spent and settings.max_restarts == 0:
        return "it may not restart"
    if early >= settings.early_failures:
        return f"its workers failed {times(early)} in a row within {settings.early_seconds:g} s of their start"
    return f"no restart is left of the {settings.max_restarts} that it may have" if spent else ""


# -- planned changes


def _let_go(view: View, epoch: EpochRecord, leaving: Sequence[str], settings: RendezvousSettings) -> Decision:
    """Members leave in order, and are still there: whoever asked for a notice has it first, they included."""
    change = _continue_without(view, epoch, leaving, settings)
    if not isinstance(change, FormEpoch) and _saves(view, settings) and _nobody_stays(view):
        # Nobody needs a next epoch, but those who leave wait for the end of this one.
        change = pause(view, epoch, candidates(view), EpochReason.NODE_LEFT, departures(leaving, view))
    return notices.after_notice(view, change, settings)


def _saves(view: View, settings: RendezvousSettings) -> bool:
    return notices.standing(view) is not None or notices.wanted(view, settings) > 0


def _change_membership(view: View, epoch: EpochRecord, settings: RendezvousSettings) -> Decision:
    """All is well in the epoch: does it have the right members?"""
    them = candidates(view)
    chosen = {peer.id for peer in them.chosen}
    # A member whose key is on its way back is still a member, and so is one that has done its part and went; only a
    # smaller size sends one away.
    staying = [node for node in view.ranks if node in chosen or node in view.silent or node in view.done]
    joining = [peer for peer in them.chosen if peer.id not in view.ranks]
    if len(staying) < len(view.ranks):
        kept = set(staying)
        away = [node for node in view.ranks if node not in kept]
        change = _with_enough(view, epoch, them, EpochReason.RESIZED, f"{named(away)} {are(len(away))} taken away")
        return notices.after_notice(view, change, settings)
    finishing = any(map(view.finishing, view.ranks))
    if len({peer.id for peer in them.ordered}.union(staying)) < view.size.min and not finishing:
        cause = f"at least {count(view.size.min, 'node')} {are(view.size.min)} wanted now"
        change = pause(view, epoch, them, EpochReason.RESIZED, cause)
        return notices.after_notice(view, change, settings)
    if not joining or them.target <= len(view.ranks):
        return notices.call_off(view, Hold())
    if finishing:
        return notices.call_off(view, Hold(why="the run is about to finish; whoever comes now waits"))
    if view.incomplete:
        return Hold(why="a member's key is on its way back; whoever comes now waits")
    if any(not view.peers[node].answers for node in view.ranks if node in view.peers):
        return Hold(why="a member has not linked to its new leader yet; whoever comes now waits")
    return notices.after_notice(view, _gathered(view, epoch, them, joining, settings), settings)


def _gathered(
    view: View, epoch: EpochRecord, them: Candidates, joining: Sequence[Peer], settings: RendezvousSettings
) -> Decision:
    """Take the newcomers in: at once when all that are wanted are there, else when no more came for a moment."""
    if len(them.ordered) < them.target:
        until = _gathering_ends(view, joining, settings.gather)
        if view.now < until:
            return Hold(until)
    newcomers = [peer for peer in them.chosen if peer.id not in view.ranks]
    return form(view, epoch, them, EpochReason.NODE_JOINED, greeting(newcomers or them.chosen))


def _gathering_ends(view: View, joining: Sequence[Peer], moment: float) -> float:
    """Until when newcomers that arrive together, each soon after the one before, wait for the next one."""
    limit = LONGEST_GATHERING * moment
    # One that has only just come may not have answered yet; a dead one never will.
    mute = [peer.arrived for peer in view.peers.values() if not peer.answers and may_join(peer, view)]
    arrivals = sorted([peer.arrived for peer in joining] + mute)
    first = last = arrivals[-1]
    for arrived in reversed(arrivals):
        if first - arrived > moment:
            break
        first = arrived
    return first + limit if any(arrived >= first for arrived in mute) else min(last + moment, first + limit)


def describe(failure: FailureRecord) -> str:
    """A failure in words: "rank 3 on digits-2: ValueError: …"."""
    return f"rank {failure.rank} on {name_of(failure.node)}: {failure.message or f'exit code {failure.exit_code}'}"
