"""The leader's decision, as a pure function of the membership.

The leader calls :func:`plan` after every change and carries out the result. The rules, in order:

1. A run that has an outcome is over.
2. A store that lost data is restored.
3. All workers of all members exited with 0: the run has succeeded.
4. A worker failed in a way that is configured as non-retryable: the run has failed.
5. A member is lost, or a worker failed: the next round forms at once with the nodes that are present. A failure
   counts against the restart budget. A change of membership does not, nor does a failure that a lost member explains
   or whose exit code is configured as uncharged.
6. A member leaves, the size has changed, or a node joins: the next round forms after the notice that workers have
   asked for. Joins are debounced first. The round includes the desired number of nodes; others wait as spares.
7. Too few nodes are left: the next round has no members, and all nodes wait.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from torchelastic.protocol.codec import other_version, shorten
from torchelastic.protocol.records import (
    NUMBER_STEP,
    PROTOCOL_VERSION,
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
)
from torchelastic.rendezvous.policy.membership import (
    MAX_NAMES,
    are,
    count,
    departures,
    describe,
    in_rank_order,
    joined,
    named,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torchelastic.config.settings import RendezvousSettings
    from torchelastic.protocol.records import NodeRecord
    from torchelastic.rendezvous.policy.membership import Membership, Peer

CAUSE_WINDOW: Final = 0.1
"""Seconds to wait for the cause of a failure that looks like a consequence: the exit of a peer may be reported a few
milliseconds after the failed collective operation that it causes."""

REPORT_WINDOW: Final = 1.0
"""Seconds that a run that is about to fail waits for members that have not reported their failure yet."""

MAX_KEPT_MESSAGE: Final = 1024
"""Maximum length of a failure's message in later rounds, in characters."""

MAX_SENTENCE: Final = 12_000
"""Maximum length of a cause or of an outcome's message, in characters."""

MAX_DEBOUNCE_FACTOR: Final = 10
"""Upper bound on join debouncing, as a multiple of ``join_debounce``."""

LAST_CALL: Final = 1.0
MAX_LAST_CALL: Final = 10.0
"""The default of ``last_call_timeout`` in seconds, without and with a desired size. The second is also the longest wait
for a stream of new nodes, or for nodes that are starting, unless ``last_call_timeout`` is longer."""

RECONNECT_TIME: Final = 1.5
"""Seconds within which a node of a running round registers again after the store is back: it retries each second. A
request that the store never answers delays this by half a lease."""

STORE_LOST_ROUND: Final = "the store had lost a round that nodes still know"


@dataclass(frozen=True, slots=True)
class Hold:
    """Do nothing until something changes.

    Attributes:
        until: when to decide again without a change; None to wait for a change.
        why: the reason, for the log; empty if there is nothing to log.
    """

    until: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Resign:
    """Give up the lead for one lease, in favor of a node that can restore a round that the store has lost."""


Decision = Hold | Resign | RoundRecord | NoticeRecord | OutcomeRecord
"""The leader commits a record: the next round, a notice of it (0 seconds withdraw the notice), or the run's outcome."""


def plan(membership: Membership, settings: RendezvousSettings) -> Decision:
    """Return the leader's next decision."""
    return Hold() if membership.outcome is not None else _Plan(membership, settings).decide()


def root_cause(failures: Iterable[tuple[int, FailureRecord]]) -> FailureRecord:
    """Return the failure that explains the others: by kind, then non-retryable first, then by the revision."""
    kinds = list(FailureKind)
    return min(failures, key=lambda each: (kinds.index(each[1].kind), not each[1].non_retryable, each[0]))[1]


