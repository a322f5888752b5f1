"""The preparation steps of the test bed, with their durations and lanes."""

from __future__ import annotations

import enum
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from tests.support.testbed import binaries, packages
from tests.support.testbed.cache import Missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Lane(enum.Enum):
    """The steps of one lane run one after the other; lanes run concurrently."""

    COMPILER = enum.auto()
    """What Go builds: takes processors."""
    DOWNLOADS = enum.auto()
    """Packages, and images built of them: takes network and disk. Goes on beside the compiler."""
    LAST = enum.auto()
    """What is made of the others."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Something that is made once.

    Attributes:
        what: it, in words.
        lane: when it is made.
        minutes: how long that takes on two cores, the first time.
        is_ready: whether it is there already.
        make: makes it; raises Missing.
    """

    what: str
    lane: Lane
    minutes: float
    is_ready: Callable[[], bool]
    make: Callable[[], object]


_PACKAGES: Final[dict[packages.SetName, str]] = {
    "node": "the node",
    "build": "building images",
    "prometheus": "Prometheus",
    "browser": "the browser",
}
"""What each set of packages is for."""
_IMAGES: Final = {"operator": (Lane.DOWNLOADS, 2.0), "agent": (Lane.DOWNLOADS, 6.0)}
"""Of images that are built from a Dockerfile: the lane, and the minutes."""


def programs(*names: str, the_users: bool = True) -> Iterator[Step]:
    """Make these programs, and with each all others of its project.

    Args:
        names: of the programs.
        the_users: whether the user's own will do.

    Raises:
        Missing: one is not there, and there is no compiler.
    """
    for name in names:
        project = binaries.project_of(name)
        if not binaries.is_ready(name, the_users=the_users):
            binaries.compiler(project)
        yield Step(
            what=f"{', '.join(project.packages)} {project.version}, built from source",
            lane=Lane.COMPILER,
            minutes=project.minutes,
            is_ready=partial(binaries.is_ready, name, the_users=the_users),
            make=partial(binaries.binary, name, the_users=the_users),
        )


def unpacked_packages(name: packages.SetName) -> Step:
    """Make a set of what is used of Debian's packages."""
    return Step(
        what=f"Debian's packages for {_PACKAGES[name]}, unpacked",
        lane=Lane.DOWNLOADS,
        minutes=0.5,
        is_ready=partial(packages.is_ready, name),
        make=partial(packages.unpacked, name),
    )


def browser() -> Step:
    """Have a browser."""
    from tests.support.testbed import browser as any_browser

    return Step(
        what="a browser, of Debian's packages, unpacked",
        lane=Lane.DOWNLOADS,
        minutes=1.0,
        is_ready=any_browser.is_ready,
        make=any_browser.browser,
    )


def oldest_torch() -> Step:
    """Install the oldest torch that is supported."""
    from tests.support import oldest_torch as oldest

    return Step(
        what=f"torch {oldest.VERSION}",
        lane=Lane.DOWNLOADS,
        minutes=oldest.MINUTES,
        is_ready=oldest.is_ready,
        make=oldest.packages,
    )


def images() -> Iterator[Step]:
    """Make all images."""
    from tests.support.testbed import images as all_images

    def is_ready(name: str) -> bool:
        """Without building the program that the image may be of."""
        return (not binaries.knows(name) or binaries.is_ready(name)) and all_images.is_ready(name)

    for name, tag in all_images.IMAGES.items():
        lane, minutes = _IMAGES.get(name, (Lane.LAST, 0.1))
        yield Step(
            what=f"the image {tag}",
            lane=lane,
            minutes=minutes,
            is_ready=partial(is_ready, name),
            make=partial(all_images.archive, name),
        )


def make(steps: Sequence[Step], say: Callable[[str], None]) -> dict[str, Missing]:
    """Make what is not there.

    Args:
        steps: what is wanted; where two say the same, one is enough.
        say: gets lines for a person: what is done, how long it will take, how long it took.

    Returns:
        What could not be made, each with what is missing for it.
    """
    todo = list({step.what: step for step in steps if not step.is_ready()}.values())
    if not todo:
        return {}
    missing: dict[str, Missing] = {}
    one_line_at_a_time = threading.Lock()

    def tell(line: str) -> None:
        with one_line_at_a_time:
            say(line)

    def take(lane: Lane) -> None:
        for step in todo:
            if step.lane is lane:
                try:
                    _take(step, tell)
                except Missing as why:
                    missing[step.what] = why

    tell(f"What the tests run on is made: up to {_minutes(todo):.0f} minutes on two cores.")
    with ThreadPoolExecutor() as threads:
        list(threads.map(take, [lane for lane in Lane if lane is not Lane.LAST]))
    take(Lane.LAST)
    return missing


def _minutes(todo: Sequence[Step]) -> float:
    """How long it all takes: what goes on side by side is slower for that."""
    *side_by_side, last = (sum(step.minutes for step in todo if step.lane is lane) for lane in Lane)
    longest = max(side_by_side)
    return max(1.0, longest + (sum(side_by_side) - longest) / 2 + last)


def _take(step: Step, say: Callable[[str], None]) -> None:
    """Make one thing."""
    about = f"{step.minutes:g} minutes" if step.minutes > 1 else f"{step.minutes * 60:.0f} seconds"
    say(f"- {step.what}: up to {about}")
    begun = time.monotonic()
    step.make()
    say(f"  {step.what}: done in {time.monotonic() - begun:.0f} s")
