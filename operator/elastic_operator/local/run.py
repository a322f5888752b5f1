"""Runs one job on this machine, with processes in place of pods.

A run ends in this order: the reconciler stops, then the pods, then the store; the last snapshot is written; the name is
released.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TextIO

import msgspec
import yaml
from watchfiles import awatch

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.status import Condition, JobState, decode_report, encode_report, merged, status_to_json
from elastic_operator.controller.model import EtcdState, JobEvent, Observed, Plan, PodPhase, with_applied_spec
from elastic_operator.controller.reconciler import Reconciler, ReconcileSettings
from elastic_operator.controller.report import breakdown_at_change, report_of
from elastic_operator.errors import BadInput, ClusterError
from elastic_operator.local.control import SnapshotFeed, control_server
from elastic_operator.local.job import LiveJob, unsupported_fields
from elastic_operator.local.processes import EtcdProcess, PodCommand, PodProcess, pod_command, tail
from elastic_operator.local.run_dir import RunDir, replace_file
from elastic_operator.manifest.loader import ElasticJobManifest, Manifest, load
from elastic_operator.resources.worker_pod import termination_settings
from elastic_operator.store_mirror import StoreMirror, store_at
from elastic_operator.views.job_view import (
    EndView,
    EtcdView,
    EventView,
    JobView,
    PodView,
    ProgressView,
    RoundView,
    RunView,
)
from torchelastic.errors import SettingsError, StoreError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine, Mapping
    from pathlib import Path

    from elastic_operator.api.status import Report
    from elastic_operator.controller.model import Job, NewPod, Pod
    from torchelastic.protocol.records import SizeRecord

STOP_GRACE: Final = 3.0
"""Seconds that pods have to exit when the user interrupts the run, in addition to the workers' notice period."""
_VIEW_INTERVAL: Final = 0.1
_RECORD_INTERVAL: Final = 0.5
_RECONCILE: Final = ReconcileSettings(max_delay=5.0)
_WATCH: Final[dict[str, Any]] = {"step": 100, "debounce": 1000, "rust_timeout": 60_000}
"""Times in milliseconds; the debounce combines the steps in which an editor writes a file."""
_MAX_EVENTS: Final = 200
_MAX_ROUNDS: Final = 10
_PROGRESS_BYTES: Final = 8192
_PROGRESS_CHARACTERS: Final = 500
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


EXIT_CODES: Final = {"succeeded": 0, "failed": 1, "badInput": 2, "deleted": 3, "interrupted": 130}
"""Exit codes of ``elasticjob run``, by the value of ``how`` in :class:`~elastic_operator.views.job_view.EndView`."""


def begin_end(end: asyncio.Future[EndView], how: str, message: str = "") -> None:
    """Begin to end the run; later calls have no effect, so the first reason counts."""
    if not end.done():
        end.set_result(EndView(how, message))


