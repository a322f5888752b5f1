"""The peer server answers nodes of its own run, and closes other connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING

import pytest

from tests.support.ports import free_range
from torchelastic.config.settings import RendezvousSettings
from torchelastic.errors import NoFreePort
from torchelastic.protocol.records import NodeRecord, SizeRecord
from torchelastic.rendezvous import peer_connection
from torchelastic.rendezvous.node import RendezvousNode, listen
from torchelastic.rendezvous.peer_connection import (
    PeerServer,
    ProbeResult,
    hold_connection,
    keyed_digest,
    probe,
    run_digest,
)
from torchelastic.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

RUN_DIGEST = run_digest("run")
KEY = "0123456789abcdef"
HELLO = {"run": RUN_DIGEST, "node": "b.1", "key": keyed_digest("b.1", KEY), "stay": True}


class Observer:
    """Records the peers that connected and the peers that were lost."""

    def __init__(self) -> None:
        self.seen: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def __call__(self, node: str, connected: bool) -> None:
        self.seen.put_nowait(("connected" if connected else "lost", node))


@asynccontextmanager
async def serving(node: str = "a.1", run: str = "run") -> AsyncIterator[tuple[PeerServer, Observer]]:
    observer = Observer()
    server = PeerServer(run=run, node=node, key=KEY, listener=listen("127.0.0.1"))
    server.observer = observer
    server.start()
    try:
        yield server, observer
    finally:
        await server.close()


async def answer_to(server: PeerServer, line: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(line)
        async with asyncio.timeout(30):
            return await reader.readline()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04\x95\n",
        b"[]\n",
        json.dumps({**HELLO, "run": run_digest("another")}).encode() + b"\n",
        b'{"run": "run", "node": "b.1"}\n',
        b'{"node": "b.1"}\n',
        json.dumps({**HELLO, "node": 7}).encode() + b"\n",
        json.dumps({**HELLO, "node": "x" * 300}).encode() + b"\n",
        json.dumps({**HELLO, "node": "x" * 5000}).encode() + b"\n",
        b"[" * 900 + b"\n",
        json.dumps({key: value for key, value in HELLO.items() if key != "key"}).encode() + b"\n",
    ],
)
async def test_a_connection_without_a_valid_hello_is_closed(line: bytes) -> None:
    async with serving() as (server, observer):
        assert await answer_to(server, line) == b""
        assert observer.seen.empty()
        assert await probe(f"127.0.0.1:{server.port}", run="run", node="b.1", peer="a.1", key=KEY) is ProbeResult.ALIVE


async def test_a_peer_that_sends_more_than_a_hello_is_disconnected() -> None:
    async with serving() as (server, observer):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(json.dumps(HELLO).encode() + b"\n")
        assert json.loads(await reader.readline())["node"] == "a.1"
        assert await observer.seen.get() == ("connected", "b.1")
        assert server.is_connected("b.1")
        writer.write(b"more")
        assert await observer.seen.get() == ("lost", "b.1")
        assert await reader.read() == b""
        writer.close()


async def test_nodes_with_long_ids_connect_and_a_node_whose_server_closes_is_dead() -> None:
    run, node, peer = "字" * 5000, "é" * 253 + ".12345678", "𝄞" * 253 + ".12345678"
    observer = Observer()
    async with serving(node=peer, run=run) as (server, seen):
        address = f"127.0.0.1:{server.port}"
        holding = asyncio.create_task(
            hold_connection(address, run=run, node=node, peer=peer, key=KEY, observer=observer)
        )
        assert await seen.seen.get() == ("connected", node)
        assert await observer.seen.get() == ("connected", peer)
    assert await holding is ProbeResult.DEAD
    assert await observer.seen.get() == ("lost", peer)


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_accepted_while_the_server_closes_is_closed(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_connection, "HELLO_TIMEOUT", 600.0)
    server = PeerServer(run="run", node="a.1", key=KEY, listener=listen("127.0.0.1"))
    with socket.create_connection(("127.0.0.1", server.port)) as early:
        early.setblocking(False)
        server.start()
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.close()
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(30):
                assert await asyncio.get_running_loop().sock_recv(early, 1) == b""


async def test_a_node_is_dead_if_another_one_answers_and_silent_if_another_run_answers() -> None:
    async with serving(node="c.1") as (server, _):
        address = f"127.0.0.1:{server.port}"
        assert await probe(address, run="run", node="b.1", peer="a.1", key=KEY) is ProbeResult.DEAD
        assert await probe(address, run="another", node="b.1", peer="a.1", key=KEY) is ProbeResult.NO_ANSWER


async def test_a_stranger_who_knows_the_run_but_no_key_is_not_a_node() -> None:
    async with serving() as (server, observer):
        forged = json.dumps({**HELLO, "key": keyed_digest("b.1", "another")}).encode() + b"\n"
        assert "key" not in json.loads(await answer_to(server, forged))
        assert observer.seen.empty()
        assert not server.is_connected("b.1")
        address = f"127.0.0.1:{server.port}"
        assert await probe(address, run="run", node="b.1", peer="a.1", key="00") is ProbeResult.NO_ANSWER
        holding = hold_connection(address, run="run", node="b.1", peer="a.1", key="00", observer=observer)
        assert await holding is ProbeResult.NO_ANSWER
        assert observer.seen.empty()


async def test_a_listener_that_does_not_answer_gives_no_result() -> None:
    with closing(listen("127.0.0.1")) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert await probe(address, run="run", node="b.1", peer="a.1", key=KEY, timeout=0.05) is ProbeResult.NO_ANSWER


def test_every_free_port_of_a_range_is_used_before_one_repeats() -> None:
    ports = free_range(4)
    with closing(listen("127.0.0.1", ports)) as other:
        assert other.getsockname()[1] == ports.first
        taken = [ports.first]
        for _ in range(6):
            with closing(listen("127.0.0.1", ports, after=taken[-1])) as listener:
                taken.append(listener.getsockname()[1])
    assert taken[1:] == 2 * list(range(ports.first + 1, ports.last + 1))


def test_a_node_behind_a_gateway_listens_on_all_interfaces_on_a_port_of_the_range() -> None:
    ports = free_range(2)
    with closing(listen("192.0.2.1", ports)) as listener:
        assert listener.getsockname() == ("0.0.0.0", ports.first)


async def test_an_exhausted_port_range_is_explained_and_leaks_no_socket() -> None:
    ports = free_range(2)
    size = SizeRecord(min=1, max=1)
    record = NodeRecord(name="a", address="127.0.0.1", workers=1, size=size)
    settings = RendezvousSettings(run_id="run", size=size, ports=ports)
    with closing(listen("127.0.0.1", ports)), pytest.raises(NoFreePort) as caught:
        RendezvousNode(MemoryStore(), settings, node="a.1", record=record)
    assert str(caught.value).startswith(f"No port of --port-range {ports.first}-{ports.last} is free on this node: ")
    listen("127.0.0.1", ports).close()
