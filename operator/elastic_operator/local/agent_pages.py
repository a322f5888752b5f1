"""What the agents of the jobs on this machine tell under /metrics."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Self

import aiohttp

from elastic_operator.errors import ClusterError
from elastic_operator.local.client import find_job, known_jobs
from elastic_operator.showing.asking import LARGEST_PAGE, ask, ask_leaders
from elastic_operator.showing.shown import Shown

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from elastic_operator.showing.agent_page import Page
    from elastic_operator.showing.shown import ShownPod


class LocalPages:
    """Reads jobs on this machine with the pages of their agents; an async context manager."""

    def __init__(self) -> None:
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        # Agents of this machine are on loopback: whatever proxy there is, it is not for them.
        session = aiohttp.ClientSession(trust_env=False)
        self._session = await self._stack.enter_async_context(session)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def job(self, name: str) -> tuple[Shown, Sequence[Page], Sequence[str]]:
        """A job, the pages of its agents, and what else is to be said.

        Raises:
            NotFound: there is no such job or run.
        """
        shown = Shown.of(await asyncio.to_thread(find_job, name))
        return shown, *await ask(shown.pods if shown.run.alive else (), self._fetch)

    async def jobs(self) -> list[tuple[Shown, Sequence[Page]]]:
        """All jobs, each with the page of its leader."""
        found = [Shown.of(each) for each in await asyncio.to_thread(known_jobs)]
        pages = await ask_leaders([(shown.pods if shown.run.alive else (), self._fetch) for shown in found])
        return list(zip(found, pages, strict=True))

    async def _fetch(self, pod: ShownPod) -> str:
        try:
            async with self._session.get(pod.metrics_url or "") as response:
                if response.status != 200:
                    raise ClusterError(f"its agent answers with HTTP status {response.status}")
                data = bytearray()
                async for piece in response.content.iter_any():
                    data += piece
                    if len(data) > LARGEST_PAGE:
                        raise ClusterError("its agent's page of metrics is too large")
                return data.decode(errors="replace")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            number = error.errno if isinstance(error, OSError) else None
            why = os.strerror(number) if number else str(error) or type(error).__name__
            raise ClusterError(f"its agent does not answer ({why})") from None
