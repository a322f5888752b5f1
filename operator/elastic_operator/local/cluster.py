"""This machine behind the interface that Kubernetes has too: what is observed of a job, and what is done about it.

The cluster decides nothing. Its knowledge comes from three sources that tell it by themselves: the processes that it
started, the store's mirror, and the live object. Every change of them wakes the reconciler.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from elastic_operator.errors import ClusterError, ElasticJobError
from elastic_operator.local.etcd_process import EtcdProcess
from elastic_operator.local.pod_process import PodProcess
from elastic_operator.model import EtcdState, JobEvent, Observed, Plan
from elastic_operator.names import LocalReason
from elastic_operator.pods import ending_of
from elastic_operator.store_mirror import StoreMirror, store_at
from torchelastic.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from elastic_operator.local.etcd_process import EtcdSettings
    from elastic_operator.local.live_job import LiveJob
    from elastic_operator.local.pod_process import PodCommand
    from elastic_operator.model import Job, NewPod, Removal
    from elastic_operator.report import Report
    from torchelastic.contract import SizeRecord

_KEPT_EVENTS: Final = 200


@dataclass(frozen=True, slots=True)
class ToldEvent:
    """An event and its time.

    Attributes:
        time: seconds since the Unix epoch.
        event: what happened.
    """

    time: float
    event: JobEvent


class LocalCluster:
    """The cluster of one run; an async context manager, after whose block none of its processes is left.

    Attributes:
        pods: those that exist, in any state.
        events: the last ones, the oldest first.
        mirror: what the agents say in the store.
        etcd: the job's own; None where the manifest names one that is there already.
    """

    def __init__(
        self,
        live: LiveJob,
        *,
        etcd: EtcdSettings | None,
        command: Callable[[NewPod, str], PodCommand],
        changed: Callable[[], None],
        broken: Callable[[ElasticJobError], None],
        keep: Callable[[Report], None],
    ) -> None:
        """A cluster without pods.

        Args:
            live: the job.
            etcd: how to run the job's etcd; None where the manifest names one.
            command: what the process of a new pod is, given the store's endpoint.
            changed: called whenever something has changed.
            broken: called when the run can't go on, with what to tell.
            keep: called with what is to be kept of the run before its store goes.
        """
        self._live = live
        self._command = command
        self._changed = changed
        self._tasks = asyncio.TaskGroup()
        self._broken = broken
        self._keep = keep
        self._store_tasks: list[asyncio.Task[None]] = []
        self._store_away = False
        self._ending = False
        self.pods: list[PodProcess] = []
        self.events: deque[ToldEvent] = deque(maxlen=_KEPT_EVENTS)
        self.mirror = StoreMirror(live.job().uid, changed=self._mirror_changed, away=self._tell_store_away)
        self.etcd = EtcdProcess(etcd, changed=changed, tell=self.tell) if etcd is not None else None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(kind, error, trace)

    async def observe(self, key: str) -> tuple[Job, Observed] | None:
        """The job and all that is known of it; None for any other job."""
        if key != self._live.key:
            return None
        return self._live.job(), self.look()

    def look(self) -> Observed:
        """All that is known of the job now."""
        mirror = self.mirror
        follows = bool(self._store_tasks)  # what was read before a rest is known already
        return Observed(
            pods=tuple(pod.observed(ready=self.serves(pod)) for pod in self.pods),
            etcd=self._store_state(),
            store_read=mirror.readable,
            epoch=mirror.epoch,
            outcome=mirror.outcome,
            size=mirror.size,
            split=mirror.split if follows else None,
            history=mirror.history if follows else None,
        )

    async def apply(self, job: Job, plan: Plan) -> None:
        """Do what the plan says, in its order. Where the job has changed since it was observed, nothing is done.

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
        if plan.etcd:
            self._ensure_store()
        refusal = await self._write_size(plan.size) if plan.size is not None else None
        for removal in plan.remove:
            self._remove(removal)
        for new in plan.create:
            self._create(new)
        if not plan.etcd:
            await self.end_store()
        if plan != Plan(report=plan.report, etcd=plan.etcd, wake_at=plan.wake_at):
            self._changed()
        if refusal is not None:
            raise ClusterError(f"the wanted size could not be written to the store: {refusal}")

    @property
    def has_living_pods(self) -> bool:
        """Whether any pod has not ended."""
        return bool(self._living())

    def serves(self, pod: PodProcess) -> bool:
        """Whether the pod's agent has said in the store that it is there."""
        return any(node.name == pod.name for node in self.mirror.nodes.values())

    def tell(self, event: JobEvent) -> None:
        """Something happened that a person would want to know."""
        self.events.append(ToldEvent(time.time(), event))
        self._changed()

    def notice_asked(self) -> float:
        """Seconds that the workers ask for to save before they end."""
        return max((node.notice for node in self.mirror.nodes.values()), default=0.0)

    async def end_pods(self, grace: float | None = None) -> None:
        """End all pods, and return when they have ended. They stay among the pods, so that their end can be told.

        Args:
            grace: seconds between SIGTERM and SIGKILL; None for what a pod has in any case.
        """
        self._ending = True
        for pod in self._living():
            pod.remove(self._period() if grace is None else grace)
        await self.pods_ended()

    async def pods_ended(self) -> None:
        """Return when no pod lives."""
        await asyncio.gather(*(pod.wait() for pod in self._living()))

    def kill_pods(self) -> None:
        """End all pods at once."""
        for pod in self._living():
            pod.kill()

    async def end_store(self) -> None:
        """Stop following the store, remove what the run wrote there, and end the job's own etcd."""
        if self.etcd is None:
            with contextlib.suppress(StoreError):
                await self.mirror.forget_run()
        while self._store_tasks:
            task = self._store_tasks.pop()
            task.cancel()
            await asyncio.wait([task])

    def _period(self) -> float:
        """Seconds between SIGTERM and SIGKILL where a pod is removed, as on Kubernetes."""
        return ending_of(self._live.job().spec).period

    def _living(self) -> list[PodProcess]:
        return [pod for pod in self.pods if pod.ended is None]

    async def _write_size(self, size: SizeRecord) -> StoreError | None:
        try:
            await self.mirror.write_size(size)
        except StoreError as error:
            return error
        return None

    def _ensure_store(self) -> None:
        """Start the job's etcd, if it is ours, and follow what stands in it."""
        if self._store_tasks:
            return
        available = None
        if self.etcd is not None:
            self._store_tasks.append(self._tasks.create_task(self._run_etcd(self.etcd)))
            available = self.etcd.ready
        self._store_tasks.append(
            self._tasks.create_task(self.mirror.run(lambda: store_at(self._endpoint()), available))
        )

    async def _run_etcd(self, etcd: EtcdProcess) -> None:
        try:
            await etcd.run()
        except ElasticJobError as error:
            self._broken(error)

    def _endpoint(self) -> str:
        """Where the store is, as the agents are told it."""
        return self._live.job().spec.etcd.endpoint or (self.etcd.endpoint if self.etcd is not None else "")

    def _create(self, new: NewPod) -> None:
        if any(pod.name == new.name for pod in self.pods):
            return
        pod = PodProcess(new, uid=str(uuid.uuid4()), changed=self._changed)
        self.pods.append(pod)
        self._tasks.create_task(self._run_pod(pod))

    async def _run_pod(self, pod: PodProcess) -> None:
        await pod.run(lambda: self._command(pod.new, self._endpoint()), self.etcd.ready if self.etcd else None)
        if pod.terminating and not self._ending:
            self.pods.remove(pod)
            self._changed()

    def _remove(self, removal: Removal) -> None:
        for pod in self.pods:
            if pod.name == removal.name and pod.uid == removal.uid:
                if pod.ended is None:
                    pod.remove(self._period())
                else:
                    self.pods.remove(pod)
                return

    def _store_state(self) -> EtcdState:
        state = EtcdState.READY if self.etcd is None else self.etcd.state
        # One that runs and does not answer, as if it hung, is as one that is coming up.
        return EtcdState.STARTING if self._store_away and state is EtcdState.READY else state

    def _mirror_changed(self) -> None:
        if self.mirror.readable and self._store_away:
            self._store_away = False
            if self.etcd is None:
                self.tell(JobEvent(LocalReason.STORE_BACK, "the store can be reached again"))
        self._changed()

    def _tell_store_away(self, sentence: str) -> None:
        if self._store_away:
            return
        self._store_away = True
        if self.etcd is None:
            self.tell(JobEvent(LocalReason.STORE_AWAY, sentence, warning=True))
        else:  # of the death of our own etcd its process tells
            self._changed()
