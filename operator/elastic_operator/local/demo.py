"""The demo: a job is scaled, loses a worker and an agent to kill -9, shrinks again and succeeds, while you watch.

It measures what a user feels: the time from a step to the first line that rank 0 prints in the round that follows.
``examples/digits.py`` prints that line when it has loaded its checkpoint and trains again.
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

from watchfiles import awatch

from elastic_operator.errors import BadInput, ElasticJobError
from elastic_operator.local.client import LocalRuns
from elastic_operator.local.ending import EndReason
from elastic_operator.local.log_files import log_files
from elastic_operator.local.runner import run_job
from elastic_operator.local.view_text import DONE, FAILED, NOW, Step
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
_POLL_MILLISECONDS: Final = 1000
"""A write into a directory that was created at that moment is not noticed."""


class StepFailed(ElasticJobError):  # noqa: N818 - it names what happened
    """A step of the demo did not have its effect."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Training goes on: in this round, with so many pods and workers, from this time of the monotonic clock on."""

    round: int
    pods: int
    workers: int
    at: float


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of a step.

    Attributes:
        resumed: the rounds that followed.
        seconds: from the step to each of them.
        note: what else happened.
    """

    resumed: tuple[Resumed, ...] = ()
    seconds: tuple[float, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        """Return it in a few words."""
        if not self.resumed:
            return self.note
        later = zip(self.resumed[1:], self.seconds[1:], strict=True)
        workers = [f"{formatting.count(each.workers, 'worker')} after {seconds:.1f} s" for each, seconds in later]
        return ", ".join([f"{self.seconds[0]:.1f} s", *workers])


@dataclass(frozen=True, slots=True)
class Performance:
    """How the demo went.

    Attributes:
        run: the exit code of the run.
        code: the exit code of the demo: that of the run, or 1 if a step failed.
        steps: all steps.
        effects: of the steps that had one, in their order.
    """

    run: int
    code: int
    steps: Sequence[Step]
    effects: Sequence[Effect]

    def lines(self) -> list[str]:
        """Return what happened and how long each recovery took, as a table."""
        rows = [("STEP", "ROUND", "WORKERS", "TRAINS AFTER", "")]
        for step, effect in zip(self.steps, self.effects, strict=False):
            title, note = step.title, effect.note
            for resumed, seconds in zip(effect.resumed, effect.seconds, strict=True):
                rows.append((title, str(resumed.round), str(resumed.workers), f"{seconds:.2f} s", note))
                title = note = ""
            if not effect.resumed:
                rows.append((title, "-", "-", "-", note))
        rows += [(step.title, "-", "-", "failed", step.result) for step in self.steps if step.mark == FAILED]
        rows += [(step.title, "-", "-", "not played", "") for step in self.steps if step.mark in ("", NOW)]
        return ["", *columns(rows, " ")]


class Watched:
    """The job of the demo as it is, and ways to wait for it; an observer of the run.

    Attributes:
        job: the latest snapshot.
    """

    def __init__(self, view: View) -> None:
        self.job = JobView()
        self.on_ending = view.on_ending
        self._view = view
        self._changed = asyncio.Event()
        self._logs: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        self._first_lines: dict[int, float] = {}

    def on_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        """The job has changed."""
        self.job = JobView.of(snapshot)
        self._view.on_snapshot(snapshot)
        if not self._logs.done() and self.job.run.logs:
            self._logs.set_result(Path(self.job.run.logs))
        self._wake()

    async def watch_logs(self) -> None:
        """Notice what the workers print, until this is cancelled."""
        options: dict[str, Any] = {"debounce": 20, "step": 5, "watch_filter": None, "yield_on_timeout": True}
        async for _ in awatch(await self._logs, rust_timeout=_POLL_MILLISECONDS, **options):
            self._wake()

    @property
    def ended_by_user(self) -> bool:
        """Whether the user has ended the run."""
        ended = self.job.run.ended
        return ended is not None and ended.how in (EndReason.DELETED, EndReason.INTERRUPTED)

    @property
    def training_pods(self) -> list[PodView]:
        """The pods of the current round, in rank order."""
        return sorted((pod for pod in self.job.living_pods if pod.ranks), key=lambda pod: pod.ranks or ())

    def rank_file(self, rank: int) -> LogFile | None:
        """Return where a rank prints in its latest round."""
        files = log_files(Path(self.job.run.logs), LogSelector(rank)) if self.job.run.logs else []
        return files[-1] if files else None

    async def until(self, look: Callable[[], _Found | None], *, limit: float, what: str) -> _Found:
        """Return what ``look`` finds, as soon as it finds something within ``limit`` seconds.

        Raises:
            StepFailed: it found nothing in time, or the job ended first.
        """
        try:
            async with asyncio.timeout(limit):
                while True:
                    changed = self._changed
                    if (found := look()) is not None:
                        return found
                    if self.job.status.finished or self.job.run.ended is not None:
                        raise StepFailed(f"the job ended ({self.job.status.state}) while the demo waited for {what}")
                    await changed.wait()
        except TimeoutError:
            raise StepFailed(f"{what} did not come within {limit:.0f} s") from None

    async def resumed(self, *, after: int, pods: int | None = None, limit: float = _STEP_LIMIT) -> Resumed:
        """Return the first sign of training in a round later than ``after``, with this number of pods if given."""

        def look() -> Resumed | None:
            round = self.job.status.round
            if round <= after or round not in self._first_lines:
                return None
            found = Resumed(round, len(self.training_pods), self.job.status.world_size, self._first_lines[round])
            return found if pods in (None, found.pods) else None

        count = "" if pods is None else f" with {formatting.count(pods, 'pod')}"
        return await self.until(look, limit=limit, what=f"training{count} in a round after {after}")

    async def settled(self) -> None:
        """Return when training has visibly gone on for a while."""

        def look() -> bool | None:
            file = self.rank_file(0)
            return (file is not None and file.path.read_bytes().count(b"\n") >= _SETTLED_LINES) or None

        try:
            await self.until(look, limit=_SETTLE_LIMIT, what="a few lines of progress")
        except StepFailed:
            if self.job.status.finished:
                raise

    def _wake(self) -> None:
        file = self.rank_file(0)
        # The file may tell of a round before a snapshot does: its time is that of the line.
        if file is not None and file.round not in self._first_lines and b"\n" in file.path.read_bytes():
            self._first_lines[file.round] = time.monotonic()
        self._changed.set()
        self._changed = asyncio.Event()


class Script:
    """The steps of the demo, in their order.

    Args:
        watched: the job.
        view: shows the steps.
        sizes: the number of pods at first and in the end, and in between.
        scale: changes the number of pods.
    """

    def __init__(
        self, watched: Watched, view: View, sizes: tuple[int, int], scale: Callable[[int], Awaitable[None]]
    ) -> None:
        small, large = self._sizes = sizes
        self._watched = watched
        self._view = view
        self._scale = scale
        self._begun = time.monotonic()
        self._script: list[tuple[str, Callable[[], Awaitable[Effect]]]] = [
            (f"start with {small} pods", self._start),
            (f"scale to {large}", lambda: self._scale_to(large)),
            ("kill -9 a worker", self._kill_worker),
            ("kill -9 an agent", self._kill_agent),
            (f"scale back to {small}", lambda: self._scale_to(small)),
            ("success", self._succeed),
        ]
        self.steps = [Step(title) for title, _ in self._script]
        self.effects: list[Effect] = []

    async def play(self) -> None:
        """Play all steps. Raises StepFailed if one of them has no effect."""
        for number, (_, step) in enumerate(self._script):
            try:
                if 0 < number < len(self._script) - 1:
                    await self._watched.settled()
                self._mark(number, NOW)
                effect = await step()
            except ElasticJobError as failure:
                self._mark(number, *(("", "") if self._watched.ended_by_user else (FAILED, str(failure))))
                raise StepFailed(str(failure)) from failure
            self.effects.append(effect)
            self._mark(number, DONE, str(effect))

    def _mark(self, number: int, mark: str, result: str = "") -> None:
        self.steps[number] = replace(self.steps[number], mark=mark, result=result)
        self._view.on_steps(self.steps)

    async def _start(self) -> Effect:
        resumed = await self._watched.resumed(after=0, pods=self._sizes[0], limit=_START_LIMIT)
        return _effect(self._begun, resumed)

    async def _scale_to(self, pods: int) -> Effect:
        before, at = self._watched.job.status.round, time.monotonic()
        await self._scale(pods)
        return _effect(at, await self._watched.resumed(after=before, pods=pods))

    async def _kill_worker(self) -> Effect:
        watched = self._watched
        rank = watched.job.status.world_size - 1
        file = watched.rank_file(rank)
        pid = _writer(file.path) if file is not None else None
        if pid is None:
            raise StepFailed(f"the process of rank {rank} was not found")
        pods, before, at = len(watched.training_pods), watched.job.status.round, time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return _effect(at, await watched.resumed(after=before, pods=pods), note=f"rank {rank}, process {pid}")

    async def _kill_agent(self) -> Effect:
        watched = self._watched
        training, before = watched.training_pods, watched.job.status.round
        # That of rank 0 is the hardest one to lose: it leads, and serves the store of the round.
        pod = next((pod for pod in training if pod.pid), None)
        if pod is None or pod.pid is None:
            raise StepFailed("no agent that could be killed was found")
        at = time.monotonic()
        os.kill(pod.pid, signal.SIGKILL)
        first = await watched.resumed(after=before)
        whole = await watched.resumed(after=before, pods=len(training))
        return _effect(at, *([first] if first.round == whole.round else [first, whole]), note=f"pod {pod.name}")

    async def _succeed(self) -> Effect:
        watched = self._watched

        def look() -> str | None:
            return watched.job.status.state if watched.job.status.finished else None

        state = await watched.until(look, limit=_SUCCESS_LIMIT, what="the end of training")
        if state != "Succeeded":
            raise StepFailed(f"the job {state.lower()}: {watched.job.status.what_failed}")
        progress = watched.job.progress
        return Effect(note=formatting.printed(progress.line) if progress else "the job succeeded")


async def perform(request: RunRequest, view: View) -> Performance:
    """Run a job and play the steps on it.

    Raises:
        BadInput: the job cannot run, or cannot be scaled as the demo does it.
    """
    watched, jobs = Watched(view), LocalRuns(request.home)

    async def scale(pods: int) -> None:
        await asyncio.to_thread(jobs.scale, watched.job.run.id, pods)

    script = Script(watched, view, _sizes(request.manifest.job["spec"]), scale)

    async def play() -> bool:
        """Play the script; end a job on which a step has failed, and return False."""
        try:
            await script.play()
        except StepFailed:  # the reason stands in the step
            if watched.ended_by_user:
                return True
            if not watched.job.status.finished:
                with contextlib.suppress(ElasticJobError):  # it is ending by itself
                    await asyncio.to_thread(jobs.delete, watched.job.run.id)
            return False
        return True

    logs, playing = asyncio.create_task(watched.watch_logs()), asyncio.create_task(play())
    try:
        code = await run_job(request, observer=watched)
        succeeded = await playing
    finally:
        logs.cancel()
        playing.cancel()
        await asyncio.wait((logs, playing))
    return Performance(code, code if succeeded else 1, script.steps, script.effects)


def _sizes(spec: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of pods at first, and the larger one in between."""
    most = spec["maxReplicas"]
    small = min(spec.get("replicas") or most, most - 1)
    if small < max(spec["minReplicas"], 2):
        raise BadInput(
            f"the demo scales a job of at least 2 pods up by one and back: spec.maxReplicas must be at least "
            f"{max(spec['minReplicas'], 2) + 1}, not {most}"
        )
    return small, small + 1


def _effect(since: float, *resumed: Resumed, note: str = "") -> Effect:
    return Effect(resumed, tuple(each.at - since for each in resumed), note)


def _writer(output: Path) -> int | None:
    """Return the oldest process whose standard output is this file: the worker, and not one of its children."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and (process / "fd" / "1").samefile(output):
                found.append((int((process / "stat").read_text().rpartition(")")[2].split()[19]), int(process.name)))
        except OSError:  # it has ended, or is another user's
            continue
    return min(found)[1] if found else None
