"""What the leader decides, as a pure function of what it knows.

``decide(view, settings)`` reads no clock and does no I/O: the leader calls it after every change and carries out what
comes back. The rules, in the order in which they are asked:

1. A run that has an outcome is over.
2. A store that lost the epoch is given it back; nobody notices.
3. All workers of all members ended with 0: the run has succeeded.
4. A worker failed, or a member is lost: the next epoch forms at once with whoever is there. A failure is charged to the
   run's budget; a change of membership is free, and so is a failure that a lost member explains.
5. The membership should change: the next epoch forms as soon as the newcomers are gathered, and takes as many nodes as
   are wanted. Whoever is beyond that waits as a spare.
6. Too few are left: an epoch without members says so, and everybody waits.

Ranks are sticky: survivors keep their order, newcomers come behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from torchelastic.contract import (
    CONTRACT_VERSION,
    EpochReason,
    EpochRecord,
    FailureKind,
    FailureRecord,
    Member,
    NodePhase,
    OutcomeRecord,
    OutcomeState,
    bracketed,
    other_version,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torchelastic.contract import NodeRecord, SizeRecord
    from torchelastic.settings import RendezvousSettings

CAUSE_WINDOW: Final = 0.1
"""Seconds for which a failure that looks like a consequence waits for its cause: the death of a peer's worker or agent
reaches the leader a few milliseconds before or after the broken collective that it causes."""

EPOCH_LIMIT: Final = 10**12
"""No run has so many epochs; a larger number in a node's record is nonsense."""

LAST_WORD_WINDOW: Final = 1.0
"""Seconds for which a run that is about to fail waits for the members that have not told their failure yet."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A node as the leader sees it.

    Attributes:
        id: the node's id.
        record: what it says of itself.
        joined: when it first came, as a revision of the store: seniority among newcomers.
        arrived: when the leader first saw it; seconds of the leader's clock.
        answers: whether it is known to be alive beyond its key: it holds its link, or has had time enough to.
        failed_at: the revision of its report of a failure in the current epoch: the store's order of events.
    """

    id: str
    record: NodeRecord
    joined: int
    arrived: float
    answers: bool = True
    failed_at: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """All that the leader knows at one moment.

    Attributes:
        now: seconds of the leader's clock.
        peers: the nodes whose keys stand in the store, the leader's own included.
        epoch: the epoch that stands in the store.
        remembered: the last epoch that the leader itself has seen; more than ``epoch`` only in a store that lost data.
        outcome: the run's outcome.
        size: how many nodes there should be.
        silent: members without a key that still hold their link: their lease ended, they did not.
        dead: nodes whose death is certain though their key still stands.
        done: members that were seen done with this epoch, also if they are gone by now.
        changed_at: when the epoch in the store was first seen.
        failed_since: when the first failure of this epoch was first seen; None where there is none.
        gave_way: whether this leader has given way before to nodes that know more.
    """

    now: float
    peers: Mapping[str, Peer]
    size: SizeRecord
    epoch: EpochRecord | None = None
    remembered: EpochRecord | None = None
    outcome: OutcomeRecord | None = None
    silent: frozenset[str] = frozenset()
    dead: frozenset[str] = frozenset()
    done: frozenset[str] = frozenset()
    changed_at: float = 0.0
    failed_since: float | None = None
    gave_way: bool = False


@dataclass(frozen=True, slots=True)
class Hold:
    """Do nothing, until something changes or the time has come.

    Attributes:
        until: when to ask again though nothing changed; None for never.
        why: in words, for the log; empty where all is well.
    """

    until: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class FormEpoch:
    """Commit this epoch in the place of the one that stands."""

    record: EpochRecord


@dataclass(frozen=True, slots=True)
class EndRun:
    """Commit this outcome."""

    record: OutcomeRecord


@dataclass(frozen=True, slots=True)
class GiveWay:
    """Give the lead to a node that knows more, for a lease's time.

    Attributes:
        why: in words, for the log.
    """

    why: str


