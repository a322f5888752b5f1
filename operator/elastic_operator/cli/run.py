"""``elasticjob run`` and ``elasticjob demo``: one job on this machine, from its manifest to its exit code.

The name lock, the control socket, the etcd and the pods of a run exist only during :func:`run_job`. If the process is
killed, the kernel kills etcd and the pods (:mod:`elastic_operator.local.pdeathsig`).

The demo scales a job up, kills a worker and an agent, and scales the job back. It measures the time from the beginning
of a step of the demo to the first training step of the next round, and until the agents had started its workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TextIO

from rich.console import Console

from elastic_operator.api.validation import Problem, problem_of
from elastic_operator.client import LogSelector
from elastic_operator.client.local import LocalJobs, LogFile, LogReader, log_files
from elastic_operator.controller import messages
from elastic_operator.errors import BadInput, ElasticJobError
from elastic_operator.local.job import LiveJob
from elastic_operator.local.processes import check_program, find_etcd
from elastic_operator.local.run import EXIT_CODES, LocalRun, RunRequest, begin_end, manifest_text, on_signals
from elastic_operator.local.run_dir import RunDir, create_run, home_dir, lock_name, reopen_run, replace_file
from elastic_operator.local.view import DONE, FAILED, NOW, LiveView, Step, View, own_command
from elastic_operator.manifest.loader import load_checked
from elastic_operator.views import formatting
from elastic_operator.views.job_view import EndView, JobView, PodView, RoundView

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping


_RECOVERY_LIMIT: Final = 180.0
"""Seconds until training must resume; from a cold disk, the first import of torch alone can take half a minute."""
_SUCCESS_LIMIT: Final = 900.0
_PAUSE: Final = 2.0
"""Seconds of visible training before a step, long enough for a checkpoint."""
_POLL_INTERVAL: Final = 0.02
_STEP_LIMIT: Final = 5.0
"""Seconds from the first line that rank 0 prints after which a program without a step counts as reporting none."""


def execute(arguments: argparse.Namespace) -> int:
    """Run the job of ``elasticjob run`` or ``elasticjob demo``; return the exit code."""
    request = RunRequest(
        manifest=load_checked(Path(arguments.file)),
        home=home_dir(os.environ),
        environ=os.environ,
        resume=arguments.resume,
        spares=arguments.spares,
    )
    command = own_command(sys.argv[0], os.environ)
    with choose_view(plain=arguments.plain, command=command, output=sys.stdout, environ=os.environ) as view:
        if arguments.demo:
            outcome, code, lines = asyncio.run(perform(request, view))
        else:
            code = asyncio.run(run_job(request, on_snapshot=view.on_snapshot, on_ending=view.on_ending))
            outcome, lines = code, []
    view.say_outcome(outcome)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return code


class PlainView(View):
    """Prints a line for each change of a job, and each line of its workers' output with its rank."""

    def __init__(self, output: IO[str], command: str, clock: Callable[[], float] = time.time) -> None:
        super().__init__(output, command, clock)
        self._reader = LogReader(LogSelector(), self.on_output)

    def on_snapshot(self, job: JobView) -> None:
        """Show what has changed, and what the workers have printed since the last snapshot."""
        tail = 0 if self.job is None else None  # a resumed run has the output of earlier rounds
        super().on_snapshot(job)
        for file in log_files(Path(job.run.logs), LogSelector()) if job.run.logs else ():
            self._reader.read(file, tail=tail)

    def say_outcome(self, code: int) -> None:
        """Print how the run has ended, after the view has ended."""
        self._reader.finish()
        super().say_outcome(code)


def choose_view(*, plain: bool, command: str, output: TextIO, environ: Mapping[str, str]) -> View:
    """Return the live view if the output is a terminal that can show it, else the view with plain lines."""
    if plain or not formatting.is_terminal(output, environ):
        return PlainView(output, command)
    return LiveView(Console(file=output, highlight=False), command)


