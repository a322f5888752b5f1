"""``elasticjob run FILE``: one job on this machine, from its manifest to its exit code.

The name, the control socket, the etcd and the pods of a run exist while :func:`run_job` runs. A run always ends in one
order: the plan stops, then the pods, then the store; the last snapshot is written; the name is released. If the process
is killed, the kernel kills the others (:mod:`elastic_operator.local.pdeathsig`).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import logging
import os
import platform
import secrets
import shutil
import signal
import time
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from watchfiles import awatch

from elastic_operator.api.constants import ConditionType, LocalReason, Reason
from elastic_operator.api.report import decode_report, encode_report, merged
from elastic_operator.api.status import JobState
from elastic_operator.api.validation import Problem, problem_of
from elastic_operator.controller.model import JobEvent
from elastic_operator.controller.reconciler import Reconciler, ReconcileSettings
from elastic_operator.controller.status import breakdown_at_change, report_of
from elastic_operator.errors import BadInput, ElasticJobError
from elastic_operator.local.backend import LocalBackend
from elastic_operator.local.control import SnapshotFeed, control_server
from elastic_operator.local.etcd import EtcdSettings, find_etcd
from elastic_operator.local.job import LiveJob, warning_of
from elastic_operator.local.processes import check_program, pod_command
from elastic_operator.local.run_dir import create_run, lock_name, private_dir, reopen_run
from elastic_operator.local.snapshot import snapshot_of
from elastic_operator.manifest.loader import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from typing import TextIO

    from elastic_operator.api.report import Report
    from elastic_operator.local.run_dir import RunDir
    from elastic_operator.manifest.loader import ElasticJobManifest

STOP_GRACE: Final = 3.0
"""Seconds that pods get to end when the user interrupts the run, beyond the notice that their workers asked for."""
_VIEW_INTERVAL: Final = 0.1
_RECORD_INTERVAL: Final = 0.5
_RECONCILE: Final = ReconcileSettings(max_concurrent_reconciles=1, max_delay=5.0)
_WATCH: Final[dict[str, Any]] = {"step": 100, "debounce": 1000, "rust_timeout": 60_000}
"""Milliseconds: an editor writes a file in several steps."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndReason(enum.StrEnum):
    """Why a run ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    BAD_INPUT = "badInput"
    DELETED = "deleted"
    INTERRUPTED = "interrupted"


EXIT_CODES: Final = {
    EndReason.SUCCEEDED: 0,
    EndReason.FAILED: 1,
    EndReason.BAD_INPUT: 2,
    EndReason.DELETED: 3,
    EndReason.INTERRUPTED: 130,
}


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a run.

    Attributes:
        reason: why.
        message: an explanation; empty if there is none.
        error: what was wrong with the input, if that is the reason.
    """

    reason: EndReason
    message: str = ""
    error: ElasticJobError | None = None


class Observer(Protocol):
    """Shows a run while it lasts."""

    def on_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        """The run has changed; called at most ten times a second, and once more at the end."""

    def on_ending(self, sentence: str) -> None:
        """The run is ending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What to run.

    Attributes:
        manifest: the job.
        home: see :func:`elastic_operator.local.run_dir.home_dir`.
        environ: the environment that the pods inherit.
        resume: the id of an earlier run of this job, to continue in its directory and from its checkpoints.
    """

    manifest: ElasticJobManifest
    home: Path
    environ: Mapping[str, str]
    resume: str | None = None


async def run_job(request: RunRequest, *, observer: Observer | None = None) -> int:
    """Run a job on this machine until it has ended. To be awaited in the main thread.

    Returns:
        0 succeeded, 1 failed, 3 deleted, 130 interrupted.

    Raises:
        BadInput: the job cannot run here (exit code 2); nothing is left running.
    """
    if platform.system() != "Linux":
        raise BadInput("jobs can be run on Linux only; on another system, use a Linux machine or container")
    manifest, now = request.manifest, time.time()
    if problem := problem_of(manifest.spec):
        raise BadInput(f"{manifest.source.path}: {problem}")
    end: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
    _on_signals(lambda: _begin(end, Ending(EndReason.INTERRUPTED)))
    with lock_name(request.home, manifest.name) as name:
        socket = private_dir(request.environ, "12345678.sock") / f"{secrets.token_hex(4)}.sock"
        if request.resume is None:
            files = create_run(request.home, manifest.name, now)
        else:
            files = reopen_run(request.home, request.resume, manifest.name)
        print(f"run {files.run_id}, process {os.getpid()}", end="", file=name, flush=True)
        live = LiveJob(manifest, uid=str(uuid.uuid4()), created=now)
        with _logging_to(files.log):
            preparing = asyncio.ensure_future(_prepare(request, files, live))
            end.add_done_callback(lambda _: preparing.cancel())
            await asyncio.wait((preparing,))
            if (preparing.cancelled() or preparing.exception()) and request.resume is None:  # nothing was started
                shutil.rmtree(files.path, ignore_errors=True)
            if preparing.cancelled():
                ending = end.result()
            else:
                ending = await LocalRun(request, files, live, preparing.result(), end).main(name, socket, observer)
    if ending.error is not None:
        raise ending.error
    return EXIT_CODES[ending.reason]