Decision = Hold | FormEpoch | EndRun | GiveWay

_KIND_ORDER: Final = {FailureKind.PROGRAM: 0, FailureKind.COMMUNICATION: 1, FailureKind.ENDED: 2}


def decide(view: View, settings: RendezvousSettings) -> Decision:
    """What the leader should do now."""
    if view.outcome is not None:
        return Hold()
    if view.epoch is None:
        return _begin(view, settings)
    if view.remembered is not None and view.remembered.number > view.epoch.number:
        return FormEpoch(view.remembered)  # the store went back to an earlier state of itself
    epoch = view.epoch
    if _known(view) > epoch.number:
        return _catch_up(view, epoch)
    if view.now - view.changed_at >= settings.early_seconds:
        # It has been healthy: what failed before is no part of a row any more.
        epoch = msgspec.structs.replace(epoch, early=0)
    if not epoch.members:
        return _resume(view, epoch, settings)
    if all(node in view.done for node in epoch.nodes):
        return EndRun(OutcomeRecord(state=OutcomeState.SUCCEEDED, epoch=epoch.number, restarts=epoch.restarts))
    lost = [node for node in epoch.nodes if _is_lost(node, view)]
    failures = _failures(view, epoch)
    if lost:
        return _continue_without(view, epoch, lost, settings)
    if failures:
        return _after_failure(view, epoch, failures, settings)
    return _change_membership(view, epoch, settings)


def root_cause(failures: Iterable[tuple[int, FailureRecord]]) -> FailureRecord:
    """The failure that explains the others: by class, and within a class by the store's order, not by any clock.

    Args:
        failures: at least one, each with the revision at which it was reported.
    """
    return min(failures, key=lambda failure: (_KIND_ORDER[failure[1].kind], failure[0]))[1]


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The nodes that could be in the next epoch, in rank order, and how many of them it takes."""

    ordered: tuple[Peer, ...]
    target: int
    chosen: tuple[Peer, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "chosen", self.ordered[: self.target])


def _candidates(view: View) -> _Candidates:
    rank = {node: position for position, node in enumerate(view.epoch.nodes if view.epoch else ())}
    fit = [peer for peer in view.peers.values() if _is_fit(peer, view)]
    fit.sort(key=lambda peer: (rank.get(peer.id, len(rank)), peer.joined, peer.id))
    return _Candidates(tuple(fit), view.size.target)


def _is_fit(peer: Peer, view: View) -> bool:
    return (
        (peer.answers or (view.epoch is not None and peer.id in view.epoch.nodes))
        and peer.id not in view.dead
        and peer.record.phase is not NodePhase.LEAVING
        and peer.record.name not in view.size.going
        and peer.record.contract == CONTRACT_VERSION
    )


def _is_lost(node: str, view: View) -> bool:
    """Whether a member can't go on: it is dead or leaves. A lease that ended while its node answers is no loss."""
    if node in view.dead:
        return True
    if node not in view.peers:
        return node not in view.silent
    return _left(node, view) or view.peers[node].record.phase is NodePhase.CUT_OFF


def _failures(view: View, epoch: EpochRecord) -> list[tuple[int, FailureRecord]]:
    members = (view.peers.get(node) for node in epoch.nodes)
    return [
        (peer.failed_at, peer.record.failure)
        for peer in members
        if peer is not None and peer.record.failure is not None and peer.record.failure.epoch == epoch.number
    ]


def _known(view: View) -> int:
    """The highest epoch that any node knows of; a number that could not be counted on from is nobody's knowledge."""
    return max((peer.record.epoch for peer in view.peers.values() if peer.record.epoch < EPOCH_LIMIT), default=0)


def _catch_up(view: View, epoch: EpochRecord) -> Decision:
    """Nodes know a later epoch than the store, which lost it: one that is later still brings all together again."""
    restarts = max(epoch.restarts, *(peer.record.restarts for peer in view.peers.values()))
    candidates = _candidates(view)
    before = msgspec.structs.replace(epoch, restarts=restarts)
    cause = "the store had lost an epoch that nodes still know"
    if len(candidates.ordered) < view.size.min:
        return _pause(view, before, candidates, EpochReason.NODE_LOST, cause)
    return _form(view, before, candidates.chosen, EpochReason.NODE_LOST, cause)


