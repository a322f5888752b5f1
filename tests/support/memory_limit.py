"""A control group with a memory limit, in the version that this machine has."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.testbed import availability, node_cgroups
from tests.support.testbed.cache import Missing

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def memory_limit(megabytes: int) -> Iterator[tuple[str, ...]]:
    """A command that executes its arguments in a control group with a limit in megabytes.

    If this user may not create one, the test is skipped; with CI=true it fails.
    """
    try:
        found = node_cgroups.of_this_machine()
        node_cgroups.check(found)
    except Missing as why:
        availability.unavailable(why)
    groups = node_cgroups.plan(
        [hierarchy for hierarchy in found if hierarchy.version == 2 or hierarchy.options == "memory"],
        f"elastic-test-{os.getpid()}",
    )
    node_cgroups.make(groups)
    try:
        [folder] = map(Path, groups.folders)
        limit = folder / ("memory.max" if (folder / "memory.max").exists() else "memory.limit_in_bytes")
        limit.write_text(str(megabytes << 20))
        for swap in ("memory.swap.max", "memory.swappiness"):
            if (folder / swap).exists():
                (folder / swap).write_text("0")
        yield ("sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh")
    finally:
        left = node_cgroups.remove(groups)
        assert not left