class _Plan:
    """One decision.

    Attributes:
        membership: what the leader knows.
        settings: the rules.
        before: the round from which the run continues.
        members: the nodes of the current round that have a key.
        eligible: the nodes that could be in the next round, in order of priority.
        unconnected: the nodes that could be in the next round after they connect to this leader.
        starting: whether nodes are present that cannot start workers yet.
    """

    def __init__(self, membership: Membership, settings: RendezvousSettings) -> None:
        self.membership = membership
        self.settings = settings
        self.before = membership.round or RoundRecord(
            settings.resume.round,
            restarts=settings.resume.restarts,
            uncharged_restarts=settings.resume.uncharged_restarts,
        )
        ranks, last = membership.ranks, len(membership.ranks)
        fit = [peer for peer in membership.peers.values() if membership.may_join(peer)]
        self.members = [membership.peers[node] for node in ranks if node in membership.peers]
        self.unconnected = [peer for peer in fit if not peer.answers and peer.id not in ranks]
        self.starting = any(
            peer.record.starting for peer in membership.peers.values() if peer.id not in membership.dead
        )
        self.eligible = [peer for peer in fit if peer.answers or peer.id in ranks]
        self.eligible.sort(key=lambda peer: (ranks.get(peer.id, last), peer.joined_revision, peer.id))

    @functools.cached_property
    def chosen(self) -> list[Peer]:
        """The nodes of the next round, in rank order."""
        return in_rank_order(self.eligible[: self.membership.size.target], self.membership.ranks)

    def decide(self) -> Decision:
        """Return the decision."""
        membership = self.membership
        if (recovery := self._recover()) is not None:
            return recovery
        if membership.round is None:
            return self._form_first()
        if self.before.number > membership.number:
            # No node has restored the lost round, so form a later one with all nodes.
            return self._form_or_pause(RoundReason.NODE_LOST, STORE_LOST_ROUND)
        if membership.now - membership.changed_at >= self.settings.crash_loop_seconds:
            self._continue_with(early_failures=0)
        if not membership.ranks:
            return self._leave_pause()
        if membership.done.issuperset(membership.ranks):
            return OutcomeRecord(OutcomeState.SUCCEEDED, self.before.number, self.before.restarts)
        return self._continue()

    def _continue_with(self, **changes: Any) -> None:  # noqa: ANN401 - any field of the record
        self.before = msgspec.structs.replace(self.before, **changes)

    def _recover(self) -> Decision | None:
        """Return the decision that restores a round that the store has lost; None to continue from ``before``.

        A node's key holds the highest round number and the restart counts that it knows. A leader that remembers the
        lost round commits it again. Any other leader yields for one lease to a node that may remember it. If no node
        does, the leader continues from the highest number and counts that any node knows.
        """
        membership, highest = self.membership, self.membership.highest_round_seen
        remembered = membership.remembered
        if remembered is not None and remembered.number > membership.number and remembered.number >= highest:
            return remembered
        if membership.round is not None and highest <= membership.number:
            return None
        if highest > self.settings.resume.round and not membership.resigned:
            return Resign()
        known: list[RoundRecord | NodeRecord] = [self.before, *(peer.record for peer in membership.peers.values())]
        self._continue_with(
            number=max(self.before.number, highest),
            restarts=max(record.restarts for record in known),
            uncharged_restarts=max(record.uncharged_restarts for record in known),
        )
        return None

    def _continue(self) -> Decision:
        """Return the decision for a round that trains, or has just stopped training."""
        membership = self.membership
        failures = self._failures()
        if any(failure.non_retryable and failure.kind is FailureKind.PROGRAM for _, failure in failures):
            return self._after_failure(failures)
        needed = [node for node in membership.ranks if not self._is_dispensable(node)]
        lost = [node for node in needed if membership.is_lost(node)]
        leaving = [node for node in needed if membership.is_present(node) and membership.is_leaving(node)]
        if (lost or leaving or failures) and membership.incomplete and membership.now < membership.wait_until:
            # A round without these members would lose live nodes that may know a later round than the store.
            return Hold(membership.wait_until, "the store was unreachable; waiting for the members to reconnect")
        if lost:
            return self._continue_without([*lost, *leaving])
        if leaving:
            staying = self._failures(without=leaving)
            noticed = membership.current_notice is not None
            if staying and noticed and root_cause(staying).kind is FailureKind.PROGRAM:
                return self._after_failure(staying)  # the leaving members had not stopped yet
            return self._continue_without(leaving) if failures else self._after_departure(leaving)
        return self._after_failure(failures) if failures else self._change_membership()

    def _is_dispensable(self, node: str) -> bool:
        """Return whether a member can leave its round: its workers have exited, and it does not serve the TCPStore."""
        host = self.before.tcp_store.rpartition(":")[0]
        address = self.before.members[self.membership.ranks[node]].address
        return node in self.membership.done and host != bracketed(address)

    def _failures(self, without: Sequence[str] = ()) -> list[tuple[int, FailureRecord]]:
        """Return the failures of the members in this round, each with its position in the store's order."""
        failed = [(peer.failed_at, peer.record.failure) for peer in self.members if peer.id not in without]
        return [(at, failure) for at, failure in failed if failure and failure.round == self.membership.number]

    # -- beginnings

    def _form_first(self) -> Decision:
        """Form a round without current members: when all desired nodes are present, or after the last call.

        An empty store is either new or has lost its data, and holds nothing that tells which. A node that knows a lost
        round usually registers again within ``RECONNECT_TIME``, so a leader that has seen no such node for that time
        assumes a new store. A node that returns later, for example after a network failure, still prevails: its record
        shows the lost round, this leader resigns, and the lost round replaces the new one (see ``_recover()``). If a
        node is present that knows a lost round, but cannot restore it, the others get one lease to return.
        """
        membership, settings, nodes = self.membership, self.settings, len(self.eligible)
        since = min((peer.arrived for peer in self.eligible), default=membership.now)
        quiet = settings.last_call_timeout
        if quiet is None:
            quiet = LAST_CALL if membership.size.desired is None else MAX_LAST_CALL
        until = since + max(quiet, min(MAX_DEBOUNCE_FACTOR * quiet, MAX_LAST_CALL))
        if not (self.unconnected or self.starting):
            until = min(until, membership.appeared_at + quiet)
        if membership.round is None and membership.highest_round_seen > settings.resume.round:
            until = max(until, since + settings.lease)
        elif membership.round is None:
            until = max(until, membership.changed_at + min(RECONNECT_TIME, settings.lease))
        is_over = membership.now >= until
        if nodes < membership.size.min:
            if membership.round is not None or membership.highest_round_seen <= settings.resume.round or not nodes:
                return self._too_few(since)
            if is_over:  # workers of an older round than the lost one may still run
                return self._pause(RoundReason.NODE_LOST, STORE_LOST_ROUND)
            return Hold(until, self._waiting_for())
        if nodes >= membership.size.target or is_over:
            return self._form(RoundReason.NODE_JOINED, joined(self.chosen))
        present = f"{count(nodes, 'node')} of {membership.size.target} {are(nodes)} present"
        return Hold(until, f"{present}; waiting for more until the last call ends")

    def _start_over(self) -> Decision:
        """Form a round as at the start of the run, because no member is left.

        If the run id may be reused, this is another run with a full restart budget; the round numbers continue.
        """
        self._continue_with(early_failures=0)
        if self.settings.unique_run:
            return self._form_first()
        self._continue_with(restarts=0, failure=None)
        change = self._form_first()
        return msgspec.structs.replace(change, uncharged_restarts=0) if isinstance(change, RoundRecord) else change

    def _leave_pause(self) -> Decision:
        """Form a round with members as soon as enough nodes are present."""
        if all(peer.joined_revision > self.membership.since for peer in self.eligible):
            return self._start_over()  # the nodes that waited are gone
        if len(self.eligible) < self.membership.size.min:
            return self._too_few(self.membership.changed_at)
        return self._debounced(self.eligible)

    # -- losses and failures

    def _continue_without(self, going: Sequence[str]) -> Decision:
        """Continue with the present nodes after members are lost or leave, without waiting for a replacement."""
        if self._all_members_leave():
            return self._start_over()
        if self.membership.now < (until := self._wait_for_spares()):
            return Hold(until)
        all_leave = all(map(self.membership.is_leaving, going))
        reason = RoundReason.NODE_LEFT if all_leave else RoundReason.NODE_LOST
        return self._form_or_pause(reason, departures(going, self.membership))

    def _wait_for_spares(self) -> float:
        """Return the time until which to wait for spares to connect to a new leader, which avoids a second change."""
        if len(self.eligible) >= self.membership.size.target:
            return 0.0
        spares = [peer.arrived for peer in self.unconnected if peer.record.round == self.membership.number]
        return max(spares) + MAX_DEBOUNCE_FACTOR * self.settings.join_debounce if spares else 0.0

    def _all_members_leave(self) -> bool:
        """Return whether all members of the round are leaving or gone."""
        membership = self.membership
        return not any(
            membership.may_return(node) or (membership.is_present(node) and not membership.is_leaving(node))
            for node in membership.ranks
        )

    def _after_failure(self, failures: Sequence[tuple[int, FailureRecord]]) -> Decision:
        """Count a worker's failure against the budget or as uncharged; then restart the workers or end the run."""
        now, settings, round, failure = self.membership.now, self.settings, self.before, root_cause(failures)
        since = now if self.membership.failed_since is None else self.membership.failed_since
        all_reported = len(failures) == len(round.members)
        if failure.kind is not FailureKind.PROGRAM and now < since + CAUSE_WINDOW and not all_reported:
            return Hold(since + CAUSE_WINDOW)
        early = round.early_failures + 1 if failure.uptime < settings.crash_loop_seconds else 0
        if not self._has_stepped() and round.failures_without_step is not None:
            self._continue_with(failures_without_step=round.failures_without_step + 1)
        if why := self._why_run_ends(failure, early):
            explained = failure.non_retryable and failure.kind is FailureKind.PROGRAM
            if not explained and not all_reported and now < since + REPORT_WINDOW:
                return Hold(since + REPORT_WINDOW)
            message = shorten(f"{describe(failure)}; {why}", MAX_SENTENCE)
            return OutcomeRecord(OutcomeState.FAILED, round.number, round.restarts, message, failure)
        self._continue_with(early_failures=early)
        if failure.uncharged:
            self._continue_with(uncharged_restarts=round.uncharged_restarts + 1)
        else:
            kept = msgspec.structs.replace(failure, message=shorten(failure.message, MAX_KEPT_MESSAGE))
            self._continue_with(restarts=round.restarts + 1, failure=kept)
        return self._form_or_pause(RoundReason.WORKER_FAILED, describe(failure))

    def _has_stepped(self) -> bool:
        """Return whether the program has completed a step or written a checkpoint in the round."""
        records = [peer.record for peer in self.members if peer.record.round == self.membership.number]
        return any(record.has_stepped or record.last_checkpoint_at > 0 for record in records)

    def _why_run_ends(self, failure: FailureRecord, early: int) -> str:
        """Return why the run ends with this failure; empty if it restarts."""
        settings = self.settings
        if failure.non_retryable:
            return "this failure is non-retryable, so the run ends even if restarts are left"
        spent = self.before.restarts >= settings.max_restarts and not failure.uncharged
        if spent and settings.max_restarts == 0:
            return "restarts are not allowed"
        if early >= settings.crash_loop_limit:
            return f"its workers failed {_times(early)} within {settings.crash_loop_seconds:g} s of their start"
        if (idle := self.before.failures_without_step or 0) >= settings.crash_loop_limit:
            return f"its workers failed {_times(idle)} before they had completed a step"
        return f"no restarts are left (the limit is {settings.max_restarts})" if spent else ""

    # -- planned changes

    def _after_departure(self, leaving: Sequence[str]) -> Decision:
        """Continue without the leaving members, after the notice that members have asked for."""
        change = self._continue_without(leaving)
        noticed = self.membership.current_notice is not None or self._requested_seconds() > 0
        if not isinstance(change, RoundRecord) and noticed and self._all_members_leave():
            # No node needs another round, but the leaving nodes wait for the end of this one.
            change = self._pause(RoundReason.NODE_LEFT, departures(leaving, self.membership))
        return self._after_notice(change)

    def _change_membership(self) -> Decision:
        """Change the members of a healthy round if the size or the present nodes have changed."""
        membership, ranks, size = self.membership, self.membership.ranks, self.membership.size
        chosen = {peer.id for peer in self.chosen}
        # A member without a key, or a finished member that has left, is no reason for a new round.
        stays = {node for node in ranks if node in chosen or membership.may_return(node) or node in membership.done}
        finishing = any(map(membership.is_finishing, ranks))
        if away := [node for node in ranks if node not in stays]:
            cause = f"{named(away)} {are(len(away))} removed"
            return self._after_notice(self._form_or_pause(RoundReason.RESIZED, cause))
        if len(stays.union(peer.id for peer in self.eligible)) < size.min and not finishing:
            cause = f"at least {count(size.min, 'node')} {are(size.min)} wanted now"
            return self._after_notice(self._pause(RoundReason.RESIZED, cause))
        joining = [peer for peer in self.chosen if peer.id not in ranks]
        if not joining or size.target <= len(ranks):
            return self._withdraw_notice(Hold())
        if finishing:
            return self._withdraw_notice(Hold(why="the run is about to finish; new nodes wait"))
        if membership.incomplete:
            return Hold(why="a member without a key may return; new nodes wait")
        if not all(peer.answers for peer in self.members):
            return Hold(why="a member has not connected to its new leader yet; new nodes wait")
        return self._after_notice(self._debounced(joining))

    def _debounced(self, joining: Sequence[Peer]) -> Decision:
        """Add new nodes at once if all desired nodes are present, else after ``join_debounce`` without more joins."""
        if len(self.eligible) < self.membership.size.target:
            until = self._debounce_until(joining)
            if self.membership.now < until:
                return Hold(until)
        newcomers = [peer for peer in self.chosen if peer.id not in self.membership.ranks]
        return self._form(RoundReason.NODE_JOINED, joined(newcomers or self.chosen))

    def _debounce_until(self, joining: Sequence[Peer]) -> float:
        """Return the time until which new nodes wait for more new nodes."""
        debounce = self.settings.join_debounce
        limit = MAX_DEBOUNCE_FACTOR * debounce
        late = [peer.arrived for peer in self.unconnected]
        arrivals = sorted([peer.arrived for peer in joining] + late)
        first = last = arrivals[-1]
        for arrived in reversed(arrivals):
            if first - arrived > debounce:
                break
            first = arrived
        return first + limit if any(arrived >= first for arrived in late) else min(last + debounce, first + limit)

    # -- notice of a planned change

    def _after_notice(self, change: Decision) -> Decision:
        """Return a planned change after the requested notice; until then, give the notice or wait."""
        if not isinstance(change, RoundRecord):
            return change
        membership, notice, seconds = self.membership, self.membership.current_notice, self._requested_seconds()
        if notice is None:
            if seconds <= 0:
                return change
            # The number is higher than any that a node knows, even if the store lost the last notice.
            last = membership.notice.number if membership.notice is not None else 0
            answered = [peer.record.answered_notice for peer in membership.peers.values()]
            number = max([last, *(each for each in answered if each <= last + NUMBER_STEP)]) + 1
            return NoticeRecord(membership.number, number, seconds, reason=change.reason, cause=change.cause)
        until = membership.noticed_at + notice.seconds
        # A member without a key may not have answered yet.
        awaits = membership.incomplete or any(peer.record.answered_notice < notice.number for peer in self._asking())
        if membership.now >= until or not awaits:
            return change
        why = f"{notice.cause}: the workers have {notice.seconds:g} s to save a checkpoint before the round changes"
        return Hold(until, why)

    def _withdraw_notice(self, otherwise: Hold) -> Decision:
        """Withdraw the notice of a change that is no longer needed; without a notice, return ``otherwise``."""
        notice = self.membership.current_notice
        return otherwise if notice is None else msgspec.structs.replace(notice, seconds=0.0)

    def _requested_seconds(self) -> float:
        """Return the seconds of notice that the members ask for; 0 if none asks."""
        return min(max((peer.record.notice for peer in self._asking()), default=0.0), self.settings.notice)

    def _asking(self) -> Iterator[Peer]:
        """Yield the members whose workers have asked for notice in this round and have not exited."""
        for peer in self.members:
            asks = peer.record.notice > 0 and peer.record.phase is not NodePhase.DONE
            if asks and peer.record.round == self.membership.number:
                yield peer

    # -- round building

    def _too_few(self, since: float) -> Decision:
        """Wait for more nodes; after the join timeout, end the run."""
        membership, until = self.membership, since + self.settings.join_timeout
        away = () if membership.ranks else membership.last_members
        why = self._waiting_for(missing=[node for node in away if not membership.is_present(node)])
        if membership.now < until:
            return Hold(until, "" if self.starting and not self.eligible else why)
        message = f"no more nodes joined within {self.settings.join_timeout:g} s: {why}"
        return OutcomeRecord(OutcomeState.FAILED, self.before.number, self.before.restarts, message)

    def _form_or_pause(self, reason: RoundReason, cause: str) -> Decision:
        """Return the next round with the present nodes, or without members if there are too few nodes."""
        return (self._pause if len(self.eligible) < self.membership.size.min else self._form)(reason, cause)

    def _pause(self, reason: RoundReason, cause: str) -> RoundRecord:
        """Form a round without members: the remaining nodes stop their workers and wait."""
        return self._next_round(reason, f"{cause}; {self._waiting_for()}")

    def _form(self, reason: RoundReason, cause: str) -> Decision:
        """Return the next round with the chosen nodes; its TCPStore is on a node with an unused port."""
        chosen, before = self.chosen, self.before
        roles = tuple(peer.record.role for peer in chosen)
        # A node that has received the current round offers a new port.
        able = (peer for peer in chosen if peer.record.tcp_store_port and peer.record.round >= self.membership.number)
        host = next(able, None)
        if host is None:
            return Hold(why="waiting for a node that can serve the next round's TCPStore")
        # _after_failure() has counted a failure, even if a round without members came in between.
        failed = RoundReason.WORKER_FAILED in ((reason,) if before.members else (reason, before.reason))
        stay = [rank for rank, stays in enumerate(self._stays(chosen)) if stays]
        size = sum(peer.record.workers for peer in chosen)
        return msgspec.structs.replace(
            self._next_round(reason, cause),
            uncharged_restarts=before.uncharged_restarts + (before.number > 0 and not failed),
            members=tuple(Member(peer.id, peer.record.address, peer.record.workers) for peer in chosen),
            roles=roles if len({*roles}) > 1 else (),
            tcp_store=f"{bracketed(host.record.address)}:{host.record.tcp_store_port}",
            staying=len(stay),
            starting=tuple(sorted({*range(size)}.difference(stay))) if stay else (),
        )

    def _stays(self, chosen: Sequence[Peer]) -> Iterator[bool]:
        """Yield for each worker of the next round whether it continues from the current one.

        Workers do so only together with one that has the state of the training.
        """
        staying = [peer for peer in chosen if peer.record.round == self.membership.number and peer.record.staying]
        trains = any(peer.record.has_state for peer in staying)
        for peer in chosen:
            for local in range(peer.record.workers):
                yield trains and peer in staying and local in peer.record.staying

    def _next_round(self, reason: RoundReason, cause: str) -> RoundRecord:
        return RoundRecord(
            number=max(self.before.number, self.membership.highest_round_seen) + 1,
            restarts=self.before.restarts,
            early_failures=self.before.early_failures,
            failures_without_step=0 if self._has_stepped() else self.before.failures_without_step,
            uncharged_restarts=self.before.uncharged_restarts,
            desired=self.membership.size.desired,
            reason=reason,
            cause=shorten(cause, MAX_SENTENCE),
            failure=self.before.failure,
        )

    def _waiting_for(self, missing: Sequence[str] = ()) -> str:
        """Return the message that too few nodes are present; it names the present, missing and incompatible nodes."""
        membership, present = self.membership, [peer.id for peer in self.eligible]
        names = f" ({named(present)})" if 0 < len(present) <= MAX_NAMES else ""
        parts = [f"{count(len(present), 'node')}{names} of at least {membership.size.min} {are(len(present))} present"]
        if missing:
            parts.append(f"{named(missing)} {are(len(missing))} missing")
        if self.unconnected:
            verb = "has" if len(self.unconnected) == 1 else "have"
            parts.append(f"{named([peer.id for peer in self.unconnected])} {verb} not answered yet")
        parts.append("waiting for more")
        if others := [peer for peer in membership.peers.values() if peer.record.protocol != PROTOCOL_VERSION]:
            names = named([peer.id for peer in others])
            parts.append(f"{names} cannot take part: {other_version(others[0].record.protocol)}")
        return "; ".join(parts)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times in a row"