def _begin(view: View, settings: RendezvousSettings) -> Decision:
    """No epoch stands in the store: the run is new, or the store lost its data."""
    known = _known(view)
    if view.remembered is not None and view.remembered.number >= known:
        return FormEpoch(view.remembered)
    if known == 0:
        return _first(view, _blank(view, 0), settings)
    if not view.gave_way:
        return GiveWay("the store has lost the epoch; leaving the lead to a node that knows it")
    # Nobody has taken it: whoever knew the epoch itself is gone, and its number is all that is left.
    return _first(view, _blank(view, known), settings)


def _blank(view: View, number: int) -> EpochRecord:
    """An epoch without members that carries the history that the nodes know."""
    restarts = max((peer.record.restarts for peer in view.peers.values()), default=0)
    return EpochRecord(number=number, restarts=restarts)


def _first(view: View, before: EpochRecord, settings: RendezvousSettings) -> Decision:
    """Form an epoch with nobody to carry on: all that are wanted, or after the joining window whoever has come."""
    candidates = _candidates(view)
    arrivals = [peer.arrived for peer in candidates.ordered]
    since = min(arrivals, default=view.now)
    if len(candidates.ordered) >= candidates.target:
        return _form(view, before, candidates.chosen, EpochReason.NODE_JOINED, _greeting(candidates.chosen))
    if len(candidates.ordered) < view.size.min:
        return _too_few(view, before, candidates, since, settings)
    # In a store without an epoch there may be nodes that know one, and whose keys are on their way back.
    window = settings.joining_window if view.epoch is not None else max(settings.joining_window, settings.lease)
    if view.now >= since + window:
        return _form(view, before, candidates.chosen, EpochReason.NODE_JOINED, _greeting(candidates.chosen))
    return Hold(
        since + window,
        f"{_count(len(candidates.ordered), 'node')} of {candidates.target} {_are(len(candidates.ordered))} there; "
        "waiting for more until the joining window closes",
    )


def _resume(view: View, epoch: EpochRecord, settings: RendezvousSettings) -> Decision:
    """The standing epoch has no members: form one as soon as there are enough again."""
    candidates = _candidates(view)
    if len(candidates.ordered) < view.size.min:
        return _too_few(view, epoch, candidates, view.changed_at, settings)
    return _gathered(view, epoch, candidates, candidates.ordered, settings)


def _continue_without(view: View, epoch: EpochRecord, lost: Sequence[str], settings: RendezvousSettings) -> Decision:
    """Members are gone: go on with whoever is there; never wait for a replacement."""
    cause = _and(_departure(node, view) for node in lost)
    reason = EpochReason.NODE_LEFT if all(_left(node, view) for node in lost) else EpochReason.NODE_LOST
    candidates = _candidates(view)
    if not any(peer.id in epoch.nodes for peer in candidates.ordered) and not view.silent.intersection(epoch.nodes):
        # Nobody of the epoch is left, so nothing is being held up: begin as at the start. Where the id may be used
        # again, this is another run, which has its whole budget; the numbers go on all the same.
        restarts = epoch.restarts if settings.unique_run else 0
        return _first(view, msgspec.structs.replace(epoch, early=0, restarts=restarts), settings)
    if len(candidates.ordered) < view.size.min:
        return _pause(view, epoch, candidates, reason, cause)
    return _form(view, epoch, candidates.chosen, reason, cause)


