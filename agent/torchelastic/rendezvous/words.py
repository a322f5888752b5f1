"""What the leader says of its decisions, in sentences for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torchelastic.contract import CONTRACT_VERSION, other_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchelastic.rendezvous.placing import Candidates
    from torchelastic.rendezvous.view import Peer, View

_MOST_NAMES: Final = 8
"""So many nodes are named one by one; of more, only the number is told."""


def name_of(node: str) -> str:
    """The name in a node's id."""
    return node.rpartition(".")[0] or node


def departures(nodes: Iterable[str], view: View) -> str:
    """What became of these members: "a and b left and c died"."""
    fates: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        fates.setdefault(_fate(node, view), []).append(node)
    return listed(f"{named(some)} {fate[len(some) > 1]}" for fate, some in fates.items())


def _fate(node: str, view: View) -> tuple[str, str]:
    """What became of one member, and of several like it."""
    if view.leaves(node):
        return "left", "left"
    if view.cut_off(node):
        return "was cut off", "were cut off"
    return ("died", "died") if node in view.dead else ("is gone", "are gone")


def greeting(newcomers: Sequence[Peer]) -> str:
    """Who joined."""
    return f"{named([peer.id for peer in newcomers])} joined"


def waiting_for(view: View, candidates: Candidates, missing: Sequence[str] = ()) -> str:
    """That there are too few: who is there, who is missing, and who cannot take part.

    Args:
        view: what the leader knows.
        candidates: who is there.
        missing: nodes that were there before.
    """
    here = len(candidates.ordered)
    names = f" ({named([peer.id for peer in candidates.ordered])})" if 0 < here <= _MOST_NAMES else ""
    parts = [f"{count(here, 'node')}{names} of at least {view.size.min} {are(here)} there"]
    if missing:
        parts.append(f"{named(missing)} {are(len(missing))} missing")
    if mute := [peer.id for peer in view.peers.values() if not peer.answers and peer.id not in view.ranks]:
        parts.append(f"{named(mute)} {'has' if len(mute) == 1 else 'have'} not answered yet")
    parts.append("waiting for more")
    if strangers := [peer for peer in view.peers.values() if peer.record.contract != CONTRACT_VERSION]:
        theirs = named([peer.id for peer in strangers])
        parts.append(f"{theirs} cannot take part: {other_version(strangers[0].record.contract)}")
    return "; ".join(parts)


def named(nodes: Sequence[str]) -> str:
    """Nodes by their names, or how many where they are too many to be named."""
    return count(len(nodes), "node") if len(nodes) > _MOST_NAMES else listed(map(name_of, nodes))


def listed(parts: Iterable[str]) -> str:
    """A list in words: "a, b and c"."""
    items = list(parts)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else ""


def count(number: int, noun: str) -> str:
    """A number of things: "1 node", "2 nodes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def are(number: int) -> str:
    """The verb for so many."""
    return "is" if number == 1 else "are"


def times(number: int) -> str:
    """How often."""
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