def on_signals(action: Callable[[], object]) -> None:
    """Make this action the only handler of SIGINT, SIGTERM and SIGHUP, unless the process ignores the signal."""
    for number in _SIGNALS:
        # A program must keep ignoring SIGHUP if nohup started it, and SIGINT if a shell started it in the background.
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, action)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The parameters of a run.

    Attributes:
        home: the directory of all runs, see :func:`elastic_operator.local.run_dir.home_dir`.
        environ: the environment that the pods inherit.
        resume: the id of an earlier run of this job, to continue in its directory and from its checkpoints.
        spares: the number of spares, instead of that in the manifest; None for the manifest's.
    """

    manifest: ElasticJobManifest
    home: Path
    environ: Mapping[str, str]
    resume: str | None = None
    spares: int | None = None


class LocalRun:
    """One run: this machine as a backend of the reconciler.

    The run makes no decisions about pods. It owns the processes that it started, the mirror of the store and the live
    object; any change of these requests a reconcile.

    Attributes:
        snapshots: the feed that sends snapshots to the watchers of the run.
        checking: the check of the program, from the call of :meth:`main`.
    """

    checking: asyncio.Task[None]

    def __init__(
        self, request: RunRequest, files: RunDir, live: LiveJob, etcd: Path | None, end: asyncio.Future[EndView]
    ) -> None:
        self._manifest_path = request.manifest.source.path.absolute()
        self._environ = environ = request.environ
        self._files = files
        self._live = live
        self._end = end
        self._checked = False
        self._startable = asyncio.Event()  # the check has succeeded, and the endpoint of the store is known
        self._ended: EndView | None = None
        self._unwritten: set[Path] = set()
        self._tasks = asyncio.TaskGroup()
        self._store: asyncio.Task[None] | None = None
        self._store_away = False
        self._pods: list[PodProcess] = []
        self._events: deque[EventView] = deque(maxlen=_MAX_EVENTS)
        self.snapshots = SnapshotFeed(self.snapshot)
        self._mirror = StoreMirror(
            live.job.uid, changed=self._mirror_changed, away=self._on_store_away, recorded=self.snapshots.touch
        )
        self._etcd = None
        self._tls: ssl.SSLContext | None = None
        if etcd is not None:
            tls = files.tls if live.job.spec.etcd.has_certificates else None
            if tls is not None:
                from elastic_operator.certificates import write_certificates  # only a run needs the slow import

                self._tls = write_certificates(tls, live.job.uid)
            self._etcd = EtcdProcess(etcd, files.path, environ, tls=tls, changed=self._changed, emit=self._emit)
        self._reconciler = Reconciler(self, settings=_RECONCILE)

    # -- served by the control socket

    def snapshot(self) -> JobView:
        """Return the state of the run."""
        files, mirror, etcd, round = self._files, self._mirror, self._etcd, self._mirror.round
        nodes = {node.name: node for node in mirror.nodes.values()}
        ranks: dict[str, tuple[int, ...]] = {}
        first = 0
        for member in round.members if round else ():
            ranks[mirror.names.get(member.node, "")] = tuple(range(first, first + member.workers))
            first += member.workers

        complete = 0 < self._live.job.status.desired <= len(ranks)

        def view(process: PodProcess) -> PodView:
            pod = self._observed_pod(process)
            node = nodes.get(pod.name) if pod.ended is None else None
            return PodView.of(
                pod,
                pid=process.pid,
                ranks=ranks.get(pod.name, ()),
                spare=complete and pod.name not in ranks,
                log_dir=str(files.logs / pod.name),
                metrics_url=f"http://{node.address}:{node.metrics}/metrics" if node and node.metrics else None,
            )

        progress = None
        if round is not None and round.members and (pod := mirror.names.get(round.members[0].node)):
            progress = last_line(files.logs / pod / f"round_{round.number}" / "rank_0" / "output.log")
        return JobView(
            manifest=self._live.manifest,
            status_json=status_to_json(self._live.job.status),
            pods=tuple(map(view, sorted(self._pods, key=lambda each: (each.pod.index, each.pod.created)))),
            events=tuple(self._events),
            run=RunView(
                id=files.run_id,
                directory=str(files.path),
                logs=str(files.logs),
                checkpoints=str(files.checkpoints),
                pid=os.getpid(),
                manifest_path=str(self._manifest_path),
                alive=self._ended is None,
                ended=self._ended,
            ),
            etcd=EtcdView(etcd.pid, etcd.endpoint, etcd.restarts) if etcd else EtcdView(endpoint=self._endpoint()),
            progress=progress,
            rounds=tuple(
                RoundView(each.number, each.started_at, each.first_step_at)
                for each in (mirror.history.rounds[-_MAX_ROUNDS:] if mirror.history else ())
            ),
        )

    def patch(self, fields: dict[str, Any]) -> None:
        """Set fields of the spec. Raises BadInput if the result is not valid, or the job has ended."""
        if self._live.patch(fields):
            self._changed()

    def delete(self) -> None:
        """End the run; its directory stays."""
        self._live.delete()
        begin_end(self._end, "deleted")

    # -- the run, from its beginning to its end

    async def main(
        self,
        name: TextIO,
        check: Callable[[], Coroutine[Any, Any, None]],
        on_snapshot: Callable[[JobView], object],
        on_ending: Callable[[str], object],
    ) -> EndView:
        """Run the job until the run ends, stop all its processes, and return how the run ended.

        Args:
            name: the lock on the job's name, to be released when the run has ended.
            check: checks the program while etcd starts; the run ends if it raises BadInput.
            on_snapshot: see :func:`elastic_operator.cli.run.run_job`.
            on_ending: see :func:`elastic_operator.cli.run.run_job`.

        Raises:
            BadInput: the control socket cannot be created; nothing was started.
        """
        self.checking = asyncio.create_task(check())
        await asyncio.sleep(0)  # starts the process of the check
        if fields := ", ".join(unsupported_fields(self._live.manifest["spec"])):
            warning = f"without effect on this machine, where pods are processes: {fields}"
            self._warn(Reason.UNSUPPORTED_FIELDS, warning)
        async with control_server(self._files, self.snapshots, self.patch, self.delete), self._tasks as tasks:
            self._write_record(self.snapshot())
            tasks.create_task(self._show(on_snapshot))
            drivers = [
                tasks.create_task(self._reconciler.run()),
                tasks.create_task(self._follow_manifest()),
                tasks.create_task(self._follow_output()),
                tasks.create_task(self._each_snapshot(_RECORD_INTERVAL, self._write_record)),
            ]
            self._changed()
            ending = await asyncio.shield(self._end)
            self.checking.cancel()
            if ending.how == "interrupted":
                ending = self._finished() or ending  # the job had finished before the interruption
            for task in drivers:
                task.cancel()
            await asyncio.wait(drivers)
            await self._end_processes(ending, on_ending)
            # In this order, so that another run can start as soon as the watchers see the end of this one.
            self._ended = msgspec.structs.replace(ending, time=time.time())
            self._write_record(self.snapshot())
            name.close()
            self.snapshots.close()
        return ending

    async def _end_processes(self, ending: EndView, on_ending: Callable[[str], object]) -> None:
        """Stop all pods and the store, and write the report of an unfinished job; the pods stay in the snapshot."""
        live, pods = self._live, self._running_pods

        def kill() -> None:
            for pod in pods:
                pod.kill()

        on_signals(kill)  # when the user interrupts a second time
        if any(pod.pid for pod in pods):
            on_ending("stopping its pods; press Ctrl-C again to kill them at once")
        if pods:
            notice = max((node.notice for node in self._mirror.nodes.values()), default=0.0)
            for pod in pods:
                pod.remove(self._grace_period() if ending.how == "deleted" else STOP_GRACE + notice)
            await asyncio.gather(*(pod.wait() for pod in pods))
        if not live.job.status.finished:
            job, observed, now = live.job, self._observed(), time.time()
            breakdown = breakdown_at_change(job, observed, now)
            report = report_of(job, replace(job.status, time_breakdown=breakdown), observed)
            self._write_report(replace(report, suspensions=(round(now, 3),)))
        await self._end_store()
        if not live.job.status.finished:
            live.job = replace(live.job, status=replace(live.job.status, replicas=0, ready_replicas=0, ready_spares=0))

    async def _show(self, on_snapshot: Callable[[JobView], object]) -> None:
        """Show the run, and let pods start, when the check has succeeded."""
        await asyncio.wait([self.checking])
        if self.checking.cancelled():
            return
        try:
            self.checking.result()
        except BadInput as error:
            begin_end(self._end, "badInput", str(error))
        else:
            self._checked = True
            self._changed()
            await self._each_snapshot(_VIEW_INTERVAL, on_snapshot)

    def _changed(self) -> None:
        """Request a reconcile, notify the watchers, and end the run if the job has finished and no pod runs."""
        # An agent can start while etcd starts, because it imports modules first.
        if self._checked and self._endpoint():
            self._startable.set()
        self._reconciler.wake(self._live.key)
        self.snapshots.touch()
        if (ending := self._finished()) is not None and not self._running_pods:
            begin_end(self._end, ending.how, ending.message)

    def _finished(self) -> EndView | None:
        """Return how a finished job ended; None if it has not finished."""
        status = self._live.job.status
        if not status.finished:
            return None
        if status.state is JobState.SUCCEEDED:
            return EndView("succeeded")
        failed = status.condition(ConditionType.FAILED) or Condition("", status=False)
        how = "badInput" if failed.reason == Reason.BAD_INPUT else "failed"
        return EndView(how, status.what_failed or failed.message)

    # -- the backend of the reconciler

    async def observe(self, key: str) -> tuple[Job, Observed] | None:
        """Return the job and its state; None for any other job."""
        return (self._live.job, self._observed()) if key == self._live.key else None

    def _observed(self) -> Observed:
        mirror = self._mirror
        etcd = EtcdState.READY if self._etcd is None else self._etcd.state
        if self._store_away and etcd is EtcdState.READY:
            etcd = EtcdState.STARTING  # etcd runs but does not respond
        follows = self._store is not None  # if not, the status has the values from before the suspension
        return Observed(
            pods=tuple(map(self._observed_pod, self._pods)),
            etcd=etcd,
            store_read=mirror.readable,
            round=mirror.round,
            outcome=mirror.outcome,
            size=mirror.size,
            time_breakdown=mirror.time_breakdown if follows else None,
            history=mirror.history if follows else None,
        )

    def _observed_pod(self, process: PodProcess) -> Pod:
        running = process.pod.phase is PodPhase.RUNNING
        return replace(
            process.pod, ready=running and any(node.name == process.pod.name for node in self._mirror.nodes.values())
        )

    async def apply(self, job: Job, plan: Plan) -> None:
        """Apply the plan, or only request a reconcile if the job has changed since it was observed.

        Raises:
            ClusterError: the size could not be written; the rest of the plan was applied.
        """
        live = self._live
        if job != live.job:
            self._changed()
            return
        if plan.report is not None:
            self._write_report(plan.report)
        if plan.replicas is not None and "replicas" not in live.manifest["spec"]:
            live.set_replicas(plan.replicas)
        if plan.status is not None:
            live.job = replace(live.job, status=plan.status)
        for event in plan.events:
            self._emit(event)
        if plan.etcd and self._store is None:
            self._store = self._tasks.create_task(self._run_store())
        unwritten = await self._write_size(plan.size) if plan.size is not None else None
        for pod in plan.remove:
            self._remove(pod)
        for new in plan.create:
            self._create(with_applied_spec(job, plan), new)
        if not plan.etcd:
            await self._end_store()
        if plan != Plan(report=plan.report, etcd=plan.etcd, wake_at=plan.wake_at):
            self._changed()
        if unwritten is not None:
            raise ClusterError(f"the desired size could not be written to the store: {unwritten}")

    async def _write_size(self, size: SizeRecord) -> StoreError | None:
        try:
            await self._mirror.write_size(size)
        except StoreError as error:
            return error
        return None

    @property
    def _running_pods(self) -> list[PodProcess]:
        return [each for each in self._pods if each.pod.ended is None]

    def _create(self, job: Job, new: NewPod) -> None:
        if all(each.pod.name != new.name for each in self._pods):
            process = PodProcess(new, changed=self._changed)
            self._pods.append(process)
            self._tasks.create_task(self._run_pod(job, process))

    async def _run_pod(self, job: Job, process: PodProcess) -> None:
        def command() -> PodCommand:
            base = self._manifest_path.parent
            return pod_command(job, process.new, self._endpoint(), run=self._files, base=base, environ=self._environ)

        await process.run(command, self._startable)
        if process.pod.terminating and not self._end.done():
            self._pods.remove(process)
            self._changed()

    def _remove(self, pod: Pod) -> None:
        for process in self._pods:
            if process.pod.uid == pod.uid:
                if process.pod.ended is None:
                    process.remove(self._grace_period())
                else:
                    self._pods.remove(process)
                return

    def _grace_period(self) -> float:
        return termination_settings(self._live.job.spec)[0]

    # -- the store

    def _endpoint(self) -> str:
        return self._live.job.spec.etcd.endpoint or (self._etcd.endpoint if self._etcd is not None else "")

    async def _run_store(self) -> None:
        """Run the job's own etcd, if it has one, and follow the store."""
        async with asyncio.TaskGroup() as tasks:
            ready = self._etcd.ready if self._etcd else None
            following = self._mirror.run(lambda: store_at(self._endpoint(), self._tls), ready)
            task = tasks.create_task(following)
            if self._etcd is not None:
                try:
                    await self._etcd.run()
                except BadInput as error:
                    task.cancel()
                    begin_end(self._end, "badInput", str(error))

    async def _end_store(self) -> None:
        """Remove the run's keys from an external store, stop following the store, and stop the job's own etcd."""
        if self._etcd is None:
            with contextlib.suppress(StoreError):
                await self._mirror.forget_run()
        self._startable.clear()
        if self._store is not None:
            if not self._store.cancelling():  # a second cancellation would not wait until etcd exits
                self._store.cancel()
            await asyncio.wait([self._store])
            self._store = None

    def _mirror_changed(self) -> None:
        if self._mirror.readable and self._store_away:
            self._store_away = False
            if self._etcd is None:
                self._emit(JobEvent(Reason.STORE_BACK, "the store can be reached again"))
        self._changed()

    def _on_store_away(self, error: StoreError | SettingsError) -> None:
        if self._store_away:
            return
        self._store_away = True
        if self._etcd is None:
            self._warn(Reason.STORE_AWAY, error.message if isinstance(error, StoreError) else f"{error}")
        else:  # EtcdProcess reports that the job's own etcd exited
            self._changed()

    # -- events and files

    def _emit(self, event: JobEvent) -> None:
        self._events.append(EventView(time.time(), str(event.reason), event.message, event.warning))
        self._changed()

    def _warn(self, reason: Reason, sentence: str) -> None:
        self._emit(JobEvent(reason, sentence, warning=True))

    async def _each_snapshot(self, interval: float, take: Callable[[JobView], object]) -> None:
        async with contextlib.aclosing(self.snapshots.watch(interval)) as snapshots:
            async for snapshot in snapshots:
                take(snapshot)

    def _write_record(self, snapshot: JobView) -> None:
        self._write(self._files.record, msgspec.json.format(msgspec.json.encode(snapshot), indent=1))

    def _write_report(self, report: Report) -> None:
        """Write a report, merged with the stored report of the run if there is one."""
        kept, before = self._files.read_report(), None
        with contextlib.suppress(BadInput):
            before = decode_report(kept) if kept is not None else None
        self._write(self._files.report, encode_report(merged(before, report)))

    def _write(self, path: Path, data: bytes) -> None:
        """Replace a file of the run's directory; warn if that fails, once for each file."""
        try:
            replace_file(path, data)
        except OSError as error:
            if path not in self._unwritten:
                self._unwritten.add(path)
                self._warn(Reason.NOT_RECORDED, f"{path} cannot be written: {error.strerror}")

    async def _follow_manifest(self) -> None:
        """Apply the manifest's file whenever it is saved."""
        path = self._manifest_path
        try:
            # Watch the directory, because most editors write a new file and rename it.
            async for _ in awatch(path.parent, watch_filter=lambda _, at: at == str(path), recursive=False, **_WATCH):
                if path.exists():
                    self._apply_file()
        except OSError as error:
            self._warn(Reason.REFUSED, f"changes of {path} will not be applied: {error.strerror or error}")

    def _apply_file(self) -> None:
        try:
            file = load(self._manifest_path)
            changed = self._live.apply(file)
        except BadInput as error:
            self._warn(Reason.REFUSED, f"not applied: {error}")
            return
        if changed:
            self._write(self._files.manifest, manifest_text(file))
            self._emit(JobEvent(Reason.APPLIED, f"{self._manifest_path.name} was applied"))

    async def _follow_output(self) -> None:
        """Notify the watchers when the program prints."""
        with contextlib.suppress(OSError):
            async for _ in awatch(self._files.logs, watch_filter=None, **_WATCH):
                self.snapshots.touch()


def manifest_text(manifest: Manifest) -> bytes:
    """Return a manifest as YAML, with its fields in their original order."""
    return yaml.safe_dump(dict(manifest.data), sort_keys=False).encode()


def last_line(output: Path) -> ProgressView | None:
    """Return the last non-blank line of a file and the time of the last write; None if there is no such line."""
    text = tail(output, _PROGRESS_BYTES).decode(errors="replace")
    lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]  # a progress bar ends its line with \r
    return ProgressView(lines[-1][-_PROGRESS_CHARACTERS:], output.stat().st_mtime) if lines else None
