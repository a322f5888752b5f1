"""The demo: a job is scaled, loses a worker and an agent to kill -9, shrinks again and succeeds, while you watch.

What is measured is what a user feels: the time from the act to the first line that rank 0 prints in the epoch that
follows from it, which ``examples/digits.py`` prints when it has its checkpoint back and goes on with training.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.errors import BadInput, ElasticJobError
from elastic_operator.local.act import DONE, FAILED, NOW, Act
from elastic_operator.local.client import connect
from elastic_operator.local.demo_stage import ActFailed, Resumed, Stage
from elastic_operator.local.run import run_job
from elastic_operator.showing import words
from elastic_operator.showing.columns import columns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from elastic_operator.local.client import LocalClient
    from elastic_operator.local.run import RunRequest
    from elastic_operator.local.view import View

_START_LIMIT: Final = 180.0
"""Seconds; with a cold disk the first import of torch alone may take half a minute."""
_SUCCESS_LIMIT: Final = 900.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many pods the demo has.

    Attributes:
        small: at the start and in the end.
        large: in between.
    """

    small: int
    large: int

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Sizes:
        """The sizes that this job allows.

        Raises:
            BadInput: it cannot be made larger.
        """
        spec = manifest["spec"]
        most = spec["maxReplicas"]
        small = min(spec.get("replicas") or most, most - 1)
        if small < max(spec["minReplicas"], 2):
            raise BadInput(
                f"the demo scales a job of at least 2 pods up by one and back: spec.maxReplicas must be at least "
                f"{max(spec['minReplicas'], 2) + 1}, not {most}"
            )
        return cls(small, small + 1)


