"""Bounds on the connections of the agent's and the operator's servers, and on file descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_operator.kubernetes.http_server import http_server
from tests.support.idle_connections import idle_connections
from tests.support.scraping import scraped_text
from torchelastic import connections
from torchelastic.connections import excess, former_descriptor_limit, raise_descriptor_limit

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def low_limit() -> Iterator[tuple[int, int]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = 512 + len([*Path("/proc/self/fd").iterdir()])  # earlier tests may have left some open
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    yield low, hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_new_processes_get_the_former_limit_of_file_descriptors(low_limit: tuple[int, int]) -> None:
    raise_descriptor_limit()
    raised = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raised == (min(low_limit[1], 65536), low_limit[1])
    with former_descriptor_limit():
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == low_limit
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == raised


@pytest.mark.parametrize(
    ("addresses", "new", "closed"),
    [
        ("", "a", None),
        ("abc", "a", None),
        ("aab", "a", 0),  # one address has at most half
        ("baa", "a", 1),
        ("abcd", "e", 0),
        ("bacd", "a", 0),
    ],
)
def test_the_oldest_connection_is_closed_first_and_an_address_closes_its_own(
    addresses: str, new: str, closed: int | None
) -> None:
    assert excess(dict(enumerate(addresses)), new, 4) == closed


async def test_the_operator_answers_while_3000_connections_are_idle(low_limit: tuple[int, int]) -> None:
    web = http_server(("127.0.0.1", 0), metrics=lambda _: (b"page", "text/plain"), unready=str)
    async with web as port:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low_limit[1], low_limit[1]))
        with idle_connections(port, 3000) as idle:
            await idle.until_closed()
            assert await scraped_text(port, source="127.0.0.2") == "page"


async def test_a_connection_without_a_complete_header_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HTTP_TIMEOUT", 0.05)
    web = http_server(("127.0.0.1", 0), metrics=lambda _: (b"page", "text/plain"), unready=str)
    async with web as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(30):
                assert await reader.read() == b""
        writer.close()
