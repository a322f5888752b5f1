"""This machine as a backend of the reconciler: what is observed of a job, and how a plan is carried out.

It makes no decisions. It has the processes that it started, the mirror of the store and the live object; a change of
any of them starts a reconcile.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import deque
from typing import TYPE_CHECKING, Final, Self

from elastic_operator.api.constants import LocalReason
from elastic_operator.controller.model import EtcdState, JobEvent, Observed, Plan, with_applied_spec
from elastic_operator.errors import ClusterError, ElasticJobError
from elastic_operator.local.etcd import EtcdProcess
from elastic_operator.local.processes import PodProcess
from elastic_operator.resources.agent_command import ending_of
from elastic_operator.store_mirror import StoreMirror, store_at
from torchelastic.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from elastic_operator.api.report import Report
    from elastic_operator.controller.model import Job, NewPod, Removal
    from elastic_operator.local.etcd import EtcdSettings
    from elastic_operator.local.job import LiveJob
    from elastic_operator.local.processes import PodCommand
    from torchelastic.protocol import SizeRecord

_MAX_EVENTS: Final = 200


class LocalBackend:
    """The backend of one run; an async context manager; none of its processes is left after its block.

    Args:
        live: the job.
        etcd: how to run the job's etcd; None if the manifest names one.
        command: returns how to start a new pod of a job, given the store's endpoint.
        changed: called after each change.
        broken: called with the reason if the run cannot go on.
        keep: called with the report of the run before its store ends.

    Attributes:
        pods: the pods, in any state.
        events: the last events, each with its time in seconds since the Unix epoch; the oldest first.
        mirror: what the agents wrote into the store.
        etcd: the job's own; None if the manifest names one.
    """

    def __init__(
        self,
        live: LiveJob,
        *,
        etcd: EtcdSettings | None,
        command: Callable[[Job, NewPod, str], PodCommand],
        changed: Callable[[], None],
        broken: Callable[[ElasticJobError], None],
        keep: Callable[[Report], None],
    ) -> None:
        self._live = live
        self._command = command
        self._changed = changed
        self._broken = broken
        self._keep = keep
        self._tasks = asyncio.TaskGroup()
        self._store: asyncio.Task[None] | None = None
        self._store_away = False
        self._ending = False
        self.pods: list[PodProcess] = []
        self.events: deque[tuple[float, JobEvent]] = deque(maxlen=_MAX_EVENTS)
        self.mirror = StoreMirror(live.job().uid, changed=self._mirror_changed, away=self._on_store_away)
        self.etcd = EtcdProcess(etcd, changed=changed, tell=self.tell) if etcd is not None else None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(kind, error, trace)

    async def observe(self, key: str) -> tuple[Job, Observed] | None:
        """Return the job and its state; None for any other job."""
        return (self._live.job(), self.observed()) if key == self._live.key else None

    def observed(self) -> Observed:
        """Return the state of the job."""
        mirror = self.mirror
        etcd = EtcdState.READY if self.etcd is None else self.etcd.state
        if self._store_away and etcd is EtcdState.READY:
            etcd = EtcdState.STARTING  # it runs and does not answer
        follows = self._store is not None  # what was read before a suspension is known already
        return Observed(
            pods=tuple(pod.observed(ready=self.serves(pod)) for pod in self.pods),
            etcd=etcd,
            store_read=mirror.readable,
            round=mirror.round,
            outcome=mirror.outcome,
            size=mirror.size,
            time_breakdown=mirror.time_breakdown if follows else None,
            history=mirror.history if follows else None,
        )

    async def apply(self, job: Job, plan: Plan) -> None:
        """Carry out the plan in its order; do nothing if the job has changed since it was observed.

        Raises:
            ClusterError: the store did not take the size; all else was done.
        """
        live = self._live
        if job != live.job():
            self._changed()
            return
        if plan.report is not None:
            self._keep(plan.report)
        if plan.replicas is not None and "replicas" not in live.manifest["spec"]:
            live.set_replicas(plan.replicas)
        if plan.status is not None:
            live.status = plan.status
        for event in plan.events:
            self.tell(event)
        if plan.etcd and self._store is None:
            self._store = self._tasks.create_task(self._run_store())
        refusal = await self._write_size(plan.size) if plan.size is not None else None
        for removal in plan.remove:
            self._remove(removal)
        for new in plan.create:
            self._create(with_applied_spec(job, plan), new)
        if not plan.etcd:
            await self.end_store()
        if plan != Plan(report=plan.report, etcd=plan.etcd, wake_at=plan.wake_at):
            self._changed()
        if refusal is not None:
            raise ClusterError(f"the wanted size could not be written to the store: {refusal}")

    @property
    def running_pods(self) -> list[PodProcess]:
        """The pods that have not ended."""
        return [pod for pod in self.pods if pod.ended is None]

    def serves(self, pod: PodProcess) -> bool:
        """Return whether the pod's agent has registered in the store."""
        return any(node.name == pod.name for node in self.mirror.nodes.values())

    def tell(self, event: JobEvent) -> None:
        """Record an event."""
        self.events.append((time.time(), event))
        self._changed()

    def notice_seconds(self) -> float:
        """Return the longest notice that workers asked for to save before they end."""
        return max((node.notice for node in self.mirror.nodes.values()), default=0.0)

    async def end_pods(self, grace: float | None = None) -> None:
        """End all pods, and return when they have ended; they stay in :attr:`pods`.

        Args:
            grace: seconds between SIGTERM and SIGKILL; None for the pod's own grace period.
        """
        self._ending = True
        pods = self.running_pods
        for pod in pods:
            pod.remove(self._grace_period() if grace is None else grace)
        await asyncio.gather(*(pod.wait() for pod in pods))

    def kill_pods(self) -> None:
        """Send SIGKILL to all pods."""
        for pod in self.running_pods:
            pod.kill()

    async def end_store(self) -> None:
        """Stop following the store, remove the run's keys from a store that stays, and end the job's own etcd."""
        if self.etcd is None:
            with contextlib.suppress(StoreError):
                await self.mirror.forget_run()
        if self._store is not None:
            if not self._store.cancelling():  # a second cancellation would not wait for etcd's end
                self._store.cancel()
            await asyncio.wait([self._store])
            self._store = None

    async def _write_size(self, size: SizeRecord) -> StoreError | None:
        try:
            await self.mirror.write_size(size)
        except StoreError as error:
            return error
        return None

    def _grace_period(self) -> float:
        return ending_of(self._live.job().spec)[0]

    def _endpoint(self) -> str:
        return self._live.job().spec.etcd.endpoint or (self.etcd.endpoint if self.etcd is not None else "")

    async def _run_store(self) -> None:
        """Run the job's own etcd, if it has one, and follow the store."""
        async with asyncio.TaskGroup() as tasks:
            following = self.mirror.run(lambda: store_at(self._endpoint()), self.etcd.ready if self.etcd else None)
            task = tasks.create_task(following)
            if self.etcd is not None:
                try:
                    await self.etcd.run()
                except ElasticJobError as error:
                    task.cancel()
                    self._broken(error)

    def _create(self, job: Job, new: NewPod) -> None:
        if any(pod.name == new.name for pod in self.pods):
            return
        pod = PodProcess(new, uid=str(uuid.uuid4()), changed=self._changed)
        self.pods.append(pod)
        self._tasks.create_task(self._run_pod(job, pod))

    async def _run_pod(self, job: Job, pod: PodProcess) -> None:
        await pod.run(lambda: self._command(job, pod.new, self._endpoint()), self.etcd.ready if self.etcd else None)
        if pod.terminating and not self._ending:
            self.pods.remove(pod)
            self._changed()

    def _remove(self, removal: Removal) -> None:
        for pod in self.pods:
            if (pod.name, pod.uid) == (removal.name, removal.uid):
                if pod.ended is None:
                    pod.remove(self._grace_period())
                else:
                    self.pods.remove(pod)
                return

    def _mirror_changed(self) -> None:
        if self.mirror.readable and self._store_away:
            self._store_away = False
            if self.etcd is None:
                self.tell(JobEvent(LocalReason.STORE_BACK, "the store can be reached again"))
        self._changed()

    def _on_store_away(self, sentence: str) -> None:
        if self._store_away:
            return
        self._store_away = True
        if self.etcd is None:
            self.tell(JobEvent(LocalReason.STORE_AWAY, sentence, warning=True))
        else:  # the job's own etcd reports its death itself
            self._changed()
