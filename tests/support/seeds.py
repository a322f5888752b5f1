"""The seeds of tests with random faults."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

from testbed.availability import EXHAUSTIVE

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED_VARIABLE: Final = "TORCHELASTIC_FAULTS_SEED"


def seeds(*, usual: int, exhaustive: int) -> list[int]:
    """Return the seed in the environment, or else the usual number of seeds, or more with TORCHELASTIC_EXHAUSTIVE."""
    if given := os.environ.get(SEED_VARIABLE):
        return [int(given)]
    return [*range(1, 1 + (exhaustive if EXHAUSTIVE else usual))]


@contextlib.contextmanager
def explained(note: str) -> Iterator[None]:
    """Add a note to an error that is raised in the block."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise
