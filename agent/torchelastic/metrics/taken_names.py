"""Names of series that are taken: where two names of a program come out alike, the second one gets another."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from torchelastic.metrics.names import tagged
from torchelastic.metrics.platform_names import PLATFORM_SAMPLES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchelastic.metrics.names import Series

_log: Final = logging.getLogger(__name__)


class TakenNames:
    """Which source has which names of samples; the platform's own are taken from the beginning."""

    def __init__(self) -> None:
        self._sources: dict[str, str] = {}

    def take(self, series: Series, source: Sequence[str]) -> Series:
        """The series under a name that no other source has; the same for the same source in every process.

        Args:
            series: as it would be called.
            source: what tells its source from all others, the group and the name first.
        """
        text = repr(tuple(source))  # so that no text in it, whatever it holds, makes it look like another one
        plain = series.name
        while not self._free(series, text):
            series = tagged(series, text)
        self._sources |= dict.fromkeys(series.samples, text)
        if series.name != plain:
            _log.warning(
                "%r of the group %r would be %s, which is taken by another name; it is %s.",
                source[1],
                source[0],
                plain,
                series.name,
            )
        return series

    def _free(self, series: Series, source: str) -> bool:
        return PLATFORM_SAMPLES.isdisjoint(series.samples) and not any(
            self._sources.get(sample, source) != source for sample in series.samples
        )