def _after_failure(
    view: View, epoch: EpochRecord, failures: Sequence[tuple[int, FailureRecord]], settings: RendezvousSettings
) -> Decision:
    """A worker failed and all members are there: charge it, and begin anew or end the run."""
    failure = root_cause(failures)
    since = view.now if view.failed_since is None else view.failed_since
    all_told = len(failures) == len(epoch.members)
    if failure.kind is not FailureKind.PROGRAM and view.now < since + CAUSE_WINDOW and not all_told:
        return Hold(since + CAUSE_WINDOW)
    early = epoch.early + 1 if failure.uptime < settings.early_seconds else 0
    spent = epoch.restarts >= settings.max_restarts
    hopeless = early >= settings.early_failures
    if spent or hopeless:
        if not all_told and view.now < since + LAST_WORD_WINDOW:
            return Hold(since + LAST_WORD_WINDOW)
        reason = (
            f"its workers failed {_times(early)} in a row within {settings.early_seconds:g} s of their start"
            if hopeless and not (spent and settings.max_restarts == 0)
            else f"no restart is left of the {settings.max_restarts} that it may have"
            if settings.max_restarts
            else "it may not restart"
        )
        return EndRun(
            OutcomeRecord(
                state=OutcomeState.FAILED,
                epoch=epoch.number,
                restarts=epoch.restarts,
                message=f"{describe(failure)}; {reason}",
                failure=failure,
            )
        )
    candidates = _candidates(view)
    charged = EpochRecord(number=epoch.number, restarts=epoch.restarts + 1, early=early, store=epoch.store)
    cause = describe(failure)
    if len(candidates.ordered) < view.size.min:
        return _pause(view, charged, candidates, EpochReason.WORKER_FAILED, cause)
    return _form(view, charged, candidates.chosen, EpochReason.WORKER_FAILED, cause)


def _change_membership(view: View, epoch: EpochRecord, settings: RendezvousSettings) -> Decision:
    """All is well in the epoch: does it have the right members?"""
    candidates = _candidates(view)
    chosen = tuple(peer.id for peer in candidates.chosen)
    # A member whose key is on its way back is still a member; only a smaller size sends one away.
    staying = [node for node in epoch.nodes if node in chosen or node in view.silent]
    leaving = [node for node in epoch.nodes if node not in staying]
    joining = [peer for peer in candidates.chosen if peer.id not in epoch.nodes]
    if leaving:
        cause = _and(f"{name_of(node)} is taken away" for node in leaving)
        if len(candidates.ordered) < view.size.min:
            return _pause(view, epoch, candidates, EpochReason.RESIZED, cause)
        return _form(view, epoch, candidates.chosen, EpochReason.RESIZED, cause)
    finishing = any(_is_finishing(node, view) for node in epoch.nodes)
    fit = {peer.id for peer in candidates.ordered}
    if len(fit.union(staying)) < view.size.min and not finishing:
        cause = f"at least {_count(view.size.min, 'node')} {_are(view.size.min)} wanted now"
        return _pause(view, epoch, candidates, EpochReason.RESIZED, cause)
    room = candidates.target - len(epoch.nodes)
    if not joining or room <= 0:
        return Hold()
    if finishing:
        return Hold(why="the run is about to finish; whoever comes now waits")
    if view.silent.intersection(epoch.nodes):
        return Hold(why="a member's key is on its way back; whoever comes now waits")
    if any(not view.peers[node].answers for node in epoch.nodes if node in view.peers):
        return Hold(why="a member has not linked to its new leader yet; whoever comes now waits")
    return _gathered(view, epoch, candidates, joining, settings)


def _gathered(
    view: View, epoch: EpochRecord, candidates: _Candidates, joining: Sequence[Peer], settings: RendezvousSettings
) -> Decision:
    """Take the newcomers in: at once when all that are wanted are there, else when no more came for a moment."""
    last = max(peer.arrived for peer in joining)
    if len(candidates.ordered) < candidates.target and view.now < last + settings.gather:
        return Hold(last + settings.gather)
    newcomers = [peer for peer in candidates.chosen if peer.id not in epoch.nodes]
    return _form(view, epoch, candidates.chosen, EpochReason.NODE_JOINED, _greeting(newcomers or candidates.chosen))


