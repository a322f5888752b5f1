"""A run that goes on: it joins the plan, the processes and those who look on, until something ends it.

However it ends (success, failure, ``elasticjob delete``, Ctrl-C), it ends in one way: the plan stops, then the pods,
then the store; what is known last is set down in the run's folder, and the job's name is free again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from elastic_operator.errors import BadInput
from elastic_operator.local.cluster import LocalCluster
from elastic_operator.local.control import control_server
from elastic_operator.local.ending import Ending, How
from elastic_operator.local.follow import saves, writes_below
from elastic_operator.local.keeping import (
    keep_report,
    report_of_going_on,
    report_of_unfinished,
    with_what_was_kept,
)
from elastic_operator.local.name_claim import Holder
from elastic_operator.local.not_honoured import warning_of
from elastic_operator.local.publisher import Publisher
from elastic_operator.local.snapshot import snapshot_of
from elastic_operator.manifest import load
from elastic_operator.model import JobEvent, JobState
from elastic_operator.names import ConditionType, LocalReason, Reason
from elastic_operator.reconcile import Reconciler, ReconcileSettings, WorkQueue

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping
    from pathlib import Path

    from elastic_operator.local.ending import RunEnd
    from elastic_operator.local.etcd_process import EtcdSettings
    from elastic_operator.local.live_job import LiveJob
    from elastic_operator.local.name_claim import NameClaim
    from elastic_operator.local.pod_command import PodCommands
    from elastic_operator.local.run_folder import RunFolder
    from elastic_operator.manifest import Manifest
    from elastic_operator.report import Report

STOP_GRACE: Final = 3.0
"""Seconds that pods have to end in when the user interrupts the run, beyond the notice that their workers asked for."""

_VIEW_INTERVAL: Final = 0.1
_RECORD_INTERVAL: Final = 0.5
_RECONCILE: Final = ReconcileSettings(side_by_side=1, longest_retry=5.0)


class Observer(Protocol):
    """Something that shows a run while it goes on."""

    def on_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        """The run has changed; called at most ten times a second, and once more at the end."""

    def say_ending(self, why: str) -> None:
        """The run is being ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """What a run is made of.

    Attributes:
        live: the job.
        file: the manifest's file, with its whole path.
        folder: where the run keeps what belongs to it.
        name: the right to run a job of this name.
        socket: where its control API is to be.
        commands: what its pods' processes are.
    """

    live: LiveJob
    file: Path
    folder: RunFolder
    name: NameClaim
    socket: Path
    commands: PodCommands


