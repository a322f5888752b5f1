"""A real agent with a program that records metrics, and the agent's page."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from textwrap import dedent
from typing import TYPE_CHECKING

import aiohttp

from tests.support.agents import TIMEOUT, AgentProcess
from tests.support.ports import free_range
from tests.support.scraping import scraped

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.scraping import Page

WAIT = """
if __name__ == "__main__":
    open(sys.argv[1]).read()
"""
"""The last lines of a program, which wait until a pipe is closed."""


class Measured:
    """An agent with a program that records metrics, and the agent's page.

    Args:
        folder: the folder of the program.
        source: the Python source of the program; standard modules are imported before it.
        flags: flags of the agent.
        endpoint: the endpoint of the run's etcd, if it has one.
        env: variables in addition to the test's environment.
    """

    def __init__(
        self, folder: Path, source: str, *flags: str, endpoint: str = "", env: dict[str, str] | None = None
    ) -> None:
        program, self._pipe = folder / "program.py", folder / "go"
        program.write_text("import os, signal, subprocess, sys, threading, time\n" + dedent(source) + WAIT)
        os.mkfifo(self._pipe)
        self._port = free_range(1).first
        place = f"--rdzv-endpoint={endpoint}" if endpoint else "--standalone"
        common = (place, f"--metrics-port={self._port}", "--local-addr=127.0.0.1")
        self.agent = AgentProcess(*common, *flags, program, self._pipe, env=env)

    async def page(self) -> Page:
        return await scraped(self._port)

    async def until(self, holds: Callable[[Page], object]) -> Page:
        """Wait until the page meets a condition, and return the page."""
        async with asyncio.timeout(TIMEOUT):
            while True:
                with suppress(aiohttp.ClientConnectionError):  # not served yet
                    if holds(page := await self.page()):
                        return page
                await asyncio.sleep(0.02)

    async def after(self, pattern: str, count: int = 1) -> Page:
        """Wait until this number of workers has printed a line, and return the page."""
        since = 0
        for _ in range(count):
            await self.agent.wait_for_line(pattern, since=since)
            since = next(n for n, line in enumerate(self.agent.lines) if n >= since and pattern in line) + 1
        return await self.page()