def _begin(end: asyncio.Future[Ending], ending: Ending) -> None:
    """End the run, unless it ends already: the first ending holds."""
    if not end.done():
        end.set_result(ending)


def _on_signals(action: Callable[[], object]) -> None:
    """Do this at SIGINT, SIGTERM and SIGHUP, and nothing else, until the event loop is closed."""
    for number in _SIGNALS:
        # nohup ignores SIGHUP, and a shell ignores SIGINT for what it starts in the background.
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, action)


async def _prepare(request: RunRequest, files: RunDir, live: LiveJob) -> EtcdSettings | None:
    """Check that the job can run here; return how to run its etcd, or None if the manifest names one.

    Raises:
        BadInput: it cannot.
    """
    source, spec = request.manifest.source, request.manifest.spec
    try:
        files.write_manifest(source.data)
    except OSError as error:
        raise BadInput(f"cannot write {files.manifest}: {error.strerror}") from None
    try:
        await check_program(live.job(), run=files, base=source.path.absolute().parent, environ=request.environ)
    except BadInput as error:
        sentence, field = str(error), "command" if spec.command else "args"
        if sentence.startswith("PET_NPROC_PER_NODE="):
            sentence, field = sentence.removeprefix("PET_NPROC_PER_NODE="), "nprocPerNode"
        raise source.bad_input([Problem(("spec", field), sentence)]) from None
    if spec.etcd.endpoint is not None:
        return None
    return EtcdSettings(find_etcd(request.environ.get("PATH")), files.etcd, files.etcd_log, request.environ)


@contextlib.contextmanager
def _logging_to(file: Path) -> Iterator[None]:
    """Log into a file; the terminal is the view's."""
    try:
        handler = logging.FileHandler(file)
    except OSError as error:
        raise BadInput(f"cannot write {file}: {error.strerror}") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    with contextlib.ExitStack() as stack:
        stack.callback(handler.close)
        for name in ("elastic_operator", "torchelastic", "aiohttp", "asyncio"):
            logging.getLogger(name).addHandler(handler)
            stack.callback(logging.getLogger(name).removeHandler, handler)
        yield


