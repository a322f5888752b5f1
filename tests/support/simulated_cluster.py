"""A small cluster in memory: what is true, what an observer may see of it, and what no plan may do to it.

Pods that start, die in all ways, linger and are deleted; agents that form epochs and end the run; a store that cannot
be read or loses its keys; an API server that refuses what the spec asks for, or has no room for it. The model-based
tests of the plan drive it.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from elastic_operator.model import EtcdState, Job, Observed, Plan, Pod, PodPhase
from elastic_operator.names import ConditionType, Reason
from elastic_operator.plan.roster import Verdict, verdict
from tests.support.builders import NOW, an_epoch, failure, says, success
from torchelastic.contract import EpochRecord, ExitCode, OutcomeRecord, OutcomeState, SizeRecord

if TYPE_CHECKING:
    from elastic_operator.model import JobStatus, NewPod, Removal


class OperatorKilledError(Exception):
    """The operator died between two writes."""


class NotTakenError(Exception):
    """The API server did not take a pod."""


class ConflictError(Exception):
    """The job is not the one any more that the plan was made for."""


@dataclass
class Store:
    """The job's keys."""

    readable: bool = True
    size: SizeRecord | None = None
    epoch: EpochRecord | None = None
    outcome: OutcomeRecord | None = None


def is_live(pod: Pod) -> bool:
    return not pod.phase.ended and not pod.terminating


