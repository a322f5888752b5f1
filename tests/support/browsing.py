"""A page in a real browser, with its requests and errors."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from playwright.async_api import async_playwright

from tests.support.testbed import packages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from playwright.async_api import Browser, Page


_FONTS = """\
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig><dir>{fonts}</dir><cachedir>{cache}</cachedir></fontconfig>
"""


@contextlib.asynccontextmanager
async def started() -> AsyncIterator[Browser]:
    """Debian's Chromium, running; it ends after the block."""
    root = packages.unpacked("browser")
    fonts = root / "fonts.conf"
    if not fonts.exists():
        written = _FONTS.format(fonts=root / "usr/share/fonts", cache=root / "var/cache/fontconfig")
        fonts.with_suffix(".new").write_text(written)
        fonts.with_suffix(".new").replace(fonts)
    libraries = packages.environment(root)["LD_LIBRARY_PATH"]
    async with async_playwright() as playwright:
        # Its own sandbox needs permissions that a container may lack; it opens only our pages.
        running = await playwright.chromium.launch(
            executable_path=str(root / "usr/lib/chromium/chromium"),  # the script in usr/bin expects an installation
            env={**os.environ, "LD_LIBRARY_PATH": libraries, "FONTCONFIG_FILE": str(fonts)},
            args=["--no-sandbox"],
        )
        try:
            yield running
        finally:
            await running.close()


class OpenPage:
    """An open page.

    Attributes:
        page: the page.
        requests: the addresses that the page requested, except its own.
        complaints: the console messages and errors of the page.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    @classmethod
    async def at(cls, browser: Browser, file: Path, *, width: int = 1000, dark: bool = False) -> OpenPage:
        """Open a file.

        Args:
            browser: a running browser.
            file: the page.
            width: the width of the window.
            dark: whether the user prefers a dark theme.
        """
        page = await browser.new_page(
            viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light"
        )
        opened = cls(page)
        await page.goto(file.as_uri())
        assert opened.requests.pop(0) == file.as_uri()
        return opened

    async def boxes(self, selector: str) -> list[tuple[float, float]]:
        """The left edges and the widths of elements, in pixels."""
        found: list[tuple[float, float]] = []
        for element in await self.page.query_selector_all(selector):
            box = await element.bounding_box()
            assert box is not None, f"an element {selector} is not seen"
            found.append((box["x"], box["width"]))
        return found
