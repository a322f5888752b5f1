"""Which places are empty, who fills them and when, and whose remains are kept.

A pod that was deleted is replaced at once. One that came to nothing is, too, the first time: it ended by itself (it
died, was evicted, or its node had no room), was deleted before it ever ran, or was asked to leave by nobody knows whom,
such as a kubelet whose probe failed. Then its place waits longer and
longer, and starts over after a healthy time. The count and the time of the last failure travel with the pods, so nobody
has to remember them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elastic_operator.model import NewPod
from elastic_operator.names import pod_name
from elastic_operator.plan import words
from elastic_operator.plan.roster import Verdict, verdict
from torchelastic.contract import ExitCode

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from elastic_operator.model import Job, Pod
    from torchelastic.contract import ResumeRecord, SizeRecord

LONGEST_BACK_OFF: Final = 60.0
"""Seconds that a place waits at most."""

HEALTHY_TIME: Final = 60.0
"""Seconds without a failure, waiting aside, after which one counts as the first in its place."""

ENDED_PODS_KEPT: Final = 3
"""So many ended pods that were replaced are kept for their log, for the whole job."""


@dataclass(frozen=True, slots=True)
class Vacancy:
    """A place without a live pod.

    Attributes:
        index: which place.
        failures: how many of its pods came to nothing in a row.
        failed: when the last of them did; None where none has.
        due: when it may be filled; seconds since the Unix epoch.
        replaces: the pod that was there last, if it still can be seen.
    """

    index: int
    failures: int = 0
    failed: float | None = None
    due: float = 0.0
    replaces: Pod | None = None

    @property
    def story(self) -> str:
        """What became of its pods, to be read behind its name: "failed 3 times in a row"."""
        often = f"{words.count(self.failures, 'time')} in a row"
        if self.replaces is None or not _left(self.replaces):
            return f"failed {often}"
        return f"was deleted {often} before it ran" if self.replaces.terminating else f"was asked to leave {often}"

    def filled(
        self,
        job: Job,
        size: SizeRecord,
        taken: Collection[str],
        *,
        resume: ResumeRecord | None,
        life: str,
        excluded: tuple[str, ...],
    ) -> NewPod:
        """The pod that fills it.

        Args:
            job: the job.
            size: what the pod is started with.
            taken: names that it can't have: those of pods, and those that the agents were told are going.
            resume: what its agent knows of the run from the start.
            life: which of the job's lives between two suspensions it is; empty for the first. No pod of one is called
                like one of another: an epoch that outlived them is none of theirs.
            excluded: nodes that it keeps away from.
        """
        name = pod_name(job.name, job.uid, self.index, self.replaces.uid if self.replaces is not None else life)
        while name in taken:
            name = pod_name(job.name, job.uid, self.index, name)
        return NewPod(
            name=name,
            index=self.index,
            size=size,
            failures=self.failures,
            failed=self.failed,
            resume=resume,
            excluded=excluded,
        )


def find_vacancies(
    staying: Sequence[Pod], desired: int, last: Mapping[int, Pod], now: float, *, grown: int = 0
) -> tuple[Vacancy, ...]:
    """As many of the lowest empty places as pods are missing.

    Args:
        staying: the live pods; they may sit anywhere.
        desired: how many there should be.
        last: by index, the pod that was there last.
        now: seconds since the Unix epoch.
        grown: how many more are wanted than before: what was deleted in their places was not wanted then.
    """
    taken = {pod.index for pod in staying}
    missing = max(desired - len(staying), 0)
    empty = itertools.islice((index for index in itertools.count() if index not in taken), missing)
    return tuple(
        _vacancy(index, last.get(index), now, wanted=position < missing - grown) for position, index in enumerate(empty)
    )


def _vacancy(index: int, last: Pod | None, now: float, *, wanted: bool) -> Vacancy:
    if last is None:
        return Vacancy(index)
    began, ended = (_by_our_clock(time, last, now) for time in (last.started, last.ended))
    healthy_since = began if last.failed is None else min(began, last.failed + back_off(last.failures))
    was_healthy = (now if last.ended is None else ended) - healthy_since >= HEALTHY_TIME
    before = 0 if was_healthy else max(last.failures, 0)
    if _left(last) and (_gave_its_place(last) or not wanted):
        return Vacancy(index, before, last.failed if before else None, replaces=last)
    failures = before + 1
    failed = began if last.ended is None else ended
    if failed > now:  # then it is this clock that is wrong
        return Vacancy(index, failures, now, now, last)
    return Vacancy(index, failures, failed, failed + back_off(failures), last)


def _by_our_clock(time: float | None, pod: Pod, now: float) -> float:
    """A time that its node told, where that can be; else when the pod was made, by the clock of the API server."""
    return time if time is not None and pod.created <= time <= now else pod.created


def _left(pod: Pod) -> bool:
    """Whether it left or was deleted, and did not end by itself."""
    return verdict(pod) is Verdict.LEFT and not _ended_by_itself(pod)


def _gave_its_place(pod: Pod) -> bool:
    """Whether one that left ran until somebody deleted it, or had another use for its place."""
    has_run = pod.started is not None or pod.exit_code is not None
    return has_run and (pod.terminating or pod.fate is not None)


def _ended_by_itself(pod: Pod) -> bool:
    """Whether what is being deleted are the remains of a pod that failed."""
    code = pod.exit_code
    return pod.phase.ended and code not in (None, ExitCode.SUCCEEDED, ExitCode.INTERRUPTED, ExitCode.LEFT)


def back_off(failures: int) -> float:
    """Seconds to wait after so many failures in a row: 0, 1, 2, 4 … 60."""
    if failures <= 1:
        return 0.0
    return min(2.0 ** min(failures - 2, 16), LONGEST_BACK_OFF)


def forget(ended: Sequence[Pod], vacancies: Sequence[Vacancy]) -> tuple[Pod, ...]:
    """Ended pods that need not be kept any longer.

    One whose place is still empty is kept in any case: its successor's name and patience come from it. One of which
    another container still runs, and so holds on to what it was given, is not kept for its log.
    """
    needed = {vacancy.replaces.uid for vacancy in vacancies if vacancy.replaces is not None}
    replaced = [pod for pod in ended if pod.uid not in needed]
    silent = [pod for pod in replaced if not pod.lingers]
    silent.sort(key=lambda pod: (pod.ended or 0.0, pod.created, pod.name), reverse=True)
    kept = max(ENDED_PODS_KEPT - (len(ended) - len(replaced)), 0)
    return (*(pod for pod in replaced if pod.lingers), *silent[kept:])
