"""The demo: a job is scaled, loses a worker and an agent to kill -9, shrinks again and succeeds, while you watch.

It measures the time from a step to the first line that rank 0 prints in the round that follows. ``examples/digits.py``
prints that line when it has loaded its checkpoint and trains again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from elastic_operator.client.local import LocalJobs
from elastic_operator.controller import messages
from elastic_operator.errors import BadInput, ElasticJobError
from elastic_operator.local.log_files import log_files
from elastic_operator.local.runner import EndReason, run_job
from elastic_operator.local.view import DONE, FAILED, NOW, Step
from elastic_operator.views import formatting
from elastic_operator.views.formatting import columns
from elastic_operator.views.job_view import JobView
from elastic_operator.views.log_selector import LogSelector

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from elastic_operator.local.log_files import LogFile
    from elastic_operator.local.runner import RunRequest
    from elastic_operator.local.view import View
    from elastic_operator.views.job_view import PodView

_Found = TypeVar("_Found")

_START_LIMIT: Final = 180.0
"""Seconds; with a cold disk the first import of torch alone can take half a minute."""
_STEP_LIMIT: Final = 90.0
_SUCCESS_LIMIT: Final = 900.0
_SETTLE_LIMIT: Final = 20.0
_SETTLED_LINES: Final = 4
"""Lines of rank 0 that show that training goes on, and that give it time for a checkpoint."""
_POLL_INTERVAL: Final = 0.02


class StepFailed(ElasticJobError):  # noqa: N818 - it names what happened
    """A step of the demo did not have its effect."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Training continues: the round, its number of workers, and the seconds since the step began."""

    round: int
    workers: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Performance:
    """How the demo went.

    Attributes:
        run: the exit code of the run.
        code: the exit code of the demo: that of the run, or 1 if a step failed.
        rows: a table of what happened and how long each recovery took.
    """

    run: int
    code: int
    rows: Sequence[tuple[str, ...]]

    def lines(self) -> list[str]:
        """Return the table."""
        return ["", *columns([("STEP", "ROUND", "WORKERS", "TRAINS AFTER", ""), *self.rows], " ")]


async def perform(request: RunRequest, view: View) -> Performance:
    """Run a job and play the steps on it.

    Raises:
        BadInput: the job cannot run, or cannot be scaled as the demo does it.
    """
    demo = _Demo(view, request)
    playing = asyncio.create_task(demo.play())
    try:
        code = await run_job(request, observer=demo)
        succeeded = await playing
    finally:
        playing.cancel()
        await asyncio.wait([playing])
    return Performance(code, code if succeeded else 1, demo.rows)


