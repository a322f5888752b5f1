"""The connection that kopf works over: what it lists is not handed through kopf, but heard at once.

For each object of a listing kopf would begin a task, with a record that it keeps and a copy of the whole object that
stays until the garbage collector comes: on a large cluster that is most of all the memory that the operator ever takes.
What kopf has to know of a listing is its version, with which the watch begins. So it gets just that.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

import aiohttp
import kopf

from elastic_operator.kube.listing import LOOKED_AT
from elastic_operator.kube.page import Page

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from elastic_operator.kube.api import Access
    from elastic_operator.kube.resources import Resource

    Listed = Callable[[Resource, Page], Awaitable[None]]
    """Gets a page that was listed, and of what; the next one is asked for when it returns."""

_USER_AGENT: Final = "elastic-operator"
_BETWEEN_WATCHES: Final = 0.5
"""Seconds that lie at least between the beginnings of two watches of the same."""
_BY_PATH: Final = {resource.plural: resource for resource in LOOKED_AT}
"""What is listed, by the last part of the path under which the API server has it."""


def connection(access: Access) -> kopf.ConnectionInfo:
    """The same way to the API server in the words of kopf."""
    scheme, _, token = (access.authorization or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=access.server,
        ca_path=access.authority_file,
        ca_data=access.authority,
        insecure=access.insecure,
        certificate_path=access.certificate_file,
        private_key_path=access.key_file,
        scheme=(scheme or "Bearer") if token else None,
        token=token or None,
        proxy_url=access.proxy,
    )


class Sessions:
    """The connections that kopf asks for, one after the other; they are closed at the end of the ``async with`` block.

    It is to be entered in the loop in which kopf runs.

    Args:
        listed: gets what kopf lists.
    """

    def __init__(self, listed: Listed) -> None:
        self._answers = _answers(listed)
        self._way: kopf.ConnectionInfo | None = None
        self._session: kopf.AiohttpSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.aiohttp_session.close()

    async def over(self, access: Access) -> kopf.AiohttpSession:
        """A connection that goes this way; where the last one did, too, it is that one.

        kopf asks for another one when the API server does not accept the last one's credentials. By getting the same
        it learns that there are no others, and ends, instead of asking again and again.
        """
        way = connection(access)
        if self._session is None or way != self._way:
            if self._session is not None:
                await self._session.aiohttp_session.close()
            self._way = way
            session: Any = _Session(way, self._answers)
            self._session = kopf.AiohttpSession(server=way.server, aiohttp_session=session)
        return self._session


class _Session:
    """As much of aiohttp's session as kopf uses, but one that opens again when it is used after it was closed.

    As it ends, kopf closes its session before its watches. One of them that finds it closed would wait for another
    login, to which nobody listens any more, and may wait forever.

    Attributes:
        closed: never, as far as kopf is told.
        headers: of all requests.
    """

    closed: Final = False

    def __init__(self, way: kopf.ConnectionInfo, answers: type[aiohttp.ClientResponse]) -> None:
        self._way = way
        self._answers = answers
        self._open: aiohttp.ClientSession | None = None
        self._watched: dict[str, float] = {}
        self.headers = {**way.as_http_headers(), "User-Agent": _USER_AGENT}

    async def request(self, *, url: str, **how: Any) -> aiohttp.ClientResponse:  # noqa: ANN401 - as aiohttp has it
        """Send a request; a watch not sooner than a moment after the last one of the same."""
        where = urlsplit(url)
        if "watch=" in where.query:
            await self._pause(where.path)
        if self._open is None:
            self._open = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=self._way.as_ssl_context()),
                headers=self.headers,
                proxy=self._way.proxy_url,
                response_class=self._answers,
            )
        return await self._open.request(url=url, **how)

    async def _pause(self, path: str) -> None:
        """Wait until it may be watched again: what ends watches at once, a proxy perhaps, is not asked without end."""
        now = time.monotonic()
        begins = max(now, self._watched.get(path, 0.0) + _BETWEEN_WATCHES)
        self._watched[path] = begins
        await asyncio.sleep(begins - now)

    async def close(self) -> None:
        """Close all connections, until there is another request."""
        session, self._open = self._open, None
        if session is not None:
            await session.close()


def _answers(listed: Listed) -> type[aiohttp.ClientResponse]:
    class Answer(aiohttp.ClientResponse):
        async def json(self, **how: Any) -> Any:  # noqa: ANN401 - as aiohttp has it
            resource = _BY_PATH.get(self.url.name)
            if resource is None or not self.ok:
                return await super().json(**how)
            try:
                page = Page.of(await self.read())
            except ValueError:  # it is no listing; kopf is to see what it is
                return await super().json(**how)
            await listed(resource, page)
            return {"metadata": {"resourceVersion": page.version, "continue": page.after}, "items": []}

    return Answer
