"""A page in a real browser, and all that it asks for and complains of."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from playwright.async_api import async_playwright

from tests.support.testbed.browser import browser

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from playwright.async_api import Browser, Page


@contextlib.asynccontextmanager
async def started() -> AsyncIterator[Browser]:
    """A browser that has begun; it ends after the block."""
    found = browser()
    async with async_playwright() as playwright:
        # Its own sandbox needs rights that a container may not give; what it opens here is ours.
        running = await playwright.chromium.launch(
            executable_path=str(found.program), env=dict(found.environment), args=["--no-sandbox"]
        )
        try:
            yield running
        finally:
            await running.close()


class Look:
    """A page that is open.

    Attributes:
        page: it.
        asked: the addresses that it asked for, beside its own.
        complaints: what it printed on the console, and what went wrong in it.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    @classmethod
    async def at(cls, browser: Browser, file: Path, *, width: int = 1000, dark: bool = False) -> Look:
        """Open a file.

        Args:
            browser: that has begun.
            file: the page.
            width: of the window.
            dark: whether the user prefers it dark.
        """
        page = await browser.new_page(
            viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light"
        )
        look = cls(page)
        await page.goto(file.as_uri())
        assert look.asked.pop(0) == file.as_uri()
        return look

    async def boxes(self, selector: str) -> list[tuple[float, float]]:
        """Where the elements begin from the left, and how wide they are, in pixels."""
        found: list[tuple[float, float]] = []
        for element in await self.page.query_selector_all(selector):
            box = await element.bounding_box()
            assert box is not None, f"an element {selector} is not seen"
            found.append((box["x"], box["width"]))
        return found

    async def contrast(self, selector: str) -> float:
        """How well the first such text stands out from what is behind it, as WCAG measures it; 1 is not at all."""
        return float(await self.page.evaluate(_CONTRAST, selector))


_CONTRAST = """(selector) => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[0-9.]+/g).slice(0, 3).map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let element = document.querySelector(selector);
  const text = light(getComputedStyle(element).color);
  let behind = "rgba(0, 0, 0, 0)";
  for (; element && /, 0\\)$/.test(behind); element = element.parentElement) {
    behind = getComputedStyle(element).backgroundColor;
  }
  const [dark, bright] = [text, light(behind)].sort((a, b) => a - b);
  return (bright + 0.05) / (dark + 0.05);
}"""
