"""kopf, as far as it is told anything: how to reach the API server; and how what it tells comes to be heard."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from elastic_operator.kube.api import Access
from elastic_operator.kube.resources import PODS
from elastic_operator.kube.watching import Told, connection

if TYPE_CHECKING:
    import pytest

    from elastic_operator.kube.resources import Resource
    from elastic_operator.spec import Json

PATIENCE = 30.0


def test_a_token_is_handed_on_with_its_scheme() -> None:
    info = connection(Access("https://server:6443", authority="PEM", authorization="bearer abc", proxy="http://proxy"))
    assert info.server == "https://server:6443"
    assert info.as_http_headers() == {"Authorization": "bearer abc"}
    assert (info.ca_data, info.proxy_url) == ("PEM", "http://proxy")
    assert connection(Access("https://server", authorization="abc")).as_http_headers() == {
        "Authorization": "Bearer abc"
    }


def test_without_a_token_no_header_claims_that_there_is_one() -> None:
    info = connection(Access("https://server", certificate_file="/cert", key_file="/key", insecure=True))
    assert info.as_http_headers() == {}
    assert (info.certificate_path, info.private_key_path, info.insecure) == ("/cert", "/key", True)


def test_a_token_is_not_shown_where_the_way_is_printed() -> None:
    assert "secret" not in repr(Access("https://server", authorization="Bearer secret"))


async def test_all_that_another_thread_tells_is_heard_in_its_order() -> None:
    heard: list[int] = []
    done = asyncio.Event()
    count = 20_000

    def hear(_resource: Resource, _kind: str | None, body: Json) -> None:
        heard.append(body["number"])
        if body["number"] == count - 1:
            done.set()

    told = Told(asyncio.get_running_loop(), hear)

    def tell() -> None:
        for number in range(count):
            told.tell(PODS, "MODIFIED", {"number": number})

    async with asyncio.timeout(PATIENCE):
        await asyncio.to_thread(tell)
        await done.wait()
    assert heard == list(range(count))


async def test_what_cannot_be_understood_keeps_nothing_else_from_being_heard(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []
    done = asyncio.Event()

    def hear(_resource: Resource, _kind: str | None, body: Json) -> None:
        heard.append(body["metadata"]["name"])
        done.set()

    told = Told(asyncio.get_running_loop(), hear)
    told.tell(PODS, "ADDED", {})
    told.tell(PODS, "ADDED", {"metadata": {"name": "good"}})
    async with asyncio.timeout(PATIENCE):
        await done.wait()
    assert heard == ["good"]
    assert "an unexpected error in what a watch has told" in caplog.text
