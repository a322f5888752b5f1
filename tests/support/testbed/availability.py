"""Prepare the test bed, and report the parts that are unavailable on this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, Literal

from tests.support.testbed import steps
from tests.support.testbed.cache import Missing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from tests.support.testbed.steps import Step

Bed = Literal["control_plane", "node", "etcds", "oldest_etcd", "oldest_torch", "prometheus", "browser"]

EXHAUSTIVE: Final = os.environ.get("TORCHELASTIC_EXHAUSTIVE", "") not in {"", "0"}
"""Whether to run every test, as ``make test-exhaustive`` does."""

ONLY_EXHAUSTIVE: Final[frozenset[Bed]] = frozenset({"oldest_etcd", "oldest_torch"})
"""Beds that only exhaustive runs use."""

BEDS: Final[Mapping[Bed, str]] = {
    "control_plane": "a real API server",
    "node": "a real kubelet",
    "etcds": "etcd 3.7",
    "oldest_etcd": "etcd 3.4",
    "oldest_torch": "the oldest torch that is supported",
    "prometheus": "a real Prometheus",
    "browser": "a real browser",
}
"""The description of each bed; tests have its name as a marker."""


def prepare(beds: Collection[Bed], say: Callable[[str], None]) -> dict[Bed, Missing]:
    """Prepare these beds.

    Args:
        beds: the names of beds.
        say: receives lines about the progress and the durations.

    Returns:
        The unavailable beds, each with its first missing part.
    """
    missing: dict[Bed, Missing] = {}
    needed: dict[Bed, list[Step]] = {}
    for bed in (bed for bed in BEDS if bed in beds):
        try:
            check_machine(bed)
            needed[bed] = list(needs(bed))
        except Missing as why:
            missing[bed] = why
    not_made = steps.make([step for bed in needed for step in needed[bed]], say)
    for bed, its_steps in needed.items():
        if lacking := [not_made[step.what] for step in its_steps if step.what in not_made]:
            missing[bed] = lacking[0]
    return missing


def needs(bed: Bed) -> Iterator[Step]:
    """The steps that prepare a bed.

    Raises:
        Missing: a part is certainly unavailable.
    """
    if bed == "etcds":
        yield from steps.programs("etcd", the_users=False)
        return
    if bed == "oldest_etcd":
        yield from steps.programs("etcd-3.4", the_users=False)
        return
    if bed == "oldest_torch":
        yield steps.oldest_torch()
        return
    if bed == "prometheus":
        yield steps.unpacked_packages("prometheus")
        return
    if bed == "browser":
        yield steps.browser()
        return
    # Needed even if the user names a cluster: faults are injected only into the tests' own cluster.
    yield from steps.programs("kube-apiserver", "etcd", "helm", "kwok")
    if bed == "node":
        yield from steps.programs("coredns")
        yield steps.unpacked_packages("node")
        yield steps.unpacked_packages("build")
        yield from steps.images()


def closing_words(missing: Mapping[Bed, Missing], left_out: Mapping[Bed, int] | None = None) -> Sequence[str]:
    """The summary of the tests that did not run, with the missing parts and their remedies.

    Args:
        missing: the missing part of each bed.
        left_out: the number of such tests, if it is known.
    """
    lines = []
    for why in {str(why): why for why in missing.values()}.values():
        beds = [bed for bed in missing if str(missing[bed]) == str(why)]
        counted = sum((left_out or {}).get(bed, 0) for bed in beds)
        tests = f"{counted} test{'s' * (counted != 1)}" if counted else "tests"
        lines += [
            f"Did NOT run: {tests} with {' and '.join(BEDS[bed] for bed in beds)}.",
            f"  missing: {why.part}",
            f"  what brings it: {why.remedy}",
        ]
    return lines


def must_not_miss() -> bool:
    """Whether an unavailable bed is a failure, as in CI."""
    return os.environ.get("CI", "").lower() in {"1", "true"}


def check_machine(bed: Bed) -> None:
    """Check the requirements that can be checked at once.

    Raises:
        Missing: the bed is unavailable here.
    """
    if bed == "node":
        from tests.support.testbed import node

        node.check_machine()
