"""The sentences in which the leader explains its decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torchelastic.protocol import PROTOCOL_VERSION, other_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchelastic.protocol import FailureRecord
    from torchelastic.rendezvous.policy.membership import Candidates, Membership, Peer

_MAX_NAMES: Final = 8
"""More nodes than these are counted, not named."""


def name_of(node: str) -> str:
    """Return the name in a node's id."""
    return node.rpartition(".")[0] or node


def departures(nodes: Iterable[str], membership: Membership) -> str:
    """Return how members left: "a and b left and c died"."""
    by_fate: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        by_fate.setdefault(_fate(node, membership), []).append(node)
    return listed(f"{named(some)} {fate[len(some) > 1]}" for fate, some in by_fate.items())


def _fate(node: str, membership: Membership) -> tuple[str, str]:
    if membership.is_leaving(node):
        return "left", "left"
    if membership.is_partitioned(node):
        return "was cut off", "were cut off"
    return ("died", "died") if node in membership.dead else ("is gone", "are gone")


def joined(newcomers: Sequence[Peer]) -> str:
    """Return who joined."""
    return f"{named([peer.id for peer in newcomers])} joined"


def waiting_for(membership: Membership, candidates: Candidates, missing: Sequence[str] = ()) -> str:
    """Return that too few nodes are present: which ones are, which are missing, and which cannot take part."""
    here = len(candidates.ordered)
    names = f" ({named([peer.id for peer in candidates.ordered])})" if 0 < here <= _MAX_NAMES else ""
    parts = [f"{count(here, 'node')}{names} of at least {membership.size.min} {are(here)} there"]
    if missing:
        parts.append(f"{named(missing)} {are(len(missing))} missing")
    if mute := [peer.id for peer in membership.peers.values() if not peer.answers and peer.id not in membership.ranks]:
        parts.append(f"{named(mute)} {'has' if len(mute) == 1 else 'have'} not answered yet")
    parts.append("waiting for more")
    if others := [peer for peer in membership.peers.values() if peer.record.protocol != PROTOCOL_VERSION]:
        names = named([peer.id for peer in others])
        parts.append(f"{names} cannot take part: {other_version(others[0].record.protocol)}")
    return "; ".join(parts)


def describe(failure: FailureRecord) -> str:
    """Return a failure in words: "rank 3 on digits-2: ValueError: …"."""
    return f"rank {failure.rank} on {name_of(failure.node)}: {failure.message or f'exit code {failure.exit_code}'}"


def named(nodes: Sequence[str]) -> str:
    """Return the nodes' names, or their number if they are many."""
    return count(len(nodes), "node") if len(nodes) > _MAX_NAMES else listed(map(name_of, nodes))


def listed(parts: Iterable[str]) -> str:
    """Return a list in words: "a, b and c"."""
    items = list(parts)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else ""


def count(number: int, noun: str) -> str:
    """Return a number of things: "1 node", "2 nodes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def are(number: int) -> str:
    """Return the verb for this number."""
    return "is" if number == 1 else "are"


def times(number: int) -> str:
    """Return a frequency: "once", "3 times"."""
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