class _Demo:
    """An observer of the run, which plays the steps on it.

    Attributes:
        job: the latest snapshot.
        rows: a table of what happened.
    """

    def __init__(self, view: View, request: RunRequest) -> None:
        self._small, large = _sizes(request.manifest.job["spec"])
        self._view = view
        self._jobs = LocalJobs(home=request.home)
        self._script: list[tuple[str, Callable[[], Awaitable[tuple[list[Resumed], str]]]]] = [
            (f"start with {self._small} pods", self._start),
            (f"scale to {large}", lambda: self._scale_to(large)),
            ("kill -9 a worker", self._kill_worker),
            ("kill -9 an agent", self._kill_agent),
            (f"scale back to {self._small}", lambda: self._scale_to(self._small)),
            ("success", self._succeed),
        ]
        self._steps = [Step(title) for title, _ in self._script]
        self.job = JobView()
        self.rows: list[tuple[str, ...]] = []
        self.on_ending = view.on_ending

    def on_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        """The job has changed."""
        self.job = JobView.of(snapshot)
        self._view.on_snapshot(snapshot)

    async def play(self) -> bool:
        """Play the steps, and end the job if one fails; return whether none failed."""
        for number, (title, step) in enumerate(self._script):
            try:
                if 0 < number < len(self._script) - 1:
                    await self._settled()
                self._mark(number, NOW)
                resumed, note = await step()
            except ElasticJobError as failure:
                ended = self.job.run.ended
                by_user = ended is not None and ended.how in (EndReason.DELETED, EndReason.INTERRUPTED)
                self._mark(number, *(("", "") if by_user else (FAILED, str(failure))))
                self.rows.append((title, "-", "-", "not played" if by_user else "failed", self._steps[number].result))
                self.rows += [(later, "-", "-", "not played", "") for later, _ in self._script[number + 1 :]]
                if not by_user and not self.job.status.finished:
                    with contextlib.suppress(ElasticJobError):  # it is ending by itself
                        await asyncio.to_thread(self._jobs.delete, self.job.run.id)
                return by_user
            self._mark(number, DONE, _summary(resumed) or note)
            cells = [(str(each.round), str(each.workers), f"{each.seconds:.2f} s") for each in resumed]
            first, *others = cells or [("-", "-", "-")]
            self.rows += [(title, *first, note), *(("", *other, "") for other in others)]
        return True

    # The steps: each returns when training went on, and a note.

    async def _start(self) -> tuple[list[Resumed], str]:
        return [await self._resumed(time.monotonic(), after=0, pods=self._small, limit=_START_LIMIT)], ""

    async def _scale_to(self, pods: int) -> tuple[list[Resumed], str]:
        before, since = self.job.status.round, time.monotonic()
        await asyncio.to_thread(self._jobs.scale, self.job.run.id, pods)
        return [await self._resumed(since, after=before, pods=pods)], ""

    async def _kill_worker(self) -> tuple[list[Resumed], str]:
        rank = self.job.status.world_size - 1
        file = self._rank_file(rank)
        pid = _writer(file.path) if file is not None else None
        if pid is None:
            raise StepFailed(f"the process of rank {rank} was not found")
        pods, before, since = len(self._training_pods), self.job.status.round, time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return [await self._resumed(since, after=before, pods=pods)], f"rank {rank}, process {pid}"

    async def _kill_agent(self) -> tuple[list[Resumed], str]:
        training, before, since = self._training_pods, self.job.status.round, time.monotonic()
        # That of rank 0 is the hardest one to lose: it leads, and serves the store of the round.
        pod = next((pod for pod in training if pod.pid), None)
        if pod is None or pod.pid is None:
            raise StepFailed("no agent that could be killed was found")
        os.kill(pod.pid, signal.SIGKILL)
        first = await self._resumed(since, after=before)
        whole = await self._resumed(since, after=before, pods=len(training))
        return [first] if first.round == whole.round else [first, whole], f"pod {pod.name}"

    async def _succeed(self) -> tuple[list[Resumed], str]:
        def look() -> str | None:
            return self.job.status.state if self.job.status.finished else None

        state = await self._until(look, limit=_SUCCESS_LIMIT, what="the end of training")
        if state != "Succeeded":
            raise StepFailed(f"the job {state.lower()}: {self.job.status.what_failed}")
        return [], formatting.printed(self.job.progress.line) if self.job.progress else "the job succeeded"

    # What the steps wait for

    @property
    def _training_pods(self) -> list[PodView]:
        """The pods of the current round, in rank order."""
        return sorted((pod for pod in self.job.living_pods if pod.ranks), key=lambda pod: pod.ranks or ())

    def _rank_file(self, rank: int) -> LogFile | None:
        """Return where a rank prints in its latest round."""
        files = log_files(Path(self.job.run.logs), LogSelector(rank)) if self.job.run.logs else []
        return files[-1] if files else None

    async def _until(self, look: Callable[[], _Found | None], *, limit: float, what: str) -> _Found:
        """Return what ``look`` finds, as soon as it finds something within ``limit`` seconds.

        Raises:
            StepFailed: it found nothing in time, or the job ended first.
        """
        try:
            async with asyncio.timeout(limit):
                while (found := look()) is None:
                    if self.job.status.finished or self.job.run.ended is not None:
                        raise StepFailed(f"the job ended ({self.job.status.state}) while the demo waited for {what}")
                    await asyncio.sleep(_POLL_INTERVAL)
                return found
        except TimeoutError:
            raise StepFailed(f"{what} did not come within {limit:.0f} s") from None

    async def _resumed(
        self, since: float, *, after: int, pods: int | None = None, limit: float = _STEP_LIMIT
    ) -> Resumed:
        """Return the first sign of training in a round later than ``after``, with this number of pods if given."""
        first_lines: dict[int, float] = {}

        def look() -> Resumed | None:
            status, file = self.job.status, self._rank_file(0)
            # The file of a round may appear before the snapshot with that round; the time of the line counts.
            if file is not None and file.round not in first_lines and b"\n" in file.path.read_bytes():
                first_lines[file.round] = time.monotonic()
            begun = first_lines.get(status.round)
            if status.round <= after or begun is None or pods not in (None, len(self._training_pods)):
                return None
            return Resumed(status.round, status.world_size, begun - since)

        count = "" if pods is None else f" with {messages.count(pods, 'pod')}"
        return await self._until(look, limit=limit, what=f"training{count} in a round after {after}")

    async def _settled(self) -> None:
        """Return when training has visibly gone on for a while, or has printed nothing for a longer while."""

        def look() -> bool | None:
            file = self._rank_file(0)
            return (file is not None and file.path.read_bytes().count(b"\n") >= _SETTLED_LINES) or None

        try:
            await self._until(look, limit=_SETTLE_LIMIT, what="a few lines of progress")
        except StepFailed:
            if self.job.status.finished:
                raise

    def _mark(self, number: int, mark: str, result: str = "") -> None:
        self._steps[number] = replace(self._steps[number], mark=mark, result=result)
        self._view.on_steps(self._steps)


def _sizes(spec: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of pods at first, and the larger one in between."""
    most, least = spec["maxReplicas"], max(spec["minReplicas"], 2)
    small = min(spec.get("replicas") or most, most - 1)
    if small < least:
        raise BadInput(
            "the demo scales a job of at least 2 pods up by one and back: spec.maxReplicas must be at least "
            f"{least + 1}, not {most}"
        )
    return small, small + 1


def _summary(resumed: Sequence[Resumed]) -> str:
    parts = [f"{each.seconds:.1f} s" for each in resumed[:1]]
    parts += [f"{messages.count(each.workers, 'worker')} after {each.seconds:.1f} s" for each in resumed[1:]]
    return ", ".join(parts)


def _writer(output: Path) -> int | None:
    """Return the process whose standard output is this file: the worker, which is older than its children."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if process.name.isdecimal() and (process / "fd" / "1").samefile(output):
                found.append(int(process.name))
    return min(found, default=None)
