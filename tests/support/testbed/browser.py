"""The browser of the tests: the machine's own Chromium, or that of Debian, unpacked."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.support.testbed import packages
from tests.support.testbed.cache import Missing

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_UNPACKED: Final = Path("usr/lib/chromium/chromium")
"""The program below the root of the unpacked packages; the script in usr/bin expects an installation."""

_FONTS: Final = """\
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig><dir>{fonts}</dir><cachedir>{cache}</cachedir></fontconfig>
"""


@dataclass(frozen=True, slots=True)
class Browser:
    """The start of the browser.

    Attributes:
        program: its path.
        environment: its complete environment.
    """

    program: Path
    environment: Mapping[str, str]


def browser() -> Browser:
    """The machine's own browser, or the unpacked one, which is fetched if it is missing.

    Raises:
        Missing: there is none, and it cannot be fetched.
    """
    if (own := installed()) is not None:
        return Browser(own, dict(os.environ))
    root = packages.unpacked("browser")
    program = root / _UNPACKED
    if not program.exists():
        raise Missing("a Chromium", "install one so that `chromium` or `google-chrome` is on the PATH")
    fonts = root / "fonts.conf"
    if not fonts.exists():
        written = _FONTS.format(fonts=root / "usr/share/fonts", cache=root / "var/cache/fontconfig")
        fonts.with_suffix(".new").write_text(written)
        fonts.with_suffix(".new").replace(fonts)
    libraries = packages.environment(root)["LD_LIBRARY_PATH"]
    return Browser(program, {**os.environ, "LD_LIBRARY_PATH": libraries, "FONTCONFIG_FILE": str(fonts)})


def is_ready() -> bool:
    """Whether :func:`browser` will find one without fetching it."""
    return installed() is not None or packages.is_ready("browser")


def installed() -> Path | None:
    """The machine's own browser; None if there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    return None if found is None else Path(found)