class LocalRun:
    """One run: connects the plan, the processes and the observers.

    Attributes:
        snapshots: gives snapshots to the observers.
    """

    def __init__(
        self,
        request: RunRequest,
        files: RunDir,
        live: LiveJob,
        etcd: EtcdSettings | None,
        end: asyncio.Future[Ending],
    ) -> None:
        self._manifest_path = request.manifest.source.path.absolute()
        self._files = files
        self._live = live
        self._socket: Path | None = None
        self._end = end
        self._ended: dict[str, Any] | None = None
        self._unwritten: set[Path] = set()
        self.snapshots = SnapshotFeed(self._snapshot)
        self._backend = LocalBackend(
            live,
            etcd=etcd,
            command=functools.partial(pod_command, run=files, base=self._manifest_path.parent, environ=request.environ),
            changed=self._changed,
            broken=lambda error: _begin(end, Ending(EndReason.BAD_INPUT, str(error), error)),
            keep=self._keep_report,
        )
        self._reconciler = Reconciler(self._backend, settings=_RECONCILE)

    def report(self) -> bytes:
        """Return the report of the run as it would be now."""
        kept = self._files.read_report()
        if kept is not None and self._live.status.state.finished:
            return kept
        job, observed = self._live.job(), self._backend.observed()
        breakdown = observed.time_breakdown or job.status.time_breakdown
        return self._merged(report_of(job, replace(job.status, time_breakdown=breakdown), observed))

    def patch(self, fields: dict[str, Any]) -> None:
        """Set fields of the spec. Raises BadInput if the result is not valid, or the job is over."""
        if self._live.patch(fields):
            self._changed()

    def delete(self) -> None:
        """End the run; its directory stays."""
        self._live.delete()
        _begin(self._end, Ending(EndReason.DELETED))

    async def main(self, name: TextIO, socket: Path, observer: Observer | None) -> Ending:
        """Run the job until something ends the run, and end all that it started.

        Args:
            name: the lock on the job's name, to be released when the run has ended.
            socket: the path of the control socket.
            observer: shows the run.

        Raises:
            BadInput: the control socket cannot be created; nothing was started.
        """
        if warning := warning_of(self._live.manifest["spec"]):
            self._warn(LocalReason.UNSUPPORTED_FIELDS, warning)
        self._socket = socket
        async with control_server(self, socket), self._backend, asyncio.TaskGroup() as tasks:
            self._write_record(self._snapshot())
            if observer is not None:
                tasks.create_task(self._each_snapshot(_VIEW_INTERVAL, observer.on_snapshot))
            drivers = [
                tasks.create_task(self._reconciler.run()),
                tasks.create_task(self._follow_manifest()),
                tasks.create_task(self._follow_output()),
                tasks.create_task(self._each_snapshot(_RECORD_INTERVAL, self._write_record)),
            ]
            self._changed()
            ending = await asyncio.shield(self._end)
            if ending.reason is EndReason.INTERRUPTED:
                ending = self._finished() or ending  # the job had finished before
            for task in drivers:
                task.cancel()
            await asyncio.wait(drivers)
            await self._end_processes(ending, observer)
            # In this order, so that another run can start as soon as the end of this one is visible.
            self._ended = {
                "how": ending.reason.value,
                "exitCode": EXIT_CODES[ending.reason],
                "message": ending.message,
                "time": time.time(),
            }
            self._write_record(self._snapshot())
            name.close()
            self.snapshots.close()
        return ending

    async def _end_processes(self, ending: Ending, observer: Observer | None) -> None:
        backend, live = self._backend, self._live
        _on_signals(backend.kill_pods)  # the user interrupts a second time
        if backend.running_pods:
            if observer is not None:
                observer.on_ending("ending its pods; press Ctrl-C again to kill them at once")
            deleted = ending.reason is EndReason.DELETED
            await backend.end_pods(None if deleted else STOP_GRACE + backend.notice_seconds())
        if not live.status.state.finished:
            job, observed, now = live.job(), backend.observed(), time.time()
            breakdown = breakdown_at_change(job, observed, now)
            report = report_of(job, replace(job.status, time_breakdown=breakdown), observed)
            self._keep_report(replace(report, rested=(round(now, 3),)))
        await backend.end_store()
        if not live.status.state.finished:
            live.status = replace(live.status, replicas=0, ready_replicas=0)

    def _changed(self) -> None:
        """Plan again, and notify the watchers."""
        self._reconciler.wake(self._live.key)
        self.snapshots.touch()
        if (ending := self._finished()) is not None and not self._backend.running_pods:
            _begin(self._end, ending)

    def _finished(self) -> Ending | None:
        """Return the ending of a job that has finished."""
        status = self._live.status
        if not status.state.finished:
            return None
        if status.state is JobState.SUCCEEDED:
            return Ending(EndReason.SUCCEEDED)
        why = status.last_failure.message if status.last_failure is not None else ""
        if any(each.type == ConditionType.FAILED and each.reason == Reason.BAD_INPUT for each in status.conditions):
            return Ending(EndReason.BAD_INPUT, why, BadInput(why))
        return Ending(EndReason.FAILED, why)

    async def _each_snapshot(self, interval: float, take: Callable[[dict[str, Any]], None]) -> None:
        async with contextlib.aclosing(self.snapshots.watch(interval)) as snapshots:
            async for snapshot in snapshots:
                take(snapshot)

    def _write_record(self, snapshot: dict[str, Any]) -> None:
        self._write(self._files.record, lambda: self._files.write_record(snapshot))

    def _keep_report(self, report: Report) -> None:
        """Write a report, merged with the one from before the job was suspended."""
        self._write(self._files.report, lambda: self._files.write_report(self._merged(report)))

    def _write(self, path: Path, write: Callable[[], None]) -> None:
        """Write a file of the run's directory; warn if that fails, once for each file."""
        try:
            write()
        except OSError as error:
            if path not in self._unwritten:
                self._unwritten.add(path)
                self._warn(LocalReason.NOT_RECORDED, f"{path} cannot be written: {error.strerror}")

    def _merged(self, report: Report) -> bytes:
        kept = self._files.read_report()
        before = None
        if kept is not None:
            with contextlib.suppress(BadInput):
                before = decode_report(kept)
        return encode_report(merged(before, report))

    async def _follow_manifest(self) -> None:
        """Apply the manifest's file whenever it is saved."""
        path = self._manifest_path
        try:
            # Its directory is watched: most editors write a new file and rename it.
            async for _ in awatch(path.parent, watch_filter=lambda _, at: at == str(path), recursive=False, **_WATCH):
                if path.exists():
                    self._apply_file()
        except OSError as error:
            self._warn(LocalReason.REFUSED, f"changes of {path} will not be seen: {error.strerror or error}")

    def _apply_file(self) -> None:
        try:
            file = load(self._manifest_path)
            changed = self._live.apply(file)
        except BadInput as error:
            self._warn(LocalReason.REFUSED, f"not applied: {error}")
            return
        if changed:
            self._write(self._files.manifest, lambda: self._files.write_manifest(file.data))
            self._backend.tell(JobEvent(LocalReason.APPLIED, f"{self._manifest_path.name} was applied"))

    async def _follow_output(self) -> None:
        """Make a snapshot when the program prints."""
        with contextlib.suppress(OSError):
            async for _ in awatch(self._files.logs, watch_filter=None, **_WATCH):
                self.snapshots.touch()

    def _warn(self, reason: LocalReason, sentence: str) -> None:
        self._backend.tell(JobEvent(reason, sentence, warning=True))

    def _snapshot(self) -> dict[str, Any]:
        run = {
            "id": self._files.run_id,
            "directory": str(self._files.path),
            "logs": str(self._files.logs),
            "checkpoints": str(self._files.checkpoints),
            "pid": os.getpid(),
            "socket": str(self._socket),
            "manifestPath": str(self._manifest_path),
            "alive": self._ended is None,
            "ended": self._ended,
        }
        return snapshot_of(self._live, self._backend, self._files, run)