def _is_finishing(node: str, view: View) -> bool:
    peer = view.peers.get(node)
    return node in view.done or (peer is not None and peer.record.phase in (NodePhase.FINISHING, NodePhase.DONE))


def _too_few(
    view: View, before: EpochRecord, candidates: _Candidates, since: float, settings: RendezvousSettings
) -> Decision:
    why = _waiting_for(view, candidates)
    if view.now < since + settings.join_timeout:
        return Hold(since + settings.join_timeout, why)
    return EndRun(
        OutcomeRecord(
            state=OutcomeState.FAILED,
            epoch=before.number,
            restarts=before.restarts,
            message=f"no more nodes came within {settings.join_timeout:g} s: {why}",
        )
    )


def _pause(view: View, before: EpochRecord, candidates: _Candidates, reason: EpochReason, cause: str) -> Decision:
    """An epoch without members: those that are left stop their workers and wait."""
    return FormEpoch(
        EpochRecord(
            number=_next_number(view, before),
            restarts=before.restarts,
            early=before.early,
            wanted=view.size.wanted,
            reason=reason,
            cause=f"{cause}; {_waiting_for(view, candidates)}",
        )
    )


def _next_number(view: View, before: EpochRecord) -> int:
    return max(before.number, _known(view)) + 1


def _form(view: View, before: EpochRecord, chosen: Sequence[Peer], reason: EpochReason, cause: str) -> Decision:
    """The next epoch with these nodes, its store on the first of them that offers a port that no epoch used."""
    # Who has said that it knows the standing epoch has renewed its offer since.
    hosts = (peer for peer in chosen if peer.record.store and peer.record.epoch >= before.number)
    host = next(hosts, None)
    if host is None:
        return Hold(why="waiting for a node that can serve the next epoch's store")
    return FormEpoch(
        EpochRecord(
            number=_next_number(view, before),
            members=tuple(Member(peer.id, peer.record.address, peer.record.workers) for peer in chosen),
            store=f"{bracketed(host.record.address)}:{host.record.store}",
            restarts=before.restarts,
            early=before.early,
            wanted=view.size.wanted,
            reason=reason,
            cause=cause,
        )
    )


def name_of(node: str) -> str:
    """The name in a node's id."""
    return node.rpartition(".")[0] or node


def describe(failure: FailureRecord) -> str:
    """A failure in words: "rank 3 on digits-2: ValueError: …"."""
    return f"rank {failure.rank} on {name_of(failure.node)}: {failure.message or f'exit code {failure.exit_code}'}"


def _left(node: str, view: View) -> bool:
    peer = view.peers.get(node)
    return peer is not None and peer.record.phase is NodePhase.LEAVING


def _departure(node: str, view: View) -> str:
    if _left(node, view):
        return f"{name_of(node)} left"
    if node in view.peers and view.peers[node].record.phase is NodePhase.CUT_OFF:
        return f"{name_of(node)} was cut off"
    return f"{name_of(node)} died" if node in view.dead else f"{name_of(node)} is gone"


def _greeting(newcomers: Sequence[Peer]) -> str:
    names = [name_of(peer.id) for peer in newcomers]
    if len(names) > 8:
        return f"{len(names)} nodes joined"
    return f"{_and(names)} joined"


def _waiting_for(view: View, candidates: _Candidates) -> str:
    here = len(candidates.ordered)
    names = f" ({_and(name_of(peer.id) for peer in candidates.ordered)})" if 0 < here <= 8 else ""
    strangers = [peer for peer in view.peers.values() if peer.record.contract != CONTRACT_VERSION]
    other = (
        f"; {_and(name_of(peer.id) for peer in strangers)} cannot take part: "
        f"{other_version(strangers[0].record.contract)}"
        if strangers
        else ""
    )
    return f"{_count(here, 'node')}{names} of at least {view.size.min} {_are(here)} there; waiting for more{other}"


def _and(parts: Iterable[str]) -> str:
    """A list in words: "a, b and c"."""
    items = list(parts)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