@dataclass(frozen=True, slots=True)
class Effect:
    """What an act did.

    Attributes:
        resumed: where training went on, once for each epoch that followed from the act.
        seconds: from the act to each of them.
        note: more, in words.
    """

    resumed: tuple[Resumed, ...] = ()
    seconds: tuple[float, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        """In a few words."""
        if not self.resumed:
            return self.note
        then = [
            f"{words.count(resumed.workers, 'worker')} after {seconds:.1f} s"
            for resumed, seconds in zip(self.resumed[1:], self.seconds[1:], strict=True)
        ]
        return ", ".join([f"{self.seconds[0]:.1f} s", *then])


class Play:
    """The acts, in their order.

    Args:
        stage: the job.
        view: shows which act is played.
        sizes: of the job.
        scale: changes the job's size.
        clock: in seconds, never going back.
    """

    def __init__(
        self,
        stage: Stage,
        view: View,
        sizes: Sizes,
        scale: Callable[[int], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage = stage
        self._view = view
        self._sizes = sizes
        self._scale = scale
        self._clock = clock
        self._begun = clock()
        self._script: list[tuple[str, Callable[[], Awaitable[Effect]]]] = [
            (f"start with {sizes.small} pods", self._start),
            (f"scale to {sizes.large}", lambda: self._scale_to(sizes.large)),
            ("kill -9 a worker", self._kill_worker),
            ("kill -9 an agent", self._kill_agent),
            (f"scale back to {sizes.small}", lambda: self._scale_to(sizes.small)),
            ("success", self._succeed),
        ]
        self.acts = [Act(title) for title, _ in self._script]
        self.effects: list[Effect] = []

    async def perform(self) -> None:
        """Play all acts.

        Raises:
            ActFailed: one of them did not have its effect.
        """
        for number, (_, act) in enumerate(self._script):
            try:
                if 0 < number < len(self._script) - 1:
                    await self._stage.settles()
                self._mark(number, NOW)
                effect = await act()
            except ElasticJobError as failure:
                self._mark(number, *(("", "") if self._stage.taken_away else (FAILED, str(failure))))
                raise ActFailed(str(failure)) from failure
            self.effects.append(effect)
            self._mark(number, DONE, str(effect))

    def _mark(self, number: int, mark: str, result: str = "") -> None:
        self.acts[number] = replace(self.acts[number], mark=mark, result=result)
        self._view.show_acts(self.acts)

    async def _start(self) -> Effect:
        return _effect(self._begun, await self._stage.resumed(after=0, pods=self._sizes.small, limit=_START_LIMIT))

    async def _scale_to(self, pods: int) -> Effect:
        before, at = self._stage.shown.status.epoch, self._clock()
        await self._scale(pods)
        return _effect(at, await self._stage.resumed(after=before, pods=pods))

    async def _kill_worker(self) -> Effect:
        rank = self._stage.shown.status.world_size - 1
        file = self._stage.rank_file(rank)
        pid = writer(file.path) if file is not None else None
        if pid is None:
            raise ActFailed(f"the process of rank {rank} was not found")
        pods, before, at = len(self._stage.training_pods), self._stage.shown.status.epoch, self._clock()
        os.kill(pid, signal.SIGKILL)
        return _effect(at, await self._stage.resumed(after=before, pods=pods), note=f"rank {rank}, process {pid}")

    async def _kill_agent(self) -> Effect:
        training = self._stage.training_pods
        pods, before = len(training), self._stage.shown.status.epoch
        # Rank 0's: the hardest one to lose, since its agent leads and serves the store of the epoch.
        pod = next((pod for pod in training if pod.pid), None)
        if pod is None or pod.pid is None:
            raise ActFailed("no agent that could be killed was found")
        at = self._clock()
        os.kill(pod.pid, signal.SIGKILL)
        first = await self._stage.resumed(after=before)
        whole = await self._stage.resumed(after=before, pods=pods)
        return _effect(at, *([first] if first.epoch == whole.epoch else [first, whole]), note=f"pod {pod.name}")

    async def _succeed(self) -> Effect:
        stage = self._stage

        def look() -> str | None:
            return stage.shown.status.state if stage.shown.status.finished else None

        state = await stage.until(look, limit=_SUCCESS_LIMIT, what="the end of training")
        if state != "Succeeded":
            raise ActFailed(f"the job {state.lower()}: {stage.shown.status.what_failed}")
        return Effect(note=words.printed(stage.shown.progress.line) if stage.shown.progress else "the job succeeded")


def _effect(since: float, *resumed: Resumed, note: str = "") -> Effect:
    return Effect(resumed, tuple(each.at - since for each in resumed), note)


@dataclass(frozen=True, slots=True)
class Performance:
    """How the demo went.

    Attributes:
        run: the exit code of the run.
        code: the exit code of the demo: that of the run; 1 where an act had not its effect.
        acts: all of them.
        effects: of those that had one, in their order.
    """

    run: int
    code: int
    acts: Sequence[Act]
    effects: Sequence[Effect]

    def lines(self) -> list[str]:
        """What happened and how long each recovery took, as a table."""
        rows = [("ACT", "EPOCH", "WORKERS", "TRAINS AFTER", "")]
        for act, effect in zip(self.acts, self.effects, strict=False):
            title, note = act.title, effect.note
            for resumed, seconds in zip(effect.resumed, effect.seconds, strict=True):
                rows.append((title, str(resumed.epoch), str(resumed.workers), f"{seconds:.2f} s", note))
                title = note = ""
            if not effect.resumed:
                rows.append((title, "-", "-", "-", note))
        rows += [(act.title, "-", "-", "failed", act.result) for act in self.acts if act.mark == FAILED]
        rows += [(act.title, "-", "-", "not played", "") for act in self.acts if act.mark in ("", NOW)]
        return ["", *columns(rows, " ")]


async def perform(request: RunRequest, view: View) -> Performance:
    """Run a job and play the acts on it.

    Args:
        request: what to run.
        view: shows it.

    Raises:
        BadInput: the job cannot be run, or not be scaled as the demo does it.
    """
    sizes = Sizes.of(request.manifest.job)
    stage = Stage(view)
    play = Play(stage, view, sizes, scale=lambda pods: asyncio.to_thread(_client(stage, request).scale, pods))
    refusal: ElasticJobError | None = None
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(stage.watch_logs())
        playing = tasks.create_task(_play(play, stage, request))
        try:
            code = await run_job(request, observer=stage)
        except ElasticJobError as error:
            refusal = error
            playing.cancel()
        watching.cancel()
    if refusal is not None:
        raise refusal
    return Performance(code, code if playing.result() else 1, play.acts, play.effects)


async def _play(play: Play, stage: Stage, request: RunRequest) -> bool:
    """Play, and end a job on which an act has failed; whether the demo ends as the run does."""
    try:
        await play.perform()
    except ActFailed:  # what failed stands in the play's acts
        if stage.taken_away:
            return True
        if not stage.shown.status.finished:
            with contextlib.suppress(ElasticJobError):  # it is about to end by itself
                await asyncio.to_thread(_client(stage, request).delete)
        return False
    return True


def _client(stage: Stage, request: RunRequest) -> LocalClient:
    return connect(stage.shown.run.id, home=request.home)


def writer(output: Path) -> int | None:
    """The process whose standard output is this file, of several the oldest; None where there is none.

    So a worker is told from its children. Its environment would not do: of a forked process, /proc shows the one that
    its fork server was started with.
    """
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and (process / "fd" / "1").samefile(output):
                found.append((int((process / "stat").read_text().rpartition(")")[2].split()[19]), int(process.name)))
        except OSError:  # it has ended meanwhile, or is somebody else's
            continue
    return min(found)[1] if found else None
