"""Prepare the test bed, and report the parts that are unavailable on this machine."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from testbed import binaries, packages
from testbed.cache import Missing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

Part = Literal[
    "control_plane",
    "node",
    "etcds",
    "oldest_etcd",
    "oldest_torch",
    "prometheus",
    "browser",
    "ssh",
    "slurm",
    "simulated_nodes",
]

EXHAUSTIVE: Final = os.environ.get("TORCHELASTIC_EXHAUSTIVE", "") not in {"", "0"}
"""Whether to run every test, as ``make test-exhaustive`` does."""

ONLY_EXHAUSTIVE: Final[frozenset[Part]] = frozenset({"oldest_etcd", "oldest_torch", "simulated_nodes"})
"""Parts that only exhaustive runs use."""

PARTS: Final[Mapping[Part, str]] = {
    "control_plane": "a real API server",
    "node": "a real kubelet",
    "etcds": "etcd 3.7",
    "oldest_etcd": "etcd 3.4",
    "oldest_torch": "the oldest torch that is supported",
    "prometheus": "a real Prometheus",
    "browser": "a real browser",
    "ssh": "a real server of SSH",
    "slurm": "a real SLURM",
    "simulated_nodes": "simulated nodes (kwok)",
}
"""The description of each part; a test that needs a part has the part's name as a mark."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the preparation, which is done once.

    Attributes:
        what: the description of what the step prepares.
        lane: the lane of the step; "compiler" and "downloads" run concurrently, "last" after both.
        is_ready: returns whether it already exists.
        make: prepares it, or raises Missing.
    """

    what: str
    lane: Literal["compiler", "downloads", "last"]
    is_ready: Callable[[], bool]
    make: Callable[[], object]


def prepare(parts: Collection[Part], say: Callable[[str], None]) -> dict[Part, Missing]:
    """Prepare parts of the test bed.

    Args:
        parts: the names of the parts.
        say: called with each line about the progress.

    Returns:
        The unavailable parts, each with its first missing part.
    """
    missing: dict[Part, Missing] = {}
    needed: dict[Part, list[Step]] = {}
    for part in (part for part in PARTS if part in parts):
        try:
            needed[part] = list(_needs(part))
        except Missing as why:
            missing[part] = why
    todo = {step.what: step for steps in needed.values() for step in steps if not step.is_ready()}
    not_made: dict[str, Missing] = {}

    def make(lane: str) -> None:
        for step in [step for step in todo.values() if step.lane == lane]:
            say(f"- {step.what}, which may take minutes")
            try:
                step.make()
            except Missing as why:
                not_made[step.what] = why

    if todo:
        say("Preparing the test bed:")
    with ThreadPoolExecutor() as threads:
        list(threads.map(make, ("compiler", "downloads")))
    make("last")
    for part, steps in needed.items():
        if lacking := [not_made[step.what] for step in steps if step.what in not_made]:
            missing[part] = lacking[0]
    return missing


def _needs(part: Part) -> Iterator[Step]:
    """Yield the steps that prepare a part.

    Raises:
        Missing: the part is certainly unavailable.
    """
    match part:
        case "etcds":
            yield from _programs("etcd")
        case "oldest_etcd":
            yield from _programs("etcd-3.4")
        case "oldest_torch":
            from testbed import oldest_torch

            what, is_ready, make = f"torch {oldest_torch.VERSION}", oldest_torch.is_ready, oldest_torch.packages
            yield Step(what=what, lane="downloads", is_ready=is_ready, make=make)
        case "prometheus":
            yield _packages("prometheus", "Prometheus")
        case "browser":
            yield _packages("browser", "a browser")
        case "ssh":
            yield _packages("ssh", "a server of SSH")
        case "slurm":
            yield _packages("slurm", "SLURM")
        case "simulated_nodes":
            yield from _programs("kwok")
        case "control_plane" | "node":
            if part == "node":
                from testbed import node

                node.check_machine()
            yield from _programs("kube-apiserver", "etcd", "helm")
            if part == "node":
                yield from _programs("coredns", "kube-router")
                yield _packages("node", "the node")
                yield _packages("network_policies", "NetworkPolicies")
                yield _packages("build", "building images")
                yield from _images()


def _programs(*names: str) -> Iterator[Step]:
    """Yield the steps that build these programs, and all others of their projects.

    Raises:
        Missing: a program does not exist, and there is no compiler.
    """
    for name in names:
        project = binaries.project_of(name)
        is_ready = partial(binaries.is_ready, name)
        if not is_ready():
            binaries.compiler(project)
        yield Step(
            what=f"{', '.join(project.packages)} {project.version}, built from source",
            lane="compiler",
            is_ready=is_ready,
            make=partial(binaries.binary, name),
        )


def _packages(name: packages.SetName, purpose: str) -> Step:
    what, is_ready, make = (
        f"Debian's packages for {purpose}",
        partial(packages.is_ready, name),
        partial(packages.unpacked, name),
    )
    return Step(what=what, lane="downloads", is_ready=is_ready, make=make)


def _images() -> Iterator[Step]:
    from testbed import images

    for name, tag in images.IMAGES.items():
        yield Step(
            what=f"the image {tag}",
            lane="downloads" if name in ("operator", "agent") else "last",
            is_ready=partial(images.is_ready, name),
            make=partial(images.archive, name),
        )


def fail_if_unavailable() -> bool:
    """Return whether an unavailable part is a failure, as in CI."""
    return os.environ.get("CI", "").lower() in {"1", "true"}
