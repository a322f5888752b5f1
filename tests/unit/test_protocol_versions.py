"""A node waits, with a message, while the nodes of its run speak another protocol version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tests.support.nodes import Clients, Meeting
from torchelastic.protocol import PROTOCOL_VERSION, LeaderRecord, NodeRecord, RunKeys, SizeRecord, encode

if TYPE_CHECKING:
    import pytest

LEASE = 0.3
OTHER = PROTOCOL_VERSION + 1
KEYS = RunKeys.of("run")


async def test_a_node_waits_for_nodes_of_another_version_and_continues_after_their_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clients = Clients()
    data = clients.data
    theirs = await data.grant(60)
    record = NodeRecord(name="old", address="127.0.0.1", workers=1, size=SizeRecord(min=1, max=8), protocol=OTHER)
    await data.put(KEYS.node("old.1"), encode(msgspec.structs.replace(record, round=4)), lease=theirs)
    leader = LeaderRecord(node="old.1", address="127.0.0.1:1", protocol=OTHER)
    await data.put(KEYS.leader, encode(leader), lease=theirs)
    await data.put(KEYS.state, b'{"round":{"number":4,"members":"in another form","protocol":%d}}' % OTHER)

    async with Meeting(clients.connect, "run", lease=LEASE, last_call_timeout=0.1, join_debounce=0.0) as meeting:
        new = await meeting.node("new")
        await new.until(lambda node: bool(node.rounds))
        assert (new.rounds[-1].number, new.rounds[-1].members) == (4, ())
        assert f"({OTHER}, and {PROTOCOL_VERSION} here)" in new.rounds[-1].cause

        await data.revoke(theirs)
        round = await new.until_with("new")
        assert (round.number, round.protocol) == (5, PROTOCOL_VERSION)
    assert "old.1 leads, and this node cannot take part" in caplog.text


async def test_a_size_of_another_protocol_version_is_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clients = Clients()
    size = SizeRecord(min=2, max=2, desired=2, generation=9, protocol=OTHER)
    await clients.data.put(KEYS.size, encode(size))
    async with Meeting(clients.connect, "run", lease=LEASE) as meeting:
        alone = await meeting.node("alone", wanted=1)
        assert (await alone.until_with("alone")).number == 1
    assert f"ignoring {KEYS.size}: not a SizeRecord for us: another version" in caplog.text
