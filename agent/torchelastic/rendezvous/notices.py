"""Notices: a planned change of the epoch waits until the workers that asked for it have saved.

Somebody joins, the size changes, a node leaves: none of that is urgent. Where a member of the epoch has said that its
workers want to be told before, the leader first writes that the epoch is about to change. The change follows when all
who asked have answered, or when their time is over. A loss or a failure meanwhile ends the waiting, for nothing is left
to be saved then; a change that is called off is taken back. Where nobody asked, a change is at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from torchelastic.contract import NodePhase, NoticeRecord
from torchelastic.rendezvous.view import COUNT_LIMIT, FormEpoch, GiveNotice, Hold

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchelastic.rendezvous.view import Decision, Peer, View
    from torchelastic.settings import RendezvousSettings


def standing(view: View) -> NoticeRecord | None:
    """The notice that the standing epoch is about to change; None where there is none, or it was taken back."""
    notice = view.notice
    if notice is None or view.epoch is None or notice.epoch != view.epoch.number or notice.seconds <= 0:
        return None
    return notice


def wanted(view: View, settings: RendezvousSettings) -> float:
    """Seconds that the members ask for before a planned change; 0 where none of them asks."""
    return min(max((peer.record.notice for peer in _asking(view)), default=0.0), settings.notice)


def after_notice(view: View, change: Decision, settings: RendezvousSettings) -> Decision:
    """A planned change, when those who asked for a notice have had it; until then, what is to be done instead.

    Args:
        view: what the leader knows.
        change: the change; nothing is given notice of but another epoch.
        settings: the rules.
    """
    if not isinstance(change, FormEpoch) or view.epoch is None:
        return change
    notice = standing(view)
    if notice is None:
        seconds = wanted(view, settings)
        if seconds <= 0:
            return change
        return GiveNotice(
            NoticeRecord(
                epoch=view.epoch.number,
                serial=_last_serial(view) + 1,
                seconds=seconds,
                reason=change.record.reason,
                cause=change.record.cause,
            )
        )
    until = view.noticed_at + notice.seconds
    if view.now >= until or not _awaits_an_answer(view, notice):
        return change
    return Hold(until, f"{notice.cause}: the workers have {notice.seconds:g} s to save before the epoch changes")


def call_off(view: View, otherwise: Hold) -> Decision:
    """Take back a notice of a change that nobody wants any more.

    Args:
        view: what the leader knows.
        otherwise: the decision where none stands.
    """
    notice = standing(view)
    return otherwise if notice is None else GiveNotice(msgspec.structs.replace(notice, seconds=0.0))


def _awaits_an_answer(view: View, notice: NoticeRecord) -> bool:
    """Whether a member has yet to answer; also one whose key, with its answer, is on its way back."""
    return view.incomplete or any(peer.record.saved < notice.serial for peer in _asking(view))


def _asking(view: View) -> Iterator[Peer]:
    """The members whose workers, in this epoch, have asked for a notice and have not ended."""
    number = 0 if view.epoch is None else view.epoch.number
    for node in view.ranks:
        peer = view.peers.get(node)
        if (
            peer is not None
            and peer.record.notice > 0
            and peer.record.epoch == number
            and peer.record.phase is not NodePhase.DONE
        ):
            yield peer


def _last_serial(view: View) -> int:
    """The highest serial that anybody knows: a store that lost the last notice does not make them begin anew."""
    answers = (peer.record.saved for peer in view.peers.values())
    known = max((saved for saved in answers if saved < COUNT_LIMIT), default=0)
    return max(known, view.notice.serial if view.notice is not None else 0)
