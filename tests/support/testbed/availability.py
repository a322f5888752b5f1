"""What of the test bed can be had on this machine: makes all that is missing, and says in words what cannot be made."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from tests.support.testbed import binaries, packages, user_cluster
from tests.support.testbed.cache import Missing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

Bed = Literal["control_plane", "node"]

BEDS: Final[Mapping[Bed, str]] = {
    "control_plane": "a real API server",
    "node": "a real kubelet",
}
"""What each bed gives the tests; they carry its name as a marker."""

_MINUTES: Final = {"operator": 2.0, "agent": 6.0}
"""How long images take that are not made at once."""

_QUICK: Final = 1.0
"""Seconds up to which it is not worth a line that something was made."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Something that is made once.

    Attributes:
        what: it, in words.
        minutes: how long that takes on two cores.
        is_ready: whether it is there already.
        make: makes it; raises Missing.
    """

    what: str
    minutes: float
    is_ready: Callable[[], bool]
    make: Callable[[], object]


def prepare(beds: Collection[Bed], say: Callable[[str], None]) -> dict[Bed, Missing]:
    """Make what these beds need.

    Args:
        beds: those that are wanted.
        say: gets lines for a person: what is done, and how long it will take.

    Returns:
        The beds that cannot be had, each with the first thing that is missing.
    """
    wanted = [bed for bed in BEDS if bed in beds]
    missing: dict[Bed, Missing] = {}
    for bed in wanted:
        try:
            check_machine(bed)
        except Missing as why:
            missing[bed] = why
    todo = [step for bed in wanted if bed not in missing for step in steps(bed) if not step.is_ready()]
    if todo:
        total = sum(step.minutes for step in {step.what: step for step in todo}.values())
        say(f"The test bed of a real Kubernetes is made, once: about {total:.0f} minutes on two cores.")
    for bed in wanted:
        if bed not in missing:
            try:
                for step in steps(bed):
                    _take(step, say)
            except Missing as why:
                missing[bed] = why
    return missing


def steps(bed: Bed) -> Iterator[Step]:
    """What a bed needs, in the order in which it is made."""
    if bed == "node" or not user_cluster.named():
        yield from map(_program, ("etcd", "kube-apiserver", "helm"))
    else:
        yield _program("kubectl")
    if bed == "node":
        yield _program("coredns")
        yield from (_packages(name) for name in packages.SETS)
        yield from _images()


def closing_words(missing: Mapping[Bed, Missing], left_out: Mapping[Bed, int] | None = None) -> Sequence[str]:
    """What is told at the end: which tests did not run, what they lack, and what would bring it.

    Args:
        missing: what each bed lacks.
        left_out: how many tests that are, where it is known.
    """
    lines = []
    for why in {str(why): why for why in missing.values()}.values():
        beds = [bed for bed in missing if str(missing[bed]) == str(why)]
        counted = sum((left_out or {}).get(bed, 0) for bed in beds)
        tests = f"{counted} test{'s' * (counted != 1)}" if counted else "tests"
        lines += [
            f"The tests on a real Kubernetes did NOT run: {tests} with {' and '.join(BEDS[bed] for bed in beds)}.",
            f"  missing: {why.part}",
            f"  what brings it: {why.remedy}",
        ]
    return lines


def must_not_miss() -> bool:
    """Whether a bed that cannot be had is a failure, as it is for CI."""
    return os.environ.get("CI", "").lower() in {"1", "true"}


def check_machine(bed: Bed) -> None:
    """What can be told at once, before minutes are spent.

    Raises:
        Missing: the bed cannot be had here.
    """
    if bed == "node":
        from tests.support.testbed import node

        node.check_machine()


def _program(name: str) -> Step:
    project = binaries.project_of(name)
    return Step(
        what=f"{', '.join(project.packages)} {project.version}, built from source",
        minutes=project.minutes,
        is_ready=partial(binaries.is_ready, name),
        make=partial(binaries.binary, name),
    )


def _packages(name: packages.SetName) -> Step:
    return Step(
        what=f"Debian's packages for {'the node' if name == 'node' else 'building images'}, unpacked",
        minutes=0.5,
        is_ready=partial(packages.is_ready, name),
        make=partial(packages.unpacked, name),
    )


def _images() -> Iterator[Step]:
    from tests.support.testbed import images

    for name, tag in images.IMAGES.items():
        yield Step(
            what=f"the image {tag}",
            minutes=_MINUTES.get(name, 0.1),
            is_ready=partial(images.is_ready, name),
            make=partial(images.archive, name),
        )


def _take(step: Step, say: Callable[[str], None]) -> None:
    """Make one thing, if it is not there."""
    ready = step.is_ready()
    if not ready:
        about = f"{step.minutes:g} minutes" if step.minutes >= 1 else f"{step.minutes * 60:.0f} seconds"
        say(f"- {step.what}: about {about}")
    begun = time.monotonic()
    step.make()
    seconds = time.monotonic() - begun
    if not ready and seconds > _QUICK:
        say(f"  took {seconds:.0f} s")
