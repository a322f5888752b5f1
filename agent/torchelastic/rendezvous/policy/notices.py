"""Notice of a planned change: it waits until the workers that asked for notice have saved.

A join, a resize or a departure is not urgent. If a member's workers asked for notice, the leader first announces the
change. The change follows when all who asked have answered, or when their time is over. A loss or a failure meanwhile
ends the wait, because nothing is left to be saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from torchelastic.protocol import NodePhase, NoticeRecord
from torchelastic.rendezvous.policy.snapshot import FormRound, GiveNotice, Hold

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchelastic.config.settings import RendezvousSettings
    from torchelastic.rendezvous.policy.snapshot import Decision, Peer, Snapshot


def current_notice(snapshot: Snapshot) -> NoticeRecord | None:
    """Return the notice of the current round, if one was given and not withdrawn."""
    notice = snapshot.notice
    if notice is None or snapshot.round is None or notice.round != snapshot.number or notice.seconds <= 0:
        return None
    return notice


def requested_seconds(snapshot: Snapshot, settings: RendezvousSettings) -> float:
    """Return the seconds of notice that the members ask for; 0 if none asks."""
    return min(max((peer.record.notice for peer in _asking(snapshot)), default=0.0), settings.notice)


def after_notice(snapshot: Snapshot, change: Decision, settings: RendezvousSettings) -> Decision:
    """Return a planned change after the requested notice; until then, the decision that gives the notice or waits."""
    if not isinstance(change, FormRound) or snapshot.round is None:
        return change
    notice = current_notice(snapshot)
    if notice is None:
        seconds = requested_seconds(snapshot, settings)
        if seconds <= 0:
            return change
        serial = _last_serial(snapshot) + 1
        return GiveNotice(
            NoticeRecord(snapshot.number, serial, seconds, reason=change.record.reason, cause=change.record.cause)
        )
    until = snapshot.noticed_at + notice.seconds
    # A member without a key may still have to answer.
    awaits = snapshot.incomplete or any(peer.record.saved < notice.serial for peer in _asking(snapshot))
    if snapshot.now >= until or not awaits:
        return change
    return Hold(until, f"{notice.cause}: the workers have {notice.seconds:g} s to save before the round changes")


def withdraw_notice(snapshot: Snapshot, otherwise: Hold) -> Decision:
    """Withdraw the notice of a change that is no longer needed; without a notice, return ``otherwise``."""
    notice = current_notice(snapshot)
    return otherwise if notice is None else GiveNotice(msgspec.structs.replace(notice, seconds=0.0))


def _asking(snapshot: Snapshot) -> Iterator[Peer]:
    """Yield the members whose workers have asked for notice in this round and have not ended."""
    for node in snapshot.ranks:
        peer = snapshot.peers.get(node)
        if peer is None or peer.record.round != snapshot.number:
            continue
        if peer.record.notice > 0 and peer.record.phase is not NodePhase.DONE:
            yield peer


def _last_serial(snapshot: Snapshot) -> int:
    """Return the highest serial that any node knows, also if the store lost the last notice."""
    answered = max((peer.record.saved for peer in snapshot.peers.values()), default=0)
    return max(answered, snapshot.notice.serial if snapshot.notice is not None else 0)
