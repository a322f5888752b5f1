"""Which server of an etcd cluster a watch is made on."""

from __future__ import annotations

from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from torchelastic.errors import StoreUnavailable
from torchelastic.store.api import StoreSettings
from torchelastic.store.etcd_v3 import EtcdV3Store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def reads(request: web.Request) -> web.Response:
    return web.json_response({"header": {"cluster_id": "1", "revision": "7"}})


async def watches(request: web.Request) -> web.Response:
    return web.Response(text='{"result":{"header":{"revision":"7"},"created":true}}\n')


async def fails(request: web.Request) -> web.Response:
    return web.Response(status=503)


async def serve(stack: AsyncExitStack, watch: Callable[[web.Request], Awaitable[web.Response]]) -> str:
    app = web.Application()
    app.router.add_post("/v3/kv/range", reads)
    app.router.add_post("/v3/watch", watch)
    runner = web.AppRunner(app)
    stack.push_async_callback(runner.cleanup)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    return f"{host}:{port}"


async def test_a_watch_moves_to_another_server_if_the_first_can_only_be_read() -> None:
    async with AsyncExitStack() as stack:
        store = EtcdV3Store(StoreSettings((await serve(stack, fails), await serve(stack, watches))))
        stack.push_async_callback(store.close)
        async with aclosing(store.watch("/run/")) as batches:
            with pytest.raises(StoreUnavailable, match="status 503"):
                await anext(batches)
        async with aclosing(store.watch("/run/")) as batches:
            assert await anext(batches) == ()