class LocalRun:
    """One run that goes on: its parts, how they are joined, and the one way in which they end.

    Attributes:
        publisher: tells those who look on how things stand.
    """

    def __init__(self, parts: RunParts, etcd: EtcdSettings | None, end: RunEnd) -> None:
        """A run of which nothing is started.

        Args:
            parts: what it is made of.
            etcd: how to run the job's etcd; None where the manifest names one.
            end: whether it is to end.
        """
        self._folder = parts.folder
        self._file = parts.file
        self._live = parts.live
        self._commands = parts.commands
        self._name = parts.name
        self._socket = parts.socket
        self._end = end
        self._ended: dict[str, Any] | None = None
        self._recorded = True
        self._queue = WorkQueue()
        self.publisher = Publisher(self._snapshot)
        self._cluster = LocalCluster(
            self._live,
            etcd=etcd,
            command=lambda pod, store: self._commands.command(self._live.job(), pod, store),
            changed=self._changed,
            broken=lambda error: end.begin(Ending(How.BAD_INPUT, str(error), error)),
            keep=self._keep_report,
        )

    def report(self) -> bytes:
        """What would be kept of the run if it ended now, as JSON."""
        kept = self._folder.read_report()
        if kept is not None and self._live.status.state.finished:
            return kept
        report = report_of_going_on(self._live.job(), self._cluster.look())
        return with_what_was_kept(kept, report)

    def scale(self, replicas: int) -> None:
        """Ask for another number of pods.

        Raises:
            BadInput: that number cannot be.
        """
        if self._live.scale(replicas):
            self._changed()

    def suspend(self, *, rest: bool) -> None:
        """Have the job rest, or go on.

        Raises:
            BadInput: the job is over.
        """
        if self._live.suspend(rest=rest):
            self._changed()

    def delete(self) -> None:
        """End the run; its folder stays."""
        self._live.delete()
        self._end.begin(Ending(How.DELETED))

    async def main(self, observer: Observer | None) -> Ending:
        """Run the job until something ends the run, and end what it started.

        Args:
            observer: shown every change.

        Raises:
            BadInput: the control API cannot be served; nothing was started.
        """
        if warning := warning_of(self._live.manifest["spec"]):
            self._warn(LocalReason.NOT_HONOURED, warning)
        async with control_server(self, self._socket), self._cluster, asyncio.TaskGroup() as tasks:
            self._write_record(self._snapshot())
            self._name.tell(Holder(run=self._folder.run_id, pid=os.getpid(), socket=str(self._socket)))
            if observer is not None:
                tasks.create_task(self._show(observer))
            drivers = [tasks.create_task(driver) for driver in self._drivers()]
            self._changed()
            ending = self._as_finished(await self._end.wait())
            for task in drivers:
                task.cancel()
            await asyncio.wait(drivers)
            await self._end_processes(ending, observer)
            # In this order: whoever sees the run's end can at once start another one of this name, or resume this.
            self._ended = ending.as_json(time.time())
            self._write_record(self._snapshot())
            self._name.release()
            self.publisher.close()
        return ending

    def _drivers(self) -> Iterator[Coroutine[None, None, None]]:
        """What goes on for as long as the run does."""
        yield Reconciler(self._cluster, queue=self._queue, settings=_RECONCILE).run()
        yield self._follow_manifest()
        yield self._follow_output()
        yield self._record()

    async def _end_processes(self, ending: Ending, observer: Observer | None) -> None:
        cluster = self._cluster
        self._end.insist = cluster.kill_pods
        if cluster.has_living_pods:
            if observer is not None:
                observer.say_ending("ending its pods; Ctrl-C again kills them at once")
            await cluster.end_pods(None if ending.how is How.DELETED else STOP_GRACE + cluster.notice_asked())
        if not self._live.status.state.finished:
            self._keep_report(report_of_unfinished(self._live.job(), cluster.look(), time.time()))
        await cluster.end_store()
        if not self._live.status.state.finished:
            self._live.status = replace(self._live.status, replicas=0, ready=0)

    def _changed(self) -> None:
        """Something is not as it was: the plan is asked again, and those who look on are told."""
        self._queue.put(self._live.key)
        self.publisher.touch()
        if (ending := self._finished()) is not None and not self._cluster.has_living_pods:
            self._end.begin(ending)

    def _as_finished(self, ending: Ending) -> Ending:
        """An interruption of a job that had finished already takes nothing from how it finished."""
        return self._finished() or ending if ending.how is How.INTERRUPTED else ending

    def _finished(self) -> Ending | None:
        """The ending of a job that has finished; None where it has not."""
        status = self._live.status
        if not status.state.finished:
            return None
        if status.state is JobState.SUCCEEDED:
            return Ending(How.SUCCEEDED)
        why = status.last_failure.message if status.last_failure is not None else ""
        if any(each.type == ConditionType.FAILED and each.reason == Reason.BAD_INPUT for each in status.conditions):
            return Ending(How.BAD_INPUT, why, BadInput(why))
        return Ending(How.FAILED, why)

    async def _record(self) -> None:
        """Set down in the run's folder how things stand, whenever they change."""
        async with contextlib.aclosing(self.publisher.snapshots(interval=_RECORD_INTERVAL)) as snapshots:
            async for snapshot in snapshots:
                self._write_record(snapshot)

    def _write_record(self, snapshot: dict[str, Any]) -> None:
        try:
            self._folder.write_record(snapshot)
        except OSError as error:
            if self._recorded:
                self._recorded = False
                self._warn(LocalReason.NOT_RECORDED, f"{self._folder.record} cannot be written: {error.strerror}")

    def _keep_report(self, report: Report) -> None:
        try:
            keep_report(self._folder, report)
        except OSError as error:
            self._warn(LocalReason.NOT_RECORDED, f"{self._folder.report} cannot be written: {error.strerror}")

    async def _show(self, observer: Observer) -> None:
        async with contextlib.aclosing(self.publisher.snapshots(interval=_VIEW_INTERVAL)) as snapshots:
            async for snapshot in snapshots:
                observer.on_snapshot(snapshot)

    async def _follow_manifest(self) -> None:
        """Do what ``kubectl apply`` would, whenever the manifest's file is saved."""
        try:
            async for _ in saves(self._file):
                if self._file.exists():
                    self._apply_file()
        except OSError as error:
            self._warn(LocalReason.REFUSED, f"changes of {self._file} will not be seen: {error.strerror or error}")

    def _apply_file(self) -> None:
        try:
            file = load(self._file)
            changed = self._live.apply(file)
        except BadInput as error:
            self._warn(LocalReason.REFUSED, f"not applied: {error}")
            return
        if changed:
            self._keep(file)
            self._cluster.tell(JobEvent(LocalReason.APPLIED, f"{self._file.name} was applied"))

    def _keep(self, file: Manifest) -> None:
        try:
            self._folder.write_manifest(file.data)
        except OSError as error:
            self._warn(LocalReason.NOT_RECORDED, f"{self._folder.manifest} cannot be written: {error.strerror}")

    async def _follow_output(self) -> None:
        """Have the training's own progress told when it prints."""
        with contextlib.suppress(OSError):
            async for _ in writes_below(self._folder.logs):
                self.publisher.touch()

    def _warn(self, reason: LocalReason, sentence: str) -> None:
        self._cluster.tell(JobEvent(reason, sentence, warning=True))

    def _snapshot(self) -> dict[str, Any]:
        run = {
            "id": self._folder.run_id,
            "directory": str(self._folder.path),
            "logs": str(self._folder.logs),
            "checkpoints": str(self._folder.checkpoints),
            "pid": os.getpid(),
            "socket": str(self._socket),
            "manifestPath": str(self._file),
            "alive": self._ended is None,
            "ended": self._ended,
        }
        return snapshot_of(self._live, self._cluster, self._folder, run)
