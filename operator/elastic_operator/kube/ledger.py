"""What the API server would not make for a job, and why: kept until the spec changes, or until it is made after all."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_operator.model import Job

_FIRST_WAIT: Final = 0.5
_LONGEST_WAIT: Final = 30.0

_LASTING: Final = 5.0
_IN_A_ROW: Final = 3


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is held against one generation of a job's spec.

    Attributes:
        generation: of the spec.
        refusal: why its objects will never be taken; None where they may.
        hindrance: why they were not taken when it was tried last; None where they were.
        tries: how often in a row they were not taken.
        next_try: when it makes sense to try again; a monotonic time.
    """

    generation: int
    refusal: str | None = None
    hindrance: str | None = None
    tries: int = 0
    next_try: float = 0.0


@dataclass(slots=True)
class _Failures:
    """The tries in a row that the API server failed to answer with yes or no.

    Attributes:
        since: when the first of them was made; a monotonic time.
        number: how many there were.
    """

    since: float
    number: int = 0


class Ledger:
    """Refusals and hindrances by job.

    Args:
        clock: a monotonic time in seconds.
        lasting: seconds for which the API server may fail before that is a hindrance.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, lasting: float = _LASTING) -> None:
        self._clock = clock
        self._lasting = lasting
        self._entries: dict[str, _Entry] = {}
        self._failing: dict[str, _Failures] = {}

    def refusal(self, job: Job) -> str | None:
        """Why what the job's spec asks for will never be taken; None where it may be."""
        return self._entry(job).refusal

    def hindrance(self, job: Job) -> str | None:
        """Why something could not be made for the job when it was tried last; None where all could."""
        return self._entry(job).hindrance

    def wait(self, job: Job) -> float:
        """Seconds for which it is too early to try again."""
        return max(self._entry(job).next_try - self._clock(), 0.0)

    def refuse(self, job: Job, why: str) -> None:
        """The API server will never take what the job's spec asks for."""
        self._entries[job.uid] = _Entry(job.generation, refusal=why)

    def hinder(self, job: Job, why: str) -> None:
        """The API server does not take it now."""
        tries = self._entry(job).tries
        wait = min(_FIRST_WAIT * 2.0 ** min(tries, 16), _LONGEST_WAIT)
        self._entries[job.uid] = _Entry(job.generation, hindrance=why, tries=tries + 1, next_try=self._clock() + wait)

    def fails(self, job: Job) -> bool:
        """The API server has failed where something was to be made; gives back whether that lasts."""
        now = self._clock()
        failing = self._failing.setdefault(job.uid, _Failures(now))
        failing.number += 1
        return failing.number >= _IN_A_ROW and now - failing.since >= self._lasting

    def made(self, job: Job) -> None:
        """Something was made for the job, though perhaps not all."""
        self._failing.pop(job.uid, None)

    def clear(self, job: Job) -> bool:
        """All that was asked for was made; gives back whether that is news."""
        self.made(job)
        return self._entries.pop(job.uid, None) is not None

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self._failing.pop(uid, None)
        self._entries.pop(uid, None)

    def _entry(self, job: Job) -> _Entry:
        """What is known of the spec as it is. What hindered an earlier one holds until this one was tried."""
        entry = self._entries.get(job.uid)
        if entry is None or entry.generation == job.generation:
            return entry or _Entry(job.generation)
        return _Entry(job.generation, hindrance=entry.hindrance)