async def run_job(
    request: RunRequest, *, on_snapshot: Callable[[JobView], object], on_ending: Callable[[str], object]
) -> int:
    """Run a job on this machine until it has ended. The event loop must run in the main thread.

    Args:
        request: the parameters of the run.
        on_snapshot: called with the state of the run after each change, at most ten times a second, and at the end.
        on_ending: called with a sentence for the user before the run's pods are stopped.

    Returns:
        The exit code: 0 succeeded, 1 failed, 3 deleted, 130 interrupted.

    Raises:
        BadInput: the job cannot run on this machine (exit code 2); nothing is left running.
    """
    manifest, now = request.manifest, time.time()
    if problem := problem_of(manifest.spec):
        raise BadInput(f"{manifest.source.path}: {problem}")
    end: asyncio.Future[EndView] = asyncio.get_running_loop().create_future()
    on_signals(lambda: begin_end(end, "interrupted"))
    with lock_name(request.home, manifest.name) as name:
        if request.resume is None:
            files = create_run(request.home, manifest.name, now)
        else:
            files = reopen_run(request.home, request.resume, manifest.name)
        print(f"run {files.run_id}, process {os.getpid()}", end="", file=name, flush=True)
        live = LiveJob(manifest, uid=str(uuid.uuid4()), created=now)
        try:  # log to a file, because the view uses the terminal
            logging.basicConfig(filename=files.log, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        except OSError as error:
            raise BadInput(f"cannot write {files.log}: {error.strerror}") from None
        ran = False
        try:
            if request.spares is not None:
                live.patch({"spares": request.spares})
            etcd = find_etcd(request.environ.get("PATH")) if manifest.spec.etcd.endpoint is None else None
            replace_file(files.manifest, manifest_text(manifest.source))
            run = LocalRun(request, files, live, etcd, end)
            ending = await run.main(name, lambda: _check(request, files, live), on_snapshot, on_ending)
            cancelled = run.checking.cancelled()  # by the user, or because etcd cannot start
            ran = ending.how == "badInput" if cancelled else run.checking.exception() is None
        finally:
            if not ran and request.resume is None:  # no pod was started
                shutil.rmtree(files.path, ignore_errors=True)
    if ending.how == "badInput":
        raise BadInput(ending.message)
    return EXIT_CODES[ending.how]


async def _check(request: RunRequest, files: RunDir, live: LiveJob) -> None:
    """Check that this machine can run the job, while its etcd starts.

    Raises:
        BadInput: the job cannot run on this machine.
    """
    source, spec = request.manifest.source, request.manifest.spec
    try:
        await check_program(live.job, run=files, base=source.path.absolute().parent, environ=request.environ)
    except BadInput as error:
        sentence, field = str(error), "command" if spec.command else "args"
        if sentence.startswith("PET_NPROC_PER_NODE="):
            sentence, field = sentence.removeprefix("PET_NPROC_PER_NODE="), "nprocPerNode"
        raise source.bad_input([Problem(("spec", field), sentence)]) from None


Resumed = tuple[int, RoundView]
"""The number of workers of a round in which training resumed, and the round."""


async def perform(request: RunRequest, view: View) -> tuple[int, int, list[str]]:
    """Run a job and perform the steps of the demo.

    Returns:
        The exit code of the run; the exit code of the demo, 1 if a step failed; and the lines of a table of the steps.

    Raises:
        BadInput: the job cannot run, or cannot be scaled as the demo requires.
    """
    demo = _Demo(view, request)
    playing = asyncio.create_task(demo.play())
    try:
        code = await run_job(request, on_snapshot=demo.on_snapshot, on_ending=view.on_ending)
        succeeded = await playing
    finally:
        playing.cancel()
        await asyncio.wait([playing])
    return code, code if succeeded else 1, ["", *formatting.columns(demo.rows, " ")]


class _Demo:
    """Watches a run, and performs the steps of the demo."""

    def __init__(self, view: View, request: RunRequest) -> None:
        small, large = _sizes(request.manifest.job["spec"])
        self._view = view
        self._client = LocalJobs(home=request.home)
        # The title of each step, its action, and the number of pods that train afterwards; 0 for the end of the job.
        self._script: list[tuple[str, Callable[[], str], int]] = [
            (f"start with {small} pods", str, small),
            (f"scale to {large}", lambda: self._scale_to(large), large),
            ("kill -9 a worker", self._kill_worker, large),
            ("kill -9 an agent", self._kill_agent, large),
            (f"scale back to {small}", lambda: self._scale_to(small), small),
            ("success", str, 0),
        ]
        self._steps = [Step(title) for title, _, _ in self._script]
        self._job = JobView()
        self._reports_steps = True
        self.rows: list[tuple[str, ...]] = [("STEP", "ROUND", "WORKERS", "TRAINS AFTER", "AGENT", "")]

    def on_snapshot(self, job: JobView) -> None:
        """Store and show the new state of the job."""
        self._job = job
        self._view.on_snapshot(job)

    async def play(self) -> bool:
        """Perform the steps, and end the job if one fails; return whether all succeeded or the user ended the run."""
        for number, (title, act, pods) in enumerate(self._script):
            try:
                if number and pods:
                    until = time.monotonic() + _PAUSE
                    await self._until(lambda: time.monotonic() > until, what="the next step")  # noqa: B023
                self._mark(number, NOW)
                before, since = self._job.status.round, time.time()
                note = await asyncio.to_thread(act)
                resumed = await self._resumed(before, pods) if pods else []
                note = note if pods else await self._success()
            except ElasticJobError as failure:
                self._mark(number, FAILED, str(failure))
                self.rows.append((title, "-", "-", "failed", "-", str(failure)))
                if (ended := self._job.run.ended) is None and not self._job.status.finished:
                    with contextlib.suppress(ElasticJobError):  # the job may have ended meanwhile
                        await asyncio.to_thread(self._client.delete, self._job.run.id)
                return ended is not None and ended.how in ("deleted", "interrupted")
            summary, cells = [], []
            for workers, round in resumed:
                trains = max(round.first_step - since, 0.0)
                agent = max(round.started - since, 0.0)
                known = f"{trains:.2f} s" if round.first_step else "no steps reported"
                summary.append(f"{messages.count(workers, 'worker')} after {trains or agent:.1f} s")
                cells.append((f"{round.number}", f"{workers}", known, f"{agent:.2f} s"))
            self._mark(number, DONE, ", ".join(summary) or note)
            first, *others = cells or [("-", "-", "-", "-")]
            self.rows += [(title, *first, note), *(("", *other, "") for other in others)]
        return True

    def _scale_to(self, pods: int) -> str:
        self._client.scale(self._job.run.id, pods)
        return ""

    def _kill_worker(self) -> str:
        rank = self._job.status.world_size - 1
        file = self._rank_file(rank)
        pid = _writer(file.path) if file is not None else None
        if pid is None:
            raise ElasticJobError(f"the process of rank {rank} was not found")
        os.kill(pid, signal.SIGKILL)
        return f"rank {rank}, process {pid}"

    def _kill_agent(self) -> str:
        # The agent of rank 0 is the hardest to lose: it is the leader, and serves the round's TCPStore.
        for pod in self._training_pods:
            if pod.pid:
                os.kill(pod.pid, signal.SIGKILL)
                return f"pod {pod.name}"
        raise ElasticJobError("no running agent was found")

    @property
    def _training_pods(self) -> list[PodView]:
        """The pods of the current round, in rank order."""
        return sorted((pod for pod in self._job.living_pods if pod.ranks), key=lambda pod: pod.ranks or ())

    def _rank_file(self, rank: int) -> LogFile | None:
        """Return the log file of a rank in the rank's latest round; None if the rank has no log."""
        files = log_files(Path(self._job.run.logs), LogSelector(rank)) if self._job.run.logs else []
        return files[-1] if files else None

    async def _until(self, holds: Callable[[], bool], *, what: str, limit: float = _RECOVERY_LIMIT) -> None:
        """Wait until a condition holds.

        Raises:
            ElasticJobError: the condition did not hold within ``limit`` seconds, or the job ended first.
        """
        try:
            async with asyncio.timeout(limit):
                while not holds():
                    if self._job.status.finished or self._job.run.ended is not None:
                        state = self._job.status.state
                        raise ElasticJobError(f"the job ended ({state}) while the demo waited for {what}")
                    await asyncio.sleep(_POLL_INTERVAL)
        except TimeoutError:
            raise ElasticJobError(f"the demo stopped waiting for {what} after {limit:.0f} s") from None

    async def _resumed(self, before: int, pods: int) -> list[Resumed]:
        """Return the first round after ``before`` that trains and, if it is another, the first with ``pods`` pods."""
        first_lines: dict[int, float] = {}
        found: list[Resumed] = []

        def trains(round: RoundView) -> bool:
            if round.first_step or not round.started:
                return bool(round.first_step)
            file = self._rank_file(0)
            if file is not None and file.round == round.number and b"\n" in file.path.read_bytes():
                begun = first_lines.setdefault(round.number, time.monotonic())
                self._reports_steps = self._reports_steps and time.monotonic() - begun < _STEP_LIMIT
                return not self._reports_steps
            return False

        def resumed() -> bool:
            status = self._job.status
            current = next((each for each in self._job.rounds if each.number == status.round), RoundView())
            if status.round <= before or not trains(current):
                return False
            complete = sum(bool(pod.ranks) for pod in self._job.pods) == pods  # a pod may have finished already
            if not found or complete:
                found.append((status.world_size, current))
            return complete

        what = f"training with {messages.count(pods, 'pod')} in a round after {before}"
        await self._until(resumed, what=what)
        return found if found[0][1].number != found[-1][1].number else found[:1]

    async def _success(self) -> str:
        """Wait until the job has succeeded; return the last line of its output."""
        await self._until(lambda: self._job.status.finished, limit=_SUCCESS_LIMIT, what="the end of training")
        if self._job.status.state != "Succeeded":
            raise ElasticJobError(f"the job {self._job.status.state.lower()}: {self._job.status.what_failed}")
        return formatting.printed(self._job.progress.line) if self._job.progress else "the job succeeded"

    def _mark(self, number: int, mark: str, result: str = "") -> None:
        self._steps[number] = Step(self._script[number][0], mark, result)
        self._view.on_steps(self._steps)


def _sizes(spec: Mapping[str, Any]) -> tuple[int, int]:
    """Return the initial number of pods, and the number to scale up to."""
    most, least = spec["maxReplicas"], max(spec["minReplicas"], 2)
    small = min(spec.get("replicas") or most, most - 1)
    if small < least:
        raise BadInput(
            "the demo scales a job of at least 2 pods up by one and back: spec.maxReplicas must be at least "
            f"{least + 1}, not {most}"
        )
    return small, small + 1


def _writer(output: Path) -> int | None:
    """Return the process ID of the worker that writes this file; children that inherit the file have higher IDs."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # the process has exited, or is another user's
            if process.name.isdecimal() and (process / "fd" / "1").samefile(output):
                found.append(int(process.name))
    return min(found, default=None)
