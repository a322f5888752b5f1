"""The seeds of tests with random faults."""

from __future__ import annotations

import os
from typing import Final

from testbed.availability import EXHAUSTIVE

SEED_VARIABLE: Final = "TORCHELASTIC_FAULTS_SEED"


def seeds(*, usual: int, exhaustive: int) -> list[int]:
    """Return the seed in the environment, or else the usual number of seeds, or more with TORCHELASTIC_EXHAUSTIVE."""
    if given := os.environ.get(SEED_VARIABLE):
        return [int(given)]
    return [*range(1, 1 + (exhaustive if EXHAUSTIVE else usual))]