class SimulatedCluster:
    """What is true, what an observer may see of it, and what the plan promised."""

    def __init__(self, job: Job) -> None:
        self.now = NOW
        self.job = job
        self.pods: dict[str, Pod] = {}
        self.store = Store()
        self.etcd = False
        self.run_ended: OutcomeState | None = None
        self.refused_input = False
        self.no_agent = False
        self.refuses = False
        self.full = False
        self.refusal: tuple[int, str] | None = None
        self.hindrance: str | None = None
        self.deaths_seen: set[str] = set()
        self.sent_away: set[str] = set()
        self.seen: list[tuple[Job, Observed]] = []
        self._uids = itertools.count()
        self.look()

    # -- what can be seen

    def look(self) -> None:
        """Remember how the world looks now: an observer may still see this later on."""
        store = self.store
        readable = store.readable and self.etcd
        observed = Observed(
            pods=tuple(self.pods.values()),
            etcd=EtcdState.READY if self.etcd else EtcdState.ABSENT,
            store_read=readable,
            epoch=store.epoch if readable else None,
            outcome=store.outcome if readable else None,
            size=store.size if readable else None,
            refusal=self.refusal[1] if self.refusal is not None and self.refusal[0] == self.job.generation else None,
            hindrance=self.hindrance,
        )
        self.seen.append((self.job, observed))

    def observe(self, lateness: int = 0) -> tuple[Job, Observed]:
        """The world as it was some changes ago, but not before what was seen or written last."""
        index = max(len(self.seen) - 1 - lateness, 0)
        del self.seen[:index]
        return self.seen[0]

    # -- carrying out a plan

    def apply(self, job: Job, observed: Observed, todo: Plan, writes: int = 1_000_000) -> None:
        """Carry out the plan.

        Args:
            job: what the plan was made for.
            observed: likewise.
            todo: the plan.
            writes: after so many of them the operator is killed.

        Raises:
            ConflictError: the job is another by now; nothing was done.
            OperatorKilledError: after some of the writes.
        """
        changes_the_job = todo.replicas is not None or todo.status is not None
        if changes_the_job and (job.generation, job.status) != (self.job.generation, self.job.status):
            raise ConflictError
        assert len({removal.uid for removal in todo.remove}) == len(todo.remove), "a pod is removed twice"
        steps = [
            lambda: self._write_replicas(todo.replicas),
            lambda: self._write_status(job, observed, todo),
            lambda: self._keep_etcd(todo.etcd),
            lambda: self._write_size(todo.size),
            *(partial(self._remove, removal) for removal in todo.remove),
            *(partial(self._create, job, observed, new) for new in todo.create),
        ]
        with contextlib.suppress(NotTakenError):
            for step in steps[:writes]:
                step()
        if writes < len(steps):
            raise OperatorKilledError
        self.look()
        self.seen = self.seen[-1:]  # what it wrote itself, the operator sees

    def forget(self) -> None:
        """Another operator begins, which has not asked the API server for anything yet."""
        self.refusal = self.hindrance = None

    def _write_replicas(self, replicas: int | None) -> None:
        if replicas is not None:
            spec = replace(self.job.spec, replicas=replicas)
            self.job = replace(self.job, spec=spec, generation=self.job.generation + 1)

    def _write_status(self, job: Job, observed: Observed, todo: Plan) -> None:
        if todo.status is not None:
            self._check_charges(job, observed, todo, todo.status)
            self.job = replace(self.job, status=todo.status)

    def _keep_etcd(self, wanted: bool) -> None:
        if self.etcd and not wanted:
            self.store = Store(readable=self.store.readable)
        self.etcd = wanted

    def _write_size(self, size: SizeRecord | None) -> None:
        if size is not None and self.store.readable:
            assert self.store.size is None or self.store.size.generation < size.generation
            self.store.size = size

    def _remove(self, removal: Removal) -> None:
        if (pod := self.pods.get(removal.uid)) is not None:
            finished = self.job.status.state.finished
            assert finished or pod.uid in self.job.status.accounted, "a pod is removed before it is accounted for"
            self.delete(pod)

    def _create(self, job: Job, observed: Observed, new: NewPod) -> None:
        if any(pod.name == new.name for pod in self.pods.values()):
            return
        assert not self.job.status.state.finished, "a pod is made after the end"
        assert observed.outcome is None, "a pod is made though the run has ended"
        knew = observed.store_read or any(is_live(pod) for pod in observed.pods) or not job.status.size_generation
        assert knew, "a pod is made though the run may have ended"
        live = [pod for pod in self.pods.values() if is_live(pod)]
        assert all(pod.index != new.index for pod in live), "two live pods in one place"
        assert len(live) < job.spec.max_replicas, "more live pods than the maximum"
        assert observed.refusal is None, "what was refused is asked for again"
        self._ask_for_room()
        uid = f"uid-{next(self._uids)}"
        made = float(int(self.now))  # no cluster counts in less than seconds
        pod = Pod(new.name, uid, new.index, PodPhase.PENDING, created=made, failures=new.failures, size=new.size)
        self.pods[uid] = pod

    def _ask_for_room(self) -> None:
        self.refusal = (self.job.generation, "the spec asks for what is not there") if self.refuses else None
        self.hindrance = f"exceeded quota at {self.now}" if self.full and not self.refuses else None
        if self.refuses or self.full:
            raise NotTakenError

    def _check_charges(self, job: Job, observed: Observed, todo: Plan, status: JobStatus) -> None:
        dead = {
            pod.uid for pod in observed.pods if pod.phase.ended and not pod.terminating and verdict(pod) is Verdict.DIED
        }
        by_agents = any(
            condition.type == ConditionType.FINISHED and condition.reason != Reason.POD_FAILURES
            for condition in status.conditions
        )
        if job.status.state.finished or by_agents:
            assert status.pod_failures == job.status.pod_failures
            return
        self.deaths_seen |= dead - self.sent_away
        self.sent_away = (self.sent_away & status.accounted) | {removal.uid for removal in todo.remove}
        assert status.pod_failures == len(self.deaths_seen), "a charge is lost or doubled"
        if not status.state.finished:
            assert status.pod_failures <= max(job.spec.max_restarts, job.status.pod_failures), "the budget is exceeded"

    # -- what happens to pods

    def change(self, pod: Pod, **fields: object) -> None:
        self.pods[pod.uid] = replace(pod, **fields)  # type: ignore[arg-type]

    def end(self, pod: Pod, code: int | None, message: str = "", **more: object) -> None:
        phase = PodPhase.SUCCEEDED if code == 0 else PodPhase.FAILED
        words = says(message) if message else None
        self.change(pod, phase=phase, ready=False, exit_code=code, message=words, ended=float(int(self.now)), **more)

    def delete(self, pod: Pod) -> None:
        if pod.phase.ended and not pod.lingers:
            del self.pods[pod.uid]
        else:
            self.change(pod, terminating=True, ready=False)

    # -- what agents do

    def serving(self) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.phase is PodPhase.RUNNING and not pod.terminating]

    def agents_form_an_epoch(self) -> None:
        """The agents know the highest generation of those that they were started with and that of the store."""
        serving = self.serving()
        sizes = [pod.size for pod in serving if pod.size] + ([self.store.size] if self.store.size else [])
        if not (self.store.readable and self.etcd and sizes) or self.run_ended is not None:
            return
        size = max(sizes, key=lambda size: size.generation)
        members = [pod for pod in serving if pod.name not in size.going][: size.target]
        before = self.store.epoch or EpochRecord(number=0)
        if len(members) >= size.min and before.nodes != tuple(f"{pod.name}.1" for pod in members):
            self.store.epoch = an_epoch(*members, number=max(before.number, self.job.status.epoch) + 1)
        elif len(members) < size.min and before.members:
            self.store.epoch = an_epoch(number=before.number + 1)

    def agents_end_the_run(self, state: OutcomeState) -> None:
        epoch = self.store.epoch
        if self.run_ended is None and self.etcd and self.store.readable and epoch is not None and epoch.members:
            members = [pod for pod in self.serving() if f"{pod.name}.1" in epoch.nodes]
            if members:
                self.run_ended = state
                self.store.outcome = success() if state is OutcomeState.SUCCEEDED else failure("no restart is left")

    def agents_hear_of_the_end(self, pod: Pod, *, lingers: bool) -> None:
        if self.run_ended is OutcomeState.SUCCEEDED:
            self.end(pod, ExitCode.SUCCEEDED, lingers=lingers)
        elif self.run_ended is OutcomeState.FAILED:
            self.end(pod, ExitCode.FAILED, "no restart is left", lingers=lingers)
