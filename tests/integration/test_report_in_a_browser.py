"""The page of ``elasticjob report`` in a browser."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from playwright.async_api import async_playwright

from elastic_operator.reports.page import page
from testbed import packages
from tests.support.reports import failed, long, report

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from playwright.async_api import Browser, Page

    from elastic_operator.api.status import Report

pytestmark = [pytest.mark.integration, pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


_FONTS = """\
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig><dir>{fonts}</dir><cachedir>{cache}</cachedir></fontconfig>
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """A running Chromium from Debian's package."""
    root = packages.unpacked("browser")
    fonts = root / "fonts.conf"
    if not fonts.exists():
        written = _FONTS.format(fonts=root / "usr/share/fonts", cache=root / "var/cache/fontconfig")
        fonts.with_suffix(".new").write_text(written)
        fonts.with_suffix(".new").replace(fonts)
    libraries = packages.environment(root)["LD_LIBRARY_PATH"]
    async with async_playwright() as playwright:
        # Chromium's sandbox needs permissions that a container may lack; Chromium opens only the pages of these tests.
        running = await playwright.chromium.launch(
            executable_path=str(root / "usr/lib/chromium/chromium"),  # the script in usr/bin needs an installation
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
        complaints: the console messages and the uncaught errors of the page.
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
        """Return the left edges and the widths of elements, in pixels."""
        found: list[tuple[float, float]] = []
        for element in await self.page.query_selector_all(selector):
            box = await element.bounding_box()
            assert box is not None, f"an element {selector} is not visible"
            found.append((box["x"], box["width"]))
        return found


def written(folder: Path, shown: Report) -> Path:
    file = folder / "report.html"
    file.write_text(page(shown))
    return file


@pytest.mark.parametrize("shown", [report, failed, long])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_the_page_opens_without_errors_and_requests_nothing(
    browser: Browser, tmp_path: Path, shown: Callable[[], Report], *, dark: bool
) -> None:
    for width in (360, 1000, 1600):
        opened = await OpenPage.at(browser, written(tmp_path, shown()), width=width, dark=dark)
        assert (opened.requests, opened.complaints) == ([], [])
        assert await opened.page.title() == f"digits: {'failed' if shown is failed else 'succeeded'} after " + (
            "1d0h" if shown is long else "1m40s"
        )
        overflow = await opened.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert overflow <= 0, f"at a width of {width} the page scrolls horizontally"
        await opened.page.close()


@pytest.mark.parametrize("word", ["y" * 3000, "y" * 150], ids=["shortened", "complete"])
@pytest.mark.parametrize("width", [360, 1000])
async def test_long_texts_do_not_make_the_page_wider_than_the_window(
    browser: Browser, tmp_path: Path, word: str, width: int
) -> None:
    shown = failed(message=f"rank 0 on digits-0-aaaaa failed: ValueError: {word}", name="d" * 52)
    opened = await OpenPage.at(browser, written(tmp_path, shown), width=width)
    for summary in await opened.page.query_selector_all("summary"):
        await summary.click()
    overflow = await opened.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    assert overflow <= 0


async def test_bars_are_as_wide_as_their_durations(browser: Browser, tmp_path: Path) -> None:
    opened = await OpenPage.at(browser, written(tmp_path, failed()))
    [(left, whole)] = await opened.boxes("svg.plot")
    bars = await opened.boxes(".plot rect.round")
    lasted = [20, 20, 20, 5, 30]
    began = [5, 25, 45, 65, 70]
    assert [width / whole * 100 for _, width in bars] == pytest.approx(lasted, abs=0.2)
    assert [(x - left) / whole * 100 for x, _ in bars] == pytest.approx(began, abs=0.2)
    lost = await opened.boxes(".plot rect.lost")
    assert [width / whole * 100 for _, width in lost] == pytest.approx([4.0, 1.5, 0.5], abs=0.2)
    [(_, split)] = await opened.boxes("svg.split")
    states = await opened.boxes(".split rect.state")
    assert [width / split * 100 for _, width in states] == pytest.approx([84, 3, 6, 2, 4, 1], abs=0.2)
    marks = await opened.boxes(".plot .failure path")
    assert [(x + width / 2 - left) / whole * 100 for x, width in marks] == pytest.approx([45, 65, 100], abs=0.2)


async def test_a_failure_in_the_timeline_links_to_its_table_row(browser: Browser, tmp_path: Path) -> None:
    opened = await OpenPage.at(browser, written(tmp_path, long()))
    await opened.page.click(".plot a.failure:nth-of-type(20) path")
    assert opened.page.url.endswith("#failure-20")
    row = opened.page.locator("#failure-20")
    assert await row.evaluate("row => row.matches(':target')")
    assert "SIGKILL" in await row.inner_text()
    top = await row.evaluate("row => row.getBoundingClientRect().top")
    assert 0 <= top < 800
